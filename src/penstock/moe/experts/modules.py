"""Any module as an expert.

Shapes: R rows, M hidden size, n rows of one expert.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from penstock.moe.experts.base import Experts
from penstock.moe.experts.product import Product, grouped_product

NUMBERED = re.compile(r"(?P<before>(?:^|.*?\.)expert_modules\.)(?P<number>\d+)\.(?P<after>.+)")


class ModuleExperts(Experts):
    """Experts that `make` returns one by one, each a module that maps [n, M] to [n, M], n > 0.

    They multiply as they like: their weight gradients come with the input gradients and cannot be deferred.
    An expert without rows is not called, and its parameters get no gradient; inside a stack they get zeros.
    Raises ValueError if `make` returns a module twice.
    """

    def __init__(self, make: Callable[[], nn.Module], num_local_experts: int) -> None:
        super().__init__()
        self.num_local_experts = num_local_experts
        self.expert_modules = nn.ModuleList(make() for _ in range(num_local_experts))
        if len({id(module) for module in self.expert_modules}) < num_local_experts:
            raise ValueError("`make` returned the same module twice: every expert needs weights of its own")

    def forward(self, rows_RM: Tensor, sizes: Sequence[int], product: Product = grouped_product) -> Tensor:
        del product
        parts = zip(self.expert_modules, rows_RM.split(list(sizes)), strict=True)
        outputs = [_run(expert, part_nM) for expert, part_nM in parts if len(part_nM)]
        return torch.cat(outputs) if outputs else rows_RM

    def split(self, name: str, tensor: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        found = NUMBERED.fullmatch(name)
        if found is None:
            raise ValueError(
                f"{name} is no parameter of ModuleExperts: expected ...expert_modules.<number>...."
            )
        yield found["before"] + found["after"], int(found["number"]), tensor

    def replicas(self, slots: int) -> Experts:
        first = self.expert_modules[0]
        return ModuleExperts(lambda: copy.deepcopy(first), slots)


def _run(expert: nn.Module, rows_nM: Tensor) -> Tensor:
    out_nM: Tensor = expert(rows_nM)
    if out_nM.shape != rows_nM.shape:
        raise ValueError(
            f"{type(expert).__name__} as an expert must return what it gets, rows of shape "
            f"{list(rows_nM.shape)}, and returned {list(out_nM.shape)}"
        )
    return out_nM
