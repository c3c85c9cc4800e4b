"""The arguments of `penstock bench`; what it does is loaded when it runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from penstock.cli.out import add_overrides, user_path
from penstock.cli.run import NO_RESULT
from penstock.config import ConfigError
from penstock.lab.commands.emulate import add_emulation_options, emulation
from penstock.stops import STOPS

MOVED = {
    "collectives": "collectives",
    "layer": "layer",
    "drift": "drift",
    "published": "published",
    "suite": "suite",
}
"""Benchmarks that were options of `penstock bench`: the module of `benchmarks/` that runs each."""


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
    bench.add_argument("--config", type=user_path, metavar="FILE", help="a TOML file (default: built in)")
    bench.add_argument(
        "--schedules", metavar="A,B,...", help="schedules to compare; speed-ups are relative to the first"
    )
    bench.add_argument(
        "--peers", metavar="A,B,...", help="other systems to compare with: deepspeed, megatron"
    )
    bench.add_argument(
        "--virtual",
        action="store_true",
        help="sleep instead of computing, so that there can be more ranks than cores; settings in [virtual]",
    )
    bench.add_argument(
        "--plan",
        action="store_true",
        help="profile, choose a plan, and measure it against four published plans",
    )
    bench.add_argument(
        "--plot", type=user_path, metavar="DIR", help="write figures (PNG) and an HTML page to DIR"
    )
    for option in MOVED:
        bench.add_argument(f"--{option}", nargs="?", const="", help=argparse.SUPPRESS)
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    add_emulation_options(bench)
    bench.set_defaults(run=_run, left=NO_RESULT)


def _run(options: argparse.Namespace, given: Sequence[str]) -> int:
    with STOPS.loading():
        from penstock.lab.commands.bench import Wanted, bench

    for option, module in MOVED.items():
        if getattr(options, option) is not None:
            hint = f"Run python -m benchmarks.{module} in the folder of the source code."
            raise ConfigError(f"--{option}", True, "is a benchmark of its own", hint)
    chosen = {"schedules": options.schedules, "peers": options.peers}
    overrides = [f"compare.{k}={json.dumps(v.split(','))}" for k, v in chosen.items() if v is not None]
    wanted = Wanted(
        json=options.json,
        virtual=options.virtual,
        plan=options.plan,
        plot=options.plot,
        peers=options.peers is not None,
    )
    return bench(options.config, [*options.overrides, *overrides], given, wanted, emulation(options))
