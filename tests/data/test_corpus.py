"""The text to train on."""

from __future__ import annotations

import errno
import math
import os
import socket
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli import main
from penstock.config import ConfigError, Table
from penstock.data import Corpus, DataConfig, load_corpora
from penstock.data.corpus import MIN_TEXT_BYTES, check_one_source
from penstock.data.order import CYCLE, Dealer, Shuffled
from penstock.data.prepare import Preparation
from penstock.data.text import Text, entropy_nats, scan
from penstock.data.tokenizer import Tokenizer, open_tokenizer

TEXT = b"Water runs downhill.\n" * 100


def load_corpus(config: DataConfig) -> Corpus:
    (corpus,) = load_corpora(config)
    return corpus


def whole(corpus: Corpus) -> bytes:
    assert isinstance(corpus.text, Text)
    return corpus.text.read(0, corpus.text.size)


@pytest.mark.parametrize(
    "bad",
    [
        {"suffixes": ("txt",)},
        {"suffixes": (".",)},
        {"mixture": Table({"a": 1, "b": -1})},
        {"mixture": Table({"a": 1, "b": 0})},
        {"mixture": Table({"a": 1, "b": math.nan})},
        {"mixture": Table({"a": 1, "b": "2"})},
        {"mixture": Table({"a": 1, "b": True})},
        {"mixture": Table({"a": 1e308, "b": 1e308})},
        {"mixture": Table({"a": 1, "b": 10**400})},
        {"mixture": Table({"a": 1, "b": 1e6})},
        {"mixture": Table({"": 1, "b": 1})},
        {"mixture": Table({"a": 1}), "path": "b"},
        {"end_of_document": "</s>"},
    ],
)
def test_a_bad_setting_is_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        DataConfig(**bad)
    assert caught.value.key.partition(".")[0] in bad
    assert caught.value.hint


def test_without_a_path_the_standard_library_is_the_text() -> None:
    corpus = load_corpus(DataConfig())
    assert corpus.text.size > 1_000_000
    assert f"{corpus.text.size:,} bytes" in corpus.source
    assert 2.5 < entropy_nats([scan(corpus.text)], [1.0]) < 4.0


def test_the_standard_library_leaves_out_packages_and_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "os.py",
        "json/decoder.py",
        "test/a.py",
        "json/tests/b.py",
        "site-packages/c.py",
        "readme.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() * 200)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    text = whole(load_corpus(DataConfig()))
    assert text == b"json/decoder.py" * 200 + b"\n" + b"os.py" * 200


def test_an_interpreter_without_sources_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match="sources of Python's standard library") as caught:
        load_corpus(DataConfig())
    assert caught.value.key == "path"


def test_a_file_is_read_whatever_its_ending(tmp_path: Path) -> None:
    file = tmp_path / "text.log"
    file.write_bytes(TEXT)
    corpus = load_corpus(DataConfig(path=str(file)))
    assert whole(corpus) == TEXT
    assert corpus.source == f"{file}: 1 file, 2,100 bytes"


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    contents = {"b.txt": b"B" * 600, "a/z.MD": b"A" * 600, "c.bin": b"C" * 600, "a.txt": b"D" * 600}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    corpus = load_corpus(DataConfig(path=str(tmp_path)))
    assert whole(corpus) == b"\n".join([contents["a.txt"], contents["a/z.MD"], contents["b.txt"]])
    assert "3 files" in corpus.source
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name in (".lock", "config.toml", "metrics.jsonl", "checkpoints/a.txt"):
        (tmp_path / "run" / name).write_text("no text")
    assert whole(load_corpus(DataConfig(path=str(tmp_path)))) == whole(corpus)
    (tmp_path / "latest.txt").symlink_to(tmp_path / "b.txt")
    (tmp_path / "run.txt").hardlink_to(tmp_path / "b.txt")
    assert whole(load_corpus(DataConfig(path=str(tmp_path)))) == whole(corpus), "a file counts once"
    only = load_corpus(DataConfig(path=str(tmp_path), suffixes=(".md", ".Bin")))
    assert whole(only) == contents["a/z.MD"] + b"\n" + contents["c.bin"]


@pytest.mark.parametrize("content", [None, b"", b"x" * (MIN_TEXT_BYTES - 1)])
def test_a_path_without_enough_text_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_corpus(DataConfig(path=str(tmp_path)))
    assert caught.value.key == "path"
    assert caught.value.hint


def test_a_missing_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere: No such file"):
        load_corpus(DataConfig(path=str(tmp_path / "nowhere")))


def test_an_unreadable_file_is_an_error_and_not_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT)
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(ConfigError, match=r"b\.txt is a link to a file that is not there"):
        load_corpus(DataConfig(path=str(tmp_path)))


def test_an_unreadable_folder_is_an_error_and_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT)
    (tmp_path / "closed").mkdir()
    list_folder = os.scandir

    def refuse_closed(folder: str | Path) -> Any:  # permissions would not stop an administrator
        if Path(folder).name == "closed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return list_folder(folder)

    monkeypatch.setattr(os, "scandir", refuse_closed)
    with pytest.raises(ConfigError, match=r"cannot read .*closed"):
        load_corpus(DataConfig(path=str(tmp_path)))


@pytest.mark.parametrize("place", ["/dev/zero", "pipe", "folder/pipe.txt", "socket", "folder/link.jsonl"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, place: str) -> None:
    """A pipe has no writer here, /dev/zero no end, and the link leads nowhere."""
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    if place == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif "pipe" in place:
        os.mkfifo(path)
    elif "link" in place:
        path.symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"not a file|cannot be read") as caught:
        load_corpus(DataConfig(path=str(path.parent if path.parent.name == "folder" else path)))
    assert caught.value.key == "path" and caught.value.hint
    assert place.rpartition("/")[2] in str(caught.value)


@pytest.mark.parametrize("path", ["a\0b", "~nobody-of-that-name/text", "x" * 5000, "/proc/self/mem/x"])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_corpus(DataConfig(path=path))
    assert caught.value.key == "path" and caught.value.hint


def test_a_mixture_ends_its_documents_alike(tmp_path: Path) -> None:
    """Also one of which a text has yet to be prepared, which could take hours."""
    words = {"<|endoftext|>": 0, "<end>": 1, "water": 2, "?": 3}
    named = str(tmp_path / "tokenizer.json")
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?")).save(named)
    text = tmp_path / "text.txt"
    text.write_text("water runs downhill " * 99)
    one, two = (
        prepared(text, tmp_path / end, open_tokenizer(named, end)) for end in ("<end>", "<|endoftext|>")
    )
    refused = [
        (DataConfig(mixture=Table({one: 1.0, two: 1.0})), "end>? end with token 1, those of .* with token 0"),
        (
            DataConfig(mixture=Table({one: 1.0, str(text): 1.0}), tokenizer=named),
            "with token 1, .* with token 0",
        ),
        (DataConfig(mixture=Table({one: 1.0, str(text): 1.0})), "tokens of different tokenizers"),
    ]
    for config, why in refused:
        for check in (check_one_source, load_corpora):
            with pytest.raises(ConfigError, match=why) as caught:
                check(replace(config, cache=tmp_path / "cache"))
            assert caught.value.key == "mixture" and caught.value.hint.startswith("Prepare all texts")
    assert not (tmp_path / "cache").exists()
    check_one_source(DataConfig(mixture=Table({two: 1.0, str(text): 1.0}), tokenizer=named))


def prepared(text: Path, folder: Path, tokenizer: Tokenizer) -> str:
    work = Preparation(files=(text,), source="", field="text", tokenizer=tokenizer)
    assert list(work.run(folder))
    return str(folder)


def test_texts_of_a_mixture_share_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One would train on what the other holds out."""
    (tmp_path / "all" / "code").mkdir(parents=True)
    for name in ("all/one.txt", "all/code/two.txt", "alone.txt"):
        (tmp_path / name).write_text("Water runs downhill.\n" * 100)
    (tmp_path / "link").symlink_to(tmp_path / "all")
    (tmp_path / "soft").mkdir()
    (tmp_path / "soft" / "other.txt").symlink_to(tmp_path / "alone.txt")
    (tmp_path / "hard.txt").hardlink_to(tmp_path / "alone.txt")
    monkeypatch.chdir(tmp_path)
    pairs = [("all", "all/code"), ("all/one.txt", "all"), ("all", "./all"), ("link", "all/code/two.txt")]
    pairs += [("alone.txt", "soft"), ("soft", "hard.txt")]
    for one, other in pairs:
        with pytest.raises(
            ConfigError, match=r"both have .*\.txt: one would train on what the other"
        ) as caught:
            load_corpora(DataConfig(mixture=Table({one: 1, other: 1})))
        assert caught.value.key == "mixture"
    load_corpora(DataConfig(mixture=Table({"all": 1, "alone.txt": 1})))


def test_prepared_tokens_are_named_once(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Water runs downhill.\n" * 100)
    tokens = str(tmp_path / "tokens")
    assert main(["prepare", str(tmp_path / "text.txt"), "--out", tokens]) == 0
    with pytest.raises(ConfigError, match=r"both have .*tokens"):
        load_corpora(DataConfig(mixture=Table({tokens: 1, f"{tmp_path}/./tokens": 1})))


# ---- order -------------------------------------------------------------------------------------------------


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 9))
def test_every_number_stands_in_one_place(count: int, seed: int, epoch: int) -> None:
    for most_listed in (0, count):
        found = Shuffled(count, seed, epoch, most_listed=most_listed).at(np.arange(count))
        assert sorted(found.tolist()) == list(range(count))


def test_a_computed_order_is_as_random_as_a_drawn_one() -> None:
    """Where numbers land, and how far neighbours are apart, is uniform: chi-square over 64 cells."""
    count, cells = 1 << 16, 64
    found = Shuffled(count, 5, 0, most_listed=0).at(np.arange(count))
    for values in (found[: count // 4], np.diff(found) % count):
        seen = np.bincount(values * cells // count, minlength=cells)
        expected = len(values) / cells
        assert ((seen - expected) ** 2 / expected).sum() < 120  # one of 100,000 random orders is above


def test_epochs_and_seeds_differ_and_repeat() -> None:
    places = np.arange(1000)
    orders = [Shuffled(10**12, *seed).at(places).tolist() for seed in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert orders[0] == orders[3]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert max(map(max, orders)) < 10**12


# ---- mixtures ----------------------------------------------------------------------------------------------


shares = st.lists(st.floats(0.01, 1), min_size=1, max_size=6).map(lambda each: [x / sum(each) for x in each])


@given(shares, st.integers(0, 2**40), st.data())
def test_every_text_has_its_share_and_its_samples_are_counted(
    parts: list[float], seed: int, data: st.DataObject
) -> None:
    numbers = np.arange(2 * CYCLE + 100)
    texts, before = Dealer(parts, seed).deal(numbers)
    for text, share in enumerate(parts):
        assert before[texts == text].tolist() == list(range((texts == text).sum()))
        for cycle in (slice(0, CYCLE), slice(CYCLE, 2 * CYCLE)):
            assert abs((texts[cycle] == text).sum() - share * CYCLE) <= 1
    # whatever was asked before, and however many at once
    some = np.sort(data.draw(st.lists(st.integers(0, numbers.size - 1), min_size=1).map(np.array)))
    asked = Dealer(parts, seed)
    for _ in range(2):
        again, numbered = asked.deal(some)
        assert (again == texts[some]).all() and (numbered == before[some]).all()


@given(shares, st.integers(0, 9), st.data())
def test_until_one_text_has_no_more(parts: list[float], seed: int, data: st.DataObject) -> None:
    counts = [data.draw(st.integers(0, 2000)) for _ in parts]
    count = Dealer(parts, seed).until(counts)
    texts, before = Dealer(parts, seed).deal(np.arange(count + 1))
    assert all(before[place] < counts[texts[place]] for place in range(count))
    assert before[count] == counts[texts[count]]
