"""`penstock schedule`: prints the grid of a schedule and its simulated timeline."""

from __future__ import annotations

import argparse
import json
from typing import get_args

from penstock.config import ConfigError, shorten
from penstock.decision import PlacementConfig
from penstock.features.expert_replicas.feature import ExpertMoves
from penstock.features.sample_placement.feature import SampleMoves
from penstock.report import ScheduleDescription, describe_schedule
from penstock.report.schedule import usual_sharing
from penstock.schedule import SCHEDULES
from penstock.step import Sharing
from penstock.step.shape import FORM_TOKENS, Recompute
from penstock.words import terminal_width, whole_number

MOST_PIECES = 64


def add_schedule(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `penstock`."""
    schedule = commands.add_parser(
        "schedule",
        help="print a schedule",
        description="Prints the grid of a schedule and its simulated timeline. Needs no GPU and no network.",
        epilog="Example: penstock schedule flowmoe --layers 2 --microbatches 2",
    )
    schedule.add_argument("name", metavar="NAME", help=", ".join(SCHEDULES))
    schedule.add_argument("--layers", type=_count, default=2, metavar="N", help="MoE layers (default: 2)")
    schedule.add_argument("--microbatches", type=_count, metavar="R", help="microbatches (default: 2)")
    schedule.add_argument(
        "--chunks", type=_count, metavar="C", help="chunks per MoE layer (default: the schedule's)"
    )
    schedule.add_argument(
        "--backward-chunks",
        type=_count,
        metavar="C",
        help="chunks per MoE layer in the backward pass (default: same as forward)",
    )
    schedule.add_argument(
        "--all-reduce-chunks",
        type=_count,
        metavar="K",
        help="chunks per layer's all-reduce (default: 4)",
    )
    own = ", ".join(name for name, system in SCHEDULES.items() if system.expert_form)
    schedule.add_argument(
        "--tp-size",
        type=_count,
        metavar="N",
        help=f"ranks that share attention (default: 2 for {own}; else 1)",
    )
    schedule.add_argument(
        "--etp-size", type=_count, metavar="N", help="ranks that share every expert (default: as --tp-size)"
    )
    schedule.add_argument(
        "--tokens",
        choices=dict.fromkeys(FORM_TOKENS.values()),
        help="what ranks that share attention have of every sample between blocks (default: split)",
    )
    schedule.add_argument(
        "--expert-form",
        choices=FORM_TOKENS,
        metavar="FORM",
        help=f"how rows meet all shards of their experts: {', '.join(FORM_TOKENS)} (default: gather)",
    )
    schedule.add_argument(
        "--samples", choices=get_args(SampleMoves), default="none", help="how samples move (default: none)"
    )
    schedule.add_argument(
        "--experts",
        choices=get_args(ExpertMoves),
        default="none",
        metavar="PLANNER",
        help=f"how experts move: {', '.join(get_args(ExpertMoves))} (default: none)",
    )
    schedule.add_argument(
        "--replica-slots",
        type=_count,
        default=1,
        metavar="N",
        help="replicas of other ranks' experts on a rank per MoE layer, where experts move (default: 1)",
    )
    schedule.add_argument(
        "--recompute",
        choices=get_args(Recompute),
        default="none",
        help="what is recomputed before its backward, to save memory (default: none)",
    )
    schedule.add_argument(
        "--zero-stage",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="1: every rank updates a share of the parameters, by tasks of the step; 2: besides, whole "
        "gradients are kept of two layers at a time (default: 0)",
    )
    schedule.add_argument("--json", action="store_true", help="print one JSON object")
    schedule.set_defaults(run=lambda options, given: print_schedule(options))


def _count(text: str) -> int:
    number = whole_number(text)
    if number is None or not 1 <= number <= MOST_PIECES:
        raise argparse.ArgumentTypeError(f"{shorten(text)!r}: must be from 1 to {MOST_PIECES}")
    return number


def print_schedule(options: argparse.Namespace) -> int:
    """Print the schedule for the terminal's width, or one JSON object; return exit code 0.

    Raises ConfigError that names the option.
    """
    try:
        description = _described(options)
    except ConfigError as error:
        if not hasattr(options, error.key):
            raise
        name = f"--{error.key.replace('_', '-')}"
        raise ConfigError(name, error.value, error.why, error.hint) from error
    print(json.dumps(description.to_dict()) if options.json else description.to_text())
    return 0


def _described(options: argparse.Namespace) -> ScheduleDescription:
    usual = usual_sharing(options.name)
    return describe_schedule(
        options.name,
        layers=options.layers,
        microbatches=options.microbatches,
        chunks=options.chunks,
        backward_chunks=options.backward_chunks,
        all_reduce_chunks=options.all_reduce_chunks,
        sharing=Sharing(
            tp_size=options.tp_size or usual.tp_size,
            etp_size=options.etp_size or usual.etp_size,
            tokens=options.tokens or usual.tokens,
        ),
        expert_form=options.expert_form,
        placement=PlacementConfig(
            samples=options.samples, experts=options.experts, replica_slots=options.replica_slots
        ),
        recompute=options.recompute,
        zero_stage=options.zero_stage,
        width=terminal_width(),
    )
