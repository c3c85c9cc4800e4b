"""Arguments of the command, and what becomes of errors."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock import __version__
from penstock.cli.codes import BAD_USAGE, FAILED, INTERRUPTED
from penstock.cli.emulate import add_emulate, add_emulation_options, emulation
from penstock.cli.plan import add_plan
from penstock.config import ConfigError
from penstock.emulate import EmulationError, EmulationUnavailable
from penstock.emulate.system import check_available
from penstock.graph import ScheduleError
from penstock.schedule import SCHEDULES

MOST_PIECES = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parse(given)
    try:
        code: int = options.run(options, given)
        return code
    except (ConfigError, ScheduleError, EmulationUnavailable) as error:
        print(f"penstock: {error}", file=sys.stderr)
        return BAD_USAGE
    except EmulationError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `penstock schedule ... | head` is no failure of ours
        sys.stderr.close()
        return 0


def _parse(given: list[str]) -> argparse.Namespace:
    """Settings may stand before and behind options: argparse alone takes them in one place only."""
    parser = _parser()
    options, rest = parser.parse_known_args(given)
    if rest and (not hasattr(options, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Trains mixture-of-experts transformers and hides the network behind computation.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_schedule(commands)
    _add_bench(commands)
    add_plan(commands)
    _add_profile(commands)
    add_emulate(commands)
    return parser


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    train = commands.add_parser(
        "train",
        help="train a model",
        description="Trains what CONFIG describes. Starts local processes itself, or joins those that "
        "torchrun or Slurm started.",
        epilog="Example: penstock train configs/tiny.toml optimizer.lr=1e-3 train.steps=50",
    )
    train.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file such as configs/tiny.toml")
    train.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="settings that win over it"
    )
    train.add_argument("--json", action="store_true", help="end with one JSON object on stdout, nothing else")
    add_emulation_options(train)
    train.set_defaults(run=_train)


def _add_schedule(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    schedule = commands.add_parser(
        "schedule",
        help="print a schedule",
        description="Prints the grid of a schedule and its simulated timeline. Needs no GPU and no network.",
        epilog="Example: penstock schedule flowmoe --layers 2 --microbatches 2",
    )
    schedule.add_argument("name", metavar="NAME", help=", ".join(SCHEDULES))
    schedule.add_argument("--layers", type=_count, default=2, metavar="N", help="MoE layers (2)")
    schedule.add_argument("--microbatches", type=_count, default=2, metavar="R", help="microbatches (2)")
    schedule.add_argument(
        "--chunks", type=_count, metavar="C", help="chunks per MoE layer (the schedule's usual)"
    )
    schedule.add_argument(
        "--backward-chunks", type=_count, metavar="C", help="the same on the way back (as many as forward)"
    )
    schedule.add_argument(
        "--all-reduce-chunks", type=_count, default=4, metavar="K", help="chunks per layer's all-reduce (4)"
    )
    schedule.add_argument("--json", action="store_true", help="print one JSON object")
    schedule.set_defaults(run=_schedule)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser(
        "bench",
        help="compare schedules",
        description="Runs schedules in turns on the same shapes and seeds, and says how near each comes to "
        "what the hardware allows.",
        epilog="Example: penstock bench --emulate 2x1 --inter-rate 400mbit --schedules sequential,flowmoe",
    )
    bench.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="settings that win"
    )
    bench.add_argument("--config", type=Path, metavar="FILE", help="a TOML file; default: built in")
    bench.add_argument("--schedules", metavar="A,B,...", help="what to compare; the first is the base")
    bench.add_argument(
        "--peers", metavar="A,B,...", help="other systems to compare with: deepspeed, megatron"
    )
    bench.add_argument(
        "--virtual",
        action="store_true",
        help="sleep instead of computing: more ranks than cores, see [virtual]",
    )
    part = bench.add_mutually_exclusive_group()
    for name, text in (
        ("collectives", "measure the transport alone: how near it comes to the wire"),
        ("dispatch", "measure ways to dispatch: flat and hierarchical, small messages and large ones"),
        ("layer", "measure the MoE layer in one process, beside other implementations"),
        ("plan", "profile, choose a plan, and measure it beside four published ones"),
        ("drift", "train while the network or a rank gets slower; Linux, root, minutes"),
        ("published", "the layers of the FSMoE and FlowMoE studies, by simulation"),
    ):
        part.add_argument(f"--{name}", action="store_const", const=name, dest="subject", help=text)
    bench.set_defaults(subject="schedules")
    bench.add_argument("--plot", type=Path, metavar="DIR", help="write figures (PNG) and a page there")
    bench.add_argument(
        "--suite", type=Path, metavar="DIR", help="run all that BENCHMARKS.md shows, and write it there"
    )
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    add_emulation_options(bench)
    bench.set_defaults(run=_bench)


def _add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    profile = commands.add_parser(
        "profile",
        help="measure the cluster",
        description="Measures every collective, and the computation of a model under the real contention of "
        "all ranks; saves a cluster file, which plans are made from.",
        epilog="Example: penstock profile --emulate 2x1 --inter-rate 400mbit --out slow.json",
    )
    profile.add_argument(
        "config", nargs="?", metavar="CONFIG", help="a TOML file; default: the model of penstock bench"
    )
    profile.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="settings that win over it"
    )
    profile.add_argument(
        "--budget", type=float, default=60.0, metavar="SECONDS", help="how long, roughly (60)"
    )
    profile.add_argument(
        "--out", type=Path, default=Path("cluster.json"), metavar="FILE", help="where to (cluster.json)"
    )
    profile.add_argument("--plot", type=Path, metavar="DIR", help="draw points and lines there, as PNG")
    profile.add_argument("--json", action="store_true", help="print the cluster file, nothing else")
    add_emulation_options(profile)
    profile.set_defaults(run=_profile)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_PIECES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of pieces; use 1 or more, {MOST_PIECES} at most"
        )
    return int(text)


def _train(options: argparse.Namespace, given: Sequence[str]) -> int:
    from penstock.cli.train import train

    cluster = emulation(options)
    return train(options.config, options.overrides, given, json_wanted=options.json, emulate=cluster)


def _bench(options: argparse.Namespace, given: Sequence[str]) -> int:
    from penstock.cli.bench import Wanted, bench, suite

    if options.suite is not None:
        _check_alone(given)
        return suite(options.suite)
    chosen = {"schedules": options.schedules, "peers": options.peers}
    overrides = [f"compare.{k}={json.dumps(v.split(','))}" for k, v in chosen.items() if v is not None]
    wanted = Wanted(
        json=options.json,
        virtual=options.virtual,
        subject=options.subject,
        plot=options.plot,
        peers=options.peers is not None,
    )
    return bench(options.config, [*options.overrides, *overrides], given, wanted, emulation(options))


def _profile(options: argparse.Namespace, given: Sequence[str]) -> int:
    from penstock.cli.profile import Wanted, profile

    words = [*([] if options.config is None else [options.config]), *options.overrides]
    path = Path(words.pop(0)) if words and "=" not in words[0] else None  # argparse takes what comes first
    wanted = Wanted(budget_s=options.budget, out=options.out, plot=options.plot, json=options.json)
    return profile(path, words, given, wanted, emulation(options))


def _check_alone(given: Sequence[str]) -> None:
    """Refuse `--suite` with anything else: it would run for fifty minutes and ignore it."""
    taken = ["bench", "--suite"] if "--suite" in given else ["bench"]
    more = [word for word in given if word not in taken and not word.startswith("--suite=")]
    if len(more) > ("--suite" in given):
        why = "runs a fixed list and takes no other options or settings"
        raise ConfigError("--suite", " ".join(given[1:]), why, "Leave everything but --suite DIR out.")
    check_available()


def _schedule(options: argparse.Namespace, given: Sequence[str]) -> int:
    del given
    from penstock.cli.schedule import print_schedule

    return print_schedule(options)
