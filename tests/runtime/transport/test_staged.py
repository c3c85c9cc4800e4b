"""Tensors of GPUs that travel through memory of the host: what arrives, in which order, and who can ask."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import penstock
from penstock.device import gpu_of
from penstock.mesh import Axes, Group
from penstock.runtime.executor import TaskError
from penstock.runtime.groups import StagedTransport
from penstock.runtime.transport import GlooTransport, Transport
from penstock.topology import Layout, lane_groups
from penstock.topology.faults import watch
from penstock.topology.groups import TransportName
from tests.support.adapted import Batch, check_grads, small
from tests.support.exchange import EXPERTS, Case, model_of, rank_loss
from tests.support.exchange import batch as batch_of
from tests.support.ranks import Pools, RankPool
from tests.support.recording.gpu import recorded
from tests.support.recording.hazards import find_hazards

CPU = torch.device("cpu")
NEVER_S = 3600.0
SIZES = ((3, 0, 2, 1), (0, 0, 0, 0), (1, 4, 0, 2), (2, 2, 5, 0))
"""Rows that every rank sends to each of the others; one sends none."""


def groups(rank: int) -> dict[Axes, dist.ProcessGroup]:
    return lane_groups(Layout(world_size=4, ep_size=2, rank=rank), NEVER_S)


def exchanged(transport: Transport, rank: int, dtype: torch.dtype) -> list[list[float]]:
    """What arrives of rows sent to all, of gathered ones and of sums, twice, as tasks of one lane."""
    found: list[Tensor] = []
    for turn in range(2):
        sent, came = SIZES[rank], [row[rank] for row in SIZES]
        rows = (torch.arange(sum(sent) * 6, dtype=torch.float32).view(-1, 3, 2) + 100 * rank + turn).to(dtype)
        found.append(transport.all_to_all(rows.transpose(1, 2), sent, came, Group.WORLD))
        found.append(transport.all_gather(rows, [sum(row) for row in SIZES], Group.WORLD))
        sums = torch.arange(8.0).view(2, 4).t()[1:] * (rank + 1 + turn)  # a part, and transposed
        for group in (Group.WORLD, Group.EXPERT_DATA):
            transport.all_reduce(sums, group)
        found.append(sums)
    return [each.float().flatten().tolist() for each in found]


def compared(rank: int, dtype: torch.dtype) -> list[str]:
    """Hazards of staged exchanges on a stream of their own; asserts that they bring what Gloo brings."""
    transport = GlooTransport(partial(groups, rank))
    wanted = exchanged(transport, rank, dtype)
    dist.barrier()
    transport.close()
    with recorded() as recorder:
        gpu = gpu_of(CPU)
        staged = StagedTransport(partial(groups, rank), CPU)
        lane = gpu.new_stream(CPU, "lane")
        with gpu.running("exchanges", lane):
            found = exchanged(staged, rank, dtype)
        gpu.synchronize(CPU)
    dist.barrier()
    staged.close()
    assert found == wanted
    assert staged.traffic == transport.traffic
    return [*map(str, find_hazards(recorder.log))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_arrives_is_what_gloo_brings(ranks: Pools, dtype: torch.dtype) -> None:
    assert ranks(4).run(compared, dtype) == [[]] * 4


class WithoutAWait(StagedTransport):
    """Sends what its copy to the host may not have filled yet."""

    def _sent(self, tensor: Tensor) -> Tensor:
        return self._device.to_host(tensor)[0]


@dataclass
class OneBuffer:
    """Memory of the host that is used for every transfer, whether the copies before have ended or not."""

    inner: Any
    memory: Tensor | None = None

    def to_host(self, tensor: Tensor) -> Any:
        return self.inner.to_host(tensor)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.memory is None:
            self.memory = self.inner.pinned((1 << 10,), dtype)
        size = torch.Size(shape).numel()
        return self.memory[:size].view(*shape)


class UsedAgain(StagedTransport):
    """Receives into memory from which the copy of another lane may still read; one lane waits for its own."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._device = OneBuffer(self._device)  # type: ignore[assignment]  # what a transport needs of it


def planted(rank: int, kind: type[StagedTransport]) -> list[tuple[str, str]]:
    """Hazards of two transfers in two lanes."""
    with recorded() as recorder:
        gpu = gpu_of(CPU)
        transport = kind(partial(groups, rank), CPU)
        rows, came = torch.ones(4, 3), []
        there = gpu.current_stream(CPU).record_event(gpu.event(timed=False))
        for name in ("first", "second"):
            lane = gpu.new_stream(CPU, name)
            lane.wait_event(there)
            with gpu.running(name, lane):
                came.append(transport.all_to_all(rows, [1] * 4, [1] * 4, Group.WORLD))
        gpu.synchronize(CPU)
    dist.barrier()
    transport.close()
    return [(hazard.kind, hazard.second.op) for hazard in find_hazards(recorder.log)]


@pytest.mark.parametrize(
    ("kind", "reported"),
    [(StagedTransport, None), (WithoutAWait, "read too early"), (UsedAgain, "write too early")],
)
def test_a_lost_wait_and_a_buffer_used_again_are_reported(
    ranks: Pools, kind: type[StagedTransport], reported: str | None
) -> None:
    for found in ranks(4).run(planted, kind):
        assert {hazard for hazard, _ in found} == (set() if reported is None else {reported})


# ---- who asks for it ---------------------------------------------------------------------------------------


def through_a_layer(rank: int) -> None:
    """A layer in a loop of one's own; its gradients are those of the other transport."""
    case, found = Case(world=2), list[Tensor]()
    transports: tuple[TransportName, ...] = ("staged", "direct")
    for transport in transports:
        exchange = penstock.ExpertParallel(num_experts=EXPERTS, transport=transport)
        model = model_of(case, exchange)
        rank_loss(model, batch_of(case, 0, rank)).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        dist.barrier()
        exchange.close()
    assert torch.allclose(found[0], found[1], rtol=1e-10)


def through_parallelize(rank: int) -> None:
    """A model of transformers; its gradients are those of the whole model."""
    wanted, model = small("mixtral"), small("mixtral")
    penstock.parallelize(model, ep_size=2, plan="flowmoe", transport="staged")
    given = Batch().inputs()
    mine = {name: each[2 * rank : 2 * rank + 2] for name, each in given.items()}
    for each, batch in ((model, mine), (wanted, given)):
        each(**batch).loss.backward()
    check_grads(model, wanted, rank)


def through_a_session(rank: int) -> None:
    """A configuration, in processes that torchrun has started."""
    del rank
    sizes = ("model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "model.seq_len=8")
    with penstock.session(None, *sizes, "parallel.transport=staged") as run:
        assert isinstance(run.model.machinery.transports.inter, StagedTransport)
        tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
        run.model(tokens[:, :-1], tokens[:, 1:]).backward()
        dist.barrier()


WAYS = (through_a_layer, through_parallelize, through_a_session)


def on_a_gpu(rank: int, way: int) -> list[str]:
    with recorded() as recorder:
        WAYS[way](rank)
    return [*map(str, find_hazards(recorder.log))]


def on_processors(rank: int, way: int) -> str:
    with pytest.raises(penstock.ConfigError) as caught:
        WAYS[way](rank)
    watch(None)  # these ranks go on, in tests that start nothing by Penstock
    return caught.value.key


@pytest.mark.parametrize("way", range(len(WAYS)), ids=[way.__name__ for way in WAYS])
def test_every_way_to_start_can_ask_for_it(ranks: Pools, way: int) -> None:
    assert ranks(2).run(on_a_gpu, way) == [[]] * 2
    assert ranks(2).run(on_processors, way) == ["parallel.transport"] * 2


# ---- a rank that fails -------------------------------------------------------------------------------------


def fails_on_the_last(rank: int) -> str:
    """How a step ends on this rank, of which another one fails in its computation."""
    sizes = ("model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "model.seq_len=8")
    settings = (*sizes, "parallel.transport=staged", f"parallel.timeout_s={NEVER_S:g}")

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    with recorded(), pytest.raises(TaskError) as caught, penstock.session(None, *settings) as run:
        if rank:
            moe = run.model.parts.parts[0].moe
            assert moe is not None
            moe.experts.register_forward_pre_hook(fail)
        run.model(tokens[:, :-1], tokens[:, 1:]).backward()
    return type(caught.value.__cause__).__name__


@pytest.mark.slow
def test_the_others_learn_of_a_rank_that_fails() -> None:
    """They return at all: the timeout is longer than the pool waits. These ranks do nothing afterwards."""
    with closing(RankPool(2)) as pool:
        waited, failed = pool.run(fails_on_the_last)
    assert waited in ("RuntimeError", "PeerLostError")  # the exchange breaks, or the watch ends it
    assert failed == "ZeroDivisionError"
