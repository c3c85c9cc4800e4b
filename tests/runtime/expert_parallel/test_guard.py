"""Experts that another tool has taken over, or that differ by rank, are refused before a row leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from penstock import ExpertParallel, clip_grad_norm_, expert_parameters, ignore_experts
from penstock.moe import GeluExperts, MoELayer, SoftmaxRouter, SortPermutation, update_expert_biases
from penstock.runtime import ParameterMismatchError
from penstock.runtime.clip import ExpertRanks
from penstock.runtime.expert_parallel.guard import ExpertGuard
from penstock.runtime.groups import LocalTransport
from penstock.runtime.transport import HostCounts
from penstock.topology import Control, Layout
from tests.support.exchange import (
    CHOICES,
    EXPERTS,
    HIDDEN,
    Case,
    Model,
    batch,
    exchange_of,
    model_of,
    rank_loss,
)
from tests.support.ranks import Pools

CPU = torch.device("cpu")


def shard(model: Model) -> nn.Module:
    fully_shard(model)
    return model


def shard_experts(model: Model) -> nn.Module:
    fully_shard(model.layer.experts)
    return model


def shard_layer(model: Model) -> nn.Module:
    fully_shard(model.layer)
    return model


def in_old_fsdp(model: Model) -> nn.Module:
    ignored = expert_parameters(ignore_experts(model))
    return FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True, ignored_states=ignored)


def replicated(model: Model) -> nn.Module:
    replicate(model)
    return model


def distribute_experts(model: Model) -> nn.Module:
    distribute_module(model.layer.experts, init_device_mesh("cpu", (2,)))
    return model


def copied_first(model: Model) -> nn.Module:
    """A copy's parameters carry no mark."""
    return shard(copy.deepcopy(model))


def half_ignored(model: Model) -> nn.Module:
    fully_shard(model, ignored_params={next(model.layer.experts.parameters())})
    return model


def as_replica(model: Model) -> nn.Module:
    """What DataParallel makes of a module for each of its threads."""
    copies = {name: module._replicate_for_data_parallel() for name, module in model.named_modules()}
    copies["1"].experts = copies["1.experts"]
    copies[""]._modules = {**model._modules, "1": copies["1"]}
    replica: nn.Module = copies[""]
    return replica


WRAPPERS: dict[str, tuple[Callable[[Any], nn.Module], str]] = {
    "fully_shard": (shard, "ignored_params=penstock.expert_parameters(model)"),
    "fully_shard, layer": (shard_layer, "ignored_params=penstock.expert_parameters(model)"),
    "fully_shard, experts": (shard_experts, "ignored_params=penstock.expert_parameters(model)"),
    "fully_shard, a copy": (copied_first, "ignored_params=penstock.expert_parameters(model)"),
    "fully_shard, half": (half_ignored, "ignored_params=penstock.expert_parameters(model)"),
    "FSDP": (
        lambda model: FullyShardedDataParallel(model, device_id=CPU),
        "ignored_params=penstock.expert_parameters(model)",
    ),
    "FSDP, original parameters": (
        lambda model: FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True),
        "ignored_params=penstock.expert_parameters(model)",
    ),
    "FSDP, without experts": (in_old_fsdp, "the older class"),
    "replicate": (replicated, "ignored_params=penstock.expert_parameters(model)"),
    "replicate by DDP": (replicate_by_ddp, "DistributedDataParallel(penstock.ignore_experts(model))"),
    "DDP": (DistributedDataParallel, "DistributedDataParallel(penstock.ignore_experts(model))"),
    "distribute_module": (distribute_experts, "leave experts out"),
    "DataParallel": (as_replica, "a process per device"),
}


def refusal(rank: int, name: str) -> tuple[str, str]:
    """What the first training pass and an evaluation are told."""
    case = Case(world=2)
    wrapped, told = WRAPPERS[name][0](model_of(case, exchange_of(None, None))), []
    x = batch(case, 0, rank)[0]
    with pytest.raises(ValueError) as caught:
        wrapped(x)
    told.append(str(caught.value))
    with torch.no_grad(), pytest.raises(ValueError) as caught:
        wrapped.eval()(x)
    told.append(str(caught.value))
    return told[0], told[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPERS)
def test_whoever_takes_experts_for_everybodys_is_named(ranks: Pools, name: str) -> None:
    for told in ranks(2).run(refusal, name):
        for message in told:
            assert message.startswith("experts") and WRAPPERS[name][1] in message


def biased(rank: int, name: str, frozen: bool) -> str:
    """The refusal to move a bias by what one rank chose; one's own sum moves it, and so may nothing."""
    case = Case(world=2, gate="sigmoid")
    model, data = model_of(case, None), batch(case, 0, rank)
    if frozen:  # it counts all the same, since something before it is trained
        model.layer.requires_grad_(False)
    wrapped, bias = WRAPPERS[name][0](model), model.layer.gate.bias
    assert bias is not None
    rank_loss(wrapped, data).backward()
    wrapped.eval()(data[0])
    with pytest.raises(ValueError) as caught:
        update_expert_biases(wrapped)
    assert not bias.value_E.any() and bias.counted_E.any()
    bias.update(exchange_of(1, None).sum_over_ranks)
    assert bias.value_E.any()
    with torch.no_grad():
        wrapped.train()(data[0])
    update_expert_biases(wrapped)
    bias.rate = 0.0
    rank_loss(wrapped, data).backward()
    update_expert_biases(wrapped)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        *((name, False) for name in ("DDP", "replicate by DDP", "replicate", "fully_shard", "FSDP")),
        *((name, True) for name in ("DDP", "fully_shard")),
    ],
)
def test_a_bias_of_a_layer_that_ranks_train_needs_an_exchange(ranks: Pools, name: str, frozen: bool) -> None:
    for told in ranks(2).run(biased, name, frozen):
        assert "exchange=penstock.ExpertParallel(num_experts=8, ep_size=1)" in told


def by_itself(rank: int) -> None:
    case = Case(world=2, gate="sigmoid")
    model = model_of(case, None)
    group = [dist.new_group([0]), dist.new_group([1])][rank]
    sharded = copy.deepcopy(model)
    fully_shard(sharded, mesh=DeviceMesh.from_group(group, "cpu"))
    for wrapped in (DistributedDataParallel(model, process_group=group), sharded):
        rank_loss(wrapped, batch(case, 0, rank)).backward()
        update_expert_biases(wrapped)


@pytest.mark.slow
def test_a_bias_that_one_rank_trains_needs_no_exchange(ranks: Pools) -> None:
    ranks(2).run(by_itself)


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


def replaced(model: Model) -> None:
    experts = model.layer.experts
    experts.register_parameter("w_up", nn.Parameter(experts.get_parameter("w_up").detach().clone()))


def parametrised(model: Model) -> None:
    parametrize.register_parametrization(model.layer.experts, "w_up", Doubled())


def accepted(rank: int, name: str) -> list[float]:
    """Norms of two passes of a model that its user has changed."""
    case = Case(world=2)
    model = model_of(case, exchange_of(None, None))
    change = {"replaced": replaced, "parametrised": parametrised, "frozen": lambda model: None}[name]
    change(model)
    if name == "frozen":
        model.layer.experts.requires_grad_(False)
    norms = []
    fully_shard(model, ignored_params=expert_parameters(ignore_experts(model)))
    for turn in range(2):
        rank_loss(model, batch(case, turn, rank)).backward()
        norms.append(float(clip_grad_norm_(list(model.parameters()), 1.0)))
        if name == "replaced":
            replaced(model)  # also behind the first pass
    return norms


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replaced", "parametrised", "frozen"])
def test_what_a_user_may_do_to_experts(ranks: Pools, name: str) -> None:
    first, second = ranks(2).run(accepted, name)
    assert first == second and len(first) == 2


def odd_one(rank: int, what: str) -> None:
    """Rank 1 has another layer."""
    case = Case(world=2, ep_size=1 if what == "trained" else None)
    other = rank == 1
    model = model_of(
        Case(world=2, ep_size=case.ep_size, order="merged" if other and what == "order" else "sort"),
        exchange_of(case.ep_size, None),
    )
    if other and what == "dtype":
        model.float()
    if other and what == "trained":
        model.layer.experts.requires_grad_(False)
    x = batch(case, 0, rank)[0].to(model[0].weight.dtype)  # type: ignore[arg-type]  # a Linear's
    with torch.autocast("cpu", enabled=other and what == "autocast"):
        model(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("dtype", ("w_up torch.float64", "w_up torch.float32")),
        ("order", ("SortPermutation", "MergedPermutation")),
        ("trained", ("w_up torch.float64 8 x 6 x 5 trained", "w_up torch.float64 8 x 6 x 5")),
        ("autocast", ("autocast None", "autocast torch.bfloat16")),
    ],
)
def test_ranks_with_different_layers(ranks: Pools, what: str, told: tuple[str, str]) -> None:
    for message in ranks(2).told(ValueError, odd_one, what):
        first, second = message.split("; rank 1 has ")
        assert "rank 0 has" in first and told[0] in first and told[1] in second


def freeze(model: Model) -> None:
    model.layer.experts.requires_grad_(False)


def put_in_place(model: Model) -> None:
    """Other experts, as a module that the exchange has never seen."""
    model.layer.experts = copy.deepcopy(model.layer.experts).float()


CHANGES: dict[str, Callable[[Model], object]] = {
    "cast": lambda model: model.layer.experts.float(),
    "other experts": put_in_place,
    "frozen": freeze,
    "autocast": lambda model: None,
    "no gradients": lambda model: None,
}


def changed_alone(rank: int, what: str, ep_size: int | None, late: bool) -> tuple[str, str, bool]:
    """Rank 1 changes its layer after a pass: what both are told, twice, and if alike again they go on."""
    case, exchange = Case(world=2, ep_size=ep_size), exchange_of(ep_size, None)
    model = model_of(case, exchange)
    data = batch(case, 0, rank)
    with patch.object(exchange, "_device", torch.device("cuda" if late else "cpu")):
        return told_twice(rank, what, model, data)


def told_twice(
    rank: int, what: str, model: Model, data: tuple[Tensor, Tensor, Tensor]
) -> tuple[str, str, bool]:
    rank_loss(model, data).backward()
    before = model.layer.experts
    if rank == 1:
        CHANGES[what](model)
    told = []
    for _ in range(2):
        with (
            torch.autocast("cpu", enabled=rank == 1 and what == "autocast"),
            torch.set_grad_enabled(not (rank == 1 and what == "no gradients")),
            pytest.raises(ValueError) as caught,
        ):
            model(data[0])
        told.append(str(caught.value))
    model.layer.experts = before.double().requires_grad_(True)
    return told[0], told[1], bool(rank_loss(model, data).isfinite())


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("what", "ep_size", "told"),
    [
        ("cast", None, ("w_up torch.float64", "w_up torch.float32")),
        ("cast", 1, ("w_up torch.float64", "w_up torch.float32")),
        ("other experts", None, ("w_up torch.float64", "w_up torch.float32")),
        ("frozen", 1, ("w_up torch.float64 8 x 6 x 5 trained", "w_up torch.float64 8 x 6 x 5")),
        ("autocast", None, ("autocast None", "autocast torch.bfloat16")),
        ("no gradients", None, ("gradients on", "gradients off")),
    ],
)
def test_a_rank_that_changes_its_layer_alone(
    ranks: Pools, what: str, ep_size: int | None, told: tuple[str, str], late: bool
) -> None:
    """late: as on a GPU, where the host reads what was summed with the counts of rows."""
    for *messages, goes_on in ranks(2).run(changed_alone, what, ep_size, late):
        for message in messages:
            first, second = message.split("; rank 1 has ")
            assert "rank 0 has" in first and told[0] in first and told[1] in second
        assert goes_on


def changed_together(rank: int) -> list[float]:
    """Passes of a layer that all ranks train, evaluate, call under autocast and freeze."""
    case = Case(world=2, ep_size=1)
    model = model_of(case, exchange_of(1, None))
    data, found = batch(case, 0, rank), []
    for turn in range(2):
        found.append(float(rank_loss(model, data)))
        with torch.no_grad():
            found.append(float(rank_loss(model, data)))
        with torch.autocast("cpu"):
            found.append(float(rank_loss(model, data)))
        model.layer.experts.requires_grad_(turn == 1)
    return found


@pytest.mark.slow
def test_what_all_ranks_change_is_taken_up(ranks: Pools) -> None:
    for found in ranks(2).run(changed_together):
        assert found == [pytest.approx(found[0])] * 6


def test_a_rank_that_waits_for_no_counts_looks_for_a_change_of_its_own_alone() -> None:
    """Others read the sum in their next forward."""
    layout = Layout(world_size=2, ep_size=2, rank=1)
    experts, x = GeluExperts(HIDDEN, 5, 4), torch.zeros(3, HIDDEN)
    guard = ExpertGuard(experts, ExpertRanks(layout, LocalTransport(), CPU), Control(1, 1))

    def with_theirs(theirs: Tensor | None) -> Tensor:
        mine = guard.marks(experts, {}, seldom=True)
        guard.unread = HostCounts(mine * torch.tensor([2, 0, 0]) if theirs is None else mine + theirs)
        guard.judge_change()
        return mine * torch.tensor([1, -1, 0])  # another rank's, whose layer is the same

    guard.check(experts, x, "SortPermutation", first=False)
    theirs = with_theirs(None)
    guard.check(experts.double(), x, "SortPermutation", first=False)
    with pytest.raises(ValueError, match=r"rank 1 has w_up torch\.float64 .* since its last forward"):
        with_theirs(theirs)
    guard.unread = None
    guard.check(experts.float(), x, "SortPermutation", first=False)
    with_theirs(theirs + torch.tensor([0, 1, 0]))  # another rank has changed, and says so itself


def train_replicas_apart(rank: int, what: str, late: bool) -> tuple[int, str]:
    """The pass in which a rank hears that it has updated something otherwise, and what it hears."""
    case, exchange = Case(world=2, ep_size=1), exchange_of(1, None)
    model = model_of(case, exchange)
    parts = {"replicas": model.layer.experts, "gate": model.layer.gate}
    own = set(parts[what].parameters())
    rest = [p for p in model.parameters() if p not in own]
    groups: list[dict[str, Any]] = [{"params": list(own), "lr": 0.1 * (1 + rank)}, {"params": rest}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    wrapped = DistributedDataParallel(ignore_experts(model))
    with patch.object(exchange, "_device", torch.device("cuda" if late else "cpu")):
        for turn in range(6):
            try:
                rank_loss(wrapped, batch(case, turn, rank)).backward()
            except ParameterMismatchError as error:
                return turn, str(error)
            optimizer.step()
            optimizer.zero_grad()
    return -1, ""


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("what", "name"), [("replicas", "experts.w_up"), ("gate", "gate.weight")])
def test_values_that_ranks_of_a_layer_share_are_compared(
    ranks: Pools, what: str, name: str, late: bool
) -> None:
    first, second = ranks(2).run(train_replicas_apart, what, late)
    assert first == second and first[0] == 1 and first[1].startswith(name)


def late_for_slots(rank: int) -> tuple[int, str]:
    """The same for a capacity, with which a GPU makes the host wait for nothing."""
    case, exchange = Case(world=2, order="index"), exchange_of(None, None)
    model = model_of(case, exchange)
    with patch.object(exchange, "_device", torch.device("cuda")):
        for turn in range(4):
            try:
                rank_loss(model, batch(case, 0, rank)).backward()
            except ParameterMismatchError as error:
                return turn, str(error)
            with torch.no_grad():
                model.layer.gate.get_parameter("weight").add_(rank * 0.1)
    return -1, ""


@pytest.mark.slow
def test_what_could_not_be_read_is_read_in_the_next_forward(ranks: Pools) -> None:
    first, second = ranks(2).run(late_for_slots)
    assert first == second and first[0] == 2


def other_place(rank: int, what: str) -> None:
    del rank
    layer = model_of(Case(world=2), exchange_of(None, None)).layer
    if what == "meta":
        layer.experts.to("meta")
    if what == "group":
        layer.exchange = ExpertParallel(num_experts=EXPERTS, ep_size=1)
    layer(torch.zeros(3, HIDDEN, dtype=torch.float64, device="meta" if what == "x" else "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("meta", "experts.w_up is on the meta device"),
        ("x", "experts.w_up is on cpu and x on meta"),
        ("group", "the layer has ep_size = 2, its exchange ep_size = 1"),
    ],
)
def test_experts_in_the_wrong_place(ranks: Pools, what: str, told: str) -> None:
    assert all(told in message for message in ranks(2).told(ValueError, other_place, what))


def contradiction(rank: int) -> list[str]:
    """A place that is not the exchange's."""
    messages = []
    for place in ({"ep_size": 4}, {"ep_rank": 1 - rank}, {"ep_rank": 2}):
        parts = {
            "gate": SoftmaxRouter(HIDDEN, EXPERTS, CHOICES),
            "permutation": SortPermutation(EXPERTS),
            "expert": GeluExperts(HIDDEN, 5, EXPERTS // 2),
        }
        with pytest.raises(ValueError) as caught:
            MoELayer(**parts, exchange=exchange_of(None, None), **place)  # type: ignore[arg-type]  # a table
        messages.append(str(caught.value))
    return messages


@pytest.mark.slow
def test_a_place_that_contradicts_the_exchange(ranks: Pools) -> None:
    for rank, (size, place, outside) in enumerate(ranks(2).run(contradiction)):
        assert "ep_size = 4, its exchange ep_size = 2" in size
        assert f"ep_rank = {1 - rank}, its exchange ep_rank = {rank}" in place
        assert "ep_rank = 2: must be between 0 and ep_size - 1 (1)" in outside
