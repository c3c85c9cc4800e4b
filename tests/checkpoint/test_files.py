"""Files that are not what they seem are refused at once: no wait, no memory taken, no link followed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock.checkpoint.folder import RECORD, DamagedError, Record, open_regular, read_regular, read_table


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert read_regular(tmp_path / "a", 3) == b"abc"
    with pytest.raises(DamagedError, match="a has more than 2 bytes"):
        read_regular(tmp_path / "a", 2)


def make_link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    "make", [os.mkfifo, Path.mkdir, make_link, lambda path: path.symlink_to("/dev/zero"), lambda path: None]
)
def test_what_is_no_file_is_refused(tmp_path: Path, make: object) -> None:
    path = tmp_path / "shard"
    assert callable(make)
    make(path)
    with pytest.raises(DamagedError, match="shard"):
        open_regular(path)


def test_a_file_in_place_of_the_folder_is_damage(tmp_path: Path) -> None:
    (tmp_path / "step").write_text("")
    with pytest.raises(DamagedError, match="Not a directory"):
        open_regular(tmp_path / "step" / "shard")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", "1", "[" * 200_000, '{"a":' * 200_000, '{"a": ' + "9" * 100_000 + "}", "\ud800"],
    ids=["empty", "cut", "list", "number", "nested lists", "nested objects", "digits", "surrogate"],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(DamagedError, match=r"^a "):
        read_table(tmp_path / "a", 1 << 24)


@pytest.mark.parametrize(
    "change",
    [
        {"step": True},
        {"step": -1},
        {"processes": "2"},
        {"identity": []},
        {"settings": 1},
        {"plan_settled": 0},
        {"files": [3]},
        {"tokenizer": 3},
        {"steps": "none at all"},
        {"surprise": 1},
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    record = Record(step=1, processes=2, identity={"a": [1]}, settings=None, plan_settled=True, files=["b"])
    record.write(tmp_path)
    assert Record.read(tmp_path) == record
    (tmp_path / RECORD).write_text(json.dumps(json.loads((tmp_path / RECORD).read_text()) | change))
    with pytest.raises(DamagedError):
        Record.read(tmp_path)
