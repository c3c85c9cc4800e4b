"""Why a command fails, told on the terminal, and to torchrun, which ends with what it knows of its ranks.

Exit codes are the same for every subcommand. Success is 0.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from penstock.writing import write_whole

FAILED = 1
BAD_USAGE = 2
"""Wrong arguments or a setting that cannot be used."""

INTERRUPTED = 130
"""Ctrl-C before the work was done; the number is the one that shells use: 128 and that of the signal."""

NOT_BEGUN = "stopped before training began; nothing was saved"
NO_RESULT = "stopped before there was a result"


class CommandError(RuntimeError):
    """Raised when a command cannot do what it is asked to; its text is all that a user needs to read."""

    exit_code = FAILED


def tell(text: str) -> None:
    """Write `text` to standard error, and leave it for torchrun."""
    say(text)
    tell_torchrun(text)


def say(text: str) -> None:
    """Write `text` to standard error, in one line."""
    print(f"penstock: {text}", file=sys.stderr, flush=True)


def tell_torchrun(text: str) -> None:
    """Write the reason for this rank's end where torchrun looks for it, to be reported beside the code.

    The format is that of torch.distributed.elastic's `record`, which handles exceptions alone.
    """
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place:
        more = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):  # standard error has the reason already; this failure must not replace it
            write_whole(Path(place), json.dumps({"message": {"message": text, "extraInfo": more}}))
