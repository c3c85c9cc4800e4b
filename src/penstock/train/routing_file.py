"""Records how a run's tokens are routed, in `routing.jsonl`, for virtual devices and planners to replay.

Shapes: B samples, Y MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from penstock.config import ConfigError
from penstock.runtime import PipelinedStack
from penstock.runtime.statistics import SampleLoads
from penstock.topology import Control, Layout
from penstock.train.config import RunConfig
from penstock.train.output import written
from penstock.workloads import RecordedModel, RoutingRecorder
from penstock.writing import LineFile

ROUTING_FILE = "routing.jsonl"
Whole = npt.NDArray[np.int64]
Known = tuple[Whole, Whole]
"""Numbers of samples, and their loads [B, E]."""


class RoutingFile:
    """Writes, on rank 0, the loads of each step; with `routing_samples` also those of every sample.

    Samples' loads are gathered outside the step. done: steps done before; records of later steps are dropped.
    """

    def __init__(self, config: RunConfig, control: Control, layout: Layout, done: int) -> None:
        self._control = control
        self._samples = config.output.routing_samples
        self._recorder: RoutingRecorder | None = None
        self.records: list[LineFile] = []
        if layout.rank == 0:
            model = RecordedModel(
                moe_layers=sum(config.model.is_moe(layer) for layer in range(config.model.num_layers)),
                num_experts=config.moe.num_experts,
                top_k=config.moe.top_k,
                experts_choose=config.moe.kind == "expert",
            )
            path = config.output.dir / ROUTING_FILE
            try:
                self._recorder = RoutingRecorder(path, model, resume_step=done)
            except ConfigError as error:
                why = f"{path} cannot be continued: it {error.why}"
                raise ConfigError(
                    "output.routing", True, why, "Mend the line, or move the file away."
                ) from error
            self.records.append(self._recorder.file)

    def record(self, step: int, stack: PipelinedStack) -> None:
        """Record the step; with samples this costs an exchange of all their loads."""
        listed = None
        if self._samples:
            mine = [_of_layer(layer) for layer in stack.loads.of_samples]
            everyone = self._control.gather(mine, "collecting how samples were routed")
            listed = [sample.tolist() for sample in _joined(everyone)]
        if self._recorder is not None:
            assert stack.statistics is not None, "a step has ended"
            with written(self._recorder.file.path):
                self._recorder.write(step, stack.statistics.chosen_YE.tolist(), listed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._recorder is not None:
            self._recorder.close()


def _of_layer(microbatches: Sequence[SampleLoads]) -> Known:
    return (
        np.concatenate([each.ids_B.cpu().numpy() for each in microbatches]),
        np.concatenate([each.chosen_BE.cpu().numpy() for each in microbatches]),
    )


def _joined(everyone: Sequence[Sequence[Known]]) -> Whole:
    """Return the loads of all samples, [B, Y, E], in the order of ranks in the first layer.

    Every layer may hold a sample on another rank, and several ranks may share it.
    """
    layers = [tuple(map(np.concatenate, zip(*ranks, strict=True))) for ranks in zip(*everyone, strict=True)]
    place = {number: i for i, number in enumerate(dict.fromkeys(layers[0][0].tolist()))}
    found = np.zeros((len(place), len(layers), layers[0][1].shape[1]), dtype=np.int64)
    for layer, (ids_B, chosen_BE) in enumerate(layers):
        np.add.at(found[:, layer], [place[number] for number in ids_B.tolist()], chosen_BE)
    return found
