"""What all commands share: hints about settings are told in one line, by one process."""

from __future__ import annotations

import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.cli.run import exit_code
from penstock.config import HintWarning
from tests.support.cli import Cli
from tests.support.runs import clean_environ, command, without_reader, write_config

HINT = "penstock: parallel.tensor_parallel_size: taken as parallel.tp_size\n"
SETTING = "parallel.tensor_parallel_size=4"


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, True),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, True),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}, False),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "PENSTOCK_LAUNCHED": "1"}, False),
    ],
)
def test_one_process_tells_a_hint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], told: bool
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    def command() -> int:
        for _ in range(2):
            warnings.warn(HINT.strip().removeprefix("penstock: "), HintWarning, stacklevel=1)
        return 3

    assert exit_code(command) == 3
    assert capsys.readouterr().err == HINT * 2 * told


def test_other_warnings_are_shown_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        warnings.warn("something else", stacklevel=1)
        return 0

    with pytest.warns(UserWarning, match="something else"):
        assert exit_code(command) == 0
    assert "penstock: " not in capsys.readouterr().err


def test_a_setting_under_megatrons_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(write_config(tmp_path)), SETTING]) == 2
    hint, error = capsys.readouterr().err.splitlines()
    assert hint + "\n" == HINT
    assert error.startswith("penstock: parallel.tp_size = 4: must divide model.num_heads (2)")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "tiny", "--train.steps=7"], ["usage: penstock train", "without dashes: train.steps=7\n"]),
        (["train", "tiny", "--steps", "7"], ["arguments: --steps 7; ", "without dashes: train.steps=5\n"]),
        (["trian", "tiny"], ["there is no command 'trian'. Did you mean train?\n"]),
        (["xyz"], ["there is no command 'xyz'. Commands: train, config, prepare, "]),
    ],
)
def test_words_that_no_command_knows(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and all(word in error for word in words), error


def test_no_command_at_all_shows_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert not shown.out and "train" in shown.err and "plan" in shown.err


def test_a_model_that_is_not_there_is_refused_by_the_name_of_its_setting(tmp_path: Path, cli: Cli) -> None:
    said = cli.refuses(["train", write_config(tmp_path), "model.config=Qwen/Qwen3-30B-A3B"])
    assert 'model.config = "Qwen/Qwen3-30B-A3B": ' in said


@pytest.mark.parametrize(
    ("arguments", "usage"),
    [(["help"], "[-h]"), (["help", "help"], "[-h]"), (["help", "train"], "train [-h]")],
)
def test_help_is_a_command_as_well(
    capsys: pytest.CaptureFixture[str], arguments: list[str], usage: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: penstock {usage}")


def interrupted(*_: object, **__: object) -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("rank", "said"), [(None, True), ("0", True), ("1", False)])
@pytest.mark.parametrize("before", ["penstock.cli.train.load", "penstock.cli.train_rank.Trainer"])
def test_a_stop_before_training_says_so(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    before: str,
    rank: str | None,
    said: bool,
) -> None:
    if rank is not None:
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setattr("penstock.cli.train_rank.join", lambda *_, **__: None)
    monkeypatch.setattr("penstock.cli.train_rank.end_of_rank", lambda info, code: code)
    monkeypatch.setattr(before, interrupted)
    assert main(["train", str(write_config(tmp_path)), "parallel.processes=1"]) == 130
    told = "penstock: stopped before training began; nothing was saved\n"
    assert capsys.readouterr().err == told * said


@pytest.mark.slow
def test_help_needs_no_torch() -> None:
    code = "import sys; from penstock.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    check = code + "sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, check=False)
    assert result.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1"])
def test_a_terminal_without_a_character_is_shown_another(encoding: str) -> None:
    ended = subprocess.run(
        command("schedule", "flowmoe"),
        capture_output=True,
        env={**clean_environ(), "PYTHONIOENCODING": encoding},
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"AT0===" in ended.stdout and b"?" not in ended.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is full")
@pytest.mark.parametrize("words", [("list", "models"), ("schedule", "flowmoe", "--json")])
@pytest.mark.slow
def test_a_full_disk_under_the_output_is_said_in_one_line(words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command(*words), stdout=full, stderr=subprocess.PIPE, text=True, env=clean_environ(), check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith("penstock: standard output") and len(done.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&- <&-"])
def test_a_closed_output_is_no_failure(tmp_path: Path, closed: str) -> None:
    line = f"{shlex.join(command('config', 'show', write_config(tmp_path)))} {closed}"
    assert subprocess.run(["sh", "-c", line], env=clean_environ(), check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("words", [("list",), ("schedule", "flowmoe")])
def test_a_reader_that_goes_is_no_failure(words: tuple[str, ...], buffered: bool) -> None:
    """As `head` when it has its lines."""
    assert without_reader(words, buffered=buffered) == (0, b"")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_training_goes_on_without_a_reader(tmp_path: Path, processes: int) -> None:
    words = ("train", write_config(tmp_path), "train.steps=2", f"parallel.processes={processes}")
    code, said = without_reader(words, buffered=True)
    assert code == 0 and b"step 2/2" in said and b"Error" not in said, said
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()
