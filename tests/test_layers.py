"""What import-linter (pyproject.toml) cannot see: what a run of Python loads, and names in strings."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import penstock

ROOT = Path(penstock.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
SETTINGS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
CONTRACTS = {contract["id"]: contract for contract in SETTINGS["tool"]["importlinter"]["contracts"]}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("penstock", *parts)).removesuffix(".__init__")


@pytest.mark.slow
def test_planning_does_not_load_torch() -> None:
    """Nor does anything that it imports."""
    pure = tuple(f"{package}." for package in CONTRACTS["no-torch"]["source_modules"])
    names = [name for name in map(module_name, SOURCES) if f"{name}.".startswith(pure)]
    assert len(names) > 100
    program = "\n".join(
        [*(f"import {name}" for name in names), "import sys", "print('torch' in sys.modules)"]
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


@pytest.mark.slow
def test_the_package_reaches_for_benchmarks_in_one_place() -> None:
    """They are not installed with it, so nothing else may need them."""
    for path in SOURCES:
        nodes = ast.walk(ast.parse(path.read_text()))
        texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
        names_one = any(isinstance(text, str) and text.startswith("benchmarks") for text in texts)
        assert names_one is (module_name(path) == "penstock.lab.bench.checkout"), module_name(path)


@pytest.mark.slow
def test_traces_know_the_ops_of_features_by_themselves() -> None:
    """Nothing else of Penstock may have been loaded when a trace is written."""
    program = "import penstock.trace; from penstock.ops import spec_of; print(spec_of('RA').title)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip()
