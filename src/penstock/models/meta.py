"""Models without memory for their weights, to read sizes off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Unfilled(TorchFunctionMode):
    """Leaves out what would fill new parameters.

    There is nothing to fill, and torch would load its compiler for random numbers of no device: a second.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        given = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


@contextmanager
def on_meta() -> Iterator[None]:
    """Inside, new tensors are on the meta device, and nothing fills parameters."""
    with torch.device("meta"), _Unfilled():
        yield
