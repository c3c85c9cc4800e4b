"""Reads the structure of a pickle without unpickling it.

A pickle is a program. Its interpreter imports what it names and calls what it imports; this one does neither.
A call or an object becomes a `Made`, which says what it would have been and leaves its meaning to the reader.
Dictionaries become lists of pairs, so that nothing is hashed either: a short pickle can describe a key that
takes years to hash.
"""

from __future__ import annotations

import pickletools
from typing import Any, Final, TypeVar

from penstock.train.storage.files import DamagedError


class Made:
    """An object that a pickle wants to call or build. state: what the object would be given afterwards."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None


class Named:
    """Something that a pickle wants to import, as `module.name`."""

    __slots__ = ("name",)

    def __init__(self, module: object, name: object) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise DamagedError("a pickle imports something without a name")
        self.name = f"{module}.{name}"


class Pairs(list[tuple[Any, Any]]):
    """A dictionary, as a list of its pairs."""


T = TypeVar("T")

_MARK: Final = object()
_LITERALS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NUMBERS: Final = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"})
_TUPLES: Final = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED: Final = frozenset({"PROTO", "FRAME"})


def parse(data: bytes) -> object:
    """Return what the pickle `data` describes; only the commands in PyTorch's metadata are known.

    Raises DamagedError for any other pickle, and for data that is no pickle.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.pop()
            machine.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise DamagedError(f"not a pickle of the kind that PyTorch's checkpoints have: {error}") from error
    raise DamagedError("a pickle without an end")


class _Machine:
    """The stack and the memo of a pickle that is being read."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def pop(self) -> Any:
        return self._stack.pop()

    def step(self, command: str, argument: Any) -> None:  # noqa: PLR0912  # a case per command
        push, pop, stack = self._stack.append, self._stack.pop, self._stack
        match command:
            case _ if command in _NUMBERS:
                push(argument)
            case _ if command in _LITERALS:
                push(_LITERALS[command])
            case _ if command in _TUPLES:
                count = _TUPLES[command]
                items = [pop() for _ in range(count)]
                push(tuple(reversed(items)))
            case "TUPLE":
                push(tuple(self._since_mark()))
            case "MARK":
                push(_MARK)
            case "EMPTY_DICT":
                push(Pairs())
            case "EMPTY_LIST":
                push([])
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                push(self._memo[argument])
            case "GLOBAL":
                push(Named(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                name = pop()
                push(Named(pop(), name))
            case "REDUCE" | "NEWOBJ":
                arguments = pop()
                push(_made(pop(), arguments))
            case "BUILD":
                state = pop()
                _expect(stack[-1], Made).state = state
            case "APPEND":
                item = pop()
                _expect(stack[-1], list).append(item)
            case "APPENDS":
                found = self._since_mark()
                _expect(stack[-1], list).extend(found)
            case "SETITEM":
                value, key = pop(), pop()
                _expect(stack[-1], Pairs).append((key, value))
            case "SETITEMS":
                found = self._since_mark()
                _expect(stack[-1], Pairs).extend(zip(found[::2], found[1::2], strict=True))
            case _ if command not in _IGNORED:
                raise ValueError(f"command {command}")

    def _since_mark(self) -> list[Any]:
        found = []
        while (item := self._stack.pop()) is not _MARK:
            found.append(item)
        return found[::-1]


def _made(what: object, arguments: object) -> Made:
    return Made(_expect(what, Named).name, _expect(arguments, tuple))


def _expect(found: object, kind: type[T]) -> T:
    if type(found) is not kind:  # the pairs of a dictionary are not a list to append to
        raise ValueError(f"{type(found).__name__} in place of {kind.__name__}")
    return found
