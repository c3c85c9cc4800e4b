"""AdamW with a warm-up and cosine learning rate, and the update of a step: by whole gradients between steps,
or by shares while backward runs.

A step whose numbers are not finite is skipped on all ranks together, and counted. It leaves parameters,
optimiser state and the experts' biases as they were. Everything that is a function of the step goes on: its
samples are not seen again, the learning rate follows its curve, dropout has the next step's keys. AdamW's own
step count, by which it corrects its averages, does not advance.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Annotated, Any, Final, Literal

import torch
from torch import Tensor, nn

from penstock.config import Checked, Within
from penstock.config.bounds import Steps
from penstock.runtime import PipelinedStack, ShardedAdamW, clip_grad_norm_

MOMENTS = 2
"""Numbers that AdamW keeps for every weight."""

ZeroStage = Literal[0, 1, 2, "auto"]
NamedParameter = tuple[str, nn.Parameter]
Positive = Annotated[float, Within(0, 1e30, "larger numbers overflow float32", above=True)]
Share = Annotated[float, Within(0, 1, "it is a fraction")]
Decay = Annotated[float, Within(0, 1, "with 1 the average would never change", below=True)]
WeightDecay = Annotated[float, Within(0, 1e6, "times lr it is a fraction of the weights")]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Checked):
    """How parameters are updated: AdamW, with linear warm-up and cosine decay."""

    lr: Positive = 3e-3
    """Learning rate after the warm-up."""
    min_lr_ratio: Share = 0.1
    """Learning rate of the last step, as a share of `lr`."""
    warmup_steps: Steps = 20
    """Steps over which the learning rate rises to `lr`; 0 = none."""
    weight_decay: WeightDecay = 0.1
    """Decoupled weight decay of matrices; embeddings, norms and biases have none."""
    beta1: Decay = 0.9
    """Decay of the running average of the gradient."""
    beta2: Decay = 0.95
    """Decay of the running average of its square."""
    eps: Positive = 1e-8
    """Added to the denominator of an update."""
    clip_grad_norm: Positive | None = 1.0
    """Largest gradient norm over the whole model, where every expert counts once; none = no clipping."""
    zero_stage: ZeroStage = 0
    """What data-parallel ranks share (ZeRO): 1 = moments, of which every rank keeps and updates a part by
    tasks of the step ([more](training.md#a-sharded-optimiser)); "auto" = 1 if a whole iteration is predicted
    to be shorter so, or does not fit into memory otherwise; 2 = gradients, too
    ([more](training.md#shares-of-gradients))."""

    @property
    def is_sharded(self) -> bool:
        """Whether ranks update shares; `auto` counts as no until it is decided."""
        return self.zero_stage in (1, 2)

    @property
    def releases(self) -> bool:
        """Whether ranks keep shares of gradients, too."""
        return self.zero_stage == 2

    @property
    def shared_copies(self) -> int:
        """Number of copies of a weight (gradient, two moments) of which a rank may have only a share."""
        return 0 if self.zero_stage == 0 else MOMENTS + self.releases

    def settled(self, *, sharded: bool) -> OptimizerConfig:
        """Return the configuration with one of the two optimisers chosen."""
        stage: ZeroStage = 0 if not sharded else 2 if self.releases else 1
        return replace(self, zero_stage=stage)


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of `step`, counted from 0: linear up to `lr`, then down half a cosine.

    The last warm-up step has `lr`; the last of `total_steps`, and any later one, `min_lr_ratio * lr`. A run
    no longer than its warm-up never comes down.
    """
    if step < config.warmup_steps:
        return config.lr * ((step + 1) / config.warmup_steps)
    steps_down = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step + 1 - config.warmup_steps) / steps_down)
    height = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * height)


def build_adamw(named_parameters: Iterable[NamedParameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW over the parameters that require a gradient: group 0 with weight decay, group 1 without.

    Raises:
        ValueError: If no parameter requires a gradient.
    """
    return torch.optim.AdamW(
        groups_of(named_parameters, config),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,  # one pass over memory: four to seven times as fast as the other two on a CPU
    )


EMBEDDING: Final = re.compile(r"embed|\bwte\b")
"""What is in the names of embeddings, in the models of all families."""


def groups_of(named_parameters: Iterable[NamedParameter], config: OptimizerConfig) -> list[dict[str, Any]]:
    """Return two groups of trained parameters: those with weight decay, and those without.

    Inside a group parameters are sorted by name, so that the order, and with it a saved state, does not
    depend on how the model registers them. Names are kept in each group's `param_names`.

    Raises:
        ValueError: If no parameter requires a gradient.
    """
    trained = sorted((item for item in named_parameters if item[1].requires_grad), key=itemgetter(0))
    if not trained:
        raise ValueError("no parameter wants a gradient; call requires_grad_(True) on those to train")
    # The biases of all experts are stacked into one matrix, so the shape alone does not identify a bias.
    no_bias = {name for name, p in trained if p.ndim >= 2 and "bias" not in name.rpartition(".")[2]}
    groups = []
    for decays in (True, False):
        named = [item for item in trained if (item[0] in no_bias and not EMBEDDING.search(item[0])) is decays]
        # Names are given separately: AdamW takes (name, parameter) pairs, but finds none in an empty group.
        names, parameters = [name for name, _ in named], [parameter for _, parameter in named]
        weight_decay = config.weight_decay if decays else 0.0
        groups.append({"params": parameters, "param_names": names, "weight_decay": weight_decay})
    return groups


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` for every group from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def initialise_state(optimizer: torch.optim.AdamW) -> None:
    """Create the optimiser's state before the first step, so that a checkpoint can be loaded in place.

    AdamW creates a parameter's state at its first step; this creates the same zeros earlier, and training
    continues bit for bit as without it. State that exists already stays. Parameters are not touched.
    """
    for group in optimizer.param_groups:
        assert group["fused"], "the fused kernel keeps its step count as a float32 beside the parameter"
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": step, **zeros}


ADVICE = "A lower optimizer.lr or more optimizer.warmup_steps may help."


class DivergedError(RuntimeError):
    """The run has no finite numbers left with which to continue; continuing would only save useless state."""


class Update:
    """The last part of a training step: whole gradients on every rank, which updates all that it holds."""

    def __init__(
        self, stack: PipelinedStack, optimizer: torch.optim.Optimizer, config: OptimizerConfig
    ) -> None:
        self.stack, self.optimizer, self.max_norm = stack, optimizer, config.clip_grad_norm

    def backward(self, loss: Tensor, step: int) -> Tensor:
        """Compute gradients; return their norm before clipping, float64.

        Args:
            step: Number of the step, counted from 1.
        """
        loss.backward()
        with self.stack.machinery.control.naming(f"the gradient norm of step {step}"):
            return clip_grad_norm_(self.stack, math.inf if self.max_norm is None else self.max_norm)

    def apply(self, *, accepted: bool) -> None:
        """Change parameters, or drop the step."""
        if accepted:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def flush(self) -> None:
        """Give every rank the current parameters from here on, without a further step."""


class ShareUpdate(Update):
    """Updates this rank's shares in the backward pass; the next forward pass gathers the others' shares."""

    optimizer: ShardedAdamW
    _loss: Tensor

    def backward(self, loss: Tensor, step: int) -> Tensor:
        del step
        self._loss = loss.detach()
        with self.optimizer.in_backward():
            loss.backward()
        return self.optimizer.norm

    def apply(self, *, accepted: bool) -> None:
        """Raise DivergedError for a step that was not accepted but has already changed parameters."""
        if not (accepted or self.max_norm is not None) and math.isfinite(float(self._loss)):
            raise DivergedError(
                "gradients were not finite and have been applied: without clipping a sharded optimizer "
                "updates before the norm of all gradients is known. Set optimizer.clip_grad_norm, with which "
                "such steps are skipped, and continue from the last checkpoint (train.resume=true)"
            )

    def flush(self) -> None:
        self.optimizer.flush()


def build_update(stack: PipelinedStack, optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> Update:
    """Return the update that the optimiser needs: by shares or whole."""
    return (ShareUpdate if isinstance(optimizer, ShardedAdamW) else Update)(stack, optimizer, config)
