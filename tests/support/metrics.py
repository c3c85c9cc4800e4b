"""Records of steps for tests."""

from __future__ import annotations

from dataclasses import replace

from penstock.train.metrics import StepMetrics

EXAMPLE = StepMetrics(
    step=1,
    loss=2.5,
    learning_rate=1e-3,
    grad_norm=0.75,
    iteration_s=0.5,
    tokens_per_s=12345.6,
    exposed_communication_s=0.07,
    communication_s=1.0,
    compute_s=0.9,
    tokens_per_expert_max_over_mean=1.25,
)


def step(number: int, eval_loss: float | None = None) -> StepMetrics:
    return replace(EXAMPLE, step=number, eval_loss=eval_loss)
