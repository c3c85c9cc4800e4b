"""Measures kinds of computation by themselves, on all ranks at once: kernels, and the end of an iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.autotune.profile.sample import Action, Budget, Limits, fitted, measure_sizes
from penstock.cost import ClusterConfig
from penstock.cost.cluster_file import PRODUCT, KernelModel, TaskModel
from penstock.features.sharded_optimizer.feature import UPDATE_COPIES, UPDATES
from penstock.graph import Phase
from penstock.models.decoder import attended
from penstock.placement import ExpertPlacement
from penstock.runtime import Machinery
from penstock.train.config import RunConfig
from penstock.train.optimizer import OptimizerConfig, build_adamw, initialise_state, set_learning_rate

PIECES = (1, 4, 2, 8)
"""Divisors of the size of a whole batch, in the order of how much they tell."""


@dataclass(frozen=True)
class Kernel:
    """One kind of computation.

    Attributes:
        unit: What the work is counted in.
        size: Size of the computation on a whole batch.
        work: Operations or bytes for each of this size.
        make: Returns the computation at some size, which is timed.
    """

    name: str
    unit: Literal["flop", "byte"]
    size: int
    work: float
    make: Callable[[int], Action]


def measure_kernels(
    config: RunConfig, machinery: Machinery, dtype: torch.dtype, budget_s: float, limits: Limits
) -> tuple[KernelModel, ...]:
    """Measure kernels, with the same result on all ranks, which call it together; as many as the time allows.

    Args:
        dtype: Type of what is computed with.
        budget_s: Seconds for all kernels together.
        limits: What else ends measuring.
    """
    budget = Budget(machinery.control, budget_s, limits)
    kernels = list(_kernels(config, machinery, dtype))
    models = []
    for left, kernel in zip(range(len(kernels), 0, -1), kernels, strict=True):
        sizes, share_s = [max(1, kernel.size // pieces) for pieces in PIECES], budget.left_s / left
        unlike = tuple(dict.fromkeys(sizes))
        points = measure_sizes(kernel.make, unlike, budget, share_s, device=machinery.device, least=3)
        if not points:
            break
        line, fit = fitted((kernel.work * size, seconds) for size, seconds in points)
        models.append(
            KernelModel(
                name=kernel.name, unit=kernel.unit, alpha_s=line.alpha_s, beta_s_per_unit=line.beta, fit=fit
            )
        )
    return tuple(models)


def rates_of(assumed: ClusterConfig, kernels: tuple[KernelModel, ...]) -> ClusterConfig:
    """Return the rates of matrix products and of copies as measured, the others as assumed."""
    rates = {kernel.name: 1 / kernel.beta_s_per_unit for kernel in kernels}
    return assumed.measured(
        flops_per_s=rates.get(PRODUCT, assumed.flops_per_s),
        memory_bytes_per_s=rates.get("copy", assumed.memory_bytes_per_s),
    )


def _kernels(config: RunConfig, machinery: Machinery, dtype: torch.dtype) -> Iterator[Kernel]:
    shapes, model, moe = _Shapes(config, machinery, dtype), config.model, config.moe
    row_bytes = shapes.hidden * dtype.itemsize
    choices_bytes = shapes.k * row_bytes
    product_flop = 2.0 * shapes.hidden * moe.moe_ffn_hidden_size
    attention_flop = 2.0 * model.seq_len**2 * model.attention_size
    yield Kernel(PRODUCT, "flop", shapes.rows_per_expert, product_flop, shapes.matmul)
    yield Kernel("copy", "byte", 2 * shapes.tokens * shapes.k, row_bytes, shapes.copy)
    yield Kernel("attention", "flop", config.data.batch_per_device, attention_flop, shapes.attention)
    yield Kernel("permute", "byte", shapes.tokens, choices_bytes, shapes.permute)
    yield Kernel("unpermute", "byte", shapes.tokens, choices_bytes, shapes.unpermute)


class _Shapes:
    """Tensors of the model's shapes, and the operations on them."""

    def __init__(self, config: RunConfig, machinery: Machinery, dtype: torch.dtype) -> None:
        self.config, self.machinery, self._dtype = config, machinery, dtype
        self.hidden, self.k = config.model.hidden_size, config.moe.top_k
        self.tokens = config.data.batch_per_device * config.model.seq_len
        local_experts = ExpertPlacement.even(config.moe.num_experts, machinery.layout.ep_size).slots
        self.rows_per_expert = max(1, self.tokens * self.k // local_experts)

    def _new(self, *sizes: int) -> Tensor:
        return torch.ones(sizes, dtype=self._dtype, device=self.machinery.device)

    def matmul(self, rows: int) -> Action:
        x, weight = self._new(rows, self.hidden), self._new(self.config.moe.moe_ffn_hidden_size, self.hidden)
        return self._quiet(lambda: F.linear(x, weight))

    def copy(self, rows: int) -> Action:
        x, y = self._new(rows, self.hidden), self._new(rows, self.hidden)
        return self._quiet(lambda: y.copy_(x))

    def attention(self, samples: int) -> Action:
        model = self.config.model
        q, k, v = (
            self._new(samples, heads, model.seq_len, model.head_size)
            for heads in (model.num_heads, model.key_value_heads, model.key_value_heads)
        )
        return self._quiet(lambda: attended(q, k, v))

    def permute(self, tokens: int) -> Action:
        x, rows = self._new(tokens, self.hidden), self._shuffled(tokens) // self.k
        return self._quiet(lambda: x.index_select(0, rows))

    def unpermute(self, tokens: int) -> Action:
        """Return the un-permute: rows of all choices back to their tokens, weighted and summed."""
        out, weights = self._new(tokens * self.k, self.hidden), self._new(tokens, self.k, 1)
        rows = self._shuffled(tokens)
        return self._quiet(
            lambda: (out.index_select(0, rows).view(tokens, self.k, self.hidden) * weights).sum(1)
        )

    def _shuffled(self, tokens: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randperm(tokens * self.k, generator=generator, device="cpu").to(self.machinery.device)

    def _quiet(self, compute: Callable[[], Tensor]) -> Action:
        """Return the computation without gradients, in the precision of the run."""

        def action() -> None:
            with torch.no_grad(), self.machinery.autocast():
                compute()

        return action


MOST_BYTES = 1 << 28
"""Most bytes of parameters that are updated; gradient and moments take three times as many beside them."""

SHARE = 0.1
"""Share of a budget that updates may take."""

UPDATE_PIECES = (1, 4, 2)
"""Divisors of what is updated, in the order of how much they tell."""


def measure_updates(
    parameters: Sequence[nn.Parameter],
    config: OptimizerConfig,
    rates: ClusterConfig,
    budget: Budget,
    device: torch.device,
) -> tuple[TaskModel, ...]:
    """Return models of the updates of all kinds of gradients; none where the budget is `late`.

    All ranks call this together and get the same. The parameters keep their values, and have no gradient
    afterwards.

    Args:
        parameters: Parameters of a few layers as a run has them; their number counts beside their bytes.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return ()
    until = list(accumulate(parameter.nbytes for parameter in trained))
    most = min(MOST_BYTES, until[-1])
    sizes = dict.fromkeys(next(end for end in until if end >= most // pieces) for pieces in UPDATE_PIECES)

    def make(size: int) -> Action:
        """Return the end of an iteration of the first parameters, without a change of any."""
        parameters = trained[: until.index(size) + 1]
        limit = math.inf if config.clip_grad_norm is None else config.clip_grad_norm
        copies = [nn.Parameter(parameter.detach()) for parameter in parameters]  # gradients apart, no weights
        adamw = build_adamw([(str(place), copy) for place, copy in enumerate(copies)], config)
        initialise_state(adamw)
        set_learning_rate(adamw, 0.0)
        # Zeros would be one page, read again and again.
        gradients = [torch.ones_like(copy) for copy in copies]
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient

        def update() -> None:
            # get_total_norm would meet other ranks where a model has distributed tensors
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            nn.utils.clip_grads_with_norm_(copies, limit, norm)
            adamw.step()

        return update

    points = measure_sizes(make, list(sizes), budget, SHARE * budget.left_s, device=device)
    nominal = [(rates.nominal_s(0.0, UPDATE_COPIES * size), seconds) for size, seconds in points]
    if not nominal:
        return ()
    line, fit = fitted(nominal)
    return tuple(
        TaskModel(op=op, phase=Phase.BACKWARD, alpha_s=line.alpha_s, scale=line.beta, fit=fit)
        for op in sorted(UPDATES)
    )
