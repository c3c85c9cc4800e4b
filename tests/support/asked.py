"""`penstock train` that is asked to stop at a known place: PLACE SIGNALS, then `train CONFIG ...`.

Every rank asks itself there, as a terminal and a batch system ask all of them. Of two signals the second is a
request of its own.
"""

from __future__ import annotations

import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from penstock import stops
from penstock.checkpoint.storage import Saving
from penstock.cli import main, train_rank
from penstock.models import MoEDecoder
from penstock.stops import STOPS
from penstock.train import checkpoint, model, stopping, trainer
from penstock.train.batches import BatchStream
from penstock.train.stopping import StopRequests
from tests.support.faulty import before, wait_for_all

PLACES: dict[str, tuple[Any, str, int]] = {
    "joining": (train_rank, "join", 1),
    "building the model": (model, "build_stack", 1),
    "in the first step": (MoEDecoder, "head", 1),
    "before step 3": (BatchStream, "batch", 3),
    "in the second save": (checkpoint, "Saving", 2),
    "after step 4": (StopRequests, "agreed", 4),
    "in the last evaluation": (trainer, "evaluate", 2),
    "summing up": (trainer, "summarise", 1),
    "leaving": (train_rank, "leave", 1),
    "printing": (train_rank, "_print_summary", 1),
}
OF_ONE = {"printing"}


def ask(numbers: list[signal.Signals], folder: Path | None) -> None:
    """Raise these signals when every rank is here: one that comes later would see the others end."""
    if folder is not None:
        wait_for_all(folder)
    for number in numbers:
        signal.raise_signal(number)


class Written(Saving):
    """Writes at once, so that what was saved before a place does not depend on the disk."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.wait()


if __name__ == "__main__":
    place, names = sys.argv[1:3]
    wanted = [signal.Signals[name] for name in names.split(",")]
    stops.GRACE_S = 60.0  # on a slow machine nothing here stands still
    vars(stopping)["SAME_REQUEST_S"] = -1.0
    vars(checkpoint)["Saving"] = Written
    owner, name, calls = PLACES[place]
    before(
        owner, name, partial(ask, wanted, None if place in OF_ONE else Path(sys.argv[4]).parent), calls=calls
    )
    STOPS.hear()
    sys.exit(main(sys.argv[3:]))
