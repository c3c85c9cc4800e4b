"""Sessions for a training loop of one's own: join the processes, build the model, and leave at the end.

`penstock train` does the same with a loop of its own (`penstock.train.trainer`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.adapt.run import model_of_run
from penstock.autotune import Autotuner
from penstock.config import ConfigError, load
from penstock.device import device_of, pick_device
from penstock.moe import MoELayer
from penstock.plan.plan_config import given_schedule
from penstock.runtime import Machinery, PipelinedStack
from penstock.topology import Control, Layout, ProcessInfo, detect, find_node_size, leave
from penstock.topology.faults import give_up, reason
from penstock.topology.join import ALONE, joined
from penstock.train.assemble import build_machinery, build_stack, on_device
from penstock.train.config import RunConfig, resolved_for_all
from penstock.train.logs import show_unless_told
from penstock.train.pilot import Ranks

MakeLayer = Callable[[int, int, int], MoELayer]


@dataclass(frozen=True, kw_only=True)
class Session:
    """Everything that a training loop needs.

    Attributes:
        model: An ordinary module whose steps are scheduled: `model(tokens, labels)` is the loss of the batch
            of all ranks, and when its `backward` returns every gradient is summed over them.
        config: The configuration that runs, with the plan's choices.
        layout: Which ranks share what; ranks with the same `layout.dp_rank` work on the same samples, those
            of part `dp_rank` of `dp_size`.
        device: This process's device.
    """

    model: PipelinedStack
    config: RunConfig
    layout: Layout
    device: torch.device

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return self.layout.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.layout.world_size


class _Open:
    """The number of sessions that this process has entered and not left."""

    sessions = 0


@contextmanager
def session(
    config: RunConfig | str | Path | None = None, *settings: str, make_moe: MakeLayer | None = None
) -> Iterator[Session]:
    """Join the processes that a launcher has started, or run alone, and build the model of `config`.

    With plan.mode = "auto" the cluster is measured and a plan searched for before the body runs; unlike
    `penstock train`, which watches its steps, a loop of one's own keeps that plan. All ranks enter together
    and leave together. Leaving ends all threads and connections of the session, and the process group unless
    it existed before, even where the body raises; exchanges that have begun on GPUs are then aborted. The
    outermost session tells the other ranks why: inside an inner one an error may be caught, and need not end
    the run.

    Args:
        config: Sections in Python, or a TOML file; None = the defaults.
        settings: `section.key=value`, as on the command line; they override the file.
        make_moe: Makes the MoE layer of a block, in place of the one that section [moe] describes, from the
            block's number, the number of ranks among which experts are spread, and this rank's place among
            them; its sizes must be those of the configuration.

    Raises:
        ConfigError: A setting cannot be used, or differs between ranks.
        ValueError: There are settings beside a RunConfig.
    """
    if not isinstance(config, RunConfig):
        read: RunConfig = load(RunConfig, None if config is None else Path(config), given_schedule(settings))
    elif settings:
        raise ValueError(f"{settings[0]}: a RunConfig has all settings. Change it with dataclasses.replace")
    else:
        read = config
    started = detect(os.environ) or ALONE
    device = pick_device(started.local_rank)
    joins = not dist.is_initialized()
    waits = read.parallel
    info = joined(waits.timeout_s, device, waits.transport, start_s=waits.start_s)
    machinery = None
    try:
        with _counted() as outer:
            config, ranks = _chosen(read, info, device)
            layout = Layout.build(
                config.parallel, info.world_size, info.rank, config.moe.num_experts, ranks.node_size
            )
            machinery = build_machinery(layout, device, config.parallel, config.train.precision)
            yield _built(config, machinery, make_moe)
    except BaseException as error:
        if not outer:
            give_up(f"{type(error).__name__}: {reason(error)}")
        if machinery is not None:
            machinery.transports.abort()  # ranks that wait for this one wait no longer
        aborts = device_of(device).is_gpu  # NCCL would wait for ranks that are gone
        _close(machinery, leaves=joins, aborts=aborts)
        raise
    _close(machinery, leaves=joins, aborts=False)


@contextmanager
def _counted() -> Iterator[int]:
    """Count this session as open, and yield the number of sessions around it."""
    outer = _Open.sessions
    _Open.sessions += 1
    try:
        yield outer
    finally:
        _Open.sessions = outer


def _close(machinery: Machinery | None, *, leaves: bool, aborts: bool) -> None:
    """Close the machinery, and leave even if closing fails, so that the next session can join again."""
    try:
        if machinery is not None:
            machinery.close()
    finally:
        if leaves:
            leave(aborts=aborts)


def _chosen(config: RunConfig, info: ProcessInfo, device: torch.device) -> tuple[RunConfig, Ranks]:
    """Return the configuration with its layout chosen, and the ranks that run it."""
    show_unless_told(sys.stderr, shown=info.rank == 0)
    control = Control(info.rank, info.world_size)
    config = on_device(resolved_for_all(config, control), device)
    node_size = find_node_size(control, info.local_rank)
    ranks = Ranks(control=control, device=device, node_size=node_size)
    return Autotuner.layout(config, ranks, None), ranks


def _built(config: RunConfig, machinery: Machinery, make_moe: MakeLayer | None) -> Session:
    """Build the model with its first plan, as `penstock train` does."""
    layout = machinery.layout
    pilot = Autotuner(config, machinery, None)
    if make_moe is None:
        made = model_of_run(pilot.config, machinery, plan=pilot.plan, moving=pilot.moving, begins=True)
        stack = made.stack
    elif config.model.of_transformers:
        why = f"its layers are those of {config.model.model_type}, and make_moe makes other ones"
        raise ConfigError("model.config", str(config.model.config), why, "Give one of the two.")
    else:  # other layers may have other tasks: of the plan only the choice holds

        def layer(number: int) -> MoELayer:
            return make_moe(number, layout.ep_size, layout.ep_rank)

        stack = build_stack(pilot.config, machinery, moving=pilot.moving, make_moe=layer, begins=True)
    stack.timed = False  # nothing here reads when tasks ran
    return Session(model=stack, config=pilot.config, layout=layout, device=machinery.device)
