"""Models without memory for their weights, from which sizes are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Unfilled(TorchFunctionMode):
    """Leaves out the functions that fill new parameters.

    There is nothing to fill, and for random numbers on the meta device torch would load its compiler: a
    second.
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
    """Put new tensors on the meta device, inside this context, and leave parameters unfilled."""
    with torch.device("meta"), _Unfilled():
        yield
