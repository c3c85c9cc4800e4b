"""What a rank ends with, as torchrun reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from penstock.cli.run import tell


def test_torchrun_finds_why_a_rank_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    tell("moe.top_k = 9: more than there are experts")
    assert capsys.readouterr().err == "penstock: moe.top_k = 9: more than there are experts\n"
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(path))
    shown = str(ChildFailedError("penstock", {0: failure}))
    assert "traceback : moe.top_k = 9: more than there are experts\n" in shown


def test_a_place_that_cannot_be_written_hides_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path))
    tell("no such text")
    assert capsys.readouterr().err == "penstock: no such text\n"
