"""The arguments of `penstock bench`; what it does is loaded when it runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from penstock.cli.out import add, add_overrides, user_path
from penstock.cli.run import NO_RESULT
from penstock.config import ConfigError
from penstock.lab.commands.emulate import add_emulation_options, emulation
from penstock.stops import STOPS

MOVED = ("collectives", "layer", "drift", "published", "suite")
"""Benchmarks that were options of `penstock bench`, by the names of their modules in `benchmarks/`."""


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `bench`."""
    bench = commands.add_parser(
        "bench",
        help="compare schedules",
        description="Runs schedules in alternation with the same shapes and seeds, and reports how close "
        "each comes to the physical limit of the hardware.",
        epilog="Example: penstock bench --emulate 2x1 --inter-rate 400mbit --schedules sequential,flowmoe",
    )
    add_overrides(bench, "the defaults")
    add(bench, "--config FILE", "a TOML file (default: built in)", type=user_path)
    add(bench, "--schedules A,B,...", "schedules to compare; speed-ups are relative to the first")
    add(bench, "--peers A,B,...", "other systems to compare with: deepspeed, megatron")
    add(
        bench,
        "--virtual",
        "sleep instead of computing, so that there can be more ranks than cores; settings in [virtual]",
    )
    add(bench, "--plan", "profile, choose a plan, and measure it against four published plans")
    add(bench, "--plot DIR", "write figures (PNG) and an HTML page to DIR", type=user_path)
    for option in MOVED:
        bench.add_argument(f"--{option}", nargs="?", const="", help=argparse.SUPPRESS)
    add(bench, "--json", "print one JSON object")
    add_emulation_options(bench)
    bench.set_defaults(run=_run, left=NO_RESULT)


def _run(options: argparse.Namespace, given: Sequence[str]) -> int:
    with STOPS.loading():
        from penstock.lab.commands.bench import bench

    for option in MOVED:
        if getattr(options, option) is not None:
            hint = f"Run python -m benchmarks.{option} in the folder of the source code."
            raise ConfigError(f"--{option}", True, "is a benchmark of its own", hint)
    chosen = {"schedules": options.schedules, "peers": options.peers}
    overrides = [f"compare.{k}={json.dumps(v.split(','))}" for k, v in chosen.items() if v is not None]
    return bench(options, [*options.overrides, *overrides], given, emulation(options))
