"""Calls of a scheduled model's modules outside of its steps: refused where they would train something.

Steps alone sum gradients over ranks: a head that is called on hidden states would get the gradients of this
rank's samples. Experts refuse such calls themselves (`Cut`), and the layers with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Self
from weakref import ref

import torch
from torch import nn

from penstock.partial_state import refuse_pickle


class Inside:
    """Whether a step is running modules of the model now. Copies of a model share it with the model."""

    def __init__(self) -> None:
        self.depth = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Let modules know, in this context, that a step runs them."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class RefuseOutside:
    """A hook before the forward pass of a module beside the layers."""

    def __init__(self, path: str, inside: Inside) -> None:
        self._path, self._inside = path, inside

    def __call__(self, module: nn.Module, given: Any) -> None:
        """Raise ValueError where backward would leave this rank's gradients alone."""
        del given
        if self._inside.depth or not torch.is_grad_enabled():
            return
        trained = next((name for name, p in module.named_parameters() if p.requires_grad), None)
        if trained is not None:
            raise ValueError(
                f"{self._path} was called with gradients enabled, outside of a training step: backward would "
                f"leave in {self._path}.{trained} the gradient of this rank's samples, and ranks would drift "
                "apart. For a loss give the scheduled model labels=... in training mode; for anything else "
                "use torch.no_grad(). A head with a loss of its own must be a module outside of the model, "
                "whose gradients you sum over ranks (DistributedDataParallel around it)"
            )


class WatchOutside:
    """A hook before the forward pass of the decoder: modules that were added meanwhile are watched, too."""

    def __init__(self, model: nn.Module, path: str, inside: Inside) -> None:
        self._model, self._path, self._inside = ref(model), path, inside

    def __call__(self, *given: Any) -> None:
        del given
        model = self._model()
        if model is not None:
            watch(model, self._path, self._inside)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the hook of the copied model; where the decoder alone is copied, that of the first model."""
        twin = memo.get(id(self._model()))
        return self if twin is None else type(self)(twin, self._path, self._inside)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled, before pickle stumbles over the reference to the model. Raises TypeError."""
        refuse_pickle("a part of a scheduled model")


def watch_outside(model: nn.Module, path: str, inside: Inside) -> None:
    """Refuse calls of modules beside the layers, outside of steps, where they would train something.

    path: of the list of layers in the model.
    """
    watch(model, path, inside)
    decoder = model.get_submodule(path.rpartition(".")[0])
    decoder.register_forward_pre_hook(WatchOutside(model, path, inside))


def watch(model: nn.Module, path: str, inside: Inside) -> None:
    """Give every module beside the layers the hook that refuses calls, unless it has it; see above."""
    holder, before = model, ""
    for step in path.split("."):
        for name, child in holder.named_children():
            hooks = child._forward_pre_hooks.values()
            if name != step and not any(isinstance(hook, RefuseOutside) for hook in hooks):
                child.register_forward_pre_hook(RefuseOutside(f"{before}{name}", inside))
        holder, before = holder.get_submodule(step), f"{before}{step}."
