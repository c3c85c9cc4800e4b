"""Runs of the script in turns, A B C A B C, each with processes of its own."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.launching import launch_quietly
from benchmarks.progress import PROGRESS
from benchmarks.sft.contenders import ALONE, Contender
from benchmarks.sft.prepared import Size, prepare
from benchmarks.sft.result import OneRun, SftResult
from penstock.lab.emulate import Cluster, EmulateConfig

ENVIRON: Final = {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run.

    Attributes:
        emulate: The cluster to emulate; None = `ranks` processes beside each other.
        rounds: How often every contender runs.
        steps: How many steps of a run count.
        warmup: How many steps of a run go before.
        more: Further arguments of the script.
    """

    size: Size
    contenders: Sequence[Contender]
    emulate: EmulateConfig | None
    ranks: int
    rounds: int
    steps: int
    warmup: int
    more: tuple[str, ...] = ()

    @property
    def nodes(self) -> int:
        """The nodes of the cluster."""
        return 1 if self.emulate is None else self.emulate.nodes

    def arguments(self, folder: Path, contender: Contender) -> list[str]:
        """Return the script's arguments."""
        size, ranks = self.size, 1 if contender is ALONE else self.ranks
        sizes = {"ranks": ranks, "nodes": self.nodes, "devices": ranks // self.nodes}
        given: dict[str, object] = {
            "model_name_or_path": folder / "model",
            "dataset_name": folder / "data",
            "output_dir": folder / "trained",
            "max_length": size.length,
            "per_device_train_batch_size": size.samples * self.ranks // ranks,
            "max_steps": self.warmup + self.steps,
            "learning_rate": 1e-3,
            "router_aux_loss_coef": 0,  # the balance of a rank's own samples is not that of all
            "bf16": False,
            "use_cpu": True,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        named = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        return [*named, *self.more, *contender.arguments(folder, sizes)]


def measure(plan: Plan) -> SftResult:
    """Run one process first, whose losses are the measure of all; then every contender in every round."""
    os.environ.update(ENVIRON)
    with tempfile.TemporaryDirectory(prefix="penstock-sft-") as place, ExitStack() as stack:
        folder = Path(place)
        PROGRESS.say("preparing the model")
        parameters = prepare(folder, plan.size)
        cluster = None if plan.emulate is None else stack.enter_context(Cluster(plan.emulate))
        PROGRESS.say(ALONE.name)
        alone = _run(plan, ALONE, folder, None)
        rounds: list[list[OneRun]] = []

        def result() -> SftResult:
            by_name = zip(*rounds, strict=True)
            return SftResult(
                size=plan.size,
                parameters=parameters,
                ranks=plan.ranks,
                nodes=plan.nodes,
                rate_bit_per_s=None if plan.emulate is None else plan.emulate.inter_rate_bit_per_s,
                alone=alone,
                runs={each.name: runs for each, runs in zip(plan.contenders, by_name, strict=True)},
            )

        for number in range(plan.rounds):
            measured = []
            for contender in plan.contenders:
                PROGRESS.say(f"round {number + 1} of {plan.rounds}, {contender.name}")
                measured.append(_run(plan, contender, folder, cluster))
            rounds.append(measured)
            PROGRESS.keep(result)
        return result()


def _run(plan: Plan, contender: Contender, folder: Path, cluster: Cluster | None) -> OneRun:
    """Run the script once."""
    notes, name = folder / "notes.json", "" if cluster is None else cluster.name
    rank = [sys.executable, "-m", "benchmarks.sft.rank", str(notes), str(plan.warmup), name]
    command = [*rank, str(contender.script(folder)), *plan.arguments(folder, contender)]
    launch_quietly(command, 1 if contender is ALONE else plan.ranks, cluster, folder / "said.txt")
    return OneRun(**json.loads(notes.read_text(encoding="utf-8")))
