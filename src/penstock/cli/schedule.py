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
            mp_size=options.mp_size or usual.mp_size,
            esp_size=options.esp_size or usual.esp_size,
            tokens=options.tokens or usual.tokens,
        ),
        expert_form=options.expert_form,
        placement=PlacementConfig(
            samples=options.samples, experts=options.experts, guest_slots=options.guest_slots
        ),
        recompute=options.recompute,
        sharded_optimizer=options.sharded_optimizer,
        shard_gradients=options.shard_gradients,
        width=terminal_width(),
    )
