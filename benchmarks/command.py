"""The command lines of the benchmarks: `python -m benchmarks.NAME`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol, TypeVar

import torch

from benchmarks import hear_stops
from benchmarks.progress import PROGRESS
from penstock.cli.ranks import NOTHING_MEASURED, UNPRINTED, measure_as_rank, on_ranks
from penstock.cli.run import exit_code, parse
from penstock.config import ConfigError, load
from penstock.lab.bench import BenchConfig
from penstock.lab.bench.config import processes_of_bench
from penstock.lab.commands.emulate import add_emulation_options, emulation
from penstock.lab.emulate import EmulateConfig
from penstock.stops import STOPS
from penstock.topology import Layout, ProcessInfo, detect

UNTIL_THEN: Final = "stopped; the table has what was measured until then"


class Result(Protocol):
    """What a benchmark found."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        ...


R = TypeVar("R", bound=Result)

Measure = Callable[[BenchConfig, Layout, EmulateConfig | None], R]
"""What every rank does, with the configuration, its place, and the cluster that is emulated, if any."""


def parser_of(name: str, description: str, example: str = "") -> argparse.ArgumentParser:
    """Return a parser with the option `--json`.

    Args:
        name: The module in `benchmarks`.
        description: What the benchmark measures.
        example: Arguments of an example; "" = none is shown.
    """
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
        show = partial(print_result, render=render, plain=options.json)

        def work(info: ProcessInfo) -> int:
            def one_rank(layout: Layout, device: torch.device) -> R:
                del device  # all of them measure on the CPU
                return _unless_stopped(lambda: measure(config, layout, emulate))

            PROGRESS.begin(name, shown=info.rank == 0)
            STOPS.says(partial(_left, show))
            return measure_as_rank(info, parallel, config.moe.num_experts, one_rank, show)

        return on_ranks(
            parser.prog, given, processes_of_bench(config), parallel.timeout_s, emulate, work, program=program
        )

    hear_stops()
    sys.exit(exit_code(command, NOTHING_MEASURED))


def run_alone(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], R],
    render: Callable[[R], str],
) -> NoReturn:
    """Measure in this process, or in others that it starts by itself, print, and leave the process."""
    options = parser.parse_args()
    show = partial(print_result, render=render, plain=options.json)

    def command() -> int:
        if (info := detect(os.environ)) is not None:
            why = f"starts all that it needs by itself and has no use for {info.launcher}"
            raise ConfigError(parser.prog, info.rank, why, "Start it once.")
        PROGRESS.begin(parser.prog.rpartition(".")[2], shown=True)
        STOPS.says(partial(_left, show))
        try:
            result = _unless_stopped(lambda: measure(options))
        except KeyboardInterrupt:
            return STOPS.stopped()  # here, where an output that nobody reads any more is no failure
        STOPS.finish(None, UNPRINTED)
        return show(result)

    hear_stops()
    sys.exit(exit_code(command, NOTHING_MEASURED))


def _unless_stopped(measure: Callable[[], R]) -> R:
    """Return what was measured; raise KeyboardInterrupt after a stop, whatever it led to here."""
    try:
        result = measure()
    except Exception:
        if STOPS.heard:  # other ranks ended at the same signal
            raise KeyboardInterrupt from None
        raise
    if STOPS.heard:
        PROGRESS.keep(lambda: result)
        raise KeyboardInterrupt
    return result


def _left(show: Callable[[Any], int]) -> str:
    """Print what was measured before a stop, and return what to say of it."""
    result = PROGRESS.kept()
    if result is None:
        return NOTHING_MEASURED
    show(result)
    sys.stdout.flush()
    return UNTIL_THEN


def print_result(result: R, render: Callable[[R], str], plain: bool) -> int:
    """Print tables, or one JSON object with them as `text` if `plain`; return exit code 0."""
    text = render(result)
    print(json.dumps(result.to_dict() | {"text": text}) if plain else text)
    return 0
