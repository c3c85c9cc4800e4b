"""How often tensors are cast to another type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Casts(TorchDispatchMode):
    """Counts casts of these tensors to bfloat16. count: of all; by_tensor: of each, in their order."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.by_tensor = [0] * len(tensors)
        self._place = {tensor.untyped_storage()._cdata: place for place, tensor in enumerate(tensors)}

    @property
    def count(self) -> int:
        return sum(self.by_tensor)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is torch.bfloat16:
            place = self._place.get(args[0].untyped_storage()._cdata)
            if place is not None:
                self.by_tensor[place] += 1
        return func(*args, **(kwargs or {}))
