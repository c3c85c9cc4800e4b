"""What the ranks of the tests of peers do."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers import Batch, Peer, Work, build_peer
from penstock.decision import ScheduleConfig
from penstock.lab.bench.config import BenchConfig, CompareConfig
from penstock.lab.bench.contender import TransportName
from penstock.models import ModelConfig, MoEDecoder
from penstock.moe import MoEConfig
from penstock.runtime import PipelinedStack
from penstock.runtime.sockets import Sockets
from penstock.topology import Layout, ParallelConfig
from tests.support.close import check_close
from tests.support.parity import Case, batch_of, stack_of

SMALL = ModelConfig(num_layers=2, hidden_size=32, num_heads=2, seq_len=16)


def case_of(ep_size: int = 2, batch: int = 2, **moe: Any) -> Case:
    """Two ranks, two blocks; by default two experts of which every token takes both."""
    chosen: dict[str, Any] = {"num_experts": 2, "top_k": 2, "expert": "gelu", "capacity_factor": 1.25} | moe
    return Case(
        world_size=2,
        ep_size=ep_size,
        schedule=ScheduleConfig(name="sequential"),
        model=SMALL,
        moe=MoEConfig(moe_ffn_hidden_size=48, aux_loss_coeff=0.0, z_loss_coeff=0.0, **chosen),
        batch=batch,
    )


def bench_config(case: Case, timeout_s: float) -> BenchConfig:
    return BenchConfig(
        model=case.model,
        moe=case.moe,
        parallel=ParallelConfig(processes=2, ep_size=case.ep_size, timeout_s=timeout_s),
        compare=CompareConfig(batch_per_device=case.batch, seed=case.seed),
    )


def my_batch(rank: int, case: Case) -> Batch:
    tokens, labels = batch_of(case)
    mine = slice(rank * case.batch, (rank + 1) * case.batch)
    return tokens[mine], labels[mine]


def work_of(rank: int, case: Case, model: MoEDecoder | None = None, timeout_s: float = 60.0) -> Work:
    """The work of this rank; with fresh weights if no model is given."""
    config = bench_config(case, timeout_s)
    layout = Layout.build(config.parallel, 2, rank, case.moe.num_experts)
    if model is None:
        model = MoEDecoder(case.model, case.moe, ep_size=layout.ep_size, ep_rank=layout.ep_rank)
        model.initialise(case.seed)
    return Work(config=config, layout=layout, model=model, batch=my_batch(rank, case))


@contextmanager
def made(name: str, rank: int, case: Case, transport: TransportName = "gloo") -> Iterator[Peer]:
    """A peer with fresh weights, closed behind the test."""
    peer = build_peer(name, work_of(rank, case), transport)
    try:
        yield peer
    finally:
        peer.close()


# ---- both columns ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """Losses of two steps, and the gradients of the second."""

    losses: list[float]
    gradients: dict[str, Tensor]


def both_columns(rank: int, name: str, case: Case) -> tuple[Column, Column]:
    """As shipped, and with Penstock's transport: in one process, in turns."""
    with made(name, rank, case, "gloo") as shipped, made(name, rank, case, "penstock") as receiving:
        losses: tuple[list[float], list[float]] = ([], [])
        for number in range(2):
            for found, peer in zip(losses, (shipped, receiving), strict=True):
                peer.step(number)
                found.append(peer.loss)
        return Column(losses[0], shipped.gradients()), Column(losses[1], receiving.gradients())


def updates(rank: int, name: str, case: Case) -> tuple[list[float], list[float], bool]:
    """Losses of whole iterations in both columns, and whether weights are afterwards what they were."""
    work = replace(work_of(rank, case), max_norm=1.0)
    shipped, receiving = (build_peer(name, work, transport) for transport in ("gloo", "penstock"))
    before = {key: weight.clone() for key, weight in shipped.frame.as_penstock(_weight).items()}
    try:
        losses: tuple[list[float], list[float]] = ([], [])
        for number in range(3):
            for found, peer in zip(losses, (shipped, receiving), strict=True):
                peer.prepare(number)
                peer.step(number)
                found.append(peer.loss)
        after = shipped.frame.as_penstock(_weight)
        return *losses, all(torch.equal(before[key], weight) for key, weight in after.items())
    finally:
        shipped.close()
        receiving.close()


def _weight(parameter: torch.nn.Parameter) -> Tensor:
    return parameter.detach()


# ---- against Penstock --------------------------------------------------------------------------------------


def against_penstock(rank: int, name: str, case: Case) -> float:
    """One step of Penstock and of the peer with the same weights: gradients agree. Returns the peer's loss.

    The peer's losses are means over ranks' own tokens; Penstock's is one over all of them.
    """
    stack = stack_of(rank, case)
    tokens, labels = my_batch(rank, case)
    ids = torch.arange(case.batch) + rank * case.batch
    loss = stack(tokens, labels, ids)
    loss.backward()
    peer = build_peer(name, work_of(rank, case, _model(stack)), "gloo")
    try:
        peer.step()
        theirs = peer.gradients()
        ours = {n: p.grad for n, p in stack.model.named_parameters() if p.grad is not None}
        assert ours.keys() == theirs.keys()
        for key, gradient in ours.items():
            assert gradient.shape == theirs[key].shape
            check_close(theirs[key], gradient, 1e-5, key)
        mean = _mean(peer.loss)
        assert math.isclose(mean, loss.item(), rel_tol=1e-5), (mean, loss.item())
        return peer.loss
    finally:
        peer.close()


def _model(stack: PipelinedStack) -> MoEDecoder:
    assert isinstance(stack.model, MoEDecoder)
    return stack.model


def _mean(mine: float) -> float:
    total = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def penstock_beside(rank: int, name: str, case: Case) -> None:
    """Steps of Penstock before, between and after a peer's give the same bits: nothing leaks into it."""
    stack = stack_of(rank, case)
    alone = _own_step(stack, rank, case)
    with made(name, rank, case, "penstock") as peer:
        for _ in range(2):
            peer.step()
            _check_same(alone, _own_step(stack, rank, case))
    _check_same(alone, _own_step(stack, rank, case))


def _own_step(stack: PipelinedStack, rank: int, case: Case) -> dict[str, Tensor]:
    loss = stack(*my_batch(rank, case), torch.arange(case.batch) + rank * case.batch)
    loss.backward()
    found = {name: p.grad for name, p in stack.model.named_parameters() if p.grad is not None}
    for parameter in stack.model.parameters():
        parameter.grad = None
    return found | {"loss": loss.detach()}


def _check_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


# ---- what is on the wire -----------------------------------------------------------------------------------


def rows_on_the_wire(rank: int, name: str, case: Case) -> list[tuple[int, ...]]:
    """Shapes of everything that one step puts into an all-to-all."""
    seen: list[tuple[int, ...]] = []
    original = dist.all_to_all_single

    def noting(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(tuple(input.shape))
        return original(output, input, *args, **kwargs)

    with made(name, rank, case) as peer:
        dist.all_to_all_single = noting
        try:
            peer.step()
        finally:
            dist.all_to_all_single = original
    return seen


def send_buffers(rank: int, name: str, case: Case) -> tuple[set[int], set[int]]:
    """SO_SNDBUF of the connections of each column: on Penstock's transport, as shipped."""
    return _buffers(rank, name, case, "penstock"), _buffers(rank, name, case, "gloo")


def _buffers(rank: int, name: str, case: Case, transport: TransportName) -> set[int]:
    before, sizes = Sockets.now(), set[int]()
    with made(name, rank, case, transport):
        ours = Sockets.now().since(before)
        ours._each(lambda s: sizes.add(s.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)))
    return sizes


# ---- what is left behind -----------------------------------------------------------------------------------


def leaves_nothing(rank: int, name: str, case: Case) -> list[str]:
    """What a peer's life changed in torch and the environment, and process groups that outlived it."""
    with made(name, rank, case) as peer:
        peer.step()  # torch prepares itself for torch.compile when a package first uses it: not ours to undo
    before, groups = _names(), dist.distributed_c10d._world.pg_map.copy()
    with made(name, rank, case, "penstock") as peer, made(name, rank, case):
        peer.step()
    after = _names()
    changed = [key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)]
    return changed + [str(group) for group in dist.distributed_c10d._world.pg_map.keys() - groups.keys()]


def _names() -> dict[str, Any]:
    """Everything a patch could hide in, by name."""
    owners = {"dist": dist, "cuda": torch.cuda, "tensor": torch.Tensor, "module": torch.nn.Module}
    return {
        f"{where}.{name}": thing for where, owner in owners.items() for name, thing in vars(owner).items()
    }


# ---- one rank fails ----------------------------------------------------------------------------------------


def one_rank_fails(rank: int, name: str, case: Case, transport: TransportName) -> tuple[str, list[str]]:
    """Rank 1 has a token that is in no vocabulary. What each rank sees, and what is changed in torch then."""
    work = work_of(rank, case, timeout_s=3.0)
    peer = build_peer(name, work, transport)
    peer.step()
    before = _names()
    if rank == 1:
        work.batch[0][0, 0] = case.model.vocab_size
    error = "nothing"
    try:
        peer.step()
    except Exception as caught:
        error = type(caught).__name__
    return error, [key for key, thing in _names().items() if before.get(key) is not thing]


def refused(rank: int, name: str, case: Case) -> str:
    """What the peer says about a configuration it cannot run."""
    try:
        with made(name, rank, case):
            return "nothing"
    except ValueError as error:
        return str(error)


def unequal(case: Case, **moe: Any) -> Case:
    return replace(case, moe=replace(case.moe, **moe))
