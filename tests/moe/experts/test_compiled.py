"""Experts as the compiler of PyTorch sees them."""

from __future__ import annotations

import pytest
import torch

from penstock.moe import SwiGLUExperts
from tests.moe.experts.plain import numbers
from tests.support.card import install


@pytest.mark.slow
def test_experts_are_one_graph_for_any_number_of_rows() -> None:
    """Values and gradients, with rows that experts lack, and no second compilation."""
    from torch._dynamo.testing import CompileCounterWithBackend

    experts = SwiGLUExperts(8, 16, num_local_experts=3)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend=counter)
    for sizes in ([5, 2, 4], [3, 9, 7], [2, 6, 6]):
        rows_RM = numbers(sum(sizes), 8, dtype=torch.float32).requires_grad_()
        variables = [rows_RM, *experts.parameters()]
        wanted = experts(rows_RM, sizes)
        found = compiled(rows_RM, sizes)
        torch.testing.assert_close(found, wanted)
        for one, other in zip(
            torch.autograd.grad(found.square().sum(), variables),
            torch.autograd.grad(wanted.square().sum(), variables),
            strict=True,
        ):
            torch.testing.assert_close(one, other)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_the_operators_are_well_formed() -> None:
    """Also where PyTorch has an accelerator, of which its check keeps the random state."""
    install()
    rows, weight = numbers(7, 4), numbers(3, 4, 5, seed=1)
    inputs = (rows.requires_grad_(), weight.requires_grad_(), [4, 0, 3])
    torch.library.opcheck(torch.ops.penstock.grouped_product.default, inputs)
