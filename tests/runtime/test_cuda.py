"""The numerics contract on one GPU: streams instead of threads, against the CPU reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.runtime import PipelinedStack, clip_grad_norm_
from penstock.runtime.features.sample_placement import NetMoE
from penstock.runtime.streams import StreamLanes
from penstock.topology import Layout, ParallelConfig
from penstock.train.assemble import build_machinery, build_stack
from penstock.train.optimizer import build_adamw
from tests.runtime.test_cases import plain
from tests.steps import PLAIN
from tests.support.close import check_all_close
from tests.support.parity import CLIP, Case, batch_of, executed_as_planned, logical, prepare, reference_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NAMES = sorted(PLAIN)
TOLERANCE = 1e-4


def gpu_stack(case: Case) -> PipelinedStack:
    layout = Layout(world_size=1, ep_size=1, rank=0)
    machinery = build_machinery(layout, torch.device("cuda", 0), ParallelConfig(), "float32")
    assert isinstance(machinery.lanes, StreamLanes)
    stack = build_stack(case.config, machinery, case.dtype)
    prepare(stack, case)
    return stack


def loss_of(stack: PipelinedStack, case: Case) -> torch.Tensor:
    tokens, labels = (tensor.to(stack.machinery.device) for tensor in batch_of(case))
    ids = torch.arange(case.batch, device=stack.machinery.device)
    loss: torch.Tensor = stack(tokens, labels, ids)
    return loss


def check_gradients(stack: PipelinedStack, case: Case) -> None:
    """As planned, and equal to the reference's."""
    assert executed_as_planned(stack)
    gradients = {n: p.grad.cpu() for n, p in stack.model.named_parameters() if p.grad is not None}
    check_all_close(logical(stack, gradients), reference_step(case).gradients, TOLERANCE)


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("capacity_factor", [None, 1.0])
@pytest.mark.parametrize("expert", ["gelu", "swiglu"])
def test_a_step_equals_the_reference(schedule: str, capacity_factor: float | None, expert: str) -> None:
    case = plain(1, schedule, capacity_factor=capacity_factor, expert=expert)
    expected = reference_step(case)
    stack = gpu_stack(case)
    optimizer = build_adamw(stack.model.named_parameters(), case.config.optimizer)
    loss = loss_of(stack, case)
    loss.backward()
    assert executed_as_planned(stack)
    named = dict(stack.model.named_parameters())
    gradients = {n: p.grad.cpu() for n, p in named.items() if p.grad is not None}
    norm = float(clip_grad_norm_(stack, CLIP))
    optimizer.step()
    parameters = {n: p.detach().cpu() for n, p in named.items()}
    assert loss.item() == pytest.approx(expected.loss, rel=TOLERANCE)
    assert norm == pytest.approx(expected.norm, rel=TOLERANCE)
    check_all_close(logical(stack, gradients), expected.gradients, TOLERANCE)
    check_all_close(logical(stack, parameters), expected.parameters, TOLERANCE)


@pytest.mark.parametrize("schedule", NAMES)
def test_homes_are_found_on_the_host_beside_the_streams(schedule: str) -> None:
    case = replace(plain(1, schedule), placer=NetMoE())
    stack = gpu_stack(case)
    for _ in range(3):
        loss_of(stack, case).backward()
        check_gradients(stack, case)
        stack.zero_grad()


@pytest.mark.parametrize("schedule", ["moe_pipeline", "fsmoe", "penstock"])
def test_other_chunks_on_the_way_back(schedule: str) -> None:
    case = plain(1, schedule)
    case = replace(case, schedule=replace(case.schedule, backward_chunks=2))
    stack = gpu_stack(case)
    loss_of(stack, case).backward()
    check_gradients(stack, case)


@pytest.mark.parametrize("schedule", NAMES)
def test_every_step_runs_as_planned(schedule: str) -> None:
    """Also the later ones, where streams and memory are used again."""
    case = plain(1, schedule)
    stack = gpu_stack(case)
    losses = []
    for _ in range(4):
        stack.zero_grad()
        loss = loss_of(stack, case)
        loss.backward()
        assert executed_as_planned(stack)
        losses.append(loss.item())
    assert losses == pytest.approx([losses[0]] * 4, rel=TOLERANCE)


@pytest.mark.parametrize("schedule", NAMES)
def test_evaluation_has_the_same_loss(schedule: str) -> None:
    case = plain(1, schedule)
    stack = gpu_stack(case)
    trained = loss_of(stack, case).item()
    stack.eval()
    with torch.no_grad():
        assert loss_of(stack, case).item() == pytest.approx(trained, rel=TOLERANCE)
