"""Why a command fails, told on the terminal, and to torchrun, which ends with what it knows of its ranks."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

NOT_BEGUN = "stopped before training began; nothing was saved"


def tell(text: str) -> None:
    """Say it on standard error, and to torchrun."""
    say(text)
    tell_torchrun(text)


def say(text: str) -> None:
    """Say it on standard error, in one line."""
    print(f"penstock: {text}", file=sys.stderr, flush=True)


def tell_torchrun(text: str) -> None:
    """Leave what this rank ends with where torchrun looks for it; its last words are then not only a code.

    The form is that of torch.distributed.elastic's `record`, which knows exceptions alone.
    """
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place:
        more = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):  # it has been said on standard error, and the reason must not be this one
            Path(place).write_text(
                json.dumps({"message": {"message": text, "extraInfo": more}}), encoding="utf-8"
            )
