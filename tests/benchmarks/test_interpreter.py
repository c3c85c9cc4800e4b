"""The step beside plain autograd: both leave the same gradients, and the text says what was measured."""

from __future__ import annotations

import pytest
import torch

from benchmarks.interpreter import (
    CONFIG,
    MICROBATCHES,
    measure_interpreter,
    plain_step,
    render_interpreter,
    sample_tokens,
    step,
)
from penstock.lab.bench import BenchConfig
from penstock.models import MoEDecoder
from penstock.topology import Layout, ParallelConfig
from penstock.train.assemble import build_machinery, build_stack

ALONE = Layout(world_size=1, ep_size=1, rank=0)


@pytest.mark.slow
def test_both_ways_leave_the_same_gradients() -> None:
    """Else the comparison would be one of different work."""
    machinery = build_machinery(ALONE, torch.device("cpu"), ParallelConfig(), "float32")
    stack = build_stack(CONFIG, machinery, torch.float64)
    assert isinstance(stack.model, MoEDecoder)
    tokens_BL = sample_tokens(0)
    assert len(tokens_BL) == MICROBATCHES == stack.plan.shape.microbatches
    step(stack, tokens_BL)
    found = {name: parameter.grad for name, parameter in stack.model.named_parameters()}
    stack.model.zero_grad(set_to_none=True)
    plain_step(stack.model, tokens_BL)
    stack.close()
    for name, parameter in stack.model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-8, atol=1e-12, msg=name)


@pytest.mark.slow
def test_alone_it_is_measured_beside_plain_autograd() -> None:
    found = measure_interpreter(ALONE, BenchConfig(), rounds=2)
    assert (found.ranks, found.rounds) == (1, 2)
    assert found.plain_s is not None and min(found.step_s.low, found.plain_s.low) > 0
    assert "1 process, one thread each" in render_interpreter(found)
