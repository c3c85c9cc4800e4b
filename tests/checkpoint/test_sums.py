"""SHA256SUMS: as the standard tool writes it, and refused for a single character that is not."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.folder import SUMS, DamagedError, compare, digest_of, read_sums, write_sums

FILES = {"a.json": b"{}", "shard-00001.safetensors": bytes(range(256)), "b": b""}


def written(folder: Path) -> Path:
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    write_sums(folder, {name: digest_of(folder / name) for name in FILES})
    return folder


def check(folder: Path) -> None:
    digests = read_sums(folder)
    compare(folder, digests, digests)


def test_the_standard_tool_reads_them(tmp_path: Path) -> None:
    check(written(tmp_path))
    assert read_sums(tmp_path).keys() == FILES.keys()
    subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=tmp_path, check=True, capture_output=True)


@given(st.data())
def test_every_flipped_bit_and_every_cut_is_noticed(data: st.DataObject) -> None:
    """Of any file, that of the digests itself included."""
    with tempfile.TemporaryDirectory() as name:
        folder = written(Path(name))
        path = folder / data.draw(st.sampled_from(["a.json", "shard-00001.safetensors", SUMS]))
        content = path.read_bytes()
        place, bit = data.draw(st.integers(0, len(content) - 1)), 1 << data.draw(st.integers(0, 7))
        flipped = bytes([content[place] ^ bit]) + content[place + 1 :]
        path.write_bytes(content[:place] + data.draw(st.sampled_from([flipped, b""])))
        try:
            check(folder)
        except DamagedError:
            return
        # Whole lines may be missing at the end of the list: then the files are not those of a checkpoint.
        assert path.name == SUMS and read_sums(folder).keys() < FILES.keys()


DIGEST = "0" * 64


@pytest.mark.parametrize(
    "line",
    [
        f"{DIGEST}  ../secret\n",
        f"{DIGEST}  /etc/passwd\n",
        f"{DIGEST}  a/b\n",
        f"{DIGEST}  .hidden\n",
        f"{DIGEST} *a\n",
        f"{DIGEST.upper()}A  a\n",
        f"{DIGEST}  a\r\n",
        f"{DIGEST}  a",
        f"{DIGEST}  a\n{DIGEST}  a\n",
        "",
        "\n",
        "é",
    ],
)
def test_other_lines_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / SUMS).write_text(line)
    with pytest.raises(DamagedError, match=SUMS):
        read_sums(tmp_path)
