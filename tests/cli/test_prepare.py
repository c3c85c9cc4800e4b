"""`penstock prepare` as a user meets it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.data.tokens import read_record
from tests.support.cli import Cli
from tests.support.forked import run_text


def test_prepare_and_prepare_again(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.md").write_text("Water runs downhill.\n" * 50)
    out = tmp_path / "tokens"
    command = ["prepare", str(tmp_path / "texts"), "--out", str(out)]
    for _ in range(2):
        assert main(command) == 0
        printed = cli.capsys.readouterr()
        assert f"{out}: 3 documents, 3,153 tokens in 1 shard\n" in printed.out
        assert f"data.path={out} model.vocab_size=256" in printed.out and not printed.err
    assert cli.finds(command)["tokens"] == 3153
    shard = out / "tokens-00000.npy"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    assert main(command) == 1
    assert f"{shard} is damaged" in cli.capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nowhere"], "INPUT = .*cannot read .*nowhere"),
        ([".", "--suffixes", ".rst"], "contains no file with extension"),
        (["text.txt", "--tokenizer", "text.txt"], "tokenizer = .*is no tokenizer"),
        (["text.txt", "--suffixes", "txt"], "suffixes = .*must be a file extension"),
        (["text.txt", "--shard-tokens", "0"], "is no number of tokens"),
        (["text.txt", "--out", "text.txt"], "text.txt cannot be written"),
        (["text.txt", "--out", "x" * 300], "cannot be written .*File name too long"),
        (["text.txt.gz"], "text.txt.gz is no text"),
        (["text.txt", "."], r"INPUT: .*text.txt is named twice"),
        (["text.txt", "empty/../text.txt"], r"INPUT: .*text.txt is named twice"),
        (["empty"], "empty holds no text"),
    ],
)
def test_what_cannot_be_prepared(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt.gz").write_bytes(b"\x1f\x8b")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").touch()
    if "text.txt" in arguments:
        (tmp_path / "text.txt").write_text("Water runs downhill.\n")
    out = [] if "--out" in arguments else ["--out", "tokens"]
    try:
        code = main(["prepare", *arguments, *out])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code in (1, 2)
    assert re.search(why, capsys.readouterr().err)


def test_inputs_need_no_name_in_utf8_and_the_result_does(tmp_path: Path, cli: Cli) -> None:
    """What a configuration cannot name is refused before anything is read."""
    texts, out = tmp_path / os.fsdecode(b"\xff"), tmp_path / "tokens"
    texts.mkdir()
    (texts / "text.txt").write_text("Water runs downhill.\n" * 10)
    for _ in range(2):
        assert main(["prepare", str(texts), "--out", str(out)]) == 0
    assert read_record(out / "tokens.json").source == f"{tmp_path}/\\xff"
    told = cli.refuses(["prepare", texts, "--out", f"{texts}-tokens"])
    assert "--out = " in told and "is not UTF-8" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["tokens", texts.name])


STOPPED = """
import signal, sys
from penstock.cli import main
from penstock.data.prepare import Preparation
from penstock.stops import STOPS
from tests.support.faulty import before
before(Preparation, "run", lambda: signal.raise_signal(signal.{number}), calls=1)
STOPS.hear()
sys.exit(main(["prepare", "{text}", "--out", "{out}"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_stop_says_how_to_go_on(tmp_path: Path, number: str, code: int) -> None:
    (text := tmp_path / "a.md").write_text("Water runs downhill.\n")
    done = run_text(STOPPED.format(number=number, text=text, out=tmp_path / "tokens"))
    told = "penstock: stopped; run the same command again, and it goes on\n"
    assert (done.returncode, done.stdout, done.stderr) == (code, "", told)
