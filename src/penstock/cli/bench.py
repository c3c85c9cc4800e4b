"""`penstock bench`: schedules side by side."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.bench import BenchConfig
from penstock.bench.compare import Comparison
from penstock.bench.summarise import summarise
from penstock.bench.table import render
from penstock.cli.train import end_of_rank
from penstock.config import load
from penstock.topology import Layout, ProcessInfo, detect, join, leave
from penstock.topology.join import ALONE
from penstock.train.assemble import pick_device
from penstock.train.launcher import launch


@dataclass(frozen=True, kw_only=True)
class Network:
    """How many nodes the ranks are on, in order, and the rate of a node's uplink (None: not known)."""

    nodes: int = 1
    inter_rate_bit_per_s: float | None = None


def bench(
    path: Path | None,
    overrides: Sequence[str],
    given: Sequence[str],
    *,
    json_wanted: bool,
    network: Network | None = None,
) -> int:
    """Exit code of the comparison; rank 0 prints the table or one JSON object."""
    config = load(BenchConfig, path, overrides)
    info = detect(os.environ)
    if info is None and config.parallel.processes > 1:
        command = [sys.executable, "-m", "penstock", *given]
        return launch(command, config.parallel.processes, grace_s=config.parallel.timeout_s + 10).exit_code
    return _be_rank(config, info or ALONE, json_wanted, network or Network())


def _be_rank(config: BenchConfig, info: ProcessInfo, json_wanted: bool, network: Network) -> int:
    join(info, config.parallel.timeout_s, pick_device(info.local_rank))
    layout = Layout.build(config.parallel, info.world_size, info.rank, config.moe.num_experts)
    comparison = Comparison(config, layout)
    found = comparison.measure()
    comparison.close()
    leave()
    if info.rank == 0:
        result = summarise(
            found,
            nodes=network.nodes,
            devices=info.world_size // network.nodes,
            inter_rate_bit_per_s=network.inter_rate_bit_per_s,
        )
        print(json.dumps(result.to_dict()) if json_wanted else render(result))
    return end_of_rank(info)
