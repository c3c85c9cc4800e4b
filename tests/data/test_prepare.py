"""Folders of tokens: what is written is what is read, however often writing was cut off, or it is refused."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from penstock.config import ConfigError
from penstock.data import documents as documents_module
from penstock.data import files as files_module
from penstock.data import prepare as prepare_module
from penstock.data.files import files_of, parquet_of
from penstock.data.prepare import Preparation
from penstock.data.text import TextError
from penstock.data.tokenizer import Bytes, FileTokenizer, open_tokenizer
from penstock.data.tokens import (
    BLOCK_BYTES,
    UNFINISHED,
    WHOLE,
    Shard,
    Tokens,
    first_damage,
    shard_file,
    width_of,
    write_record,
)
from penstock.writing import DRAFT, NO_LOCKS
from tests.support.hub import hub_of
from tests.support.killed import left_by_kills
from tests.support.patience import HANG_S
from tests.support.runs import refused

DOCUMENTS = [
    f"Water runs downhill, {number} times.\nÄnd “back” up 🌊 {number * number}." for number in range(40)
]
SUFFIXES = (".txt", ".jsonl", ".parquet")
MOST_CUTS = 60


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte pairs, of 320 tokens."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(DOCUMENTS, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def write_inputs(folder: Path) -> Path:
    """Every kind of file: 40 documents in a table, 40 in lines, and two texts."""
    folder.mkdir()
    rows: list[str | None] = [None, *DOCUMENTS, ""]
    table = pyarrow.table({"id": list(range(len(rows))), "text": rows})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=7)
    lines = [json.dumps({"text": text, "id": 1}) for text in DOCUMENTS]
    (folder / "b.jsonl").write_text("\n".join([*lines[:3], "", '{"text": null}', *lines[3:]]))
    (folder / "c.txt").write_text("\n".join(DOCUMENTS))
    (folder / "d.txt").write_bytes(b"no line here \xff " * 9)
    (folder / "e.txt").write_bytes(b"")
    return folder


def expected_documents(folder: Path) -> list[str]:
    texts = [(folder / name).read_bytes().decode("utf-8", "replace") for name in ("c.txt", "d.txt")]
    return [*DOCUMENTS, *DOCUMENTS, *texts]


def preparation(folder: Path, tokenizer: Path | None = None, shard_tokens: int = 1000) -> Preparation:
    return Preparation(
        files=tuple(files_of(str(folder), SUFFIXES)),
        source="test",
        field="text",
        tokenizer=open_tokenizer(None if tokenizer is None else str(tokenizer)),
        shard_tokens=shard_tokens,
    )


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small input has many pieces and many batches."""
    monkeypatch.setattr(documents_module, "PIECE_BYTES", 64)
    monkeypatch.setattr(prepare_module, "BATCH_CHARACTERS", 300)


def finish(work: Preparation, out: Path) -> Tokens:
    for _ in work.run(out):
        pass
    return Tokens(None, out)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def split(tokens: Tokens) -> list[list[int]]:
    """The tokens of every document, by the places where one begins."""
    assert tokens.tokens(tokens.size - 1, tokens.size).tolist() == [tokens.record.end]
    starts = tokens.document_starts(0, tokens.size)
    return [part[:-1].tolist() for part in np.split(tokens.tokens(0, tokens.size), starts)]


@pytest.mark.usefixtures("small_pieces")
def test_documents_of_all_kinds_of_files_come_back(tmp_path: Path, tokenizer_file: Path) -> None:
    folder = write_inputs(tmp_path / "in")
    expected = expected_documents(folder)
    found = finish(preparation(folder), tmp_path / "bytes")
    assert [bytes(part).decode() for part in split(found)] == expected
    assert (found.vocabulary, found.record.dtype.name, found.record.documents) == (
        256,
        "uint8",
        len(expected),
    )

    pairs = finish(preparation(folder, tokenizer_file), tmp_path / "pairs")
    known = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    alphabet = {letter: byte for byte, letter in _byte_letters().items()}
    for part, text in zip(split(pairs), expected, strict=True):
        letters = "".join(known.id_to_token(each) or "" for each in part)
        assert bytes(alphabet[letter] for letter in letters).decode() == text
    assert (pairs.vocabulary, pairs.record.dtype.name, pairs.record.documents) == (
        320,
        "uint16",
        len(expected),
    )
    assert len(pairs.record.shards) > 2
    shards = [
        np.load(tmp_path / "pairs" / f"tokens-{n:05d}.npy", mmap_mode="r")
        for n in range(99)
        if n < len(pairs.record.shards)
    ]
    assert np.concatenate(shards).tolist() == pairs.tokens(0, pairs.size).tolist()


def _byte_letters() -> dict[int, str]:
    """GPT-2's letter for every byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}


@pytest.mark.slow
@pytest.mark.usefixtures("small_pieces")
def test_cut_off_anywhere_it_goes_on_to_the_same_bytes(tmp_path: Path, tokenizer_file: Path) -> None:
    """A kill leaves what is never taken for a whole folder, before any step of the work."""
    work = preparation(write_inputs(tmp_path / "in"), tokenizer_file)
    *cuts, whole_cut = left_by_kills(
        tmp_path / "whole", lambda: list(work.run(tmp_path / "whole")), tmp_path / "cuts"
    )
    whole = content(tmp_path / "whole")
    assert content(whole_cut) == whole and UNFINISHED not in whole
    assert not any(map(DRAFT.fullmatch, whole))
    broken = [cut for cut in cuts if not (cut / WHOLE).exists()]
    assert len(broken) > 50
    for cut in broken[:: 1 + len(broken) // MOST_CUTS]:
        with pytest.raises(ConfigError, match="preparation has not ended"):
            Tokens(None, cut)
        finish(work, cut)
        assert content(cut) == whole
    assert list(work.run(cuts[-1])) == [], "a whole folder stays as it is"


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_that_leads_elsewhere_is_refused(tmp_path: Path, kind: str) -> None:
    work, out = preparation(write_inputs(tmp_path / "in")), tmp_path / "out"
    out.mkdir()
    (tmp_path / "mine").write_text("mine")
    if kind == "pipe":
        os.mkfifo(out / ".lock")
    else:
        (out / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError) as caught:
        finish(work, out)
    assert caught.value.key == "--out"
    assert (tmp_path / "mine").read_text() == "mine" and [path.name for path in out.iterdir()] == [".lock"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards, one of them of several blocks."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "in.txt").write_text("Water runs downhill.\n" * 15_000)
    work = preparation(folder, shard_tokens=2 * BLOCK_BYTES + 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "PIECE_BYTES", 10_000)
        patch.setattr(prepare_module, "BATCH_CHARACTERS", 10_000)
        finish(work, folder / "out")
    return folder / "out"


@given(data=st.data())
def test_one_wrong_byte_is_found(prepared: Path, data: st.DataObject) -> None:
    names = [name for name in content(prepared) if name != ".lock"]
    name = data.draw(st.sampled_from(names))
    whole = (prepared / name).read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    change = data.draw(st.sampled_from(["flipped", "cut", "gone"]))
    flipped = whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :]
    path = prepared / name
    try:
        if change == "gone":
            path.unlink()
        else:
            path.write_bytes(flipped if change == "flipped" else whole[:place])
        damage = first_damage(prepared)
        if damage is None:  # space between two words
            assert name == WHOLE and json.loads(path.read_bytes()) == json.loads(whole)
        else:
            assert Path(name).stem in damage or (change == "gone" and "has not ended" in damage)
    finally:
        path.write_bytes(whole)
    assert first_damage(prepared) is None


def test_what_is_read_is_checked_once_and_nothing_else(prepared: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(prepared, copy)
    shard = copy / "tokens-00001.npy"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    tokens = Tokens(None, copy)
    first = tokens.record.shards[0].tokens
    assert tokens.tokens(first - 5, first + 5).size == 10, "of two shards, where both are whole"
    with pytest.raises(TextError, match=r"tokens-00001\.npy is damaged"):
        tokens.tokens(first, first + tokens.record.shards[1].tokens)


def test_more_tokens_than_memory_are_no_reason_to_take_it(prepared: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(prepared, copy)
    record = Tokens(None, copy).record
    lie = replace(record, shards=(Shard(tokens=2**62, sha256=""), *record.shards[1:]))
    write_record(lie, copy / WHOLE)
    with pytest.raises(ConfigError, match=r"tokens-00000\.npy has .* bytes, and was written with"):
        Tokens(None, copy)


@given(st.integers(1, 2**32))
def test_tokens_are_as_wide_as_their_vocabulary(vocabulary: int) -> None:
    assert np.iinfo(width_of(vocabulary)).max >= vocabulary - 1
    assert width_of(vocabulary).itemsize == 1 or vocabulary > 2 ** (4 * width_of(vocabulary).itemsize)


Change = Callable[[Path, Preparation], Preparation]
OTHERS: dict[str, Change] = {
    "another field": lambda folder, work: replace(work, field="other"),
    "another file": lambda folder, work: replace(work, files=work.files[1:]),
    "shards of another size": lambda folder, work: replace(work, shard_tokens=7),
}


@pytest.mark.parametrize("change", OTHERS)
def test_a_folder_of_something_else_is_refused(tmp_path: Path, change: str) -> None:
    work = preparation(write_inputs(tmp_path / "in"))
    finish(work, tmp_path / "out")
    other = OTHERS[change](tmp_path / "in", work)
    with pytest.raises(ConfigError, match="holds tokens of other files or settings"):
        next(other.run(tmp_path / "out"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        next(work.run(tmp_path / "full"))


@pytest.mark.slow
def test_two_at_once(tmp_path: Path) -> None:
    """The second one is refused, or waits where it may."""
    work = preparation(write_inputs(tmp_path / "in"))
    first = work.run(tmp_path / "out")
    next(first)
    with pytest.raises(ConfigError, match="another process is writing there"):
        next(work.run(tmp_path / "out"))
    second = work.run(tmp_path / "out", waits=True)
    assert next(second).tokens == 0
    assert list(first) is not None and list(second) == []


def take_locks_away(monkeypatch: pytest.MonkeyPatch, reason: int) -> None:
    def unknown(*_: object) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", unknown)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("reason", NO_LOCKS)
def test_two_at_once_where_there_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: int
) -> None:
    """As on Lustre that is mounted without them: both write the same, and what can be read stays in place."""
    take_locks_away(monkeypatch, reason)
    work, out = preparation(write_inputs(tmp_path / "in")), tmp_path / "out"
    first, second = work.run(out), work.run(out)
    next(first)
    next(second)
    finish(work, tmp_path / "alone")
    list(first)
    assert content(out).keys() >= (whole := content(tmp_path / "alone")).keys()
    states = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.glob("tokens-*[!t]")}
    list(second)
    assert content(out) == whole and "no locks" in caplog.text
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in states} == states


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("name", "before", "after"), [(WHOLE, 1, None), (UNFINISHED, 1, None), (UNFINISHED, 0, 8)]
)
def test_one_that_begins_while_another_writes_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, before: int, after: int | None
) -> None:
    """The other goes on, or ends, just after this one has looked for a record."""
    take_locks_away(monkeypatch, NO_LOCKS[0])
    work, out, exists = preparation(write_inputs(tmp_path / "in")), tmp_path / "out", Path.exists
    finish(work, tmp_path / "alone")
    other = work.run(out)
    list(islice(other, before))

    def look(path: Path) -> bool:
        there = exists(path)
        if path == out / name:
            patched.undo()
            list(islice(other, after))
        return there

    with monkeypatch.context() as patched:
        patched.setattr(Path, "exists", look)
        next(work.run(out), None)
    assert shard_file(out, 0).exists()
    list(other)
    assert content(out) == content(tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("change", "why"), [("write", "has changed while it was read"), ("remove", "c.txt")])
def test_a_file_that_changes_meanwhile_is_an_error(tmp_path: Path, change: str, why: str) -> None:
    work, file = preparation(write_inputs(tmp_path / "in")), tmp_path / "in" / "c.txt"
    going = work.run(tmp_path / "out")
    next(going)
    file.write_text("other") if change == "write" else file.unlink()
    with pytest.raises(TextError, match=why):
        list(going)
    assert not (tmp_path / "out" / WHOLE).exists()


@pytest.mark.parametrize(
    ("name", "written", "why"),
    [
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": 3}\n',
            "a.jsonl, the line from byte 14 on: field 'text' is no text",
        ),
        ("a.jsonl", b'{"text": "x"}\n{"body": ""}', "the line from byte 14 on: has no field 'text'"),
        ("a.jsonl", b"not JSON", "the line from byte 0 on: is not JSON"),
        ("a.parquet", b"PAR1 and no more", "a.parquet.*is no Parquet file"),
        ("a.txt", b"", "holds no text"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_by_its_place(
    tmp_path: Path, name: str, written: bytes, why: str
) -> None:
    (tmp_path / name).write_bytes(written)
    with pytest.raises((TextError, ConfigError), match=why):
        finish(preparation(tmp_path), tmp_path / "out")
    (tmp_path / name).unlink()
    (tmp_path / "mended.txt").write_text("x")
    finish(preparation(tmp_path), tmp_path / "out")


def test_a_field_that_a_table_lacks_is_told_with_those_it_has(tmp_path: Path) -> None:
    folder = write_inputs(tmp_path / "in")
    twice = pyarrow.table([["x"], ["y"]], names=["text", "text"])
    (tmp_path / "twice").mkdir()
    pyarrow.parquet.write_table(twice, tmp_path / "twice" / "a.parquet")
    for inputs, field, why in (
        (folder, "body", "has columns id, text"),
        (folder, "id", "is no text"),
        (tmp_path / "twice", "text", "has columns text, text"),
    ):
        with pytest.raises(ConfigError, match=why):
            replace(preparation(inputs), field=field).check()


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.string(),
        pyarrow.large_string(),
        pyarrow.string_view(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    ],
    ids=str,
)
def test_a_column_of_text_is_found_by_its_whole_name(tmp_path: Path, kind: pyarrow.DataType) -> None:
    texts = pyarrow.array(["x", None, "y", "x"]).cast(kind)
    table = pyarrow.table({"page": [{"text": "no"}] * 4, "page.text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    work = replace(preparation(tmp_path), field="page.text")
    assert bytes(finish(work, tmp_path / "out").tokens(0, 6)) == b"x\xffy\xffx\xff"


def test_a_text_cannot_spell_a_special_token(tokenizer_file: Path) -> None:
    tokenizer = FileTokenizer(str(tokenizer_file), None)
    (spelt,) = tokenizer.encode(["a <|endoftext|> b"])
    assert tokenizer.end == 0 and tokenizer.end not in spelt
    assert 255 not in b"".join(map(bytes, Bytes().encode(["ÿ \udcff"])))


def test_what_is_no_tokenizer_is_refused(
    tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for path, end, why in (
        (str(tmp_path), None, "is no tokenizer that"),
        (str(tmp_path / "none"), None, "there is no such file"),
        (str(tokenizer_file), "<end>", "has no such token"),
        (None, "<end>", "bytes have one already"),
    ):
        with pytest.raises(ConfigError, match=why):
            open_tokenizer(path, end)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"needs the package tokenizers\. Install it: pip install"):
        open_tokenizer(str(tokenizer_file))


SIZE_BYTES, GROWTH_BYTES = 96 << 20, 32 << 20
MEASURE = """
import sys
from pathlib import Path
from penstock.data.prepare import Preparation
from penstock.data.text import scan
from penstock.data.tokenizer import Bytes
from penstock.data.tokens import Tokens

def peak():  # of this program; ru_maxrss begins with that of the one that started it
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

small, large, out = map(Path, sys.argv[1:])
for file in (small, large):
    before = peak()
    work = Preparation(files=(file,), source="", field="text", tokenizer=Bytes(), shard_tokens=40 << 20)
    for _ in work.run(out / file.name):
        pass
    tokens = Tokens(None, out / file.name)
    assert scan(tokens).seen == tokens.size > 0.99 * file.stat().st_size
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", ".parquet"])
def test_memory_does_not_grow_with_the_text(tmp_path: Path, suffix: str) -> None:
    """A process that has prepared and read a small text needs no more for one of 96 MiB, in one row group."""
    for name, size in (("small", 4 << 20), ("large", SIZE_BYTES)):
        path, row = tmp_path / (name + suffix), "x" * 4096
        with path.open("wb") as file:
            file.truncate(size)
        if suffix:
            table = pyarrow.table({"text": [row] * (size // len(row))})
            pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False)
    arguments = [str(tmp_path / name) for name in (f"small{suffix}", f"large{suffix}", "out")]
    child = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], check=True, capture_output=True, text=True
    )
    assert int(child.stdout) < GROWTH_BYTES


# ---- the hub -----------------------------------------------------------------------------------------------


NOBODY = "http://127.0.0.1:9"
NAME = "someone/stories"
STORIES = [f"story {number} of several" for number in range(40)]


PROGRAM = """
import os, sys
import datasets
from huggingface_hub import constants

from penstock.cli import main

for offline, name, folder in (line.split() for line in sys.stdin):
    if not os.fork():
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = offline == "offline"
        os._exit(main(["prepare", name, "--out", folder]))
    assert os.wait()[1] == 0
"""
"""Loads what takes seconds once, for processes that each make tokens of a dataset."""


@pytest.mark.slow
def test_a_dataset_is_read_by_its_name_on_the_hub(tmp_path: Path) -> None:
    """Afterwards no hub is needed."""
    folder, named = tmp_path / "data", f"{files_module.PREFIX}{NAME}"
    folder.mkdir()
    for split, stories in (("train", STORIES), ("test", STORIES[:3])):
        lines = [json.dumps({"number": number, "text": text}) for number, text in enumerate(stories)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    every, few, later = (tmp_path / name for name in ("every", "few", "later"))
    asked = f"online {named} {every}\nonline {named}?split=test {few}\noffline {named} {later}\n"
    with hub_of(folder, NAME, "datasets") as address:
        own = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", PROGRAM]
        subprocess.run(
            command,
            env=os.environ | own,
            input=asked,
            text=True,
            capture_output=True,
            timeout=HANG_S,
            check=True,
        )
    found = [np.load(out / "tokens-00000.npy").tolist() for out in (every, few, later)]
    tokens = [
        [byte for text in stories for byte in (*text.encode(), 255)] for stories in (STORIES, STORIES[:3])
    ]
    assert found == [*tokens, tokens[0]]


@pytest.mark.slow
@pytest.mark.parametrize("links", [True, False], ids=["links", "no hard links"])
def test_the_first_to_convert_a_dataset_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """Machines with one cache convert at the same time, and one may be reading when another has ended."""
    import datasets

    first, named = list[tuple[Path, os.stat_result]](), f"{files_module.PREFIX}{NAME}"

    class Slow(datasets.Dataset):
        def to_parquet(self, *arguments: Any, **more: Any) -> int:
            monkeypatch.setattr(Slow, "to_parquet", datasets.Dataset.to_parquet)
            file = parquet_of.__wrapped__(named)  # another machine begins later, and is done before
            first.append((file, file.stat()))
            return self.to_parquet(*arguments, **more)

    def no_link(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    slow = Slow(pyarrow.table({"text": STORIES}))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: slow)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    if not links:
        monkeypatch.setattr(os, "link", no_link)
    file = parquet_of.__wrapped__(named)
    ((known, status),) = first
    assert file == known and [path.name for path in file.parent.iterdir()] == [file.name]
    assert pyarrow.parquet.read_table(file)["text"].to_pylist() == STORIES
    assert os.path.samestat(file.stat(), status)


@pytest.mark.parametrize("path", ["", "a/b/c", "someone/stories?rows=3", "?split=train"])
def test_what_names_no_dataset(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parquet_of(f"{files_module.PREFIX}{path}")
    assert caught.value.key == "path" and files_module.FORM in str(caught.value)


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "is_there", lambda module: module != "datasets")
    with pytest.raises(ConfigError, match="datasets"):
        parquet_of(f"{files_module.PREFIX}{NAME}")


@pytest.mark.slow
def test_what_the_hub_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here nobody answers; a name that is none, another split and no connection end alike."""
    import datasets
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    unhurried = {**vars(time), "sleep": lambda _: None}  # it tries six times, 23 seconds in all
    monkeypatch.setattr(_http, "time", SimpleNamespace(**unhurried))
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", NOBODY)
    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    settings = [f"data.path={files_module.PREFIX}{NAME}", f"output.dir={tmp_path / 'run'}"]
    assert "data.path" in refused(capsys, "train", "configs/tiny.toml", *settings)
