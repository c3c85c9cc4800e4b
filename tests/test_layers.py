"""The layers of the code: imports point down the list only, and planning never loads torch."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock

PURE = (
    "config",
    "mesh",
    "placement",
    "graph",
    "ops",
    "step",
    "dispatch",
    "schedule",
    "trace",
    "cost",
    "simulate",
    "plan",
    "report",
)
"""Layers that never load torch."""

LAYERS = (
    *PURE,
    "topology",
    "moe",
    "runtime",
    "models",
    "train",
    "autopilot",
    "emulate",
    "virtual",
    "bench",
    "cli",
    "__main__",
)
"""Top-level packages and modules; each imports from itself and from those before it."""

ROOT = Path(penstock.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("penstock", *parts)).removesuffix(".__init__")


def layer(module: str) -> str | None:
    """`schedule` for penstock.schedule.grid; None for the top of the package."""
    _, _, rest = module.partition(".")
    return rest.partition(".")[0] or None


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the layer"
            source = node.module or ""
            yield from (f"penstock.{a.name}" for a in node.names if source == "penstock" and a.name in LAYERS)
            yield source


def wrong_imports(path: Path, tree: ast.AST) -> list[str]:
    """Imports of `path` that point up the list or bring torch above the line."""
    here = module_name(path)
    own = layer(here)
    if own is None:
        return []
    below = LAYERS[: LAYERS.index(own) + 1] if own in LAYERS else ()
    found = []
    for name in imported(tree):
        target = layer(name) if name.split(".")[0] == "penstock" else None
        up = target is not None and target not in below
        if up or (name.split(".")[0] == "torch" and own in PURE):
            found.append(f"{here} imports {name}")
    return found


def test_every_package_and_module_has_a_layer() -> None:
    unlisted = {module.name for module in pkgutil.iter_modules([str(ROOT)])} - set(LAYERS)
    folders = {path.relative_to(ROOT).parts[0] for path in SOURCES if path.parent != ROOT} - set(LAYERS)
    assert unlisted | folders == set()


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_point_down(path: Path) -> None:
    assert wrong_imports(path, ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    ("module", "line", "wrong"),
    [
        ("graph/task.py", "import penstock.schedule", True),
        ("graph/task.py", "from penstock.schedule.grid import draw", True),
        ("graph/task.py", "from penstock import cost", True),
        ("graph/task.py", "def f():\n    from penstock.train import metrics", True),
        ("trace/records.py", "from penstock.cost import StepCost", True),
        ("simulate.py", "import torch.distributed as dist", True),
        ("simulate.py", "if TYPE_CHECKING:\n    from torch import Tensor", True),
        ("graph/task.py", "from penstock.graph.errors import ScheduleError", False),
        ("graph/task.py", "from penstock import __version__", False),
        ("cost/measured.py", "from penstock.trace import TaskRecord", False),
        ("moe/layer.py", "import torch", False),
        ("graph/task.py", "from penstock.unheard import of", True),
    ],
)
def test_what_counts_as_wrong(module: str, line: str, wrong: bool) -> None:
    assert bool(wrong_imports(ROOT / module, ast.parse(line))) is wrong


def test_planning_does_not_load_torch() -> None:
    names = [module_name(path) for path in SOURCES]
    pure = [name for name in names if layer(name) is None or layer(name) in PURE]
    assert {layer(name) for name in pure} == {None, *PURE}
    program = "\n".join([*(f"import {name}" for name in pure), "import sys", "print('torch' in sys.modules)"])
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
