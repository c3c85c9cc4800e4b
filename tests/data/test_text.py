"""Text that is read where it lies: the same bytes as all files joined, whatever is asked for."""

from __future__ import annotations

import gc
import hashlib
import math
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError
from penstock.data.files import MOST_OPEN
from penstock.data.text import BLOCK_BYTES, SAMPLED_BLOCKS, Text, TextError, entropy_nats, scan


def text_of(*contents: bytes) -> Text:
    """Of files whose names are gone by the time it is read; up to MOST_OPEN of them."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(number)) for number in range(len(contents))]
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)
        return Text(None, files)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@given(st.lists(st.binary(max_size=12), min_size=1, max_size=6), st.data())
def test_any_range_is_that_of_all_files_joined(contents: list[bytes], data: st.DataObject) -> None:
    joined, text = b"\n".join(contents), text_of(*contents)
    assert text.size == len(joined)
    start = data.draw(st.integers(0, text.size))
    stop = data.draw(st.integers(start, text.size))
    assert text.read(start, stop) == joined[start:stop]
    assert text.tokens(start, stop).tolist() == list(joined[start:stop])
    begins = np.cumsum([len(content) + 1 for content in contents])[:-1]
    assert text.document_starts(start, stop).tolist() == [each for each in begins if start < each < stop]


@pytest.mark.slow
def test_more_files_than_may_be_open_are_read(tmp_path: Path) -> None:
    files = [tmp_path / f"{number:04}.txt" for number in range(3 * MOST_OPEN)]
    for number, file in enumerate(files):
        file.write_text(f"file {number}")
    gc.collect()  # files of other tests
    open_before = open_files()
    text = Text(str(tmp_path), files)
    joined = "\n".join(f"file {number}" for number in range(len(files))).encode()
    for _ in range(2):
        assert text.read(0, text.size) == joined
    assert open_files() <= open_before + MOST_OPEN
    del text
    assert open_files() == open_before


@pytest.mark.parametrize("change", ["cut short", "overwritten", "gone"])
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, change: str) -> None:
    files = [tmp_path / f"{number}.txt" for number in range(MOST_OPEN + 1)]
    for file in files:
        file.write_bytes(b"x" * 100)
    text, first = Text(None, files), files[0]  # which is closed again by now
    if change == "gone":
        first.unlink()
    else:
        first.write_bytes(b"y" * (50 if change == "cut short" else 100))
        os.utime(first, (1, 1))  # clocks of file systems are coarse
    with pytest.raises(TextError, match=r"0\.txt"):
        text.read(0, 10)


def test_what_cannot_be_opened_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"0\.txt there is no such file") as caught:
        Text("texts", [tmp_path / "0.txt"])
    assert (caught.value.key, caught.value.value) == ("path", "texts")


@given(st.binary(min_size=1, max_size=300))
def test_entropy_lies_between_one_byte_and_all_bytes(content: bytes) -> None:
    found = entropy_nats([scan(text_of(content))], [1.0])
    assert -1e-12 <= found <= math.log(len(set(content))) + 1e-12


def test_entropy_of_equally_frequent_bytes() -> None:
    assert entropy_nats([scan(text_of(bytes(range(256)) * 3))], [1.0]) == pytest.approx(math.log(256))


def test_a_text_is_identified_by_the_hash_of_all_of_it() -> None:
    """As earlier versions did: their checkpoints go on."""
    contents = os.urandom(2 * BLOCK_BYTES + 77), b"more", b""
    joined, found = b"\n".join(contents), scan(text_of(*contents))
    assert found.digest == hashlib.sha256(joined).hexdigest()
    assert found.counts.tolist() == np.bincount(np.frombuffer(joined, np.uint8), minlength=256).tolist()
    assert found.seen == len(joined)


@pytest.mark.slow
def test_of_a_long_text_a_sample_is_read(tmp_path: Path) -> None:
    """A sparse file of a terabyte takes as long as the sample; size and what is sampled make another one."""
    path, size = tmp_path / "long.txt", 1 << 40
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(size - 3)
        file.write(b"end")
    found = scan(Text(None, [path]))
    assert found.seen == found.counts.sum() == SAMPLED_BLOCKS * BLOCK_BYTES
    assert [found.counts[byte] for byte in b"end"] == [1, 1, 1], "the last block is in the sample"


def test_another_size_or_sampled_byte_is_another_text() -> None:
    small = 4096
    contents = [b"a" * 9000, b"a" * 9001, b"b" + b"a" * 8999]
    digests = {scan(text_of(content), whole_bytes=small).digest for content in contents}
    assert len(digests) == len(contents)
