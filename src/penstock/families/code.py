"""The code that modules of a model run: that of transformers for the family, or other code.

Steps run some modules in parts, by Penstock's knowledge of their family, and not by their own `forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from penstock.families.adapters import core_of
from penstock.families.family import Family

LIBRARIES = ("transformers.", "torch.")
"""Packages of the functions that run where nothing was changed."""

Code = tuple[Callable[..., Any], Callable[..., Any]]
"""The `forward` and the `__call__` of a class."""


def code_of(module: nn.Module) -> Code:
    """Return the functions that a call of a module runs by its class."""
    return type(module).forward, type(module).__call__


def in_parts(layer: Any, block: Any, family: Family) -> list[nn.Module]:
    """Return the modules of a layer with experts that steps run in parts."""
    found = [layer, block, core_of(family.experts_of(block))]
    return [*found, family.router_of(block)] if family.form.rebuilds else found


def changed_code(modules: Iterable[nn.Module]) -> list[str]:
    """Return the names of the functions, of these modules' classes, that are not those of transformers."""
    found: dict[str, None] = {}
    for module in modules:
        for name in ("forward", "__call__"):
            if not _is_original(type(module), name):
                found[f"{type(module).__name__}.{name}"] = None
    return list(found)


def _is_original(kind: type, name: str) -> bool:
    """Return whether a class has this function from a library, and not from a user or another tool."""
    owner = next(each for each in kind.__mro__ if name in vars(each))
    function = vars(owner)[name]
    if name == "forward" and getattr(function, "__qualname__", None) != f"{owner.__qualname__}.{name}":
        return False
    return all(_is_of_library(each) for each in _layers(function))


def _layers(function: Any) -> Iterator[Any]:
    """Yield a function and what decorators have put it around."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _is_of_library(function: Any) -> bool:
    defined_in: object = getattr(function, "__globals__", {}).get("__name__", "")
    return str(defined_in).startswith(LIBRARIES)


def is_patched(module: nn.Module) -> bool:
    """Return whether a module's own `forward` was replaced, as by accelerate or hooks of device maps."""
    return "forward" in module.__dict__


def patched(module: nn.Module, hint: str) -> str:
    """Return the message about such a module."""
    return (
        f"{type(module).__name__}.forward was replaced in this one module (accelerate does that for mixed "
        f"precision and device maps), and steps would go on without what that adds: {hint}"
    )
