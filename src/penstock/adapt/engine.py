"""The engine, which runs the steps of a scheduled model, and the balance loss of these steps.

transformers judges balance over all MoE layers together: aux = E * sum_e f_e * P_e, where f_e is the number
of choices of expert e per token and layer, and P_e its mean probability, over the tokens of all MoE layers
that the attention mask shows (`load_balancing_loss_func`, Switch Transformer, equations 4-6). Before a step,
changes of the model that it would miss are refused.
Shapes: B samples (of a microbatch), L tokens per sample, E experts, Y MoE layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as _modules

from penstock.adapt.cut import READERS, is_foreign
from penstock.adapt.decoder import CutLayer, Decoder, Inputs
from penstock.adapt.passes import Passes
from penstock.adapt.planning import Planner
from penstock.config import ConfigError
from penstock.device import device_of
from penstock.families.adapters import around
from penstock.families.inspection import code_of, is_patched, patched
from penstock.moe import MoEConfig
from penstock.moe.routers import GlobalBalance
from penstock.runtime import ParameterMismatchError, PipelinedStack
from penstock.runtime.batch import NO_LABEL
from penstock.runtime.consistency import LABELLED
from penstock.runtime.endings import RankLoss, StepStates
from penstock.runtime.handlers import Ending
from penstock.runtime.ops import TokenLoss
from penstock.runtime.step import check_no_transform
from penstock.step.shape import Recompute
from penstock.topology import Layout


class BalanceOverLayers(GlobalBalance):
    """Balance judged as in transformers: over the batch of all ranks, and over all layers at once.

    Args:
        top_k: Choices of a token, from which the number of tokens follows: padding may have a label, and go
            to experts.
    """

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k

    def by_layer(self, pieces_Y: Tensor, chosen_YE: Tensor, probability_YE: Tensor, tokens: Tensor) -> Tensor:
        """Return every layer's part of the single loss of all layers, [Y]."""
        del pieces_Y, tokens
        products_Y = (chosen_YE.sum(0) * probability_YE).sum(dim=1)
        return chosen_YE.shape[-1] * products_Y / self._rows(chosen_YE) ** 2

    def slope(self, chosen_BE: Tensor, chosen_YE: Tensor, layer: int, tokens: Tensor) -> Tensor:
        del layer, tokens
        factors_E = chosen_YE.shape[-1] * chosen_YE.sum(0) / self._rows(chosen_YE) ** 2
        return factors_E.expand(chosen_BE.shape)

    def _rows(self, chosen_YE: Tensor) -> Tensor:
        """Return the number of tokens of all MoE layers together."""
        return (chosen_YE.sum() / self._top_k).clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """Arguments of a call of the model, as a step needs them.

    Attributes:
        inputs: Those besides tokens and labels.
        labels_BL: Labels as transformers takes them, at the places of the tokens; None where others are
            given, or the caller makes a loss.
        shift_labels_BL: Labels at the places of the tokens before them.
        valid: Divisor of the sum of token losses, over all ranks; None = the number of these tokens.
    """

    inputs: Inputs
    tokens_BL: Tensor
    labels_BL: Tensor | None
    shift_labels_BL: Tensor | None
    valid: float | None

    @property
    def targets(self) -> Tensor:
        """The token that is to follow each token, [B, L]."""
        if self.shift_labels_BL is not None:
            return self.shift_labels_BL.contiguous()  # logits are kept by the place of labels in memory
        if self.labels_BL is None:
            return torch.full_like(self.tokens_BL, NO_LABEL, dtype=torch.int64)
        return torch.nn.functional.pad(self.labels_BL[:, 1:], (0, 1), value=NO_LABEL)

    @property
    def valid_tokens(self) -> Tensor | None:
        """Tokens that are not padding, [B, L]; a token with a label is none, whatever the mask says."""
        mask_BL = self.inputs.mask_BL
        if mask_BL is None or mask_BL.dim() != 2:
            return None
        return mask_BL.bool() | (self.targets != NO_LABEL)


@dataclass
class BalanceRequest:
    """Whether a model wants the balance loss of the step that its decoder runs; then that loss."""

    wanted: bool
    balance: Tensor | None = None


@dataclass(frozen=True)
class _Planned:
    """Conditions for which a plan was made.

    Attributes:
        trained: Names of parameters.
        types: Types of autocast for which a plan was searched for, one after the other.
    """

    recompute: Recompute | None
    trained: frozenset[str]
    types: frozenset[torch.dtype | None]


class Engine:
    """The stack of a model, its pieces, its forward passes outside of steps, and the time of its plan.

    A plan is made at the first step, whose sizes are known, and when a parameter is trained that was frozen
    then, for which the plan has no reduction. It is searched for again, once, where steps begin to compute
    under another autocast.

    Attributes:
        averages: Whether a loss of labels is that of this rank's samples, and gradients are averaged over
            ranks, as with DistributedDataParallel; else it is that of all ranks' tokens.
        averages_own: Whether gradients of a loss that the caller makes are averaged over ranks; else they are
            summed.
        balance_request: What a model wants of the step that its decoder runs; None outside of such a step.
    """

    def __init__(self, stack: PipelinedStack, decoder: Decoder, planner: Planner, passes: Passes) -> None:
        self.stack, self.decoder, self._planner, self.passes = stack, decoder, planner, passes
        self._recompute: Recompute | None = None
        self._planned_for: _Planned | None = None
        self._balance = BalanceOverLayers(stack.moe.top_k)
        self._first = 0
        self.averages, self.averages_own = False, True
        self.balance_request: BalanceRequest | None = None

    @property
    def layout(self) -> Layout:
        return self.stack.machinery.layout

    def recompute(self, what: Recompute) -> None:
        """Recompute `what` in backward from the next step on, whatever the plan said."""
        self._recompute = what

    def step(self, given: StepInputs) -> tuple[Tensor, Tensor | None]:
        """Return the loss of the labels, and the balance loss, which is part of it."""
        self.stack.turns.begin(LABELLED)
        balances = given.inputs.routers == "balanced"
        weight = (self.decoder.coefficient or 0.0) if balances else 0.0
        if self.averages:
            self._prepare(given, weight, None, partial(RankLoss, given.valid, self.layout.dp_size))
        else:
            self._prepare(given, weight, given.valid, TokenLoss)
        loss = self._run(given)
        self._first += len(given.tokens_BL)
        statistics = self.stack.statistics
        assert statistics is not None
        if given.valid is None:  # the mean of no losses is no number, as in transformers; gradients are zero
            labels = (given.targets != NO_LABEL).sum() if self.averages else statistics.labels
            loss = loss + torch.where(labels.to(loss.device) > 0, 0.0, torch.nan)
        return loss, statistics.aux if balances else None

    def hidden_states(self, given: StepInputs) -> StepStates:
        """Return hidden states after the last layer, and what was asked of routers, for any loss.

        Padding goes to experts, too, as in transformers: the loss may use any token.
        """
        self.stack.turns.forward()
        self._prepare(given, float(given.inputs.routers == "balanced"), None, TokenLoss)
        states = self.stack.hidden_states(given.tokens_BL, self._begin(given), averaged=self.averages_own)
        self.decoder.calls.end_with(states.balance)
        self._first += len(given.tokens_BL)
        return states

    @contextmanager
    def balancing(self, wanted: bool) -> Iterator[BalanceRequest]:
        """Let the step inside this context find the balance loss, if it is wanted."""
        self.balance_request = request = BalanceRequest(wanted)
        try:
            yield request
        finally:
            self.balance_request = None

    def _run(self, given: StepInputs) -> Tensor:
        ids_B = self._begin(given)
        loss: Tensor = self.stack(given.tokens_BL, given.targets, ids_B, given.valid_tokens)
        self.decoder.calls.end_with(loss)
        return loss

    def _begin(self, given: StepInputs) -> Tensor:
        """Begin the forward pass of a step on these samples; return their numbers."""
        self.decoder.begin(given.inputs)
        numbers_B = torch.arange(self._first, self._first + len(given.tokens_BL), device="cpu")
        device = self.stack.machinery.device
        return device_of(device).from_host(numbers_B, device)

    def warn_if_different(self) -> None:
        """Warn on rank 0 if ranks have drifted apart: what was trained is saved all the same."""
        try:
            self.stack.compare_values()
        except ParameterMismatchError as error:
            if self.layout.rank == 0:
                warnings.warn(f"rank 0's values are saved: {error}", stacklevel=4)

    def logits_of_step(self) -> Callable[[], Tensor] | None:
        """Return what makes the logits of the last step with labels, [B, L, V], when they are asked for.

        Returns:
            A function, which raises ValueError when parameters of the head have changed; None where ranks
            share a sample's tokens.
        """
        decoder, machinery = self.decoder, self.stack.machinery
        left, decoder.left = decoder.left, {}
        if self.layout.tp_size > 1 or not left:
            return None
        device_of(machinery.device).hand_over(left.values())
        head = decoder.outside_layers()
        versions = [p._version for p in head]

        @torch.no_grad()
        def logits() -> Tensor:
            if [p._version for p in head] != versions:
                raise ValueError(
                    "logits of a step are computed when they are read, and the model was updated since: read "
                    "them before optimizer.step()"
                )
            with machinery.autocast():
                pieces = [
                    decoder.logits(left[place]).unflatten(0, left[place].shape[:2]) for place in sorted(left)
                ]
            return torch.cat(pieces)

        return logits

    def watch_outside(self) -> None:
        """Sum gradients of what the model has beside its layers over ranks, also without a step."""
        averaged = self.layout.dp_size if self.averages_own else 1
        self.stack.outside.begin(self.decoder.outside_layers(), averaged=averaged)

    def _prepare(
        self, given: StepInputs, weight: float, valid: float | None, ending: Callable[[], Ending]
    ) -> None:
        """Make ready for a training step. weight: of the balance loss."""
        check_no_transform()
        self.passes.check_whole()
        stack = self.stack
        stack.training = True
        check_unchanged(self.decoder, balances=given.inputs.routers != "unused")
        trains = torch.is_grad_enabled()
        if trains:
            self.watch_outside()
        moe: MoEConfig = replace(stack.moe, aux_loss_coeff=weight)
        stack.minimise(moe, self._balance, valid, ending)
        device = stack.machinery.device
        stack.compute_in(
            torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        )
        plan, autocast = self._planned_for, stack.machinery.autocast_dtype
        kept = plan is not None and plan.recompute == self._recompute and self._reduces_all()
        cast = plan is not None and self._planner.searches and autocast not in plan.types
        # A plan must be measured with backward.
        if trains and (cast or not kept):
            if plan is not None and self.layout.world_size > 1:
                # The first plan all ranks need. A rank that alone was changed must not wait for the others:
                # ranks tell each other whether all need another one.
                new = sorted(self._trained() - plan.trained)
                why = "parameters were replaced or moved to other layers"
                if cast:
                    why = f"it computes under autocast {autocast}, for which no plan was measured"
                if new:
                    why = f"{new[0]} is trained now and was not when its plan was made"
                if plan.recompute != self._recompute:
                    why = f"gradient checkpointing was switched to {self._recompute!r}"
                with stack.requesting_replan(why), device_of(device).fork_random(device):
                    self._run(given)
            sizes = stack.machinery.control.largest(given.tokens_BL.shape, "comparing the sizes of batches")
            batch, length = map(int, sizes)
            stack.adopt(self._planner.of(stack, batch, length, self._recompute))
            before = frozenset[torch.dtype | None]() if plan is None or not kept else plan.types
            self._planned_for = _Planned(self._recompute, self._trained(), before | {autocast})

    def _trained(self) -> frozenset[str]:
        return frozenset(name for name, p in self.stack.model.named_parameters() if p.requires_grad)

    def _reduces_all(self) -> bool:
        """Return whether the plan has a reduction for every gradient of what is trained now."""
        gradients, shape = self.stack.gradients, self.stack.plan.shape
        if gradients.holds(shape):
            return True
        sizes = gradients.sizes_bytes.by_kind
        pairs = ((sizes[kind], pieces) for kind, pieces in shape.pieces.items())
        return all(
            any(chunks[: layer + 1])
            for trained, chunks in pairs
            for layer, size_bytes in enumerate(trained)
            if size_bytes
        )


def refuse_sharing(engine: Engine, what: str) -> None:
    """Raise ConfigError where ranks share attention, and `what` knows nothing of that."""
    if (size := engine.layout.tp_size) > 1:
        raise ConfigError("tp_size", size, f"{what} knows nothing of ranks that share attention", "Use 1.")


def check_device(engine: Engine, device: torch.device, who: str) -> None:
    """Raise ValueError unless a model's steps run where a library, which would move the model, trains it."""
    here = engine.stack.machinery.device
    if here.type != device.type or (None not in (here.index, device.index) and here != device):
        raise ValueError(
            f"{who} trains on {device}, and the model's steps run on {here}, where it was when it was "
            f'scheduled: schedule it where it is to be, penstock.parallelize(model.to("{device}"))'
        )


COUNTERS = ("torch.",)
"""Package of hooks on all modules that only count, such as those of torch's counter of operations."""


def check_unchanged(decoder: Decoder, *, balances: bool) -> None:
    """Raise ValueError if a step would not compute what the model computes now.

    Args:
        balances: Whether the step has a router loss.
    """
    if is_patched(decoder.base):
        raise ValueError(patched(decoder.base, "parallelize the model without it"))
    kind = decoder.base_kind
    if (kind.forward, kind.__call__) != decoder.code or kind not in type(decoder.base).__mro__[:2]:
        raise ValueError(_exchanged(kind))
    if decoder.kind.forward is not decoder.plain:
        raise ValueError(_exchanged(decoder.kind))
    after = (_modules._global_forward_hooks, _modules._global_backward_hooks)
    before = (_modules._global_backward_pre_hooks, _modules._global_forward_pre_hooks)
    for hook in (hook for hooks in (*after, *before) for hook in hooks.values()):
        if is_foreign(hook, (*READERS, *COUNTERS)):
            raise ValueError(
                f"a hook on all modules ({getattr(hook, '__qualname__', type(hook).__name__)}) would not see "
                "what layers with experts get and return in a training step, which runs them without their "
                "experts. Remove it (register_module_forward_hook and the like return a handle), or "
                "register it on the modules that it is meant for"
            )
    layers = decoder.layers
    if len(layers) != len(decoder.parts):
        raise ValueError(
            f"the model has {len(layers)} layers now, and {len(decoder.parts)} were parallelized"
        )
    for part, layer in zip(decoder.parts, layers, strict=True):
        if layer is not part.layer:
            raise ValueError(_replaced(f"layer {part.index} was", layer))
        if getattr(layer, "gradient_checkpointing", False):
            raise ValueError(
                f"layer {part.index} would run again in backward by itself, with what it sends: call "
                "gradient_checkpointing_enable() of the scheduled model, and not of what is in it"
            )
        if isinstance(part, CutLayer):
            _check_cut(part, layer, decoder)
            _check_hooks(part, layer, decoder, balances=balances)
    decoder.check_shared()


def _check_cut(part: CutLayer, layer: Any, decoder: Decoder) -> None:
    block, family, cut = decoder.family.block_of(layer), decoder.family, part.cut
    if block is not cut.block:
        raise ValueError(_replaced(f"the MoE block of layer {part.index} was", block))
    cut.follow()
    experts = family.experts_of(block)
    if experts is not cut.experts:
        raise ValueError(_replaced(f"the experts of layer {part.index} were", experts))
    shared = None if family.shared_module is None else getattr(block, family.shared_module, None)
    for what, current, wanted in (
        ("router", family.router_of(block), cut.router),
        ("shared expert", shared, cut.shared),
    ):
        if current is not wanted:
            raise ValueError(_replaced(f"the {what} of layer {part.index} was", current))
    for module in (layer, block, *around(experts)[1:]):
        if is_patched(module):
            raise ValueError(patched(module, "parallelize the model without it"))
    for module, code in part.code.items():
        if code_of(module) != code:
            raise ValueError(_exchanged(type(module)))
    if not cut.is_whole():
        raise ValueError(patched(experts, "leave those of a scheduled model as they are"))


def _check_hooks(part: CutLayer, layer: Any, decoder: Decoder, *, balances: bool) -> None:
    """Raise ValueError for hooks on a layer with experts that its steps would not follow."""
    cut, form = part.cut, decoder.family.form
    for module in (layer, cut.block, *around(cut.experts), cut.shared):
        if module is None:
            continue
        after = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
        if any(is_foreign(hook) for hooks in after for hook in hooks.values()):
            raise ValueError(
                f"a hook on {type(module).__name__} of layer {part.index} would not see what the module "
                "returns: in a training step it runs without its experts, which are tasks of their own. "
                "Remove the hook, or put it on a module inside attention"
            )
    outer, *inner = around(cut.experts)
    entering = [*inner, outer] if form.rebuilds or cut.shared is not None else inner
    routers = [cut.router] if form.rebuilds else []
    for module in (*entering, *routers):
        hooks: list[Any] = list(module._forward_pre_hooks.values())
        if module in routers:
            hooks += [hook for hook in module._forward_hooks.values() if not cut.owns(hook)]
        if any(map(is_foreign, hooks)):
            raise ValueError(
                f"a hook on {type(module).__name__} of layer {part.index} may change what its experts get, "
                "and a training step takes that from elsewhere in this family. Remove the hook, or put it "
                f"on {type(cut.block).__name__}, before its forward pass (register_forward_pre_hook)"
            )
    others = [hook for hook in cut.router._forward_hooks.values() if not cut.owns(hook)]
    if balances and any(map(is_foreign, others)):
        raise ValueError(
            f"output_router_logits = True: a hook on {type(cut.router).__name__} of layer {part.index} may "
            "change its logits, and whether the router loss counts them before or after it depends on the "
            "order of hooks. Remove the hook, or make a subclass of the router and parallelize the model then"
        )


def _exchanged(kind: type) -> str:
    return (
        f"{kind.__name__}.forward was replaced in its class, or the class by another one, after the model "
        "was parallelized, and its steps would go on with the former one: change it first, and parallelize "
        "the model then"
    )


def _replaced(what: str, found: object) -> str:
    return (
        f"{what} replaced or wrapped ({type(found).__name__}) after the model was parallelized, and its "
        "steps would go on without what that adds: change the model first, and parallelize it then"
    )
