"""The check, before every step, that a model is unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
Kind = tuple[bool, torch.dtype, torch.Size, torch.device]


class Snapshot:
    """The modules and parameters of models, by identity, and each parameter's type, shape and device.

    Values are not looked at. Taking or comparing one costs about a microsecond per module and parameter.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._tree = _tree(models)
        self.modules = _each_once(self._tree, nn.Module)
        self.parameters = _each_once(self._tree, nn.Parameter)
        self._kinds = _kinds(self.parameters)

    def holds(self) -> bool:
        """Return whether nothing was added, removed, replaced, moved, frozen, thawed or converted since."""
        return self.has_same_modules() and _kinds(self.parameters) == self._kinds

    def has_same_modules(self) -> bool:
        """Return whether no module or parameter was added, removed or replaced since."""
        tree = _tree(self._models)
        return len(tree) == len(self._tree) and all(map(is_, tree, self._tree))

    def buffers(self) -> list[Tensor]:
        """Return the present buffers of all modules."""
        return [b for module in self.modules for b in module._buffers.values() if b is not None]

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return a parameter's first name in the models."""
        named = (pair for model in self._models for pair in model.named_parameters())
        return next((name for name, each in named if each is parameter), "a parameter that was replaced")


def _each_once(tree: list[Any], kind: type[T]) -> list[T]:
    return list({id(each): each for each in tree if isinstance(each, kind)}.values())


def _tree(models: Sequence[nn.Module]) -> list[Any]:
    """Return modules and parameters in order; None after the last child of a module, so that levels show."""
    found: list[Any] = []
    seen: set[int] = set()

    def visit(module: nn.Module) -> None:
        found.append(module)
        if id(module) in seen:
            return
        seen.add(id(module))
        found.extend(module._parameters.values())
        for child in module._modules.values():
            if child is not None:
                visit(child)
        found.append(None)

    for model in models:
        visit(model)
    return found


def _kinds(parameters: Sequence[nn.Parameter]) -> list[Kind]:
    return [(p.requires_grad, p.dtype, p.shape, p.device) for p in parameters]
