"""A model that is changed where ranks share parameters: taken up part by part, or refused by name."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.decision import GradientBytes, ScheduleConfig
from penstock.models import MoEDecoder
from penstock.runtime import PipelinedStack
from penstock.step.shape import TokenLayout
from tests.runtime.test_surgery import CASE
from tests.support.close import check_all_close
from tests.support.joining import joined
from tests.support.parity import (
    Case,
    StepResult,
    gradients_of,
    logical,
    own_batch,
    parts_of,
    stack_of,
)
from tests.support.ranks import Pools
from tests.support.surgery import operated, operated_before, refused, run

pytestmark = pytest.mark.slow
SHARED = replace(
    CASE, tp_size=2, ep_size=1, etp_size=2, batch=4, model=replace(CASE.model, vocab_size=12), double=True
)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["float32", "assigned state", "swapped blocks", "compiled block", "hook"])
def test_what_leaves_parts_as_they_are_is_taken_up(ranks: Pools, name: str) -> None:
    results, wanted = ranks(2).run(operated, SHARED, name), operated_before(SHARED, name)
    tolerance = 1e-5 if name == "float32" else 1e-10
    assert len({result.norm for result in results}) == 1
    assert results[0].loss == pytest.approx(wanted.loss, rel=tolerance)
    assert results[0].norm == pytest.approx(wanted.norm, rel=tolerance)
    found = joined((result.gradients, result.parts) for result in results)
    check_all_close(found, wanted.gradients, tolerance)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("head", r"lm_head.weight is [12, 8], and should be one of 2 parts [6, 8] of a parameter [12, 8]"),
        ("vocabulary", r"model.embed_tokens.weight is [17, 8], and should be one of 2 parts [6, 8]"),
        ("LoRA", r"self_attn.q_proj.weight is gone, and was one of 2 parts [4, 8] of a parameter [8, 8]"),
        ("weight norm", r"self_attn.o_proj.weight is gone, and was one of 2 parts [8, 4]"),
    ],
)
def test_what_does_not_is_refused_on_all_ranks(ranks: Pools, name: str, words: str) -> None:
    for text in ranks(2).run(refused, SHARED, name):
        assert words in text and "Keep its name and shape" in text


def compared(rank: int, case: Case) -> None:
    """Compare values before a step, after it, and those of a copy."""
    stack = stack_of(rank, case)
    stack.compare_values()
    stack(*own_batch(rank, case)).backward()
    stack.compare_values()
    copy.deepcopy(stack).compare_values()


def test_parts_are_compared_by_none_of_those_that_have_others(ranks: Pools) -> None:
    ranks(2).run(compared, SHARED)


def ruled_out(rank: int, case: Case, unused: range) -> StepResult:
    """A step of a model that rules out some tokens, which are no labels of it."""
    stack, (tokens, labels) = stack_of(rank, case), own_batch(rank, case)
    assert isinstance(stack.model, MoEDecoder)
    width = case.model.vocab_size // case.tp_size
    mask = torch.isin(torch.arange(width) + rank * width, torch.tensor(unused))
    stack.model.lm_head.register_forward_hook(lambda head, given, out: out.masked_fill(mask, -torch.inf))
    loss = stack(tokens, labels.masked_fill(torch.isin(labels, torch.tensor(unused)), -100))
    loss.backward()
    gradients = logical(stack, gradients_of(stack.model))
    return StepResult(loss.item(), 0.0, gradients, parts=parts_of(stack))


@pytest.mark.parametrize("unused", [range(1), range(6, 7), range(6, 12)], ids=str)
def test_tokens_that_a_model_rules_out_count_for_nothing(ranks: Pools, unused: range) -> None:
    """The first of a rank's vocabulary, where others' labels are looked up, too, or all of it."""
    results = ranks(2).run(ruled_out, SHARED, unused)
    wanted = ruled_out(0, replace(SHARED, world_size=1, tp_size=1, etp_size=1), unused)
    assert [each.loss for each in results] == pytest.approx([wanted.loss] * 2, rel=1e-10)
    check_all_close(joined((each.gradients, each.parts) for each in results), wanted.gradients, 1e-10)


# ---- what a plan covers ------------------------------------------------------------------------------------


def trained_at_the_gate(rank: int, case: Case) -> tuple[GradientBytes, Any, Any]:
    """Sizes that the plan was made of; digests of gradients after planning for, and training, gates alone."""
    stack = stack_of(rank, case)
    run(stack, rank, case)
    wanted = of_gates(stack)
    for name, parameter in stack.model.named_parameters():
        parameter.grad = None
        parameter.requires_grad_(".gate." in name or ".experts." in name)
    stack.replan()
    run(stack, rank, case)
    sizes = {
        kind: tuple(sum(p.nbytes for flat in bucket for p in flat.parameters) for bucket in layers)
        for kind, layers in stack.buckets.by_kind.items()
    }
    made = GradientBytes(sizes["replicated"], sizes["experts"], sizes["partial"])
    assert stack.gradients.sizes_bytes.of_form(stack.plan.shape.expert_form).by_kind == made.by_kind
    return made, wanted, of_gates(stack)


def of_gates(stack: PipelinedStack) -> dict[str, torch.Tensor]:
    named = stack.model.named_parameters()
    return {name: p.grad.clone() for name, p in named if ".gate." in name and p.grad is not None}


@pytest.mark.parametrize("tokens", ["split", "replicated"])
@pytest.mark.parametrize("schedule", ["sequential", "baseline_esp", "parm_s1", "parm_s2"])
def test_a_new_plan_reduces_what_its_form_makes_complete(
    ranks: Pools, schedule: str, tokens: TokenLayout
) -> None:
    """The gate's gradient is partial in some forms and complete in others, and nothing else is trained."""
    case = replace(SHARED, schedule=ScheduleConfig(name=schedule), tokens=tokens)
    complete = schedule == "parm_s2"
    for made, wanted, found in ranks(2).run(trained_at_the_gate, case):
        assert any(made.replicated) is complete
        assert any(made.partial) is not complete
        assert wanted.keys() == found.keys() and wanted
        check_all_close(found, wanted, 1e-10)
