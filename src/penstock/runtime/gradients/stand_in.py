"""Stand-ins for gradients that no rank has whole: an error says so where one would be used.

Without them `.grad` would be None after a backward pass, and everything that goes over gradients would do
nothing and say nothing: clipping and norms of torch, a scaler of losses, another optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

ALLOWED = {
    *(
        "to",
        "double",
        "float",
        "half",
        "bfloat16",
        "cpu",
        "cuda",
        "type",
    ),  # a model converts them with itself
    *("detach_", "requires_grad_", "zero_"),  # they are cleared
    *("__get__", "__set__", "_has_compatible_shallow_copy_type"),  # looked at, but for numbers
    *("dim", "size", "is_floating_point", "is_complex"),
}
"""Functions that do not use a gradient's numbers."""


class InShares(Tensor):
    """The gradient of which every rank has a share: with the shape, type and device of its parameter.

    It is an empty sparse tensor, which takes no memory, and to which autograd adds a gradient of another
    backward pass as if there were none.
    """

    @staticmethod
    def of(parameter: nn.Parameter) -> InShares:
        """Return a stand-in for the gradient of a parameter."""
        empty = torch.zeros(
            parameter.shape, layout=torch.sparse_coo, dtype=parameter.dtype, device=parameter.device
        )
        return _standing_in(empty)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        name = getattr(func, "__name__", str(func))
        if name in ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **(kwargs or {}))
            return _standing_in(found) if type(found) is Tensor else found
        if name == "__repr__":
            return f"InShares({args[0].dtype}, {list(args[0].shape)})"
        raise RuntimeError(
            f"{name} would use a gradient that a sharded optimizer has in shares, and that no rank has "
            "whole. Such an optimizer clips by itself (max_norm, or optimizer.clip_grad_norm), has the norm "
            "of all gradients after a step (optimizer.norm), updates all parameters of its stack, and leaves "
            "out steps that are not finite. Use that, or optimizer.zero_stage=0"
        )


def has_gradient(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has a gradient that is no stand-in."""
    return parameter.grad is not None and not isinstance(parameter.grad, InShares)


def give_up_stand_ins(parameters: Iterable[nn.Parameter]) -> None:
    """Leave no gradient where there is a stand-in."""
    for parameter in parameters:
        if isinstance(parameter.grad, InShares):
            parameter.grad = None


def _standing_in(empty: Tensor) -> InShares:
    stand_in: InShares = Tensor._make_subclass(InShares, empty)
    return stand_in
