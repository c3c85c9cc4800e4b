"""A model that does not fit with AdamW trains with shares of it: ranks under a limit of the system."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from penstock.autopilot.run_problem import assumed_problem
from penstock.config import load
from penstock.plan import estimate_memory
from penstock.topology import Layout
from penstock.train.assemble import build_machinery, build_optimizer, build_stack
from penstock.train.config import RunConfig
from penstock.train.update import build_update
from tests.support.ranks import RankPool

pytestmark = pytest.mark.slow

STEPS = 2
SETTINGS = (
    "model.num_layers=8",
    "model.hidden_size=512",
    "model.num_heads=8",
    "model.seq_len=16",
    "model.moe_layers=[0]",
    "moe.num_experts=2",
    "moe.moe_ffn_hidden_size=64",
    "data.batch_per_device=1",
    "schedule.name=flowmoe",
    "schedule.microbatches=1",
    "schedule.all_reduce_chunk_bytes=4194304",
)
"""About 100 MiB of weights in matrices of 4 MiB at most; hardly any activations."""


def config_of(sharded: bool) -> RunConfig:
    return load(RunConfig, None, [*SETTINGS, f"optimizer.sharded={str(sharded).lower()}"])


def data_bytes() -> int:
    """What counts for RLIMIT_DATA: the private memory of this process, touched or not."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def trained(rank: int, sharded: bool, room_bytes: int | None) -> int | str:
    """Bytes that this rank has more after some steps, or what was said when there was no more memory.

    room_bytes: how many more it may have; None = as many as it likes.
    """
    config = config_of(sharded)
    layout = Layout.build(config.parallel, 2, rank, 2)
    machinery = build_machinery(layout, torch.device("cpu"), config.parallel, "float32")
    before = data_bytes()
    if room_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (before + room_bytes, resource.RLIM_INFINITY))
    try:
        stack = build_stack(config, machinery)
        update = build_update(stack, build_optimizer(stack, config.optimizer), config.optimizer)
        tokens = torch.randint(256, (2, 1, 16), generator=torch.Generator().manual_seed(rank))
        for step in range(1, STEPS + 1):
            update.backward(stack(*tokens), step)
            update.apply(accepted=True)
        return data_bytes() - before
    except (RuntimeError, MemoryError) as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def on_two_ranks(sharded: bool, room_bytes: int | None) -> list[int | str]:
    """In processes of their own, which have kept no memory of what ran before."""
    pool = RankPool(2)
    try:
        return pool.run(trained, sharded, room_bytes)
    finally:
        pool.close()


def test_a_model_that_does_not_fit_trains_with_a_sharded_optimizer() -> None:
    """The room lies in the middle between what both need, and that differs by what the planner says."""
    needs = {}
    for sharded in (False, True):
        found = on_two_ranks(sharded, None)
        assert all(isinstance(each, int) for each in found), found
        needs[sharded] = max(int(each) for each in found)
    layout = Layout(world_size=2, ep_size=2, rank=0)
    planned = {
        sharded: estimate_memory(
            assumed_problem(config_of(sharded), layout),
            config_of(sharded).schedule.decision("flat"),
        ).total_bytes
        for sharded in (False, True)
    }
    saved = needs[False] - needs[True]
    assert saved == pytest.approx(planned[False] - planned[True], rel=0.2)
    room_bytes = needs[True] + saved // 2
    assert all(isinstance(each, int) for each in on_two_ranks(True, room_bytes))
    refused = on_two_ranks(False, room_bytes)
    assert all(isinstance(each, str) and "memory" in each for each in refused), refused
