"""Replay of what a computation selected and drew, so that a second run does the same.

Two runs of one computation may differ in the last bit, and a router that then chose another expert would get
the gradient of a choice that was never made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from penstock.device import device_of

_ATEN = torch.ops.aten
SELECTING = frozenset(
    {
        _ATEN.topk.default,
        _ATEN.sort.default,
        _ATEN.sort.stable,
        _ATEN.argsort.default,
        _ATEN.argsort.stable,
        _ATEN.argmax.default,
        _ATEN.argmin.default,
        _ATEN.max.dim,
        _ATEN.min.dim,
        _ATEN.kthvalue.default,
    }
)
"""Operators whose results jump where their inputs change by little."""


class _Noting(TorchDispatchMode):
    """Records what is selected."""

    def __init__(self, found: list[Any]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        if func in SELECTING:
            self._found.append(tree_map(torch.clone, out))  # a router may divide its weights in place
        return out


class _Repeating(TorchDispatchMode):
    """Selects what was recorded, in order. It stands below autograd, so gradients take their usual way."""

    def __init__(self, found: list[Any]) -> None:
        super().__init__()
        self._left = iter(found)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        return next(self._left) if func in SELECTING else func(*args, **(kwargs or {}))


class Replay:
    """One computation that runs twice: inside `first`, and later inside `second`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._selected = device, list[Any]()

    @contextmanager
    def first(self) -> Iterator[None]:
        """Run without keeping anything for a backward but selections and the state of random numbers."""
        self._modes = tuple(_get_current_function_mode_stack())  # such as a default device
        self._random = torch.get_rng_state()
        self._random_there = device_of(self._device).random_state(self._device)
        with torch.no_grad(), _Noting(self._selected):
            yield

    @contextmanager
    def second(self) -> Iterator[None]:
        """Run with the same selections and random numbers; generators then go on as if nothing was drawn.

        Autograd takes part, which is switched off inside a backward.
        """
        forked = device_of(self._device).fork_random(self._device)
        with ExitStack() as modes, forked, torch.enable_grad(), _Repeating(self._selected):
            for mode in self._modes:  # a backward has none of them
                modes.enter_context(mode)
            torch.set_rng_state(self._random)
            if self._random_there is not None:
                device_of(self._device).set_random_state(self._random_there, self._device)
            yield
        self._selected = []
