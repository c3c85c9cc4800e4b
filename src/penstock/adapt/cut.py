"""The place where a layer of a model is cut: at the call of its experts.

A decoder layer runs unchanged, up to its experts, which only record their arguments and return zeros. The
layer's output is then the residual stream; the recorded arguments go to the experts' ranks.
Shapes: T tokens, M hidden size, E experts (total), k choices per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penstock.copies import Shared
from penstock.families.adapters import check_adapters, core_of, settle
from penstock.families.experts import ModelExperts, RouterCall
from penstock.families.known import Family
from penstock.moe.routers import Router, RouterSums, TokenChoice, Tokens, count_choices, sum_by_sample

Spreads = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps tokens [T, M], choices [T, k] and weights [T, k] to the sum of the experts' outputs [T, M]."""


RouterUse = Literal["unused", "balanced", "handed_out"]
"""Whether a step balances routers, hands out their logits, or neither."""


READERS = ("transformers.",)
"""Package of hooks that only record outputs, and only on request: those of transformers."""


def is_foreign(hook: object, own: tuple[str, ...] = READERS) -> bool:
    """Return whether a hook is of none of these packages."""
    return not str(getattr(hook, "__module__", "")).startswith(own)


@dataclass(frozen=True)
class Caught:
    """Arguments with which experts were called.

    Attributes:
        x_TM: Tokens.
        experts_Tk: Experts that a token has chosen.
        weights_Tk: Weights of their outputs.
        logits_TE: Logits of the router, as it returned them.
        attended_T: Whether a token counts for the balance loss; None = all do.
        routers: What the step does with the router.
    """

    x_TM: Tensor
    experts_Tk: Tensor
    weights_Tk: Tensor
    logits_TE: Tensor
    attended_T: Tensor | None = None
    routers: RouterUse = "unused"


class Inside(Shared):
    """Whether a step is running modules of the model now."""

    def __init__(self) -> None:
        self.depth = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Let modules know, in this context, that a step runs them."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


class Cut:
    """Replaces the `forward` of the experts of one MoE block, and that of its shared experts.

    Attributes:
        block: The MoE block.
        shared: The module of its shared experts, or None.
        top_k: Experts per token.
        spread: Runs experts when the model is not cut, where other ranks hold some of them.
        ranks: Number of ranks that train the model.
        holds_share: Whether this rank has some of the experts alone.
        rows: Runs the experts on rows.
    """

    def __init__(self, block: Any, family: Family, *, shared: Any, top_k: int) -> None:
        self.block, self.family, self.shared, self.top_k = block, family, shared, top_k
        self.experts, self.router = family.experts_of(block), family.router_of(block)
        self.rows: ModelExperts | None = None
        self._form = family.form
        self._cutting = False
        self._asked: RouterCall | None = None
        self._caught: Caught | None = None
        self.spread: Spreads | None = None
        self.ranks, self.holds_share = 1, False
        # Set as attributes of the modules, which keep their classes: `nn.Module.__call__` looks there first.
        settle(self.experts)
        self.experts.forward = self._meet
        self._hook = self.router.register_forward_hook(self._note)
        self._following = block.register_forward_pre_hook(self._before)
        if shared is not None:
            shared.forward = self._pass

    @contextmanager
    def open(self) -> Iterator[None]:
        """Make experts return zeros and record the arguments of their calls, inside this context."""
        self._cutting, self._caught, self._asked = True, None, None
        try:
            yield
        finally:
            self._cutting = False

    @property
    def caught(self) -> Caught:
        """Arguments with which the experts were called inside `open`."""
        assert self._caught is not None, "a layer with experts calls them"
        return self._caught

    def take(self) -> Caught:
        """Return the arguments of the experts' call, and forget them here."""
        caught, self._caught, self._asked = self.caught, None, None
        return caught

    def put(self, caught: Caught) -> None:
        """Set the arguments of the experts' call where the layer itself cannot run, as there is no sample."""
        self._caught = caught

    def run(self, caught: Caught) -> Tensor:
        """Return what the experts' own code makes of these arguments, with all experts here, [T, M]."""
        return self._form.whole(self.experts, (caught.x_TM, caught.experts_Tk, caught.weights_Tk))

    def run_rows(self, caught: Caught) -> Tensor:
        """Return the same as steps compute it, over rows sorted by expert, [T, M]."""
        assert self.rows is not None
        top_k = caught.experts_Tk.shape[1]
        order_R = caught.experts_Tk.flatten().argsort(stable=True)
        count = self._form.count(core_of(self.experts))
        sizes = caught.experts_Tk.flatten().bincount(minlength=count).tolist()
        out_RM = self.rows(caught.x_TM[order_R // top_k], sizes)
        weights_R1 = caught.weights_Tk.flatten()[order_R].unsqueeze(1)
        return torch.zeros_like(caught.x_TM).index_add(
            0, order_R // top_k, (out_RM * weights_R1).to(caught.x_TM)
        )

    def follow(self) -> None:
        """Follow changes by peft, which has put adapters around experts or router, or has taken them away.

        Raises:
            ValueError: For adapters that cannot be spread.
        """
        experts, router = self.family.experts_of(self.block), self.family.router_of(self.block)
        if experts is not self.experts and core_of(experts) is core_of(self.experts):
            check_adapters(experts, type(self.block).__name__)
            if self.rows is not None and self.rows.shard.size > 1:
                raise ValueError(
                    f"{type(self.block).__name__}: ranks share every expert (etp_size = "
                    f"{self.rows.shard.size}), and adapters are those of whole ones: use etp_size = 1"
                )
            settle(experts)
            self.experts.__dict__.pop("forward", None)
            self.experts, experts.forward = experts, self._meet
            if self.rows is not None:
                self.rows.source = experts
        if router is not self.router and core_of(router) is core_of(self.router):
            self._hook.remove()
            self.router, self._hook = router, router.register_forward_hook(self._note)

    def undo(self) -> None:
        """Restore the modules."""
        self._hook.remove()
        self._following.remove()
        del self.experts.forward
        if self.shared is not None:
            del self.shared.forward

    def is_whole(self) -> bool:
        """Return whether the modules still call the replacements."""
        met = self.experts.__dict__.get("forward") == self._meet
        return met and (self.shared is None or self.shared.__dict__.get("forward") == self._pass)

    def owns(self, hook: object) -> bool:
        """Return whether a hook on the router is the one that notes what the router returns."""
        return hook == self._note

    def _before(self, block: nn.Module, given: Any) -> None:
        del block, given
        self.follow()

    def _note(self, router: nn.Module, given: Any, returned: Any) -> None:
        del router
        self._asked = RouterCall(given, returned)

    def _meet(self, *given: Tensor) -> Tensor:
        if not self._cutting and self.ranks > 1:
            # Backward would leave no gradient, or only this rank's part of it; in training mode even if all
            # parameters are frozen, as gradients of what is computed from the output would stay here.
            entering = (*given, *self.experts.parameters())
            trains = self.experts.training or any(tensor.requires_grad for tensor in entering)
            if torch.is_grad_enabled() and trains:
                raise ValueError(
                    f"{type(self.experts).__name__} was called with gradients enabled, outside of a training "
                    "step: backward would leave no gradients that belong to all ranks. For a loss give the "
                    "scheduled model labels=... in training mode; for anything else use torch.no_grad()"
                )
        if not self._cutting and self.spread is None:
            if self.holds_share:
                kind = type(self.experts).__name__
                raise ValueError(
                    f"{kind} was called outside of a step, and this rank has a share of the experts alone: a "
                    "run's model runs in steps of its stack, also without gradients. To generate, load a "
                    "checkpoint"
                )
            self._asked = None
            out: Tensor = type(self.experts).forward(self.experts, *given)
            return out
        assert self._asked is not None, "a router is called before its experts"
        routed, logits_TE = self._form.called(self._asked, given), self._form.logits(self._asked)
        self._asked = None
        if self._cutting:
            self._caught = Caught(*routed, logits_TE)
            return torch.zeros_like(given[0])
        assert self.spread is not None
        return self._form.returned(self.spread(*routed), given)

    def _pass(self, x: Tensor) -> Tensor:
        if self._cutting:
            return torch.zeros_like(x)
        out: Tensor = type(self.shared).forward(self.shared, x)
        return out


class CutGate(Router):
    """A router that returns the choice of the model's own router."""

    kind = "token"

    def __init__(self, num_experts: int, cut: Cut) -> None:
        super().__init__(num_experts)
        self.top_k, self._cut = cut.top_k, cut

    def forward(self, x_TM: Tensor, tokens: Tokens) -> TokenChoice:
        return self.choose(x_TM, tokens)

    def choose(self, x_TM: Tensor, tokens: Tokens) -> TokenChoice:
        caught = self._cut.take()
        chosen_Tk = _without_padding(caught.experts_Tk, tokens)
        counted_Tk, probability_BE = chosen_Tk, x_TM.new_zeros(tokens.samples, self.num_experts)
        if caught.routers == "balanced":
            probability_TE = caught.logits_TE.softmax(dim=-1)
            # transformers counts by logits and attention mask alone, whatever the router has chosen.
            judged = replace(tokens, valid_T=caught.attended_T)
            counted_Tk = _without_padding(probability_TE.topk(self.top_k, dim=-1).indices, judged)
            probability_BE = sum_by_sample(probability_TE, judged)
        sums = RouterSums(
            chosen_BE=count_choices(counted_Tk, tokens.samples, self.num_experts),
            probability_BE=probability_BE,
            z=x_TM.new_zeros(()),
            logits_TE=caught.logits_TE if caught.routers == "handed_out" else None,
        )
        return TokenChoice(chosen_Tk, caught.weights_Tk, sums, masked=tokens.masked)


def _without_padding(experts_Tk: Tensor, tokens: Tokens) -> Tensor:
    if tokens.valid_T is None:
        return experts_Tk
    return experts_Tk.masked_fill(~tokens.valid_T.unsqueeze(1), -1)
