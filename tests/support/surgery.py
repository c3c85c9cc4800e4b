"""Things that people do to a model after they have put it into a stack."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from penstock.decision import ScheduleConfig
from penstock.models import MoEDecoder
from penstock.runtime import PipelinedStack, clip_grad_norm_
from penstock.runtime.fingerprints import ParameterMismatchError
from penstock.train.assemble import first_plan
from tests.support.alone import numbers as drawn
from tests.support.parity import (
    Case,
    StepResult,
    gradients_of,
    logical,
    machinery,
    own_batch,
    parts_of,
    stack_of,
)


class LoRA(nn.Module):
    """A linear layer, frozen, and a trained product of two small matrices beside it; as in peft, `weight` is
    that of the layer."""

    def __init__(self, base: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(drawn(2, base.in_features).to(dtype))
        self.up = nn.Parameter(drawn(base.out_features, 2, seed=1).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        more = x.to(self.down.dtype) @ self.down.T @ self.up.T
        out: Tensor = self.base(x) + more.to(x.dtype)
        return out

    @property
    def weight(self) -> Tensor:
        return self.base.weight


class Reaching(nn.Module):
    """A head that uses a parameter of the model which none of its layers has."""

    def __init__(self, base: nn.Linear, model: MoEDecoder) -> None:
        super().__init__()
        self.base = base
        self.reach: Callable[[], Tensor] = lambda: model.get_parameter("extra")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x * self.reach())
        return out


def linear(inputs: int, outputs: int, seed: int = 0) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False, dtype=torch.float64)
    made.weight = nn.Parameter(drawn(outputs, inputs, seed=seed))
    return made


# ---- what can be taken up ----------------------------------------------------------------------------------


def add_lora(model: MoEDecoder, dtype: torch.dtype = torch.float64) -> None:
    for block in model.parts:
        block.self_attn.register_module("q_proj", LoRA(block.self_attn.q_proj, dtype))


def replace_head(model: MoEDecoder) -> None:
    model.lm_head = linear(model.config.hidden_size, model.config.vocab_size)


def resize_vocabulary(model: MoEDecoder) -> None:
    hidden = model.config.hidden_size
    model.model.embed_tokens = nn.Embedding(17, hidden, _weight=drawn(17, hidden, seed=3))
    model.lm_head = linear(hidden, 17)


def convert(model: MoEDecoder) -> None:
    model.to(torch.float32)


def normalise_weights(model: MoEDecoder) -> None:
    for block in model.parts:
        parametrizations.weight_norm(block.self_attn.o_proj)


def replace_block(model: MoEDecoder) -> None:
    block = copy.deepcopy(model.parts[1])
    assert block.moe is not None
    for name, parameter in block.named_parameters():
        if ".experts." not in name:
            parameter.data = drawn(*parameter.shape, seed=len(name)) / 3
    for name, parameter in block.moe.experts.named_parameters():
        for number, weight in zip(block.moe.placement.held(block.moe.ep_rank), parameter.data, strict=True):
            weight.copy_(drawn(*weight.shape, seed=len(name) + number))
    model.model.layers[1] = block


def add_parameter(model: MoEDecoder) -> None:
    model.extra = nn.Parameter(drawn(model.config.hidden_size, seed=5))
    model.register_module("lm_head", Reaching(model.lm_head, model))


def assign_state(model: MoEDecoder) -> None:
    state = {n: 2 * t if t.is_floating_point() else t for n, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def swap_blocks(model: MoEDecoder) -> None:
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]


def compile_block(model: MoEDecoder) -> None:
    compiled: Any = torch.compile(model.model.layers[0], backend="eager")
    model.model.layers[0] = compiled


def hook(model: MoEDecoder) -> None:
    model.lm_head.weight.register_hook(lambda gradient: 3 * gradient)


TAKEN_UP: dict[str, Callable[[MoEDecoder], None]] = {
    "LoRA": add_lora,
    "LoRA in float32": partial(add_lora, dtype=torch.float32),
    "head": replace_head,
    "vocabulary": resize_vocabulary,
    "float32": convert,
    "weight norm": normalise_weights,
    "block": replace_block,
    "parameter": add_parameter,
    "assigned state": assign_state,
    "swapped blocks": swap_blocks,
    "compiled block": compile_block,
    "hook": hook,
}


def operated(rank: int, case: Case, name: str) -> StepResult:
    """A step, surgery, and another step, of the same stack."""
    stack = stack_of(rank, case)
    run(stack, rank, case)
    assert isinstance(stack.model, MoEDecoder)
    TAKEN_UP[name](stack.model)
    return run(stack, rank, case)


def refused(rank: int, case: Case, name: str) -> str:
    """The error of the step after surgery that this layout cannot take up."""
    try:
        operated(rank, case, name)
    except ValueError as error:
        return str(error)
    return ""


def operated_before(case: Case, name: str) -> StepResult:
    """The same with surgery before the stack is built, in one process that has the whole batch."""
    alone = replace(
        case,
        world_size=1,
        ep_size=1,
        tp_size=1,
        etp_size=1,
        batch=sum(case.samples),
        schedule=ScheduleConfig(name="sequential"),
    )
    model = stack_of(0, alone).model
    assert isinstance(model, MoEDecoder)
    TAKEN_UP[name](model)
    there = machinery(1, 1, 0)
    plan = partial(first_plan, alone.config, there.layout)
    return run(PipelinedStack(model, model, alone.moe, there, plan), 0, alone)


def run(stack: PipelinedStack, rank: int, case: Case) -> StepResult:
    """A step, without an update."""
    stack.zero_grad()
    loss = stack(*own_batch(rank, case))
    loss.backward()
    gradients = gradients_of(stack.model)
    norm = float(clip_grad_norm_(stack, math.inf))
    return StepResult(loss.item(), norm, logical(stack, gradients), parts=parts_of(stack))


# ---- what ranks must do together ---------------------------------------------------------------------------


def freeze_head(model: MoEDecoder, rank: int) -> None:
    if rank == 1:
        model.lm_head.requires_grad_(False)


def other_head(model: MoEDecoder, rank: int) -> None:
    model.lm_head = linear(8, 11, seed=rank)


def head_of_one(model: MoEDecoder, rank: int) -> None:
    if rank == 1:
        model.lm_head = linear(8, 11)


def other_shape(model: MoEDecoder, rank: int) -> None:
    model.lm_head = linear(8, 11 + rank)


def extra_of_one(model: MoEDecoder, rank: int) -> None:
    if rank == 0:
        model.extra = nn.Parameter(torch.zeros(3, dtype=torch.float64))


def other_type(model: MoEDecoder, rank: int) -> None:
    if rank == 1:
        model.parts[0].self_attn.k_norm.to(torch.float32)


def frozen_replica(model: MoEDecoder, rank: int) -> None:
    """Of an expert that both ranks hold."""
    moe = model.parts[0].moe
    assert moe is not None
    moe.experts.get_parameter("w_up").requires_grad_(rank == 0)


APART: dict[str, tuple[Callable[[MoEDecoder, int], None], str]] = {
    "frozen": (freeze_head, r"lm_head.weight is frozen there and trained here"),
    "values": (other_head, r"lm_head.weight differs between ranks"),
    "replaced by one": (head_of_one, r"lm_head.weight differs between ranks"),
    "shape": (other_shape, r"lm_head.weight is float64 \[12, 8\] there and float64 \[11, 8\] here"),
    "added by one": (extra_of_one, r"extra does not exist there"),
    "type": (other_type, r"k_norm.weight is float32 \[4\] there and float64 \[4\] here"),
    "replica": (frozen_replica, r"experts.w_up is frozen there and trained here"),
}
"""What was done on one rank only, and how the error names it: on rank 1 against rank 0."""


def apart(rank: int, case: Case, name: str) -> tuple[str, bool]:
    """The error of the step after, and whether the stack trains on once the ranks are alike again."""
    stack = stack_of(rank, case)
    assert isinstance(stack.model, MoEDecoder)
    run(stack, rank, case)
    before = {n: (m, dict(m._parameters)) for n, m in stack.model.named_modules()}
    values = copy.deepcopy(stack.state_dict())
    APART[name][0](stack.model, rank)
    try:
        run(stack, rank, case)
    except ParameterMismatchError as error:
        text = str(error)
    else:
        text = "no error"
    for module, parameters in before.values():
        module._parameters.clear()
        module._parameters.update(parameters)
    stack.model.lm_head = before["lm_head"][0]
    stack.model.requires_grad_(True).double()
    stack.load_state_dict(values)
    return text, run(stack, rank, case).norm > 0
