"""`clip_grad_norm_` where ranks share parameters: every part counts once, on any layout."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from penstock import clip_grad_norm_
from penstock.mesh import Axes, Group
from penstock.runtime.clip import ExpertRanks, mark_experts
from penstock.sharding import Sharding, mark_shards
from penstock.topology import Layout, ParallelConfig
from penstock.train.assemble import build_machinery
from tests.support.close import check_close
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow
EXPERTS, LIMIT = 4, 0.5


@dataclass(frozen=True)
class World:
    """How four ranks share what there is."""

    tp_size: int
    ep_size: int
    etp_size: int


WORLDS = [World(2, 2, 2), World(4, 1, 4), World(2, 4, 1), World(2, 1, 2), World(1, 2, 2), World(4, 2, 1)]


class Bag(nn.Module):
    """Parameters with gradients, and which of them are parts."""

    def __init__(self) -> None:
        super().__init__()
        self.shardings: dict[str, Sharding] = {}

    def add(self, name: str, whole: Tensor, sharding: Sharding | None) -> None:
        here = whole if sharding is None else sharding.part(whole).clone()
        parameter = nn.Parameter(torch.zeros_like(here))
        parameter.grad = here.clone()
        self.register_parameter(name, parameter)
        if sharding is not None:
            self.shardings[name] = sharding


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def wholes() -> dict[str, Tensor]:
    """The gradients of the whole model: an expert under its number."""
    dense = {"norm": numbers(5, seed=1), "gate": numbers(4, 5, seed=2)}
    shared = {"qkv": numbers(24, 5, seed=3), "out": numbers(5, 8, seed=4), "embedding": numbers(8, 5, seed=5)}
    experts = {f"up{e}": numbers(5, 8, seed=10 + e) for e in range(EXPERTS)}
    return {**dense, **shared, **experts}


@cache
def ranks_on(rank: int, world: World) -> ExpertRanks:
    layout = Layout(
        world_size=4, rank=rank, tp_size=world.tp_size, ep_size=world.ep_size, etp_size=world.etp_size
    )
    machinery = build_machinery(layout, torch.device("cpu"), ParallelConfig(), "float32")
    return ExpertRanks(layout, machinery.transports.inter, torch.device("cpu"))


def bag_of(rank: int, world: World) -> Bag:
    """What one rank holds of the whole model."""
    ranks, whole, found = ranks_on(rank, world), wholes(), Bag()
    mesh = ranks.layout.mesh

    def part(axes: Axes, dim: int, of: Tensor, view: tuple[int, ...] | None = None) -> Sharding:
        place, count = mesh.place(rank, axes), mesh.size(axes)
        shape = tuple(of.shape)
        return Sharding(axes=axes, shape=shape, view=view or shape, dim=dim, index=place, count=count)

    for name in ("norm", "gate"):
        found.add(name, whole[name], None)
    found.add("qkv", whole["qkv"], part(Group.TENSOR, 1, whole["qkv"], (3, 8, 5)))
    found.add("out", whole["out"], part(Group.TENSOR, 1, whole["out"]))
    found.add("embedding", whole["embedding"], part(Group.TENSOR, 0, whole["embedding"]))
    experts = torch.arange(EXPERTS).chunk(world.ep_size)[ranks.layout.ep_rank].tolist()
    for expert in experts:
        found.add(f"up{expert}", whole[f"up{expert}"], part(Group.SHARDS, 1, whole[f"up{expert}"]))
    mark_experts((p for name, p in found.named_parameters() if name.startswith("up")), ranks)
    mark_shards(found, ranks)
    return found


@dataclass(frozen=True)
class Clipped:
    """What clipping found and left on one rank."""

    norm: float
    gradients: dict[str, Tensor]
    shardings: dict[str, Sharding]


def clipped(rank: int, world: World, order: float) -> Clipped:
    bag = bag_of(rank, world)
    parameters = list(bag.parameters())
    random.Random(rank).shuffle(parameters)
    norm = float(clip_grad_norm_(parameters, LIMIT, order))
    assert norm > LIMIT
    left = {name: p.grad for name, p in bag.named_parameters() if p.grad is not None}
    return Clipped(norm, left, bag.shardings)


def clipped_alone(order: float) -> tuple[float, dict[str, Tensor]]:
    parameters = {name: nn.Parameter(torch.zeros_like(grad)) for name, grad in wholes().items()}
    for name, gradient in wholes().items():
        parameters[name].grad = gradient
    norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), LIMIT, order))
    return norm, {name: p.grad for name, p in parameters.items() if p.grad is not None}


@pytest.mark.every_value
@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_the_norm_is_that_of_one_process(ranks: Pools, world: World, order: float) -> None:
    results = ranks(4).run(clipped, world, order)
    wanted, gradients = clipped_alone(order)
    assert len({result.norm for result in results}) == 1, "the very same bits on all ranks"
    assert results[0].norm == pytest.approx(wanted, rel=1e-14)
    for result in results:
        for name, gradient in result.gradients.items():
            sharding = result.shardings.get(name)
            mine = gradients[name] if sharding is None else sharding.part(gradients[name])
            check_close(gradient, mine, 1e-12, name)


def with_a_fault(rank: int, name: str, only: int, value: float) -> str:
    """On rank `only` one gradient is another than its replicas have."""
    bag = bag_of(rank, World(2, 2, 2))
    gradient = bag.get_parameter(name).grad
    assert gradient is not None
    if rank == only:
        gradient.fill_(value)
    try:
        return f"norm {float(clip_grad_norm_(bag.parameters(), math.inf))}"
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("only", [1, 2])
def test_parts_that_differ_between_their_replicas_are_told(ranks: Pools, only: int) -> None:
    same = "0, 2" if only == 2 else "1, 3"
    for text in ranks(4).run(with_a_fault, "qkv", only, 9.0):
        assert f"gradients of the part of parameters that ranks {same} hold differ" in text


def test_whole_parameters_that_differ_are_told(ranks: Pools) -> None:
    for text in ranks(4).run(with_a_fault, "gate", 3, 9.0):
        assert "gradients of parameters that all ranks hold differ" in text


@pytest.mark.parametrize("name", ["out", "norm"])
def test_all_ranks_hear_of_what_is_not_finite_on_one(ranks: Pools, name: str) -> None:
    assert ranks(4).run(with_a_fault, name, 3, math.nan) == ["norm nan"] * 4


def test_a_part_of_unknown_ranks_is_refused() -> None:
    bag = Bag()
    whole = numbers(4, 3, seed=0)
    bag.add("weight", whole, Sharding.along(0, (4, 3), Group.TENSOR, 0, 2))
    mark_shards(bag)
    with pytest.raises(ValueError, match="is a part of a larger one"):
        clip_grad_norm_(bag.parameters(), 1.0)
