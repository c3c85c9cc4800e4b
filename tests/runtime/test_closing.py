"""What `close` leaves behind, where the process group goes on: neither threads nor descriptors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import penstock
from penstock.lab.virtual import VirtualConfig, build_virtual
from penstock.moe import GeluExperts, MoELayer, SoftmaxRouter, SortPermutation
from penstock.runtime.expert_parallel.exchange import ExpertParallel
from penstock.topology import Layout, ParallelConfig
from penstock.train.assemble import build_machinery, build_stack
from tests.support.cases import small_case as case
from tests.support.parity import batch_of
from tests.support.ranks import Pools

HERE = Path("/proc/self")
pytestmark = pytest.mark.skipif(not HERE.exists(), reason="only Linux says what a process has open")

TINY = ("model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "model.seq_len=8")
CPU = torch.device("cpu")


def stepped(model: Any) -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    model(tokens, tokens).backward()


def use_a_session() -> None:
    with penstock.session(None, *TINY, "schedule.name=penstock") as run:
        stepped(run.model)


def fail_in_a_session() -> None:
    with suppress(ZeroDivisionError), penstock.session(None, *TINY) as run:
        stepped(run.model)
        raise ZeroDivisionError


def fail_to_build_a_session() -> None:
    def make_moe(number: int, ep_size: int, ep_rank: int) -> MoELayer:
        raise ZeroDivisionError(number, ep_size, ep_rank)

    with suppress(ZeroDivisionError), penstock.session(None, *TINY, make_moe=make_moe):
        pass


def use_a_stack() -> None:
    """With groups inside nodes and between them."""
    step = case(2, "softmax", "sort", "hierarchical_2d", "swiglu", "flowmoe")
    layout = Layout(world_size=2, ep_size=2, rank=dist.get_rank(), node_size=1)
    stack = build_stack(step.config, build_machinery(layout, CPU, ParallelConfig(), "float32"), step.dtype)
    stack(*(whole[step.mine(dist.get_rank())] for whole in batch_of(step))).backward()
    stack.close()
    stack.close()  # does nothing more


def use_a_virtual_stack() -> None:
    step = case(2, "softmax", "sort", "flat", "swiglu", "flowmoe")
    layout = Layout(world_size=2, ep_size=2, rank=dist.get_rank())
    stack = build_virtual(
        step.config, VirtualConfig(), build_machinery(layout, CPU, ParallelConfig(), "float32")
    )
    stack.step(0)
    stack.close()


def use_layers() -> None:
    torch.manual_seed(0)  # all ranks begin with the same gates
    exchange = ExpertParallel(num_experts=4)
    layers = [
        MoELayer(
            gate=SoftmaxRouter(16, 4, 2),
            permutation=SortPermutation(4),
            expert=GeluExperts(16, 8, 2),
            exchange=exchange,
        )
        for _ in range(2)
    ]
    rows = torch.randn(6, 16)
    for layer in layers:
        rows = layer(rows)
    rows.sum().backward()
    exchange.close()
    with pytest.raises(RuntimeError):
        layers[0](rows)


USES: tuple[Callable[[], None], ...] = (
    use_a_session,
    fail_in_a_session,
    fail_to_build_a_session,
    use_a_stack,
    use_a_virtual_stack,
    use_layers,
)


def left_by(rank: int, use: Callable[[], None]) -> list[tuple[int, int]]:
    """Threads and descriptors before, and after each time."""
    del rank
    use()  # the first time libraries are loaded
    counts = []
    for _ in range(3):
        gc.collect()
        counts.append((len([*(HERE / "task").iterdir()]), len([*(HERE / "fd").iterdir()])))
        dist.barrier()
        use()
    return counts


@pytest.mark.parametrize("use", USES)
def test_what_was_opened_is_closed(ranks: Pools, use: Callable[[], None]) -> None:
    for first, *others in ranks(2).run(left_by, use):
        assert others == [first] * len(others)
