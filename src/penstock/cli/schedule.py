"""`penstock schedule`: prints the grid of a schedule and its simulated timeline."""

from __future__ import annotations

import argparse
import json
from typing import get_args

from penstock.cli.out import add, whole
from penstock.config import ConfigError
from penstock.decision import PlacementConfig
from penstock.features.expert_replicas.feature import ExpertMoves
from penstock.features.sample_placement.feature import SampleMoves
from penstock.report import describe_schedule
from penstock.report.schedule import usual_sharing
from penstock.schedule import SCHEDULES
from penstock.step import Sharing
from penstock.step.shape import FORM_TOKENS, Recompute
from penstock.words import terminal_width

MOST_PIECES = 64
PIECES = whole(1, MOST_PIECES, f"must be from 1 to {MOST_PIECES}")


def add_schedule(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `penstock`."""
    schedule = commands.add_parser(
        "schedule",
        help="print a schedule",
        description="Prints the grid of a schedule and its simulated timeline. Needs no GPU and no network.",
        epilog="Example: penstock schedule flowmoe --layers 2 --microbatches 2",
    )
    add(schedule, "name NAME", ", ".join(SCHEDULES))
    add(schedule, "--layers N", "MoE layers (default: 2)", type=PIECES, default=2)
    add(schedule, "--microbatches R", "microbatches (default: 2)", type=PIECES)
    add(schedule, "--chunks C", "chunks per MoE layer (default: the schedule's)", type=PIECES)
    add(
        schedule,
        "--backward-chunks C",
        "chunks per MoE layer in the backward pass (default: same as forward)",
        type=PIECES,
    )
    add(schedule, "--all-reduce-chunks K", "chunks per layer's all-reduce (default: 4)", type=PIECES)
    own = ", ".join(name for name, system in SCHEDULES.items() if system.expert_form)
    add(schedule, "--tp-size N", f"ranks that share attention (default: 2 for {own}; else 1)", type=PIECES)
    add(schedule, "--etp-size N", "ranks that share every expert (default: as --tp-size)", type=PIECES)
    add(
        schedule,
        "--tokens",
        "what ranks that share attention have of every sample between blocks (default: split)",
        choices=dict.fromkeys(FORM_TOKENS.values()),
    )
    add(
        schedule,
        "--expert-form FORM",
        f"how rows meet all shards of their experts: {', '.join(FORM_TOKENS)} (default: gather)",
        choices=FORM_TOKENS,
    )
    planners = ", ".join(get_args(ExpertMoves))
    for option, what, kinds in (
        ("--samples", "how samples move", SampleMoves),
        ("--experts PLANNER", f"how experts move: {planners}", ExpertMoves),
        ("--recompute", "what is recomputed before its backward, to save memory", Recompute),
    ):
        add(schedule, option, f"{what} (default: none)", choices=get_args(kinds), default="none")
    add(
        schedule,
        "--replica-slots N",
        "replicas of other ranks' experts on a rank per MoE layer, where experts move (default: 1)",
        type=PIECES,
        default=1,
    )
    add(
        schedule,
        "--zero-stage",
        "1: every rank updates a share of the parameters, by tasks of the step; 2: besides, whole "
        "gradients are kept of two layers at a time (default: 0)",
        type=int,
        choices=(0, 1, 2),
        default=0,
    )
    add(schedule, "--json", "print one JSON object")
    schedule.set_defaults(run=lambda options, given: print_schedule(options))


def print_schedule(options: argparse.Namespace) -> int:
    """Print the schedule for the terminal's width, or one JSON object; return exit code 0.

    Raises:
        ConfigError: It names the option.
    """
    try:
        usual = usual_sharing(options.name)
        description = describe_schedule(
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
    except ConfigError as error:
        if not hasattr(options, error.key):
            raise
        name = f"--{error.key.replace('_', '-')}"
        raise ConfigError(name, error.value, error.why, error.hint) from error
    print(json.dumps(description.to_dict()) if options.json else description.to_text())
    return 0
