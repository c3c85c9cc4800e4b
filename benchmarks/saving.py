"""How long a checkpoint stops training, in steps: python -m benchmarks.saving [--checkout FOLDER].

A model with 659 MB of parameters and moments is trained on one process. A stop is the time between two steps
in which a checkpoint is saved, without the look at held-out text before it. Beside the time on the clock
stands that of the main thread on a processor, which no other work on the machine changes, and no disk. With
another checkout of the repository, runs of both take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

STEPS, EVERY, ROUNDS = 10, 3, 3
MB = 1e6
SETTINGS = (
    *("parallel.processes=1", f"train.steps={STEPS}", f"train.checkpoint_every={EVERY}"),
    *("model.num_layers=4", "model.hidden_size=512", "model.num_heads=8", "model.seq_len=128"),
    *("moe.num_experts=8", "moe.moe_ffn_hidden_size=1024", "data.batch_per_device=4"),
    *(
        "train.eval_every=0",
        "plan.watch=false",
        "schedule.name=flowmoe",
        "output.tensorboard=false",
        "output.loads=false",
    ),
)

Timed = tuple[float, float]
"""Seconds on the clock, and of this thread on a processor."""


def timing(work: Any, found: list[Timed]) -> Any:
    """Return a function that does the same and notes how long it took."""

    def timed(*given: Any, **named: Any) -> Any:
        wall_s, thread_s = time.perf_counter(), time.thread_time()
        result = work(*given, **named)
        found.append((time.perf_counter() - wall_s, time.thread_time() - thread_s))
        return result

    return timed


def measure(folder: Path) -> dict[str, Any]:
    """Train in this process; return medians of steps and of stops, and the size of the state."""
    import torch

    from penstock.autotune import Autotuner
    from penstock.config import load
    from penstock.topology import join, leave
    from penstock.topology.join import ALONE
    from penstock.train.config import RunConfig
    from penstock.train.trainer import Trainer

    torch.set_num_threads(1)
    text, device = folder / "text.txt", torch.device("cpu")
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(20_000)))
    (folder / "run.toml").write_text("")
    settings = [*SETTINGS, f"data.path={text}", f"output.dir={folder / 'run'}"]
    config = load(RunConfig, folder / "run.toml", settings)
    join(ALONE, 60.0, device)
    run = Trainer(config, ALONE, device, Autotuner, quiet=True)
    steps, stops = list[Timed](), list[Timed]()
    vars(run)["_step"] = timing(run._step, steps)
    save = "begin" if hasattr(run.checkpoints, "begin") else "save"
    vars(run.checkpoints)[save] = timing(getattr(run.checkpoints, save), stops)
    run.run()
    leave()
    del stops[-1]  # the last one is waited for
    newest = max((folder / "run" / "checkpoints").glob("step-*"))
    return {
        "step_s": [median(each) for each in zip(*steps[1:], strict=True)],
        "stop_s": [median(each) for each in zip(*stops, strict=True)],
        "state_mb": sum(path.stat().st_size for path in newest.iterdir()) / MB,
    }


def main() -> int:
    """Print a line for every run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, help="another checkout, whose runs take turns with these")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(Path(folder))))
        return 0
    here = Path(__file__).resolve().parents[1]
    checkouts = {"this": here} | ({"other": given.checkout.resolve()} if given.checkout else {})
    print("checkout  state   step (clock, processor)  stop (clock, processor)  in steps (clock, processor)")
    for _ in range(ROUNDS):
        for name, checkout in checkouts.items():
            environ = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}:{here}"}
            command = [sys.executable, "-m", "benchmarks.saving", "--alone"]
            done = subprocess.run(command, env=environ, cwd=here, capture_output=True, text=True, check=True)
            measured = json.loads(done.stdout.splitlines()[-1])
            step_s, stop_s = measured["step_s"], measured["stop_s"]
            print(
                f"{name:8} {measured['state_mb']:4.0f} MB  {step_s[0]:9.2f} s {step_s[1]:6.2f} s"
                f"      {stop_s[0]:9.2f} s {stop_s[1]:6.2f} s"
                f"      {stop_s[0] / step_s[0]:9.2f} {stop_s[1] / step_s[1]:6.2f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
