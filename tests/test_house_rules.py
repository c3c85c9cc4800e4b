"""Who computes with ranks, who decides by the name of an op, a lane or a device, how files are opened, how
docstrings begin: by syntax."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import penstock

ROOT = Path(penstock.__file__).parent

RANKS = {"rank", "ranks", "world_size", "node_size", "ep_size", "ep_rank"}
COMPUTES_WITH_RANKS: Mapping[str, str] = {
    "mesh.py": "is the place for it",
    "placement.py": "how many experts or samples a rank has",
    "autotune/profile/links.py": "an equal share of a buffer for every rank",
    "plan/predict.py": "how many noisy steps are drawn",
}

DECIDES = re.compile(
    r"(ops|step|schedule)/|features/(build|\w+/(ops|passes|feature))\.py"
    r"|runtime/(ops|features/\w+(/(handlers|updates))?)\.py"
)
"""Rooms that may decide by names: what an op means, the passes, the handlers, the order rules."""
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields): ")
FIELD = re.compile(r"(?:^|[.;!?)] )(\w+(?:, \w+)*): (?=\S)")
RAISES = re.compile(r"[.!?)] Raises `?[A-Z]\w*(?:Error|Interrupt)\b")
TEXT_MODE = re.compile(r"[rwxa]\+?t?\+?")
OPENS_FOR_WRITING: Mapping[str, str] = {
    "stops.py": "what is loaded before all else puts the null device in place of an output that is gone",
    "writing.py": "has the functions that open files for writing; all others call these",
}

WRITING_MODE = re.compile(r"[rwxabt]*[wxa+][bt+]*")
WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND", "O_TRUNC"}
WRITERS = {"write_text", "write_bytes", "touch", "mkstemp", "copyfile", "copy2", "tofile", "memmap"}
SAVERS = {"savefig", "savez", "savez_compressed", "torch.save"}
"""Functions of other packages that take a path or a file; a file must come from `writing.replacing`."""
NAMES = {"Op", "Lane"}
LISTS = {"TRANSFERS", "HOME", "AWAY", "GRADIENT_KINDS", "UPDATES", "GATHERS"}
DECIDES_BY_NAME: Mapping[str, str] = {
    "graph/task.py": "says what a lane is",
    "runtime/executor.py": "runs the lanes; the forward half ends with the sums of the loss",
    "runtime/streams.py": "runs the lanes of a GPU",
    "runtime/transport.py": "which transport a lane has",
    "cost/cluster.py": "the devices of a node share its link to others, and not those inside",
    "cost/moves.py": "what transfers send by routing, op by op",
    "plan/bound.py": "embedding and head stand outside of the bound's chain of layers",
    "plan/problem.py": "gaps of the lane on which replicas travel, between experts",
    "autotune/profile/links.py": "which transport measures a leg",
    "lab/virtual/handlers.py": "virtual devices have handlers of their own",
}


NAMES_CUDA: Mapping[str, str] = {
    "device.py": "is the place for it",
    "runtime/buckets.py": "lists functions of tensors by their names",
}
SHORT: Mapping[str, str] = {
    "lab/emulate/test_links.py": "none may answer",
    "runtime/transport/test_later.py": "lets a second thread come, which never may; a slow one is as good",
}
"""Files of tests with timeouts that are numbers, and why a machine may be as slow as it is for all that."""
NO_VERB = re.compile(
    "an?|all|as|at|both|by|each|every|for|from|how|in|its|none|of|on|one|over|same|some|such|that|the|their|"
    "th[eo]se|there|this|under|wh.*|with"
)


@cache
def walked(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a file: every rule looks at them."""
    return tuple(ast.walk(tree))


def arithmetic(tree: ast.AST) -> Iterator[str]:
    """Quotients and remainders in which something is called a rank, or a number of them."""
    for node in walked(tree):
        division = isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod)
        if isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant | ast.JoinedStr):
            division = division and not isinstance(getattr(node.left, "value", ""), str)
        both = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "divmod"
        if (division or both) and RANKS & set(_words(node)):
            yield f"line {node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]  # an expression


def decisions(tree: ast.AST) -> Iterator[str]:
    """Comparisons with an op or a lane, or with the name of one."""
    for node in walked(tree):
        if isinstance(node, ast.Compare) and any(map(_is_name, [node.left, *node.comparators])):
            yield f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Compare) and _by_letters(node):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def without_verb(tree: ast.AST) -> Iterator[str]:
    """Docstrings of functions that begin with an article, a preposition or a question."""
    for node in walked(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_property(node):
            continue
        first = (ast.get_docstring(node) or "Return").split()[0].strip(",.:")
        if NO_VERB.fullmatch(first.lower()):
            yield f"line {node.lineno}: {node.name}: {first} ..."


def told_in_prose(tree: ast.AST) -> Iterator[str]:
    """Public docstrings that describe a parameter, a field or an error outside of Google's sections."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or (
            node.name.startswith("_") and node.name != "__init__"
        ):
            continue
        names = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
        if isinstance(node, ast.ClassDef):
            yield from told_in_prose(node)
            names = {each.target.id for each in node.body if _is_field(each)}  # type: ignore[attr-defined]
        for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
            text = " ".join(paragraph.split())
            if SECTION.match(text):
                continue
            fields = [each for each in FIELD.findall(text) if set(each.split(", ")) <= names]
            if fields or RAISES.search(text):
                yield f"line {node.lineno}: {node.name}: {fields or 'Raises'}"


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """What is read like an attribute is described like one."""
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def _words(tree: ast.AST) -> Iterator[str]:
    for node in walked(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _is_name(operand: ast.expr) -> bool:
    """`Op.DISPATCH`, a tuple with it, or a list of such names."""
    for node in ast.walk(operand):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in NAMES:
            return True
        if isinstance(node, ast.Name) and node.id in LISTS:
            return True
    return False


def _by_letters(node: ast.Compare) -> bool:
    """`task.op == "D"`, `lane in ("intra", "inter")`."""
    operands = [node.left, *node.comparators]
    asked = any(isinstance(each, ast.Attribute) and each.attr in ("op", "lane") for each in operands)
    found = (word for each in operands for word in ast.walk(each) if isinstance(word, ast.Constant))
    return asked and any(isinstance(word.value, str) for word in found)


def unnamed_encodings(tree: ast.AST) -> Iterator[int]:
    """Lines in which a file of text is read or written in the encoding of whoever runs it."""
    for node in walked(tree):
        if isinstance(node, ast.Call) and "encoding" not in {each.arg for each in node.keywords}:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            as_text = called == "open" and isinstance(first, str) and TEXT_MODE.fullmatch(first)
            if as_text or (called == "read_text" and not node.args) or called == "write_text":
                yield node.lineno


def gpu_questions(tree: ast.AST) -> Iterator[str]:
    """Uses of torch.cuda, and comparisons with the name of a kind of device."""
    for node in walked(tree):
        asked = isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda")
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            kinds = any(isinstance(side, ast.Attribute) and side.attr == "type" for side in sides)
            asked = kinds and any(isinstance(side, ast.Constant) for side in sides)
        if asked or (isinstance(node, ast.Constant) and node.value == "cuda"):
            yield f"line {node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]  # an expression


def writings(tree: ast.AST) -> Iterator[str]:
    """Calls that open a file for writing, or that may."""
    calls = [node for node in walked(tree) if isinstance(node, ast.Call)]
    entered = [item for node in walked(tree) if isinstance(node, ast.With) for item in node.items]
    files = {
        item.optional_vars.id
        for item in entered
        if isinstance(item.optional_vars, ast.Name)
        and ast.unparse(item.context_expr).startswith("replacing(")
    }
    for call in calls:
        called = ast.unparse(call.func)
        name, given = called.rpartition(".")[2], [*call.args, *(each.value for each in call.keywords)]
        words = [each.value for each in given if isinstance(each, ast.Constant)]
        opens = name in ("open", "fdopen") and any(map(WRITING_MODE.fullmatch, map(str, words)))
        opens |= called == "os.open" and bool(WRITING_FLAGS & set(_words(call)))
        saves = {name, called} & SAVERS and not files & {ast.unparse(each) for each in given}
        if opens or saves or name in WRITERS:
            yield f"line {call.lineno}: {called}"


def short_timeouts(tree: ast.AST) -> Iterator[str]:
    """Timeouts that are numbers."""
    for call in (node for node in walked(tree) if isinstance(node, ast.Call)):
        limits = [each.value for each in call.keywords if each.arg == "timeout"]
        if any(isinstance(limit, ast.Constant) and limit.value is not None for limit in limits):
            yield f"line {call.lineno}: {ast.unparse(call)}"


@cache
def _sources() -> tuple[tuple[str, ast.AST], ...]:
    paths = sorted(ROOT.rglob("*.py"))
    gc.disable()  # nothing of a tree is garbage, and to look for some takes longer than to parse
    try:
        return tuple((path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())) for path in paths)
    finally:
        gc.enable()


@pytest.mark.slow
def test_only_the_mesh_computes_with_ranks() -> None:
    found = {name: list(arithmetic(tree)) for name, tree in _sources()}
    strangers = {name: lines for name, lines in found.items() if lines and name not in COMPUTES_WITH_RANKS}
    assert strangers == {}, "ask the mesh (mesh.py), or give a reason in COMPUTES_WITH_RANKS"
    assert [name for name in COMPUTES_WITH_RANKS if not found.get(name)] == [], "exceptions that none needs"


def test_only_some_rooms_decide_by_the_name_of_an_op_or_a_lane() -> None:
    found = {name: list(decisions(tree)) for name, tree in _sources() if not DECIDES.match(name)}
    strangers = {name: lines for name, lines in found.items() if lines and name not in DECIDES_BY_NAME}
    assert strangers == {}, "ask for the op's kind or the lane's property, or give a reason"
    assert [name for name in DECIDES_BY_NAME if not found.get(name)] == [], "exceptions that none needs"


def test_files_of_text_are_in_one_encoding() -> None:
    found = {name: lines for name, tree in _sources() if (lines := list(unnamed_encodings(tree)))}
    assert found == {}, 'write encoding="utf-8": another machine, or another shell, has another default'


def test_only_one_module_asks_torch_what_a_gpu_is() -> None:
    found = {name: lines for name, tree in _sources() if (lines := list(gpu_questions(tree)))}
    assert list(found) == [*NAMES_CUDA], "ask penstock.device, so that recorded devices run the same code"


def test_one_file_opens_files_for_writing() -> None:
    found = {name: lines for name, tree in _sources() if (lines := list(writings(tree)))}
    assert list(found) == [*OPENS_FOR_WRITING], "write by penstock.writing, which follows no links"


@pytest.mark.slow
def test_no_test_gives_up_soon() -> None:
    here = Path(__file__).parent
    texts = {path.relative_to(here).as_posix(): path.read_text() for path in here.rglob("*.py")}
    trees = {name: ast.parse(text) for name, text in texts.items() if "timeout" in text}
    found = {name: lines for name, tree in trees.items() if (lines := list(short_timeouts(tree)))}
    strangers = {name: lines for name, lines in found.items() if name not in SHORT}
    assert strangers == {}, "wait by tests.support.patience, or give a reason"
    assert [name for name in SHORT if name not in found] == [], "exceptions that none needs"


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    found = {name: lines for name, tree in _sources() if (lines := list(without_verb(tree)))}
    assert found == {}, "say what the function does or returns: Return ..., Write ..., Gather ..."


def test_fields_and_errors_have_lines_of_their_own() -> None:
    found = {name: lines for name, tree in _sources() if (lines := list(told_in_prose(tree)))}
    assert found == {}, "use the sections Args, Attributes, Returns and Raises"


@pytest.mark.parametrize(
    ("docstring", "found"),
    [
        ("Send rows. rows: what is sent.", True),
        ("Send rows.\n\n    rows: what is sent.", True),
        ("Send rows. Raises ValueError if there are none.", True),
        (
            "Send rows.\n\n    Args:\n        rows: What is sent.\n\n    Raises:\n        ValueError: None.",
            False,
        ),
        ("Send rows. why: not a parameter.", False),
        ("Raise ValueError if there are no rows.", False),
    ],
)
def test_what_counts_as_told_in_prose(docstring: str, found: bool) -> None:
    code = f'def send(rows):\n    """{docstring}"""\n'
    assert bool(list(told_in_prose(ast.parse(code)))) is found
    assert not list(told_in_prose(ast.parse(code.replace("send", "_send"))))


@pytest.mark.parametrize(
    ("docstring", "found"),
    [
        ("The bytes sent.", True),
        ("Of every rank.", True),
        ("Whether it fits.", True),
        ("Return bytes.", False),
    ],
)
def test_what_counts_as_a_docstring_without_a_verb(docstring: str, found: bool) -> None:
    function = f'def sent(self):\n    """{docstring}"""'
    assert bool(list(without_verb(ast.parse(function)))) is found
    assert not list(without_verb(ast.parse(f"@property\n{function}")))


EXAMPLES: dict[Callable[[ast.AST], Iterator[object]], tuple[list[str], list[str]]] = {
    arithmetic: (
        ["node = rank // self.node_size", "a, b = divmod(layout.world_size, n)"],
        ["text = '%s' % rank", "x = rank + 1", "y = tokens // chunks"],
    ),
    gpu_questions: (
        [
            "torch.cuda.synchronize()",
            "if rows.is_cuda: pass",
            "x = rows.device.type != 'cpu'",
            "device = torch.device('cuda', 0)",
        ],
        ["y = one.device.type == other.device.type", "device = torch.device('cpu')"],
    ),
    unnamed_encodings: (
        ["text = path.read_text()", "path.write_text(text)", "file = path.open('w')"],
        ["path.write_text(text, encoding='utf-8')", "file = path.open('rb')", "cut.open()"],
    ),
    writings: (
        [
            "path.open('wb')",
            "path.open(mode='a', encoding='utf-8')",
            "open(handle, 'r+b')",
            "os.open(path, os.O_RDWR | os.O_NOFOLLOW)",
            "path.write_text(text, encoding='utf-8')",
            "np.savez_compressed(path, loads=loads)",
            "with path.open('rb') as file: torch.save(state, file)",
            "path.touch()",
        ],
        [
            "path.open('rb')",
            "path.open(encoding='utf-8')",
            "os.open(path, os.O_RDONLY | os.O_NOFOLLOW)",
            "with replacing(path) as file: torch.save(state, file)",
            "with replacing(path) as picture: figure.savefig(picture, dpi=DPI)",
            "self.replica_manager.open(self.layers, shape)",
            "states.save(folder)",
        ],
    ),
    decisions: (
        [
            "if task.op == Op.DISPATCH: pass",
            "x = [t for t in tasks if t.lane in (Lane.INTRA, Lane.INTER)]",
            "y = task.op in TRANSFERS",
            "z = task.op == 'D'",
            "w = link.lane in ('intra', 'inter')",
        ],
        ["v = task.lane.computes", "u = first.lane is second.lane", "t = {Op.DISPATCH: 1}"],
    ),
    short_timeouts: (
        ["process.wait(timeout=10)"],
        ["process.wait(timeout=HANG_S)", "process.wait(timeout=None)"],
    ),
}
"""By rule, lines that it finds and lines that it does not."""


@pytest.mark.parametrize("rule", EXAMPLES, ids=lambda rule: rule.__name__)
def test_what_a_rule_finds(rule: Callable[[ast.AST], Iterator[object]]) -> None:
    found, others = EXAMPLES[rule]
    assert [line for line in (*found, *others) if list(rule(ast.parse(line)))] == found
