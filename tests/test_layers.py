"""The layers of the code: imports point down the list only, and planning never loads torch."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import penstock

PURE = (
    "stops",
    "writing",
    "config",
    "words",
    "apportion",
    "extras",
    "mesh",
    "placement",
    "placing",
    "graph",
    "ops",
    "step",
    "dispatch",
    "decision",
    "schedule",
    "trace",
    "workloads",
    "data",
    "cost",
    "simulate",
    "plan",
    "report",
)
"""Layers that never load torch."""

LAYERS = (
    *PURE,
    "device",
    "topology",
    "partial_state",
    "sharding",
    "dtensors",
    "checkpoint",
    "moe",
    "runtime",
    "models",
    "families",
    "train",
    "autopilot",
    "adapt",
    "own_loop",
    "doctor",
    "cli",
    "__main__",
    "lab",
)
"""Top-level packages and modules; each imports from itself and from those before it."""

ROOT = Path(penstock.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("penstock", *parts)).removesuffix(".__init__")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


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


def test_imports_point_down() -> None:
    assert [wrong for path in SOURCES for wrong in wrong_imports(path, tree_of(path))] == []


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


def test_plans_and_predictions_read_no_clock() -> None:
    """The same step has the same prediction, however busy the machine. `data` reads files for so long, and
    `stops` waits for processes."""
    sources = [path for path in SOURCES if layer(module_name(path)) in set(PURE) - {"data", "stops"}]
    assert len(sources) > 100
    assert [str(path) for path in sources if "time" in set(imported(tree_of(path)))] == []


def test_planning_does_not_load_torch() -> None:
    names = [module_name(path) for path in SOURCES]
    pure = [name for name in names if layer(name) is None or layer(name) in PURE]
    assert {layer(name) for name in pure} == {None, *PURE}
    program = "\n".join([*(f"import {name}" for name in pure), "import sys", "print('torch' in sys.modules)"])
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


# ---- no cycles ---------------------------------------------------------------------------------------------


def while_running(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports at and below `node` that may run, in functions too; those for type checkers alone do not."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node
        return
    only_types = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    for child in node.orelse if only_types and isinstance(node, ast.If) else ast.iter_child_nodes(node):
        yield from while_running(child)


def imports_of(tree: ast.AST, modules: Collection[str]) -> set[str]:
    """Those of `modules` that the code imports: a name from a package is its module, if there is one."""
    found: set[str] = set()
    for node in while_running(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            names = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {full if full in modules else node.module or "" for full in names.values()}
    return found & set(modules)


def cycle(trees: Mapping[str, ast.AST]) -> list[str]:
    """Modules that import each other in a ring, the first one again at the end; none: an empty list."""
    sorter = TopologicalSorter({name: imports_of(tree, trees) - {name} for name, tree in trees.items()})
    try:
        sorter.prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert cycle({module_name(path): tree_of(path) for path in SOURCES}) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from penstock.second import f", True),
        ("from penstock import second", True),
        ("import penstock.second", True),
        ("def f() -> None:\n    from penstock.second import g", True),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import penstock.second", True),
        ("if TYPE_CHECKING:\n    from penstock.second import F", False),
        ("if typing.TYPE_CHECKING:\n    import penstock.second", False),
        ("from penstock import __version__", False),
    ],
)
def test_what_counts_as_a_cycle(line: str, found: bool) -> None:
    trees = {"penstock": "", "penstock.first": line, "penstock.second": "from penstock.first import h"}
    ring = cycle({name: ast.parse(text) for name, text in trees.items()})
    assert sorted(set(ring)) == (["penstock.first", "penstock.second"] if found else [])


# ---- beside the package ------------------------------------------------------------------------------------


def test_the_package_reaches_for_benchmarks_in_one_place() -> None:
    """They are not installed with it, so nothing else may need them."""
    for path in SOURCES:
        for name in imported(tree := tree_of(path)):
            assert name.partition(".")[0] != "benchmarks", f"{module_name(path)} imports {name}"
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        names_one = any(isinstance(text, str) and text.startswith("benchmarks") for text in texts)
        assert names_one is (module_name(path) == "penstock.lab.bench.checkout"), module_name(path)
