"""What a checkpoint says about its state."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config import ConfigError
from penstock.train.storage.record import RECORD, Record


def test_a_record_of_an_earlier_version_knows_no_tokenizer(tmp_path: Path) -> None:
    said = Record(step=3, processes=2, identity={}, settings={}, plan_settled=True, files=[])
    written = replace(said, tokenizer="bytes")
    written.write(tmp_path)
    assert Record.read(tmp_path) == written
    table = json.loads((tmp_path / RECORD).read_text())
    del table["tokenizer"]
    for version in (1, 3):
        (tmp_path / RECORD).write_text(json.dumps({**table, "format": version}))
        if version == 1:
            assert Record.read(tmp_path) == said
        else:
            with pytest.raises(
                ConfigError, match="is of format 3, and this version of Penstock reads 1 and 2"
            ):
                Record.read(tmp_path)
