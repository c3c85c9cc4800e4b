"""`penstock schedule`: prints the grid of a schedule and its simulated timeline."""

from __future__ import annotations

import argparse
import json

from penstock.config import ConfigError
from penstock.decision import PlacementConfig
from penstock.report import ScheduleDescription, describe_schedule
from penstock.report.schedule import usual_sharing
from penstock.step import Sharing
from penstock.words import terminal_width


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
