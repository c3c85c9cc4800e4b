"""Ranks that share attention and experts, called in other orders than one step: as one process has it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from penstock.decision import ScheduleConfig
from penstock.models import MoEDecoder
from penstock.runtime import PipelinedStack
from penstock.runtime.clip import clip_grad_norm_
from penstock.sharding import Sharding
from penstock.step.shape import ExpertForm
from penstock.train.assemble import first_plan
from tests.support.close import check_all_close
from tests.support.joining import joined
from tests.support.layouts import tiny_case
from tests.support.parity import Case, logical, parts_of, stack_of
from tests.support.ranks import Pools

TOLERANCE = 1e-12
PLANS = ("fsmoe", "parm_s2", "baseline_esp", "parm_s1", "penstock", "flowmoe")


def case_of(form: ExpertForm) -> Case:
    """Four ranks, two of which share attention and two every expert; samples of five tokens do not divide."""
    return tiny_case(
        4,
        "sequential",
        expert_form=form,
        hidden_size=16,
        num_heads=4,
        vocab_size=32,
        ffn_hidden_size=32,
        top_k=2,
        ep_size=2,
        tp_size=2,
        etp_size=2,
        double=True,
    )


def alone(case: Case) -> Case:
    schedule = replace(case.schedule, expert_form=None)
    one = replace(case, world_size=1, ep_size=1, tp_size=1, etp_size=1, batch=4)
    return replace(one, schedule=schedule)


@dataclass
class Loop:
    """A training loop on one rank. numbers: losses and norms, which must be those of one process."""

    rank: int
    case: Case
    stack: PipelinedStack
    numbers: list[float]

    def step(self, number: int) -> None:
        loss = self.loss(number)
        loss.backward()
        self.numbers.append(loss.item())

    def loss(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        shape = (sum(self.case.samples), self.case.model.seq_len)
        tokens, labels = (torch.randint(32, shape, generator=generator) for _ in range(2))
        mine, ids = self.case.mine(self.rank), torch.arange(len(tokens))
        loss: Tensor = self.stack(tokens[mine], labels[mine], ids[mine])
        return loss

    def forget(self) -> None:
        for parameter in self.stack.model.parameters():
            parameter.grad = None


def accumulate(loop: Loop) -> None:
    loop.step(1)
    loop.step(2)


def freeze_and_thaw(loop: Loop) -> None:
    loop.step(1)
    loop.forget()
    for name, parameter in loop.stack.model.named_parameters():
        parameter.requires_grad_(not ("self_attn" in name or "gate" in name or name.startswith("lm_head")))
    loop.step(2)
    for parameter in loop.stack.model.parameters():
        parameter.requires_grad_(True)
    loop.step(3)


def evaluate_between(loop: Loop) -> None:
    loop.step(1)
    loop.stack.eval()
    loop.numbers.append(loop.loss(9).item())
    loop.stack.train()
    loop.step(2)


def change_plans(loop: Loop) -> None:
    stack = loop.stack
    for number, name in enumerate(PLANS):
        config = replace(loop.case.config, schedule=ScheduleConfig(name=name))
        layout = stack.machinery.layout
        stack.adopt(first_plan(config, layout, stack.base_shape, stack.gradients.sizes_bytes))
        loop.step(number)


def copy_the_stack(loop: Loop) -> None:
    loop.step(1)
    loop.stack = copy.deepcopy(loop.stack)
    loop.forget()
    loop.step(2)


def replace_parts(loop: Loop) -> None:
    """A part that was replaced is a part of the same whole."""
    loop.step(1)
    loop.forget()
    model = cast(MoEDecoder, loop.stack.model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 1.5)
    attention = model.parts[0].self_attn
    attention.q_proj.weight = nn.Parameter(attention.q_proj.weight.detach() * 0.5)
    loop.step(2)


def clip_a_list(loop: Loop) -> None:
    loop.step(1)
    loop.numbers.append(float(clip_grad_norm_(list(loop.stack.model.parameters()), 0.05)))


Order = Callable[[Loop], None]
ORDERS = (
    accumulate,
    freeze_and_thaw,
    evaluate_between,
    change_plans,
    copy_the_stack,
    replace_parts,
    clip_a_list,
)
Left = tuple[list[float], dict[str, Tensor], dict[str, Sharding]]


def run(rank: int, case: Case, order: Order) -> Left:
    loop = Loop(rank, case, stack_of(rank, case), [])
    order(loop)
    found = {n: p.grad for n, p in loop.stack.model.named_parameters() if p.grad is not None}
    return loop.numbers, logical(loop.stack, found), parts_of(loop.stack)


@pytest.mark.slow
@pytest.mark.every_value
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
@pytest.mark.parametrize("form", ["gather", "s1", "s2", "baseline"])
def test_any_order_of_calls_ends_as_on_one_process(form: ExpertForm, order: Order, ranks: Pools) -> None:
    case = case_of(form)
    found: list[Left] = ranks(4).run(run, case, order)
    ((expected, theirs, _),) = ranks(1).run(run, alone(case), order)
    assert all(numbers == found[0][0] for numbers, _, _ in found), "ranks differ"
    assert found[0][0] == pytest.approx(expected, rel=TOLERANCE)
    ours = joined((gradients, parts) for _, gradients, parts in found)
    check_all_close(ours, theirs, TOLERANCE, least=1e-9)
