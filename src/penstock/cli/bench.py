"""`penstock bench`: schedules side by side."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.bench import BenchConfig
from penstock.bench.compare import compare
from penstock.bench.field import Field, RealField
from penstock.bench.summarise import summarise
from penstock.bench.table import render
from penstock.bench.virtual_field import VirtualField
from penstock.cli.codes import BAD_USAGE
from penstock.cli.train import end_of_rank
from penstock.config import ConfigError, load
from penstock.emulate import Cluster, EmulateConfig
from penstock.runtime.host_memory import keep_freed_memory
from penstock.topology import Layout, ProcessInfo, detect, join, leave
from penstock.topology.join import ALONE
from penstock.train.assemble import pick_device
from penstock.train.launcher import Place, launch


def bench(
    path: Path | None,
    overrides: Sequence[str],
    given: Sequence[str],
    *,
    json_wanted: bool,
    emulate: EmulateConfig | None = None,
    virtual: bool = False,
) -> int:
    """Exit code of the comparison; rank 0 prints the table or one JSON object."""
    config = load(BenchConfig, path, overrides)
    info = detect(os.environ)
    if info is None and emulate is not None:
        with Cluster(emulate) as cluster:
            return _start_ranks(config, given, emulate.shape.ranks, cluster)
    if info is None and config.parallel.processes > 1:
        return _start_ranks(config, given, config.parallel.processes)
    make_field = VirtualField if virtual else RealField
    return _be_rank(config, info or ALONE, make_field, json_wanted, emulate)


def _start_ranks(
    config: BenchConfig, given: Sequence[str], processes: int, place: Place | None = None
) -> int:
    command = [sys.executable, "-m", "penstock", *given]
    outcome = launch(command, processes, grace_s=config.parallel.timeout_s + 10, place=place)
    if outcome.first_failure is not None and outcome.exit_code != BAD_USAGE:
        print(f"penstock: {outcome.first_failure.describe()}", file=sys.stderr)
    return outcome.exit_code


def _be_rank(
    config: BenchConfig,
    info: ProcessInfo,
    make_field: Callable[[BenchConfig, Layout], Field],
    json_wanted: bool,
    emulate: EmulateConfig | None,
) -> int:
    """Measure; without an emulated cluster all ranks count as one node with a link of unknown rate."""
    try:
        keep_freed_memory()
        join(info, config.parallel.timeout_s, pick_device(info.local_rank))
        layout = Layout.build(config.parallel, info.world_size, info.rank, config.moe.num_experts)
        field = make_field(config, layout)
    except ConfigError as error:
        if info.rank == 0:
            print(f"penstock: {error}", file=sys.stderr)
        return end_of_rank(info, BAD_USAGE)
    found = compare(field, config.compare)
    field.close()
    leave()
    if info.rank == 0:
        nodes = 1 if emulate is None else emulate.shape.nodes
        rate = None if emulate is None else emulate.inter_rate_bit_per_s
        devices = info.world_size // nodes
        result = summarise(found, nodes=nodes, devices=devices, inter_rate_bit_per_s=rate)
        print(json.dumps(result.to_dict()) if json_wanted else render(result))
    return end_of_rank(info, 0)
