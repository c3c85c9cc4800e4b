"""`python -m benchmarks.trained`: samples and experts that move, in real training on the wall clock.

A small model learns very different texts without a balance loss, so that experts become specialists and some
of them popular. Every contender then continues from that checkpoint, on 2 emulated nodes of 1 device, by the
same schedule: nothing moves, samples move, experts do, both. They take turns, and their losses are compared.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from benchmarks.command import parser_of, run_alone
from benchmarks.launching import launch_quietly
from benchmarks.mixed_text import write_texts
from penstock.lab.bench.config import Named
from penstock.lab.bench.result import Spread
from penstock.lab.emulate import Cluster, EmulateConfig
from penstock.words import markdown_table

CONTENDERS: Final = (
    "flowmoe",
    "flowmoe+netmoe",
    "flowmoe+least_loaded",
    "flowmoe+planned",
    "flowmoe+netmoe+planned",
)
RATES: Final = (200e6,)
"""Between nodes, bit/s."""

ROUNDS: Final = 3
LEARNT_STEPS: Final = 150
STEPS: Final = 14
"""That every contender adds in a turn; the first `WARM_UP` do not count."""
WARM_UP: Final = 4

SETTINGS: Final = (
    *("model.num_layers=4", "model.hidden_size=128", "model.num_heads=4", "model.seq_len=128"),
    *("moe.num_experts=8", "moe.top_k=2", "moe.moe_ffn_hidden_size=512", "moe.aux_loss_coeff=0"),
    *("parallel.processes=2", "data.batch_per_device=16", "schedule.microbatches=2"),
    *("optimizer.lr=3e-3", "optimizer.warmup_steps=20"),
    *("train.eval_every=0", "train.checkpoint_every=0", "output.tensorboard=false", "output.trace_steps=0"),
)


@dataclass(frozen=True, kw_only=True)
class TrainedCase:
    """One contender on one link.

    Attributes:
        iterations_s: The median iteration of each round.
        speedup: Speed-up over the first contender, round by round.
        uplink_bytes: Bytes of a step in the busiest direction.
        imbalance: The busiest rank's rows over the mean, by owner of the expert, before any replica helps.
        loss: The loss of the last step of the last round.
    """

    rate_bit_per_s: float
    name: str
    iterations_s: tuple[float, ...]
    speedup: Spread
    uplink_bytes: float
    imbalance: float
    crossing: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class TrainedResult:
    """All contenders, one link after the other."""

    trained: tuple[TrainedCase, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """What one contender's run says of its steps, and what its uplink carried in each."""

    steps: list[dict[str, Any]]
    uplink_bytes: float

    @property
    def iteration_s(self) -> float:
        return float(median(step["iteration_s"] for step in self.steps[WARM_UP:]))

    def mean(self, key: str) -> float:
        """Return the mean over the counted steps and all layers; of steps that say nothing, 0."""
        means = [fmean(step[key]) for step in self.steps[WARM_UP:] if step.get(key)]
        return fmean(means) if means else 0.0


def measure() -> TrainedResult:
    """Measure all contenders on every link; minutes. Linux, root.

    Raises:
        ProgramFailedError: If a run fails; ends with what the run said.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-trained-") as name:
        folder = Path(name)
        (folder / "texts").mkdir()
        write_texts(folder / "texts")
        (folder / "config.toml").write_text("", encoding="utf-8")
        learnt = folder / "learnt"
        fast = EmulateConfig(nodes=2, devices=1, inter_rate_bit_per_s=10e9)
        _train(folder, learnt, fast, (f"train.steps={LEARNT_STEPS}", "schedule.name=flowmoe"))
        cases = [case for rate in RATES for case in _on_link(folder, learnt, rate)]
    return TrainedResult(trained=tuple(cases))


def _on_link(folder: Path, learnt: Path, rate: float) -> list[TrainedCase]:
    emulate = EmulateConfig(nodes=2, devices=1, inter_rate_bit_per_s=rate)
    turns: dict[str, list[_Turn]] = {name: [] for name in CONTENDERS}
    for _ in range(ROUNDS):
        for name, taken in turns.items():
            taken.append(_continue(folder, learnt, emulate, name))
    base = [turn.iteration_s for turn in turns[CONTENDERS[0]]]
    return [_summary(name, rate, taken, base) for name, taken in turns.items()]


def _summary(name: str, rate: float, turns: Sequence[_Turn], base: Sequence[float]) -> TrainedCase:
    seconds = tuple(turn.iteration_s for turn in turns)
    return TrainedCase(
        rate_bit_per_s=rate,
        name=name,
        iterations_s=seconds,
        speedup=Spread.of([first / own for first, own in zip(base, seconds, strict=True)]),
        uplink_bytes=median(turn.uplink_bytes for turn in turns),
        imbalance=fmean(turn.mean("rank_rows_max_over_mean") for turn in turns),
        crossing=fmean(turn.mean("rows_crossing_nodes") for turn in turns),
        loss=turns[-1].steps[-1]["loss"],
    )


def _continue(folder: Path, learnt: Path, emulate: EmulateConfig, name: str) -> _Turn:
    """Run some more steps of the learnt model, as `name` says, in a folder that goes away."""
    named, output = Named.of(name), folder / "turn"
    shutil.copytree(learnt, output)
    own = (
        *(f"schedule.name={named.schedule}", f"placement.samples={named.samples}"),
        *(f"placement.experts={named.experts}", "train.resume=true", f"train.steps={LEARNT_STEPS + STEPS}"),
    )
    try:
        return _train(folder, output, emulate, own)
    finally:
        shutil.rmtree(output)


def _train(folder: Path, output: Path, emulate: EmulateConfig, own: Sequence[str]) -> _Turn:
    places = (f"data.path={folder / 'texts'}", f"output.dir={output}")
    command = (sys.executable, "-m", "penstock", "train", str(folder / "config.toml"))
    before = _count(output / "metrics.jsonl")
    whole = [*command, *SETTINGS, *places, *own]
    with Cluster(emulate) as cluster:
        launch_quietly(whole, emulate.shape.ranks, cluster, folder / "said.txt")
        sent = max(link.sent_bytes for link in cluster.bytes_sent())
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[before:]
    return _Turn(steps=[json.loads(line) for line in lines], uplink_bytes=sent / len(lines))


def _count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def render_trained(result: TrainedResult) -> str:
    """Return a Markdown table, and how far losses are apart."""
    head = (
        "link",
        "contender",
        "iteration ms",
        "speed-up [95 %]",
        "uplink MB",
        "rows crossing",
        "busiest rank",
    )
    rows = [head, *(_row(case) for case in result.trained)]
    losses = [case.loss for case in result.trained]
    apart = max(losses) / min(losses) - 1
    about = (
        f"Iterations are medians of {STEPS - WARM_UP} steps, then of {ROUNDS} rounds. Uplink bytes include "
        f"start and checkpoint. Busiest rank: rows for the experts that it owns, over the mean of all ranks. "
        f"Losses at the end, {losses[0]:.4f}, differ by {apart:.1e} (relative; rounding)."
    )
    return "\n".join([*markdown_table(rows), "", about])


def _row(case: TrainedCase) -> tuple[str, ...]:
    speedup = case.speedup
    return (
        f"{case.rate_bit_per_s / 1e6:.0f} Mbit/s",
        case.name,
        f"{1e3 * median(case.iterations_s):.0f}",
        f"{speedup.median:.2f} [{speedup.low:.2f}, {speedup.high:.2f}]",
        f"{case.uplink_bytes / 1e6:.1f}",
        f"{100 * case.crossing:.0f} %",
        f"{case.imbalance:.2f}",
    )


if __name__ == "__main__":
    about = "Trains with samples and experts that stay, and that move. Linux, root, ten minutes."
    run_alone(parser_of("trained", about), lambda _: measure(), render_trained)
