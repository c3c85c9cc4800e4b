"""Measures what ends an iteration on all ranks at once: the norm of gradients, clipping, and AdamW."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from penstock.autotune.profile.sample import Action, Budget, measure_sizes
from penstock.cost import ClusterConfig
from penstock.cost.cluster_file import Fit, TaskModel
from penstock.cost.fit import fit_line
from penstock.features.sharded_optimizer.feature import UPDATE_COPIES, UPDATES
from penstock.graph import Phase
from penstock.train.optimizer import OptimizerConfig, build_adamw, initialise_state, set_learning_rate

MOST_BYTES = 1 << 28
"""Most bytes of parameters that are updated; gradient and moments take three times as many beside them."""

SHARE = 0.1
"""Share of a budget that updates may take."""

PIECES = (1, 4, 2)
"""Divisors of what is updated, in the order of how much they tell."""


def measure_updates(
    parameters: Sequence[nn.Parameter],
    config: OptimizerConfig,
    rates: ClusterConfig,
    budget: Budget,
    device: torch.device,
) -> tuple[TaskModel, ...]:
    """Return models of the updates of all kinds of gradients; none where the budget is `late`.

    parameters: of a few layers as a run has them; their number counts beside their bytes. They keep their
    values, and have no gradient afterwards. All ranks call this together and get the same.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return ()
    until = list(accumulate(parameter.nbytes for parameter in trained))
    most = min(MOST_BYTES, until[-1])
    sizes = dict.fromkeys(next(end for end in until if end >= most // pieces) for pieces in PIECES)

    def make(size: int) -> Action:
        return _update_of(trained[: until.index(size) + 1], config)

    points = measure_sizes(make, list(sizes), budget, SHARE * budget.left_s, device=device)
    nominal = [(rates.nominal_s(0.0, UPDATE_COPIES * size), seconds) for size, seconds in points]
    if not nominal:
        return ()
    line = fit_line(nominal)
    fit = Fit(r2=line.r2, residual=line.residual, points=tuple(sorted(nominal)))
    return tuple(
        TaskModel(op=op, phase=Phase.BACKWARD, alpha_s=line.alpha_s, scale=line.beta, fit=fit)
        for op in sorted(UPDATES)
    )


def _update_of(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> Action:
    """Return the end of an iteration of these parameters, without a change of any."""
    limit = math.inf if config.clip_grad_norm is None else config.clip_grad_norm
    copies = [nn.Parameter(parameter.detach()) for parameter in parameters]  # gradients apart, no weights
    adamw = build_adamw([(str(place), copy) for place, copy in enumerate(copies)], config)
    initialise_state(adamw)
    set_learning_rate(adamw, 0.0)
    gradients = [torch.ones_like(copy) for copy in copies]  # zeros would be one page, read again and again
    for copy, gradient in zip(copies, gradients, strict=True):
        copy.grad = gradient

    def update() -> None:
        # get_total_norm would meet other ranks where a model has distributed tensors
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        nn.utils.clip_grads_with_norm_(copies, limit, norm)
        adamw.step()

    return update
