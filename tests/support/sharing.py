"""Models whose layers share parameters and of which parts are frozen, on ranks and by the plain reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from penstock.decision import ScheduleConfig
from penstock.models import MoEDecoder
from penstock.moe import MoELayer, build_layer
from penstock.moe.build import build_shared
from penstock.runtime import PipelinedStack
from penstock.train.assemble import build_stack
from tests.support.close import check_close
from tests.support.parity import Case, StepResult, batch_of, logical, machinery, prepare
from tests.support.reference import reference_loss
from tests.support.reference_moe import Weights
from tests.support.reference_step import settings_of
from tests.support.searching import short_search
from tests.support.surgery import run


def one_shared_expert(case: Case, ep_size: int, rank: int) -> Callable[[int], MoELayer]:
    """Makes layers that all have the same shared experts, as an object."""
    hidden = case.model.hidden_size
    common = build_shared(hidden, case.moe)
    assert common is not None

    def make(layer: int) -> MoELayer:
        made = build_layer(hidden, case.moe, ep_size=ep_size, ep_rank=rank % ep_size, layer=layer)
        made.shared = common
        return made

    return make


def share_attention(model: MoEDecoder) -> None:
    """Layers 0 and 2 project their queries, keys and values alike."""
    first, last = model.parts[0].self_attn, model.parts[-1].self_attn
    last.q_proj.weight = first.q_proj.weight


def share_experts(model: MoEDecoder) -> None:
    """Experts of layers 1 and 2 have one input matrix."""
    first, last = model.parts[1].moe, model.parts[-1].moe
    assert first is not None and last is not None
    last.experts.register_parameter("w_up", first.experts.get_parameter("w_up"))


def tie(model: MoEDecoder) -> None:
    """Head and embedding are one matrix, tied after the stack was built."""
    model.lm_head.weight = model.model.embed_tokens.weight


SHARING: dict[str, Callable[[MoEDecoder], None]] = {
    "attention": share_attention,
    "experts": share_experts,
    "tied later": tie,
}
"""What can be shared in a model that there is already."""


def shared_stack(rank: int, case: Case, sharing: tuple[str, ...]) -> PipelinedStack:
    """The case's stack; `sharing` names what its layers have in common."""
    ep_size = case.ep_size or case.world_size
    tied = replace(case.model, tie_word_embeddings="tied" in sharing)
    case = replace(case, model=tied)
    make_moe = one_shared_expert(case, ep_size, rank) if "shared expert" in sharing else None
    with short_search():
        stack = build_stack(case.config, machinery(case.world_size, ep_size, rank), case.dtype, make_moe)
    prepare(stack, case)
    assert isinstance(stack.model, MoEDecoder)
    for name in sharing:
        if name in SHARING:
            SHARING[name](stack.model)
    return stack


def freeze(model: nn.Module, frozen: tuple[str, ...]) -> None:
    """Freeze parameters whose name contains one of these, thaw all others."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))


def steps(rank: int, case: Case, sharing: tuple[str, ...], frozen: list[tuple[str, ...]]) -> list[StepResult]:
    """Steps of one stack on this rank, of which each freezes something else."""
    stack, found = shared_stack(rank, case, sharing), []
    for names in frozen:
        freeze(stack.model, names)
        found.append(run(stack, rank, case))
    return found


def plain_steps(case: Case, sharing: tuple[str, ...], frozen: list[tuple[str, ...]]) -> list[StepResult]:
    """The same by the reference, in one process."""
    alone = replace(case, world_size=1, ep_size=1, schedule=ScheduleConfig(name="sequential"))
    stack = shared_stack(0, alone, sharing)
    copies = {id(p): p.detach().clone() for p in stack.model.parameters()}
    named = list(stack.model.named_parameters(remove_duplicate=False))
    found = []
    for names in frozen:
        leaves = {key: copy.clone().requires_grad_() for key, copy in copies.items()}
        loss = reference_loss({n: leaves[id(p)] for n, p in named}, settings_of(case), *batch_of(case))
        loss.backward()
        gradients = {
            n: leaves[id(p)].grad
            for n, p in stack.model.named_parameters()
            if not any(part in n for part in names)
        }
        present: dict[str, Tensor] = {n: g for n, g in gradients.items() if g is not None}
        norm = torch.cat([torch.zeros(1), *(g.flatten() for g in present.values())]).norm()
        found.append(StepResult(loss.item(), float(norm), logical(stack, present)))
    return found


def check_steps(everyone: list[list[StepResult]], wanted: list[StepResult], tolerance: float = 1e-10) -> None:
    """All ranks together have the reference's gradients, and no others."""
    for number, expected in enumerate(wanted):
        together: Weights = {}
        for rank in everyone:
            found = rank[number]
            assert abs(found.loss - expected.loss) <= tolerance * abs(expected.loss)
            assert abs(found.norm - expected.norm) <= tolerance * max(expected.norm, 1e-7), "norm"
            for name, gradient in found.gradients.items():
                known = together.setdefault(name, gradient)
                assert torch.equal(known, gradient), f"step {number}: {name} differs between ranks"
        assert together.keys() == expected.gradients.keys(), f"step {number}"
        for name, gradient in expected.gradients.items():
            check_close(together[name], gradient, tolerance, f"step {number}: {name}")
