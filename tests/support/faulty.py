"""`penstock train` where one rank gets into trouble at a known place: PLACE RANK, then `train CONFIG ...`."""

# ruff: noqa: TID251 - ranks sleep for ever, or until all are there

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from penstock.cli import main
from penstock.models import MoEDecoder
from penstock.train import checkpoint
from penstock.train.batches import BatchStream
from penstock.train.stopping import StopRequests

AT_STEP = 3


def stop(*given: Any) -> None:
    """Stop this process, as a signal from outside would."""
    del given
    os.kill(os.getpid(), signal.SIGSTOP)


def loop(*given: Any) -> None:
    """Run, and never come back."""
    del given
    while True:
        time.sleep(0.1)


def fail(*given: Any) -> None:
    del given
    raise ZeroDivisionError("a fault of this rank alone")


def before(owner: Any, name: str, trouble: Any, *, calls: int) -> None:
    """Call `trouble` before the `calls`-th call of a method or function."""
    original, seen = getattr(owner, name), [0]

    def replaced(*given: Any, **more: Any) -> Any:
        seen[0] += 1
        if seen[0] == calls:
            trouble()
        return original(*given, **more)

    setattr(owner, name, replaced)


PLACES = {
    "stopped in a step": (MoEDecoder, "head", stop, AT_STEP),
    "stopped at the vote": (StopRequests, "agreed", stop, AT_STEP),
    "stopped in a save": (checkpoint, "Saving", stop, 1),
    "loading for ever": (BatchStream, "batch", loop, AT_STEP),
    "fails in a task": (MoEDecoder, "head", fail, AT_STEP),
}


def wait_for_all(folder: Path) -> None:
    """Until every rank has imported what it needs: a short timeout must not count that."""
    (folder / f"ready{os.environ['RANK']}").touch()
    while len(list(folder.glob("ready*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)


if __name__ == "__main__":
    place, rank = sys.argv[1:3]
    wait_for_all(Path(sys.argv[4]).parent)
    if os.environ["RANK"] == rank:
        owner, name, trouble, calls = PLACES[place]
        before(owner, name, trouble, calls=calls)
    sys.exit(main(sys.argv[3:]))
