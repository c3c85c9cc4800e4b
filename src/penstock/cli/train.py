"""`penstock train`: starts the ranks, or is one of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from penstock.cli.ranks import Emulated, Left, ranks_of, start_ranks
from penstock.cli.run import put
from penstock.config import ConfigError, is_missing, load
from penstock.cost.clusters import find_cluster
from penstock.device import count_gpus
from penstock.plan.plan_config import AUTO, given_schedule
from penstock.stops import STOPS
from penstock.topology import Layout, ProcessInfo, detect
from penstock.topology.join import ALONE
from penstock.topology.local import Places, limit_threads
from penstock.train.assemble import check_run, host_bytes
from penstock.train.batches import check_source
from penstock.train.config import RunConfig
from penstock.train.launcher import Place
from penstock.train.metrics import check_wandb
from penstock.train.output import check_output


def train(
    path: Path,
    overrides: Sequence[str],
    given: Sequence[str],
    *,
    json_wanted: bool,
    emulate: Emulated | None = None,
) -> int:
    """Run the training and return its exit code, in a cluster of its own if `emulate` describes one.

    A wrong configuration is refused before any process starts.
    """
    config = load(RunConfig, path, given_schedule(overrides))
    info = detect(os.environ)
    if emulate is not None and (info is None or info.launcher != "penstock"):
        if info is not None:
            hint = "Start penstock train itself, or leave --emulate out."
            why = f"ranks that {info.launcher} started already have a network"
            raise ConfigError("--emulate", str(emulate.shape), why, hint)
        # One rank per device of the cluster, whatever parallel.processes says; ranks are told so, too.
        ranks = ranks_of(config, None, emulate)
        where = f"{Places.here().describe(ranks)}, in an emulated cluster {emulate.shape}"
        announced = "" if json_wanted else f"starting {where}"
        with emulate.cluster() as cluster:
            arguments, size = [*given, f"parallel.processes={ranks}"], emulate.devices
            return _start_ranks(config, arguments, ranks, node_size=size, place=cluster, announced=announced)
    if info is not None:
        return _be_rank(config, info, json_wanted)
    processes, places = ranks_of(config, None, None), Places.here()
    if processes == 1:
        limit_threads()
        if not json_wanted:
            put(places.describe(1))
        return _be_rank(config, ALONE, json_wanted)
    announced = "" if json_wanted else f"starting {places.describe(processes)}"
    return _start_ranks(config, given, processes, node_size=processes, announced=announced)


def _start_ranks(
    config: RunConfig,
    given: Sequence[str],
    processes: int,
    *,
    node_size: int,
    place: Place | None = None,
    announced: str = "",
) -> int:
    resolved = config.resolved(processes)  # a wrong setting is refused before any process starts
    check_source(resolved)
    if config.train.resume is False:  # a run that is continued may have a cluster and a plan of its own
        if config.plan.cluster is not None:
            find_cluster(config.plan.cluster, "plan.cluster")
        if config.plan.path is not None and is_missing(config.plan.path):
            hint = "Use the path of a plan file, or plan.mode=auto."
            raise ConfigError("plan.file", config.plan.file, "there is no such file", hint)
    _check_layout(resolved, processes, node_size)
    if config.train.resume is True:
        from penstock.train.resume import require_checkpoint

        require_checkpoint(config)
    check_wandb(config.metrics)
    check_output(config.output.dir, keep=config.train.resume is not False)
    left = Left(config)
    STOPS.says(left.by_a_stop)
    waits = config.parallel
    longest_s = max(waits.timeout_s, waits.start_s, waits.checkpoint_s)
    return start_ranks(given, processes, longest_s, place, left.way_out, announced=announced)


def _check_layout(config: RunConfig, processes: int, node_size: int) -> None:
    """Refuse a run in whose layout, or in every possible one, something does not divide, the memory does not
    suffice, or no step can be built."""
    there = None if count_gpus() else host_bytes()
    if config.plan.layout == AUTO:
        from penstock.autotune.choose.layouts import check_some_layout

        check_some_layout(config, processes, node_size, there)
        return
    layout = Layout.build(config.parallel, processes, 0, config.moe.num_experts, node_size)
    if there is not None:
        check_run(config, layout, there_bytes=there, sharing=processes)
    if config.train.resume is False or config.plan.file is None:  # a continued run may have a plan of its own
        from penstock.autotune.problem import check_compatible

        check_compatible(config, layout)


def _be_rank(config: RunConfig, info: ProcessInfo, json_wanted: bool) -> int:
    with STOPS.loading():
        from penstock.cli.train_rank import be_rank

    return be_rank(config, info, json_wanted)
