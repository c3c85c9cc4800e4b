"""What the documentation shows is what runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.cli.main import _parser
from penstock.cli.run import parse
from penstock.config import load
from penstock.config.described import described, page
from penstock.lab.bench.config import BenchConfig
from penstock.topology import Layout
from penstock.train.config import RunConfig
from tests.support.forked import run_forked

ROOT = Path(__file__).parent.parent
MOST_WORDS = 25_000
"""Of all pages in docs."""
OWN_LOOP = (ROOT / "docs" / "own-loop.md").read_text()
SETTINGS = (ROOT / "docs" / "settings.md").read_text()


def test_the_example_in_the_text_is_the_file() -> None:
    block = re.search(r"```python\n(.*?)```", OWN_LOOP, re.DOTALL)
    assert block is not None
    assert block[1] == (ROOT / "docs" / "example_training.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_example_runs(processes: int) -> None:
    result = run_forked(processes, program=str(ROOT / "docs" / "example_training.py"))
    assert result.returncode == 0, result.stderr
    losses = [float(value) for value in re.findall(r"loss ([0-9.]+)", result.stdout)]
    assert len(losses) == 3 and losses[-1] < 0.2 < losses[0]


@pytest.mark.slow
def test_the_model_of_hugging_face_comes_back_as_it_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a plan that is given: to measure and search takes longer than all else."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    program, loads = str(ROOT / "docs" / "example_hugging_face.py"), ["transformers.models.qwen3_moe"]
    result = run_forked(2, tmp_path, "flowmoe", program=program, loads=loads)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("\nthe same\n")


@pytest.mark.slow
def test_a_model_that_trl_has_trained_is_read_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    program, loads = str(ROOT / "docs" / "example_trl.py"), ["trl.trainer.sft_trainer", "datasets"]
    result = run_forked(2, tmp_path, "flowmoe", program=program, loads=loads)
    assert result.returncode == 0, result.stderr
    found = re.fullmatch(r"loss (\S+) -> (\S+): The network .*", result.stdout.splitlines()[-1])
    assert found is not None and float(found[2]) < float(found[1])


def test_pages_have_few_words() -> None:
    """Those of tables and of commands count, their lines do not."""
    words = [word for page in (ROOT / "docs").glob("*.md") for word in page.read_text().split()]
    assert len([word for word in words if re.search(r"\w", word)]) <= MOST_WORDS, "say each thing once"


def test_the_page_of_settings_is_the_generated_one() -> None:
    assert page(RunConfig) == SETTINGS, "penstock config docs > docs/settings.md"
    assert all(each.meaning for each in described(RunConfig)), "write what it means below the field"


def test_sections_that_bench_reads_are_those_of_its_page() -> None:
    page = (ROOT / "docs" / "emulation.md").read_text().partition("`--config FILE` gives")[2]
    told = re.findall(r"`\[(\w+)\]`|^\| `(\w+)\.", page.partition("| column |")[0], re.MULTILINE)
    assert {section or key for section, key in told} == {field.name for field in fields(BenchConfig)}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_configurations_load(path: Path) -> None:
    assert tomllib.loads(path.read_text())
    assert isinstance(load(RunConfig, path), RunConfig)


def test_the_readme_shows_both_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make run" in readme and "make test" in readme
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_schedule_that_is_shown_is_real(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["schedule", "flowmoe"]) == 0
    printed = capsys.readouterr().out.splitlines()
    shown = re.search(r"\$ penstock schedule flowmoe\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    assert [line for line in shown[1].splitlines() if line not in printed] == []


def test_the_batch_file_is_a_script_that_slurm_and_bash_read() -> None:
    """Slurm stops to read options at the first command; bash checks the rest."""
    file = ROOT / "docs" / "train.sbatch"
    subprocess.run(["bash", "-n", str(file)], check=True)
    head, _, commands = file.read_text().partition("\n\n")
    assert head.startswith("#!/bin/bash\n#SBATCH") and "#SBATCH" not in commands
    for command in re.findall(r"python -m penstock (\w+)", commands):
        assert command in ("doctor", "train")


# ---- links and commands of all pages -----------------------------------------------------------------------

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Those that a Markdown reader gives to headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def commands(page: Path) -> Iterator[list[str]]:
    """The words behind `penstock` of every command that a page shows in a block."""
    for block in re.findall(r"^ *```\w*\n(.*?)```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"\s*(?:\$ )?(?:\S+ .*-m )?penstock (\w+(?!\S).*)", line)
            if found is not None and "=" not in line.split()[0]:
                yield shlex.split(re.split(r" [|>&] | && ", found[1])[0], comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_the_pages_are_understood(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands(page):
        try:
            parse(_parser(), words)
        except SystemExit as end:
            assert not end.code, (words, capsys.readouterr().err)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_ranks_that_the_pages_start_can_share_the_experts(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    started = r"torchrun (?:--nnodes (\d+) )?.*?--nproc-per-node (\d+) .*-m penstock \w+ (\S+\.toml.*)"
    for nodes, each, words in re.findall(started, text):
        path, *settings = shlex.split(words, comments=True)
        config = load(RunConfig, ROOT / path, [word for word in settings if "=" in word])
        Layout.build(config.parallel, int(nodes or 1) * int(each), 0, config.moe.num_experts)


def test_extras_of_the_readme_are_those_of_the_package() -> None:
    there = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"`penstock\[(\w+)\]`", (ROOT / "README.md").read_text())) == there.keys() - {"dev"}


def test_the_restart_that_is_shown_is_one_of_these_settings() -> None:
    page = (ROOT / "docs" / "many-machines.md").read_text()
    told = re.search(r"With `(.*?)` rank 1 is killed after step (\d+).*?```\n(.*?)```", page, re.DOTALL)
    assert told is not None
    train = load(RunConfig, ROOT / "configs" / "tiny.toml", told[1].split()).train
    steps = [(int(step), int(last)) for step, last in re.findall(r"^step (\d+)/(\d+)", told[3], re.MULTILINE)]
    assert steps and all(step % train.log_every == 0 and last == train.steps for step, last in steps)
    (kept,) = re.findall(r"^continuing from .*/step-0*(\d+)$", told[3], re.MULTILINE)
    assert int(kept) == int(told[2]) // train.checkpoint_every * train.checkpoint_every


def test_trl_that_is_told_to_install_is_the_tested_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    told = re.findall(r"`pip install '(trl.*?)'`", (ROOT / "docs" / "trainers.md").read_text())
    assert told and set(told) <= set(project["optional-dependencies"]["dev"])


# ---- the batch file ----------------------------------------------------------------------------------------

SRUN = """#!/bin/bash
echo "$@" >> said
case "$*" in *" doctor "*) exit $DOCTOR ;; esac
mkdir -p runs/job && echo "{\\"interrupted\\": $INTERRUPTED}" > runs/job/summary.json
exit $TRAINED
"""


@pytest.mark.parametrize(
    ("doctor", "trained", "interrupted", "failures", "left", "again"),
    [
        (0, 0, "false", 0, 0, False),
        (0, 0, "true", 3, 0, True),
        (0, 1, "false", 2, 3, True),
        (0, 137, "false", 0, 1, True),
        (0, 1, "false", 3, 4, False),
        (0, 2, "false", 0, 0, False),
        (1, 0, "true", 2, 2, False),
    ],
)
def test_a_job_goes_into_the_queue_again_where_that_helps(
    tmp_path: Path, doctor: int, trained: int, interrupted: str, failures: int, left: int, again: bool
) -> None:
    """The batch file in bash, with programs in place of those that only a cluster has.

    failures: since the last time limit, of starts that Slurm counts together with those after time limits.
    """
    counted = tmp_path / "penstock-12.failures"
    counted.write_text("exit code 1\n" * failures)
    for name, text in (("srun", SRUN), ("scontrol", '#!/bin/bash\necho "$@" >> queued\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    said = {"DOCTOR": doctor, "TRAINED": trained, "INTERRUPTED": interrupted}
    slurm = {"SLURM_JOB_NAME": "job", "SLURM_JOB_ID": 12, "SLURM_RESTART_COUNT": 7}
    environ = {name: str(value) for name, value in (said | slurm).items()}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "docs" / "train.sbatch"), "train.steps=9"]
    code = subprocess.run(command, cwd=tmp_path, env=environ | path, check=False).returncode
    assert code == (doctor or trained)
    assert (len(counted.read_text().splitlines()) if counted.exists() else 0) == left
    queued = tmp_path / "queued"
    assert (queued.read_text() if queued.exists() else "") == ("requeue 12\n" if again else "")
    lines = (tmp_path / "said").read_text().splitlines()
    assert len(lines) == (1 if doctor else 2)
    assert all(" output.dir=runs/job train.steps=9" in line for line in lines)
