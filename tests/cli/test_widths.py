"""No printed line is longer than the terminal; a word, such as a path, is never broken."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from penstock.cli import main
from penstock.cost.clusters import find_cluster, names
from penstock.lab.bench.result import render
from penstock.report.profile import profile_text
from penstock.schedule import SCHEDULES
from penstock.train.progress import Progress
from penstock.words import UNKNOWN, folded, markdown_table, stacked, terminal_width
from tests.autotune.test_trials import run as run_trials
from tests.lab.bench.test_summarise import result
from tests.report.test_summary import SUMMARY
from tests.support.cli import Cli
from tests.support.metrics import step

WIDTH = 80
STAGES = (
    "plan --model flowmoe/gpt2-tiny --cluster 4x2xA100-80GB,net=10gbit --layers 8 --batch 1 --budget 0.01 "
    "--pipeline-parallel-size 4 --global-batch 32 --recompute experts"
)
PLAN = ["plan", "--model", "flowmoe/gpt2-tiny", "--cluster", "flowmoe-cluster-2", "--layers", "1"]
HELP = (
    *("train", "plan", "profile", "schedule", "bench", "emulate", "list", "report", "doctor"),
    *("config show", "config validate", "config schema", "config docs"),
)
LONG = " ".join(["many words in a message"] * 20)


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def fits(text: str) -> bool:
    assert text.strip()
    return all(len(line) <= WIDTH for line in text.splitlines())


@pytest.mark.parametrize(
    "words",
    [
        *(["schedule", name] for name in SCHEDULES),
        pytest.param([*PLAN, "--budget", "0.0001"], marks=pytest.mark.slow),
        pytest.param(STAGES.split(), marks=pytest.mark.slow),
    ],
)
def test_commands_fit(words: list[str], cli: Cli) -> None:
    assert fits(cli.prints(words))


@pytest.mark.parametrize("command", HELP)
def test_help_fits(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert fits(text)
    assert text.split("\n\n")[1].endswith("."), "it says what the command does"
    assert not [line for line in text.splitlines() if line.endswith("-")], "a command cannot be copied"


def test_messages_of_a_run_fit(capsys: pytest.CaptureFixture[str]) -> None:
    trials, _ = run_trials({"penstock": 0.5, "flowmoe": 0.3, "sequential": 0.4})
    lines = ["Plan 1   " + LONG, LONG, "\n".join(trials.lines)]
    with Progress(total_steps=100_000, every=1) as progress:
        for line in lines:
            progress.say(line)
        progress.update(replace(step(99_999, eval_loss=2.75), tokens_per_s=1e9))
    said = capsys.readouterr().err
    assert fits(said)
    assert said.splitlines()[1].startswith(" " * 9)
    assert said.splitlines()[-1].startswith("step 99999/100000  loss 2.500  held-out loss 2.750")
    assert " ".join(said.split()).startswith(" ".join(" ".join(lines).split()))


def test_results_fit() -> None:
    assert fits(replace(SUMMARY, corpus=LONG).to_text(WIDTH))
    assert fits(render(replace(result(), notes=(LONG,)), WIDTH))
    for name in names():
        assert fits(profile_text(find_cluster(name), WIDTH))


def test_a_table_in_parts_has_every_column_once() -> None:
    rows = [[f"{name}{number}" for name in ("row", "left", "middle", "right")] for number in range(3)]
    parts = list(stacked(rows, 22))
    assert [part[1] for part in parts] == [["row1", "left1"], ["row1", "middle1"], ["row1", "right1"]]
    assert list(stacked(rows, 100)) == [rows]


def test_words_stand_on_the_left_and_numbers_on_the_right() -> None:
    rows = [("way", "ms", "ratio", "why"), ("a", "1,750", "+0.5 [0, 1]", "x"), ("long", "9", "-", "2 x")]
    assert markdown_table(rows) == [
        "| way  |    ms |       ratio | why |",
        "|------|------:|------------:|-----|",
        "| a    | 1,750 | +0.5 [0, 1] | x   |",
        "| long |     9 |           - | 2 x |",
    ]


def test_columns_and_paths_stay_whole() -> None:
    path = "/a-very-long-path" * 8
    assert folded(f"label  text and {path}", 40) == f"label  text and\n       {path}"
    assert folded("computation 86 %, network 9 %", 28) == "computation 86 %, network\n    9 %"
    assert (
        folded("short  line\n\n" + "word " * 4 + "end", 15) == "short  line\n\nword word word\n    word end"
    )


def test_without_a_terminal_lines_have_a_fixed_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    assert terminal_width(io.StringIO()) == UNKNOWN
