"""The command lines of the benchmarks: `python -m benchmarks.NAME`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import torch

from penstock.bench import BenchConfig
from penstock.cli.codes import INTERRUPTED
from penstock.cli.emulate import add_emulation_options, emulation
from penstock.cli.ranks import measure_as_rank, on_ranks, processes_of_bench
from penstock.cli.run import exit_code, parse
from penstock.config import ConfigError, load
from penstock.emulate import EmulateConfig
from penstock.topology import Layout, ProcessInfo, detect


class Result(Protocol):
    """What a benchmark found."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        ...


R = TypeVar("R", bound=Result)

Measure = Callable[[BenchConfig, Layout, EmulateConfig | None], R]
"""What every rank does, with the configuration, its place, and the cluster that is emulated, if any."""


class Stopped(KeyboardInterrupt):
    """A signal ended a benchmark; result: what it had found by then, as it returns it, None if nothing."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def parser_of(name: str, description: str, example: str = "") -> argparse.ArgumentParser:
    """A parser with the option `--json`. name: of the module in `benchmarks`."""
    program = f"python -m benchmarks.{name}"
    epilog = f"Example: {program} {example}" if example else None
    parser = argparse.ArgumentParser(prog=program, description=description, epilog=epilog)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run_on_ranks(
    name: str, description: str, example: str, measure: Measure[R], render: Callable[[R], str]
) -> NoReturn:
    """Measure on several ranks, on emulated links if that is asked for, print, and leave the process."""
    given = sys.argv[1:]
    parser = parser_of(name, description, example)
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="settings that override the defaults",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file; default: built in")
    add_emulation_options(parser)
    options = parse(parser, given)

    def command() -> int:
        emulate = emulation(options)
        config = load(BenchConfig, options.config, options.overrides)
        parallel, program = config.parallel, f"benchmarks.{name}"

        def one_rank(layout: Layout, device: torch.device) -> R:
            del device  # all of them measure on the CPU
            return measure(config, layout, emulate)

        def work(info: ProcessInfo) -> int:
            finish = partial(print_result, render=render, plain=options.json)
            return measure_as_rank(info, parallel, config.moe.num_experts, one_rank, finish)

        return on_ranks(
            parser.prog, given, processes_of_bench(config), parallel.timeout_s, emulate, work, program=program
        )

    sys.exit(exit_code(command))


def run_alone(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], R],
    render: Callable[[R], str],
    given: Sequence[str] | None = None,
) -> NoReturn:
    """Measure in this process, or in others that it starts by itself, print, and leave the process."""
    options = parser.parse_args(given)

    def command() -> int:
        if (info := detect(os.environ)) is not None:
            why = f"starts all that it needs by itself and has no use for {info.launcher}"
            raise ConfigError(parser.prog, info.rank, why, "Start it once.")
        try:
            return print_result(measure(options), render, options.json)
        except Stopped as stop:
            if stop.result is not None:
                print_result(stop.result, render, options.json)
            print("stopped, as requested; this is what had ended by then", file=sys.stderr)
            return INTERRUPTED

    sys.exit(exit_code(command))


def print_result(result: R, render: Callable[[R], str], plain: bool) -> int:
    """Print tables, or one JSON object if `plain`; returns exit code 0."""
    print(json.dumps(result.to_dict()) if plain else render(result))
    return 0
