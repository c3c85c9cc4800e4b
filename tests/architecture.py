"""The tables of ARCHITECTURE.md, from what they describe; `python -m tests.architecture` writes them."""

from __future__ import annotations

import ast
import re
import sys
import threading
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import penstock
from penstock.features import FEATURES
from penstock.ops import OPS
from penstock.runtime import clip_grad_norm_
from tests.support.layouts import tiny_case
from tests.support.parity import own_batch, stack_of
from tests.support.ranks import Pools
from tests.test_house_rules import DECIDES_BY_NAME

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "ARCHITECTURE.md"
SOURCE: Final = Path(penstock.__file__).parent
PROJECT: Final = (ROOT / "pyproject.toml").read_text()
CASE: Final = tiny_case(2, hidden_size=16, seq_len=8, vocab_size=32, top_k=2)
TABLE: Final = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """Return the page with every table between its two marks as it is now."""
    return TABLE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", page)


def by_hand(page: str) -> list[str]:
    """Return the lines that are in no table."""
    return [line for line in TABLE.sub("", page).splitlines() if line.strip()]


def _rows(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [titles, ("---",) * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _layers() -> str:
    settings = tomllib.loads(PROJECT)["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in settings if each["id"] == "layers")
    pure = next(each["source_modules"] for each in settings if each["id"] == "no-torch")

    def row(name: str) -> tuple[str, ...]:
        package = SOURCE / name / "__init__.py"
        text = (package if package.exists() else SOURCE / f"{name}.py").read_text(encoding="utf-8")
        about = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].replace("\n", " ")
        about = re.sub(
            r"[;]? ?(No torch|Without torch|Pure Python: no torch|it knows no torch)\.$", "", about
        )
        shown = f"`{name}/`" if package.exists() else f"`{name}`"
        return shown, about, "no" if f"penstock.{name}" in pure else ""

    return _rows(("layer", "what it holds", "torch"), map(row, layers))


def _ops() -> str:
    rows = ((f"`{name}`", str(op.kind), op.title, str(op.backward)) for name, op in OPS.items())
    return _rows(("op", "occupies", "what happens", "backward"), rows)


def _features() -> str:
    rows = (
        (
            f"`{feature.name}/`",
            feature.title,
            feature.source,
            ", ".join(f"`{spec.name}`" for spec in feature.ops),
            ", ".join(f"`{name}`" for name in feature.fields),
        )
        for feature in FEATURES
    )
    return _rows(("folder", "what it does", "source", "ops", "what a plan decides"), rows)


def _names() -> str:
    return _rows(("file", "why"), ((f"`{name}`", why) for name, why in DECIDES_BY_NAME.items()))


def _dependencies() -> str:
    return _rows(("package", "extra", "why"), dependencies())


def dependencies() -> Iterator[tuple[str, str, str]]:
    """Yield package, extra and reason of every line of dependencies in pyproject.toml."""
    extra = ""
    text = PROJECT[PROJECT.index("\ndependencies = [") : PROJECT.index("[project.scripts]")]
    for line in text.splitlines():
        code, _, why = line.partition("  # ")
        if named := re.match(r"(\w+) = \[", code):
            extra = named[1]
        packages = re.findall(r'"([A-Za-z][\w.-]*)[^"]*"', code)
        if packages and packages != ["penstock"]:
            yield ", ".join(packages), "" if extra == "dependencies" else extra, why


def _batch() -> str:
    pools = Pools()
    try:
        return batch_table(pools(2).run(files_of_a_batch)[0])
    finally:
        pools.close()


def batch_table(files: list[str]) -> str:
    """Return the table of the files that one batch passes."""
    folders: dict[str, list[str]] = {}
    for name in files:
        folder, _, file = name.rpartition("/")
        folders.setdefault(folder, []).append(f"`{file}`")
    rows = ((f"`{folder}/`" if folder else "", ", ".join(names)) for folder, names in sorted(folders.items()))
    return _rows(("folder", f"the {len(files)} files that one batch passes"), rows)


def files_of_a_batch(rank: int) -> list[str]:
    """Return the files of which something runs in a step on two ranks, by `flowmoe`, after the first two."""
    seen, armed = set[str](), False

    def note(frame: Any, event: str, value: object) -> None:
        del value
        file = Path(frame.f_code.co_filename)
        if armed and event == "call" and SOURCE in file.parents:
            seen.add(file.relative_to(SOURCE).as_posix())

    threading.setprofile(note)  # threads of lanes are started by the first step
    sys.setprofile(note)
    try:
        stack = stack_of(rank, CASE)
        tokens, labels = own_batch(rank, CASE)
        for number in range(3):
            armed = number == 2
            stack(tokens, labels).backward()
            clip_grad_norm_(stack, 1.0)
        stack.close()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(seen)


TABLES: Final[dict[str, Callable[[], str]]] = {
    "layers": _layers,
    "features": _features,
    "ops": _ops,
    "batch": _batch,
    "names": _names,
    "dependencies": _dependencies,
}

if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
