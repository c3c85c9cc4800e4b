"""Any module as an expert, against a loop over rows and against stacked experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.moe import MoELayer, SoftmaxRouter, SortPermutation
from penstock.moe.experts import ModuleExperts, SwiGLUExperts
from tests.moe.experts.plain import numbers

HIDDEN = 4


class Counted(nn.Module):
    """Two matrices with GELU between; knows how often it has been called."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 6, bias=False, dtype=torch.float64)
        self.down = nn.Linear(6, HIDDEN, bias=False, dtype=torch.float64)
        self.calls = 0

    def forward(self, rows_nM: Tensor) -> Tensor:
        self.calls += 1
        assert len(rows_nM)
        out_nM: Tensor = self.down(nn.functional.gelu(self.up(rows_nM)))
        return out_nM


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_equal_a_loop_over_rows(sizes: list[int]) -> None:
    experts = ModuleExperts(Counted, len(sizes))
    rows = numbers(sum(sizes), HIDDEN).requires_grad_()
    weight = numbers(sum(sizes), HIDDEN, seed=1)
    out = experts(rows, sizes)
    assert [module.calls for module in experts.expert_modules] == [int(size > 0) for size in sizes]
    owners = [experts.expert_modules[e] for e, size in enumerate(sizes) for _ in range(size)]
    looped = torch.stack([owner(row) for owner, row in zip(owners, rows, strict=True)]) if owners else rows
    torch.testing.assert_close(out, looped)
    variables = [rows, *experts.parameters()]
    found, wanted = (
        torch.autograd.grad((result * weight).sum(), variables, allow_unused=True) for result in (out, looped)
    )
    torch.testing.assert_close(found, wanted)
    for module, size in zip(experts.expert_modules, sizes, strict=True):
        used = [grad is not None for v, grad in zip(variables, found, strict=True) if _owns(module, v)]
        assert used == [size > 0] * 2


def _owns(module: nn.Module, variable: Tensor) -> bool:
    return any(variable is parameter for parameter in module.parameters())


@pytest.mark.parametrize("prefix", ["", "experts", "model.model.layers.0.mlp.experts"])
def test_split_names_every_expert_once(prefix: str) -> None:
    experts = ModuleExperts(lambda: nn.ModuleList([Counted(), Counted()]), 11)
    pieces = [
        piece
        for name, parameter in experts.named_parameters(prefix=prefix)
        for piece in experts.split(name, parameter)
    ]
    start = f"{prefix}." if prefix else ""
    names = {f"{start}expert_modules.{i}.{matrix}.weight" for i in range(2) for matrix in ("up", "down")}
    assert {(name, number) for name, number, _ in pieces} == {(n, e) for n in names for e in range(11)}
    for name, number, tensor in pieces:
        inside = name.removeprefix(f"{start}expert_modules.")
        assert tensor is experts.get_parameter(f"expert_modules.{number}.{inside}")


def test_split_refuses_what_is_no_expert() -> None:
    with pytest.raises(ValueError, match=r"experts\.w_up is no parameter of ModuleExperts"):
        list(ModuleExperts(Counted, 1).split("experts.w_up", torch.zeros(1)))


def test_one_module_cannot_be_two_experts() -> None:
    only = Counted()
    with pytest.raises(ValueError, match="same module twice"):
        ModuleExperts(lambda: only, 2)


def test_a_module_that_changes_the_width_is_named() -> None:
    experts = ModuleExperts(lambda: nn.Linear(HIDDEN, 5), 2)
    with pytest.raises(ValueError, match=r"Linear .* shape \[3, 4\], and returned \[3, 5\]"):
        experts(torch.zeros(3, HIDDEN), (3, 0))


class InFull(nn.Linear):
    def forward(self, rows_nM: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(rows_nM)


def test_a_module_may_switch_autocast_off_where_no_row_travels() -> None:
    experts = ModuleExperts(lambda: InFull(HIDDEN, HIDDEN), 2)
    layer = MoELayer(gate=SoftmaxRouter(HIDDEN, 2, 1), permutation=SortPermutation(2), expert=experts)
    x = numbers(5, HIDDEN).float()
    with torch.autocast("cpu"):
        out = layer(x)
    torch.testing.assert_close(out, layer(x))


def test_what_is_built_on_meta_stays_there() -> None:
    with torch.device("meta"):
        assert all(p.is_meta for p in SwiGLUExperts(8, 16, 2).parameters())
