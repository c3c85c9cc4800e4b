"""The step beside plain autograd: both leave the same gradients, and the text says what was measured."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.interpreter import (
    CONFIG,
    MICROBATCHES,
    InterpreterResult,
    measure_interpreter,
    plain_step,
    render_interpreter,
    sample_tokens,
    step,
)
from benchmarks.layer.measure import Band
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
    assert InterpreterResult.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def band(median: float) -> Band:
    return Band(median=median, low=0.9 * median, high=1.1 * median)


def test_the_text() -> None:
    found = InterpreterResult(
        ranks=1,
        tasks=377,
        rounds=60,
        step_s=band(0.08),
        plain_s=band(0.06),
        ratio=band(1.33),
        per_task_s=band(5e-5),
    )
    assert render_interpreter(found).splitlines() == [
        "hidden size 16, 8 layers, 4 microbatches, schedule flowmoe, 1 process, one thread each",
        "60 rounds, in turns; median, 10 % to 90 % of rounds",
        "",
        "| tasks |           step ms | plain autograd ms |      step / plain | us per task above plain |",
        "|------:|------------------:|------------------:|------------------:|------------------------:|",
        "|   377 | 80.0 [72.0, 88.0] | 60.0 [54.0, 66.0] | 1.33 [1.20, 1.46] |             50 [45, 55] |",
    ]


def test_several_ranks_have_no_plain_autograd_beside_them() -> None:
    text = render_interpreter(InterpreterResult(ranks=2, tasks=377, rounds=60, step_s=band(0.1)))
    assert "2 processes" in text and "plain" not in text
