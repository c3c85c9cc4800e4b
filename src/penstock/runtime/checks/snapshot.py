"""The check, before every step, that a model is unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import nn

Kind = tuple[bool, torch.dtype, torch.Size, torch.device]


class Snapshot:
    """The modules and parameters of models, by identity, and each parameter's type, shape and device.

    Values are not looked at. Taking or comparing one costs about a microsecond per module and parameter.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._tree = _tree(models)
        self._kinds = _kinds(self._tree)

    def holds(self) -> bool:
        """Return whether nothing was added, removed, replaced, moved, frozen, thawed or converted since."""
        tree = _tree(self._models)
        same = len(tree) == len(self._tree) and all(map(is_, tree, self._tree))
        return same and _kinds(tree) == self._kinds


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


def _kinds(tree: list[Any]) -> list[Kind]:
    return [(p.requires_grad, p.dtype, p.shape, p.device) for p in tree if isinstance(p, nn.Parameter)]
