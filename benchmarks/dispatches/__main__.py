"""`python -m benchmarks.dispatches`."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.command import run_on_ranks
from benchmarks.dispatches.measure import LINKS_S, measure_dispatches, summarise_dispatches
from benchmarks.dispatches.render import render_dispatches
from benchmarks.dispatches.result import DispatchesResult
from penstock.bench import BenchConfig
from penstock.emulate import EmulateConfig
from penstock.topology import Layout
from penstock.train.assemble import build_machinery


def measure(config: BenchConfig, layout: Layout, emulate: EmulateConfig | None) -> DispatchesResult:
    """As one of the ranks."""
    machinery = build_machinery(layout, torch.device("cpu"), config.parallel, "float32")
    links_s = min(LINKS_S, config.compare.profile_s)
    rate = None if emulate is None else emulate.inter_rate_bit_per_s
    result = partial(summarise_dispatches, inter_rate_bit_per_s=rate)
    rounds = config.compare.rounds
    return result(measure_dispatches(machinery, rounds=rounds, links_s=links_s, result=result))


if __name__ == "__main__":
    run_on_ranks(
        "dispatches",
        "Measures ways to dispatch: flat and hierarchical, small messages and large ones.",
        "--emulate 2x2 --inter-rate 2gbit moe.num_experts=4",
        measure,
        render_dispatches,
    )
