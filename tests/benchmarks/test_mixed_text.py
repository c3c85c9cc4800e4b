"""The corpus of very different texts, and the recording that runs replay."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from benchmarks import mixed_text
from benchmarks.mixed_text import CATALOGUE_MAGIC, KEPT_STEPS, MANY_EXPERTS, RECORDED, _catalogue, write_texts
from penstock.config import ConfigError
from penstock.workloads import read_recording


def catalogue(entries: list[tuple[bytes, bytes]]) -> bytes:
    """A compiled catalogue of GNU gettext."""
    head = 20 + 16 * len(entries)
    tables, texts = [b"", b""], b""
    for column in (0, 1):
        for entry in entries:
            tables[column] += struct.pack("<2I", len(entry[column]), head + len(texts))
            texts += entry[column] + b"\0"
    start = struct.pack("<5I", CATALOGUE_MAGIC, 0, len(entries), 20, 20 + 8 * len(entries))
    return start + tables[0] + tables[1] + texts


def test_translations_are_read_without_the_header(tmp_path: Path) -> None:
    path = tmp_path / "a.mo"
    path.write_bytes(catalogue([(b"", b"Language: de"), (b"file", b"Datei"), (b"%d\0%d", b"eins\0viele")]))
    assert list(_catalogue(path)) == ["Datei", "eins\nviele"]


@pytest.mark.slow
def test_every_machine_has_some_kinds_of_text(tmp_path: Path) -> None:
    """Python and headers come with what Penstock needs."""
    assert {"python", "headers"} <= set(write_texts(tmp_path)) == {path.stem for path in tmp_path.iterdir()}


def test_too_few_kinds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_text, "texts", lambda: iter([("python", "x" * (1 << 20))]))
    with pytest.raises(ConfigError, match="has 1 kinds of text only"):
        write_texts(tmp_path)


@pytest.mark.parametrize(
    ("path", "steps", "shape"), [(RECORDED, KEPT_STEPS, (128, 4, 16)), (MANY_EXPERTS, 4, (128, 2, 64))]
)
def test_recordings_have_every_sample(path: Path, steps: int, shape: tuple[int, ...]) -> None:
    found = read_recording(path)
    assert len(found.steps) == steps
    assert [None if samples is None else samples.shape for samples in found.samples] == [shape] * steps
