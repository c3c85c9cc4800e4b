"""Changes to a process that end with a `with`: every contender of a comparison runs in the same one."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import ModuleType
from typing import Any

_ABSENT = object()


@contextmanager
def replaced(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    """Inside, `owner.name` is `stand_in`. On any exit it is what it was, or not there if it was not."""
    original = getattr(owner, name, _ABSENT)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


@contextmanager
def quiet(logger: str) -> Iterator[None]:
    """Let nothing below an error through: not from this logger, not as a warning, not as a bare print."""
    logging.getLogger(logger).setLevel(logging.ERROR)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


class OwnGlobals:
    """The private variables of a module, as one of several users of it keeps them.

    Both peers keep their process groups in variables of a module, so that a process has one set of them.
    Here every user has its own, starting from what the module holds when this is made.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._mine = {name: _copy(value) for name, value in vars(module).items() if _is_state(name, value)}

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, the module holds this user's values; changes to them are kept for the next time."""
        outside = {name: getattr(self._module, name) for name in self._mine}
        vars(self._module).update(self._mine)
        try:
            yield
        finally:
            self._mine = {name: getattr(self._module, name) for name in self._mine}
            vars(self._module).update(outside)


def _is_state(name: str, value: Any) -> bool:
    """Return whether this is a variable rather than a constant, a function or an import."""
    return name.startswith("_") and not name.startswith("__") and (value is None or isinstance(value, dict))


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, dict) else value
