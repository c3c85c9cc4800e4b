"""Adapters of peft on experts: LoRA of their stacked weights (`target_parameters`).

peft puts a `ParamWrapper` around the module of experts for every weight that it adapts, one inside another. A
rank has the adapters of its own experts. They multiply rows, and no weight of their size is computed:
rows (W + s * left right) = rows W + s * (rows left) right.
Shapes: R rows, E experts (of this rank), r rank of an adapter, M and H widths of a weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

WRAPPER = "ParamWrapper"
"""Name of the class, by which peft itself recognises it; it is not imported, as peft may be missing."""

USE = (
    "adapters of experts are those of LoRA on their stacked weights: LoraConfig(target_parameters="
    '["experts.gate_up_proj", "experts.down_proj"])'
)


@dataclass(frozen=True)
class ExpertAxis:
    """The way in which experts lie in a tensor.

    Attributes:
        dim: The dimension that counts them: 0 in a stacked weight or in LoRA's A, [E * r, M], one expert
            after the other; 1 in LoRA's B, [H, r * E].
        rank: Number of times that experts lie in turn: in a row of LoRA's B come the first columns of all
            experts, then the second ones.
    """

    dim: int = 0
    rank: int = 1

    def part(self, whole: Tensor, place: int, ranks: int) -> Tensor:
        """Return the experts of the rank at `place` among `ranks`, from those of all ranks."""
        turns: Tensor = whole.unflatten(self.dim, (self.rank, ranks, -1))
        return turns.select(self.dim + 1, place).flatten(self.dim, self.dim + 1)

    def join(self, parts: list[Tensor]) -> Tensor:
        """Join the experts of all ranks, in the order of the ranks."""
        turns = [part.unflatten(self.dim, (self.rank, -1)) for part in parts]
        return torch.cat(turns, dim=self.dim + 1).flatten(self.dim, self.dim + 1)

    def whole_shape(self, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
        """Return the shape of the tensor to which parts of this shape are joined."""
        return (*shape[: self.dim], shape[self.dim] * ranks, *shape[self.dim + 1 :])


def core_of(experts: Any) -> Any:
    """Return the module of experts inside peft's wrappers."""
    return wrappers(experts)[-1].base_layer if is_wrapper(experts) else experts


def is_wrapper(module: Any) -> bool:
    """Return whether a module is peft's wrapper around a module of which it adapts a parameter."""
    return type(module).__name__ == WRAPPER and hasattr(module, "parameter_name")


def wrappers(experts: Any) -> list[Any]:
    """Return peft's wrappers around experts, the outermost first."""
    chain: list[Any] = []
    while is_wrapper(experts):
        chain.append(experts)
        experts = experts.base_layer
    return chain


def around(experts: Any) -> list[Any]:
    """Return peft's wrappers around the experts, and the module of experts itself."""
    return [*wrappers(experts), core_of(experts)]


def axes_of(experts: Any) -> dict[nn.Parameter, ExpertAxis]:
    """Return how experts lie in every parameter of theirs and of their adapters."""
    axes: dict[nn.Parameter, ExpertAxis] = dict.fromkeys(experts.parameters(), ExpertAxis())
    for wrapper in wrappers(experts):
        for adapter, layer in wrapper.lora_B.items():
            axes[layer.weight] = ExpertAxis(1, wrapper.r[adapter])
    return axes


def check_adapters(experts: Any, where: str) -> None:
    """Raise ValueError for adapters of experts that cannot be split over ranks."""
    for wrapper in wrappers(experts):
        weight = wrapper.get_param()
        if weight.dim() != 3:
            raise ValueError(
                f"{where}: the adapter of {wrapper.parameter_name} {list(weight.shape)} is one of all "
                f"experts together, which ranks do not share: leave it out; {USE}"
            )
    for name, module in core_of(experts).named_modules():
        if hasattr(module, "adapter_layer_names"):
            raise ValueError(
                f"{where}: {name} of {type(core_of(experts)).__name__} has an adapter "
                f"({type(module).__name__}), and {USE}. Leave it out of target_modules and target_parameters"
            )


def settle(experts: Any) -> None:
    """Make adapters of a single expert mergeable, too: peft takes its weight for one of two dimensions."""
    for wrapper in wrappers(experts):
        if wrapper.num_experts == 1:
            wrapper.get_delta_weight = MethodType(_delta_weight, wrapper)


def _delta_weight(wrapper: Any, adapter: str) -> Tensor:
    left, right, scale = wrapper.get_delta_factors(adapter)
    delta: Tensor = scale * (left @ right)
    return delta


def active(wrapper: Any) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield left [E, M, r], right [E, r, H] and the scale of every adapter that is to be added now."""
    if wrapper.disable_adapters:
        if wrapper.merged:
            wrapper.unmerge()  # as the wrapper itself does it
        return
    for adapter in () if wrapper.merged else wrapper.active_adapters:
        if adapter in wrapper.lora_A:
            left, right, scale = wrapper.get_delta_factors(adapter)
            yield left.contiguous(), right.contiguous(), scale
