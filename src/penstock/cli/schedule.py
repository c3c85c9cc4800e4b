"""`penstock schedule`: the grid of a schedule and its simulated timeline."""

from __future__ import annotations

import argparse
import json

from penstock.report import describe_schedule
from penstock.words import terminal_width


def print_schedule(options: argparse.Namespace) -> int:
    """Print for the terminal's width, or one JSON object."""
    description = describe_schedule(
        options.name,
        layers=options.layers,
        microbatches=options.microbatches,
        chunks=options.chunks,
        backward_chunks=options.backward_chunks,
        all_reduce_chunks=options.all_reduce_chunks,
        width=terminal_width(),
    )
    print(json.dumps(description.to_dict()) if options.json else description.to_text())
    return 0
