"""Optimisers that are wrong with what a rank holds are refused by name, before they have changed anything."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from penstock.runtime import PipelinedStack
from penstock.runtime.clip import ExpertRanks, mark_experts
from penstock.runtime.expert_parallel.optimizers import check_optimizer, watch_optimizer
from penstock.runtime.groups import LocalTransport
from penstock.topology import Layout
from tests.runtime.features.sharded_optimizer.steps import Habits, build, loss_of
from tests.support.exchange import Case as LayerCase
from tests.support.exchange import batch, exchange_of, model_of, rank_loss
from tests.support.layouts import layout_case, tiny_case
from tests.support.parity import Case, stack_of
from tests.support.ranks import Pools

NEED_TENSORS = (
    *("Adafactor", "AdaFactor", "FusedLAMB", "NVLamb", "LAMB8bit", "LARS", "Muon", "MuonWithAuxAdam"),
    *("NorMuon", "DistributedShampoo", "SOAP", "CAME", "GaLoreAdamW8bit", "APOLLOAdamW", "Adam_mini"),
    *("StableAdamW", "NovoGrad", "SM3", "AdamP"),
)
NEED_MODELS = ("LBFGS", "FullBatchLBFGS", "Prodigy", "DAdaptAdam", "SAM")
NEED_NUMBERS = (
    *("Adam", "AdamW", "AdamW8bit", "FusedAdam", "PagedAdamW", "AdamWScheduleFree", "RAdam", "Lion", "SGD"),
    *("RMSprop", "Adagrad", "AdEMAMix", "Adadelta", "Camel", "Larson", "Soapbox"),
)


class Named(torch.optim.SGD):
    """An optimiser that has nothing of another but its name."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, lr=0.1)


def held(*, ep_size: int, stacked: bool) -> list[nn.Parameter]:
    """A parameter of experts, of two ranks."""
    parameter = nn.Parameter(torch.zeros(2, 3, 3))
    layout = Layout(world_size=2, ep_size=ep_size, rank=0)
    mark_experts([parameter], ExpertRanks(layout, LocalTransport(), torch.device("cpu")), stacked=stacked)
    return [parameter]


@pytest.mark.parametrize("name", [*NEED_TENSORS, *NEED_MODELS, *NEED_NUMBERS])
def test_an_optimizer_is_known_by_its_name_and_that_of_its_base(name: str) -> None:
    kind = type(name, (Named,), {})
    for each in (kind, type("Mine", (kind,), {})):
        check_optimizer(each(held(ep_size=1, stacked=True)))  # all experts are here
        share, expert = each(held(ep_size=2, stacked=True)), each(held(ep_size=2, stacked=False))
        for optimizer, refused in (
            (share, name not in NEED_NUMBERS),
            (expert, name in NEED_MODELS),  # a tensor of one expert is whole
        ):
            if refused:
                with pytest.raises(ValueError, match=each.__name__):
                    check_optimizer(optimizer)
            else:
                check_optimizer(optimizer)
    frozen = held(ep_size=2, stacked=True)
    frozen[0].requires_grad_(False)
    check_optimizer(kind(frozen))


class Mine(torch.optim.Optimizer):
    """An optimiser of one's own, of which nobody knows what it needs."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {})


@pytest.mark.parametrize(("ep_size", "stacked", "warned"), [(2, True, 1), (2, False, 0), (1, True, 0)])
def test_of_an_optimizer_that_nobody_knows_ranks_with_shares_warn_once(
    recwarn: pytest.WarningsRecorder, ep_size: int, stacked: bool, warned: int
) -> None:
    for kind in (Mine, torch.optim.RMSprop, type("Schedulefree", (torch.optim.SGD,), {})):
        optimizer = kind(held(ep_size=ep_size, stacked=stacked))
        for _ in range(2):
            watch_optimizer(optimizer)
    assert ["Mine" in str(each.message) for each in recwarn] == [True] * warned


# ---- real ranks --------------------------------------------------------------------------------------------

SPREAD = tiny_case(2, num_layers=1, moe_ffn_hidden_size=6)
PARTS = replace(layout_case((2, 2, 1, 1), "flowmoe", "gather"), double=False)

Made = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def by_transformers(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = transformers.Adafactor(parameters, lr=0.01, relative_step=False)
    return made


def matrices(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2])


OPTIMIZERS: dict[str, Made] = {
    "Adafactor": torch.optim.Adafactor,
    "Adafactor of transformers": by_transformers,
    "Muon": matrices,
    "LBFGS": torch.optim.LBFGS,
    "AdamW": torch.optim.AdamW,
}


def step_of(rank: int, case: Case, name: str, which: str) -> str:
    """What a rank hears at the first step of an optimiser of all, or of other parameters than experts."""
    stack = stack_of(rank, case)
    chosen = [p for n, p in stack.named_parameters() if which == "all" or ".experts." not in n]
    optimizer = OPTIMIZERS[name](chosen)
    loss_of(stack, rank, case, 0).backward()
    before = [p.detach().clone() for p in chosen]
    try:
        optimizer.step(lambda: 0.0) if name == "LBFGS" else optimizer.step()
    except ValueError as error:
        assert all(map(torch.equal, chosen, before))
        return str(error)
    assert not all(map(torch.equal, chosen, before))
    return ""


@pytest.mark.parametrize(
    ("case", "name", "which", "share"),
    [
        (SPREAD, "Adafactor", "all", "[2, 8, 6]"),
        (SPREAD, "Adafactor of transformers", "all", "[2, 8, 6]"),
        (SPREAD, "LBFGS", "all", "[2, 8, 6]"),
        (SPREAD, "AdamW", "all", ""),
        (SPREAD, "Adafactor", "dense", ""),
        (replace(SPREAD, ep_size=1), "Adafactor", "all", ""),
        (PARTS, "Muon", "all", "[12, 16]"),
    ],
)
def test_a_rank_with_a_share_refuses_what_needs_the_whole(
    ranks: Pools, case: Case, name: str, which: str, share: str
) -> None:
    for said in ranks(2).run(step_of, case, name, which):
        assert said.startswith(name.partition(" ")[0]) if share else not said, said
        assert share in said


def step_of_layer(rank: int, experts: str) -> None:
    case = LayerCase(world=2, experts=experts)
    model = model_of(case, exchange_of(None, None))
    optimizer = torch.optim.Adafactor(model.parameters())
    rank_loss(model, batch(case, 0, rank)).backward()
    optimizer.step()


@pytest.mark.parametrize(("experts", "refused"), [("gelu", True), ("module", False)])
def test_a_layer_by_itself_refuses_it_where_experts_are_stacked(
    ranks: Pools, experts: str, refused: bool
) -> None:
    for said in ranks(2).told(ValueError, step_of_layer, experts):
        assert said.startswith("Adafactor") is refused, said


# ---- a sharded optimiser -----------------------------------------------------------------------------------

SHARDED = layout_case((2, 1, 1, 1), "flowmoe", "gather")


def scale(stack: PipelinedStack) -> None:
    for parameter in stack.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def unscale(stack: PipelinedStack) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(stack.parameters(), lr=0.1))


def step_foreign(stack: PipelinedStack) -> None:
    torch.optim.AdamW(stack.parameters()).step()


USES: dict[str, Callable[[PipelinedStack], object]] = {
    "norm": lambda stack: clip_grad_norm_(stack.parameters(), 1.0),
    "value": lambda stack: clip_grad_value_(stack.parameters(), 1.0),
    "total": lambda stack: get_total_norm([p.grad for p in stack.parameters() if p.grad is not None]),
    "scaled": scale,
    "unscaled": unscale,
    "finite": lambda stack: [p.grad.isfinite() for p in stack.parameters() if p.grad is not None],
    "another optimiser": step_foreign,
}


def use_shares(rank: int, case: Case, releases: bool, in_backward: bool) -> dict[str, str]:
    """What a rank hears that uses gradients in shares, by what it did; training goes on afterwards."""
    habits = Habits(releases=releases)
    stack, optimizer = build(rank, case, habits, sharded=True)
    twin, other = build(rank, case, habits, sharded=True)
    said = {}
    for step in range(2):
        for each, own in ((stack, optimizer), (twin, other)):
            loss = loss_of(each, rank, case, step)
            if in_backward:
                with own.in_backward():
                    loss.backward()
            else:
                loss.backward()
            if each is stack:
                for name, use in USES.items():
                    with pytest.raises(RuntimeError) as caught:
                        use(stack)
                    said[name] = str(caught.value)
            own.step()
            own.flush()
    assert all(map(torch.equal, stack.parameters(), twin.parameters()))
    return said


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("releases", [False, True])
def test_what_would_use_gradients_in_shares_is_told(ranks: Pools, releases: bool, in_backward: bool) -> None:
    for said in ranks(2).run(use_shares, SHARDED, releases, in_backward):
        assert said.keys() == USES.keys()
        assert all("sharded optimizer" in each for each in said.values())


def test_gradients_in_shares_are_converted_cleared_and_left_out_of_copies() -> None:
    case = layout_case((1, 1, 1, 1), "flowmoe", "gather")
    stack, optimizer = build(0, case, Habits(), sharded=True)
    loss_of(stack, 0, case, 0).backward()
    for parameter in stack.parameters():
        assert "InShares" in repr(parameter.grad)
    assert pickle.loads(pickle.dumps(stack.model)).state_dict().keys() == stack.model.state_dict().keys()
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is None for p in stack.parameters())
    loss_of(stack, 0, case, 0).backward()
    optimizer.step()
    assert all(p.grad is None for p in stack.parameters())
    loss_of(stack, 0, case, 0).backward()
    stack.zero_grad(set_to_none=False)
    optimizer.zero_grad()
    loss_of(stack, 0, case, 0).backward()
    optimizer.zero_grad()
    stack.float()
    loss_of(stack, 0, case, 0).backward()
    optimizer.step()


@pytest.mark.slow
def test_a_model_may_have_another_optimiser_when_its_shares_are_gone() -> None:
    case = layout_case((1, 1, 1, 1), "flowmoe", "gather")
    stack, optimizer = build(0, case, Habits(), sharded=True)
    model = stack.model
    foreign = torch.optim.AdamW(model.parameters())
    with pytest.raises(RuntimeError):
        check_optimizer(foreign)
    del stack, optimizer
    gc.collect()
    check_optimizer(foreign)
