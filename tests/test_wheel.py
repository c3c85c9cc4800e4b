"""The wheel by itself, outside the checkout: what is in it, and that it works without any extra."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import penstock
from penstock.extras import EXTRAS
from tests.support.runs import clean_environ
from tests.test_extras import HIDE

ROOT = Path(__file__).parents[1]
SETTINGS = ("train.steps=2", "train.eval_every=0", "plan.mode=fixed", "parallel.processes=1")

PLANNED = (
    "--cluster",
    "fsmoe-testbed-b",
    "--json",
    "--budget",
    "0.001",
    "moe.num_experts=32",
    "model.num_layers=1",
)


def run(
    command: Sequence[str | Path], folder: Path, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    found = subprocess.run(
        list(map(str, command)), cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, f"{command}\n{found.stdout}{found.stderr}"
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with this environment's setuptools from a copy: the checkout stays as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "src"):
        (source / name).symlink_to(ROOT / name)
    backend = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"
    run(["cp", "-rL", source, folder / "copy"], folder)
    for left in (folder / "copy" / "src").glob("*.egg-info"):
        run(["rm", "-r", left], folder)
    run([sys.executable, "-c", backend, folder], folder / "copy")
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which it is, and in which every extra is hidden from what runs there."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder)
    (folder / "sitecustomize.py").write_text(HIDE.format(hidden=set(EXTRAS)))
    return folder


def command(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = clean_environ() | {"PYTHONPATH": str(installed), "COLUMNS": "200"}
    return run([sys.executable, "-m", "penstock", *words], folder, environ)


@pytest.mark.slow
def test_files_of_the_wheel(wheel: Path) -> None:
    """Everything of the package, and nothing beside it."""
    with zipfile.ZipFile(wheel) as opened:
        found = {name for name in opened.namelist() if ".dist-info/" not in name}
    package = Path(penstock.__file__).parent
    files = (path.relative_to(package.parent) for path in package.rglob("*") if path.is_file())
    assert found == {path.as_posix() for path in files if path.suffix != ".pyc"}
    assert any(name.endswith(".json") for name in found) and "penstock/config/shipped/tiny.toml" in found


@pytest.mark.slow
def test_the_wheel_runs_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    where = run(
        [sys.executable, "-c", "import penstock; print(penstock.__file__, penstock.__version__)"],
        tmp_path,
        clean_environ() | {"PYTHONPATH": str(installed)},
    )
    file, version = where.stdout.split()
    assert Path(file).is_relative_to(installed) and version == penstock.__version__
    planned = command(installed, tmp_path, "plan", "tiny", *PLANNED)
    assert json.loads(planned.stdout)


@pytest.mark.slow
def test_the_wheel_trains_without_extras(installed: Path, tmp_path: Path) -> None:
    done = command(installed, tmp_path, "train", "tiny", "model.num_layers=1", *SETTINGS)
    said = " ".join((done.stdout + done.stderr).split())  # lines are wrapped
    assert "output.tensorboard needs the package tensorboard and is left out" in said
    assert "pip install 'penstock[plots]'" in said
    assert (tmp_path / "runs/tiny/metrics.jsonl").read_text().count("\n") == 2
    assert not list(tmp_path.rglob("*.png")) and "tensorboard" not in done.stdout


@pytest.mark.soak
def test_the_wheel_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """With all that it needs from a package index, and nothing else; takes minutes."""
    home = tmp_path / "environment"
    venv.create(home, with_pip=True)
    environ = {**clean_environ(), "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    environ.pop("PYTHONPATH", None)  # which may lead to the checkout
    run(
        ["python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel],
        tmp_path,
        environ,
    )
    assert penstock.__version__ in run(["penstock", "--version"], tmp_path, environ).stdout
    run(["penstock", "plan", "tiny", *PLANNED], tmp_path, environ)
    done = run(["penstock", "train", "tiny", "train.steps=20", "train.eval_every=0"], tmp_path, environ)
    assert "penstock[tensorboard]" in done.stdout + done.stderr
    assert (tmp_path / "runs/tiny/metrics.jsonl").read_text().count("\n") == 20
