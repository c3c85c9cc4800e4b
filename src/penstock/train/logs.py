"""Opens what a run's metrics are written to in addition to its own file, as its settings require."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config import to_dict
from penstock.extras import is_there
from penstock.train.config import RunConfig
from penstock.train.curves import ScalarLog, TensorBoard
from penstock.train.wandb_sink import open_wandb


def open_logs(config: RunConfig, layers: Sequence[int], first: int) -> list[ScalarLog]:
    """Open the logs, on one rank. layers: numbers of the MoE layers. first: steps that were done before.

    Raises ConfigError if one of them cannot be opened.
    """
    output, logs = config.output, list[ScalarLog]()
    if output.tensorboard and is_there("tensorboard"):
        logs.append(TensorBoard(output.dir, first, layers))
    if config.metrics.wandb:
        logs.append(open_wandb(config.metrics, output.dir, to_dict(config), layers, resumes=first > 0))
    return logs
