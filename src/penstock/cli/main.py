"""The command `penstock`: its subcommands and their arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType

from penstock import __version__
from penstock.cli.config import HelpSettings, add_config
from penstock.cli.listing import add_list
from penstock.cli.models import add_models
from penstock.cli.out import Parser, add, add_overrides, user_path
from penstock.cli.own import import_own, own_modules
from penstock.cli.plan import add_plan
from penstock.cli.prepare import add_prepare
from penstock.cli.report import add_report
from penstock.cli.run import BAD_USAGE, NO_RESULT, NOT_BEGUN, commands, exit_code, parse, replace_unencodable
from penstock.cli.schedule import add_schedule
from penstock.stops import STOPPED, STOPS

Commands = argparse._SubParsersAction  # argparse has no public name for it


def lab() -> ModuleType:
    """Return the lab's commands, without torch; it is loaded by name, since it is built on this package."""
    return import_module("penstock.lab.commands")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    replace_unencodable()
    every = list(sys.argv[1:] if arguments is None else arguments)
    own, given = own_modules(every)
    if code := exit_code(lambda: import_own(own)):
        return code
    parser = _parser()
    if not given:
        parser.print_help(sys.stderr)
        return BAD_USAGE
    if given[:1] == ["help"]:
        given = [*(word for word in given[1:2] if word != "help"), "--help"]
    names = list(commands(parser))
    for word in given[:1]:
        if not word.startswith("-") and word not in names:
            near = get_close_matches(word, names, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(names)}."
            parser.error(f"there is no command {word!r}. {hint}")
    options = parse(parser, given)
    return exit_code(lambda: options.run(options, every), getattr(options, "left", STOPPED))


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = Parser(
        prog="penstock",
        description="Trains mixture-of-experts transformers and overlaps communication with computation.",
        epilog="penstock help COMMAND prints the help of a command.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    add(
        parser,
        "--import MODULE",
        "import code of your own first, on every rank: it may register schedules, ops, passes and decisions "
        "(docs/extending.md); a module of this folder, or an installed one",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    add_config(commands)
    add_prepare(commands)
    add_schedule(commands)
    lab().add_bench(commands)
    add_plan(commands)
    _add_profile(commands)
    _add_doctor(commands)
    lab().add_emulate(commands)
    add_models(commands)
    add_report(commands)
    add_list(commands)
    return parser


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    train = commands.add_parser(
        "train",
        help="train a model",
        description="Trains the model that CONFIG describes. Starts local processes, or joins those that "
        "torchrun, srun or mpirun started.",
        epilog="Examples: penstock train configs/tiny.toml optimizer.lr=1e-3 train.steps=50; with tensor "
        "parallelism and sharded experts: penstock train configs/tiny.toml parallel.tp_size=2 "
        "parallel.etp_size=2. --help-settings SECTION says what the settings of a section mean, such as moe.",
    )
    add(train, "config CONFIG", "a TOML or YAML file, or tiny: the one that is shipped", type=user_path)
    add(
        train,
        "--help-settings SECTION",
        "say what every setting means, or those of a section",
        action=HelpSettings,
        nargs="?",
        const="",
    )
    add_overrides(train)
    add(train, "--json", "print only one JSON object, at the end, on stdout")
    lab().add_emulation_options(train)
    train.set_defaults(run=_train, left=NOT_BEGUN)


def _add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    profile = commands.add_parser(
        "profile",
        help="measure the cluster",
        description="Measures every collective, and the computation of a model under the real contention of "
        "all ranks; saves a cluster file, from which plans are made.",
        epilog="Example: penstock profile --emulate 2x1 --inter-rate 400mbit --out slow.json",
    )
    add(profile, "config CONFIG", "a TOML file (default: the model of penstock bench)", nargs="?")
    add_overrides(profile)
    add(profile, "--budget SECONDS", "approximate measuring time (default: 60)", type=float, default=60.0)
    add(
        profile,
        "--out FILE",
        "cluster file to write (default: cluster.json)",
        type=user_path,
        default=Path("cluster.json"),
    )
    add(profile, "--plot DIR", "draw measurements and fitted lines into DIR/profile.png", type=user_path)
    add(profile, "--json", "print only the cluster file")
    lab().add_emulation_options(profile)
    profile.set_defaults(run=_profile, left=NO_RESULT)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check a cluster before a job",
        description="Checks versions, clocks, names, interfaces, links, memory, disks and limits on all "
        "ranks, and says in one sentence each what to fix. Start it as the job itself: by torchrun, srun "
        "or with parallel.processes. Exit code 1 if something is to be fixed.",
        epilog="Example: torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint "
        "node0:29500 -m penstock doctor configs/tiny.toml",
    )
    add(doctor, "config CONFIG", "a TOML file: is there room for that run, at its output.dir?", nargs="?")
    add_overrides(doctor)
    add(
        doctor,
        "--cluster NAME|FILE",
        "a cluster file (of penstock profile, or cluster.json of a run) whose link rates are compared "
        "(default: that of plan.cluster, or beside plan.file)",
    )
    add(
        doctor, "--wait SECONDS", "how long to wait for ranks to come (default: 60)", type=float, default=60.0
    )
    add(doctor, "--json", "print one JSON object")
    _add_gpu_doctor(doctor)
    lab().add_emulation_options(doctor)
    doctor.set_defaults(run=_doctor)


def _add_gpu_doctor(doctor: argparse.ArgumentParser) -> None:
    gpu = doctor.add_argument_group(
        "checks of GPUs", "docs/gpu.md says what each stage does, and what it shows on processors."
    )
    add(
        gpu,
        "--gpu",
        "instead of all that, run real steps and exchanges in stages, each with a time limit, and say "
        "PASS, SLOW or FAIL for each",
    )
    add(
        gpu,
        "--device",
        "cpu: try the stages themselves on two processes without a GPU (default: auto, the GPUs)",
        choices=("auto", "cpu"),
    )
    add(gpu, "--stage A,B,...", "run these alone, and what they need (default: all)")
    add(gpu, "--timeout SECONDS", "time limit of every stage (default: its own)", type=float)
    add(
        gpu,
        "--out FILE",
        "file for the findings, without names; with curves it is a cluster file (default: gpu.json)",
        type=user_path,
    )


def _train(options: argparse.Namespace, given: Sequence[str]) -> int:
    with STOPS.loading():
        from penstock.cli.train import train

    cluster = lab().emulation(options)
    return train(options.config, options.overrides, given, json_wanted=options.json, emulate=cluster)


def _profile(options: argparse.Namespace, given: Sequence[str]) -> int:
    with STOPS.loading():
        from penstock.cli.profile import profile

    return profile(options, given, lab().emulation(options))


def _doctor(options: argparse.Namespace, given: Sequence[str]) -> int:
    with STOPS.loading():
        from penstock.cli.doctor import doctor

    return doctor(options, given, lab().emulation(options))
