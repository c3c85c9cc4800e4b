"""One rank: TRL's script, run as it is, whose steps a callback of Trainer notes.

python -m benchmarks.sft.rank NOTES WARMUP CLUSTER SCRIPT ARGUMENTS...
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, trainer
from transformers.utils import output_capturing

from penstock.lab.emulate import open_cluster


class Notes(TrainerCallback):
    """The notes of rank 0.

    Attributes:
        path: The file that gets them.
        warmup: How many steps go before those that count.
        cluster: The name of the emulated cluster; "" = there is none.
        times_s: Seconds of the steps behind the warm-up.
        losses, norms: Losses and norms of gradients of all steps.
    """

    def __init__(self, path: Path, warmup: int, cluster: str) -> None:
        self.path, self.warmup, self.cluster = path, warmup, cluster
        self.times_s: list[float] = []
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.start_s, self.before = 0.0, [0]

    def on_step_begin(self, _args: Any, state: TrainerState, *_: Any, **_more: Any) -> None:
        """Start the clock; behind the warm-up read the counters first."""
        if len(self.times_s) == self.warmup and state.is_world_process_zero:
            self.before = self._crossed()
        self.start_s = time.perf_counter()

    def on_step_end(self, *_: Any, **_more: Any) -> None:
        """Note the seconds."""
        self.times_s.append(time.perf_counter() - self.start_s)

    def on_log(self, *_: Any, logs: dict[str, float], **_more: Any) -> None:
        """Note what Trainer logs of a step."""
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.norms.append(logs["grad_norm"])

    def on_train_end(self, _args: Any, state: TrainerState, *_: Any, **_more: Any) -> None:
        """Write the notes."""
        if not state.is_world_process_zero:
            return
        crossed = [after - before for before, after in zip(self.before, self._crossed(), strict=True)]
        times_s = self.times_s[self.warmup :]
        sent = max(crossed) / len(times_s)
        notes = {"times_s": times_s, "losses": self.losses, "norms": self.norms, "uplink_bytes": sent}
        self.path.write_text(json.dumps(notes), encoding="utf-8")

    def _crossed(self) -> list[int]:
        if not self.cluster:
            return [0]
        uplinks = open_cluster(self.cluster).bytes_sent()
        return [count for each in uplinks for count in (each.sent_bytes, each.received_bytes)]


def accept_defaults() -> None:
    """Let transformers' registry of recorded outputs take `get(name, default)`, as every dict does.

    AutoEP of DeepSpeed 0.19.8 calls it so, and with transformers 5.24 ends in `TypeError:
    _CanRecordRegistry.get() takes 2 positional arguments but 3 were given`.
    """

    def get(self: dict[str, Any], model: Any, default: Any = None) -> Any:
        recorded = dict.get(self, model if isinstance(model, str) else str(model.__class__))
        return recorded or ({} if default is None else default)

    output_capturing._CanRecordRegistry.get = get


def main() -> None:
    """Run the script."""
    notes, warmup, cluster, *sys.argv = sys.argv[1:]
    trainer.DEFAULT_CALLBACKS.append(Notes(Path(notes), int(warmup), cluster))
    accept_defaults()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
