"""The run that was given to the command, as stages measure it: with its model, and an optimiser of learning
rate 0, so that every step does the same."""

from __future__ import annotations

from dataclasses import replace

from penstock.doctor.gpu.here import Here
from penstock.doctor.gpu.small import Running
from penstock.moe.build import dispatch_of
from penstock.runtime import Machinery
from penstock.topology import Layout, find_node_size
from penstock.train.assemble import build_machinery
from penstock.train.config import RunConfig
from penstock.train.optimizer import set_learning_rate


def settled(here: Here) -> RunConfig:
    """Return the run with what it leaves open decided in the plainest way."""
    given = here.config
    return replace(
        given,
        moe=replace(given.moe, dispatch=dispatch_of(given.moe)),
        optimizer=given.optimizer.settled(sharded=given.optimizer.is_sharded),
        output=replace(given.output, loads=False),
    )


def given_layout(here: Here) -> Layout:
    """Return the layout of the run. All ranks must call it together."""
    node_size = find_node_size(here.control, here.info.local_rank)
    experts = here.config.moe.num_experts
    return Layout.build(here.config.parallel, here.world_size, here.info.rank, experts, node_size)


def given_machinery(here: Here) -> Machinery:
    """Build what the run runs on. All ranks must call it together."""
    config = here.config
    return build_machinery(given_layout(here), here.device, config.parallel, config.train.precision)


def given_run(here: Here, machinery: Machinery) -> Running:
    ran = Running(settled(here), machinery)
    set_learning_rate(ran.update.optimizer, 0.0)
    return ran
