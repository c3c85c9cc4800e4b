"""What a step ends with beside the usual `TokenLoss` (`ops.py`): other losses of labels, and hidden states.

Shapes: B samples, L tokens per sample, M hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.device import device_of
from penstock.graph import Lane, Task
from penstock.mesh import Group
from penstock.runtime.handlers import Inputs, LossGradients, Outputs, StepContext, TensorPlace
from penstock.runtime.ops import TokenLoss, microbatch
from penstock.runtime.statistics import HeadSums, StepStatistics
from penstock.runtime.transport import Transport, Transports, gathered, scattered


@dataclass(frozen=True)
class StepStates:
    """What a step hands out for a loss of the caller's.

    Attributes:
        hidden_BLM: Hidden states after the last layer.
        balance: The sum of all layers' balance losses over all ranks' samples.
        routers_YTE: Router logits of every MoE layer; () unless the step hands them out.
    """

    hidden_BLM: Tensor
    balance: Tensor
    routers_YTE: tuple[Tensor, ...]


class RankLoss(TokenLoss):
    """The mean cross-entropy of this rank's tokens, whose gradients are averaged over ranks.

    It is the loss of a model that DistributedDataParallel wraps. With a divisor it is this rank's summand of
    a loss of all ranks, and a rank has a part of the balance loss as well, so that the summands of all ranks
    are the whole.

    Attributes:
        valid: The divisor of the sum of token losses; None: the number of this rank's labels.
        ranks: The number of ranks over which gradients are averaged.
    """

    def __init__(self, valid: float | None, ranks: int) -> None:
        self.valid, self.ranks = valid, ranks
        self._sums: dict[int, HeadSums] = {}

    def forward(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        outputs = super().forward(context, task, inputs)
        self._sums[microbatch(task)] = outputs["loss"]
        return outputs

    def outputs(self, context: StepContext, statistics: StepStatistics) -> tuple[Tensor, ...]:
        sums = [self._sums[number].loss.double() for number in sorted(self._sums)]
        labels = [self._sums[number].valid for number in sorted(self._sums)]
        self._labels = torch.stack(labels).sum().clamp(min=1)
        self._sums.clear()
        shares = 1 if self.valid is None else self.ranks
        balance = context.moe.aux_loss_coeff * statistics.aux / shares
        return (torch.stack(sums).sum() / self._divisor(statistics) + balance,)

    def slopes(self, *grads: Tensor) -> LossGradients:
        balance = grads[0] if self.valid is None else grads[0] / self.ranks
        return LossGradients(loss=grads[0] / self.ranks, balance=balance)

    def _divisor(self, statistics: StepStatistics) -> Tensor:
        return self._labels if self.valid is None else torch.full_like(statistics.valid, self.valid)


@dataclass(frozen=True)
class SharedTokens:
    """The ranks that share every sample's tokens, each of which makes a loss of all of them.

    Attributes:
        place: This rank's place among them.
        split: Whether each rank has routed its part of the tokens; otherwise each has routed all.
        transports: The transports of the steps.
    """

    place: TensorPlace
    split: bool
    transports: Transports

    def whole(self, mine_TE: Tensor, tokens_BL: Tensor) -> Tensor:
        """Return what belongs to all tokens of a microbatch, of which this rank has its part."""
        if not self.split or self.place.size == 1:
            return mine_TE
        lengths = self.place.lengths(tokens_BL.shape[1])
        own_BLE = mine_TE.view(len(tokens_BL), lengths[self.place.rank], -1)
        return gathered(own_BLE, lengths, self._transport, Group.TENSOR).flatten(0, 1)

    def mean(self, all_TE: Tensor, tokens_BL: Tensor) -> Tensor:
        """Return the mean of all ranks' gradients of what `whole` has returned, for what it was given."""
        if self.place.size == 1:
            return all_TE
        all_TE = all_TE / self.place.size
        if not self.split:
            self._transport.all_reduce(all_TE, Group.TENSOR)
            return all_TE
        lengths, all_BLE = self.place.lengths(tokens_BL.shape[1]), all_TE.view(*tokens_BL.shape, -1)
        own_BLE = scattered(all_BLE, lengths, self.place.rank, self._transport, Group.TENSOR)
        return own_BLE.flatten(0, 1)

    @property
    def _transport(self) -> Transport:
        return self.transports.of(Lane.INTRA, Group.TENSOR)


class HiddenStates:
    """Hidden states after the last layer, and the balance loss: the caller makes a loss of them.

    The caller's backward pass brings their gradients, from which the backward half starts. Ranks that share
    tokens have all hidden states, and their gradients are averaged.

    Attributes:
        averaged: The number of ranks over which gradients are averaged; 1: they are summed.
        ranks: The number of ranks that have samples of their own.
        tokens: The ranks that share this rank's tokens.
        meet: Called with this rank's gradient of the balance loss before the backward half, which comes when
            the caller's loss asks for it; returns the gradient of all ranks.
    """

    tells_at_once = True

    def __init__(
        self, *, averaged: int, ranks: int, tokens: SharedTokens, meet: Callable[[Tensor], Tensor]
    ) -> None:
        self.averaged, self.ranks, self.tokens, self.meet = averaged, ranks, tokens, meet
        self._left: dict[int, Tensor] = {}
        self._routers: dict[int, dict[int, Tensor]] = {}
        # By microbatch, and by layer too: what has been handed to a task is kept no longer.
        self._grads: dict[int, Tensor] = {}
        self._router_grads: dict[int, dict[int, Tensor]] = {}
        self._ended = False

    def forward(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        """Keep the hidden states of a microbatch; return sums of no losses."""
        self._left[microbatch(task)] = inputs.one("hidden")
        return self.loss(context, task, inputs)

    def backward(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        """Return the gradient of a microbatch's hidden states."""
        del context, inputs
        return {"hidden": self._grads.pop(microbatch(task))}

    # Where ranks share the vocabulary, hidden states of all tokens are left to the caller, whose head is cut.

    def logits(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        """Keep the hidden states of a microbatch; return no logits, and peaks without a meaning."""
        del context
        h_BLM = self._left[microbatch(task)] = inputs.one("hidden")
        return {"logits": None, "peaks": h_BLM.new_zeros(1, 3), "saved": None}

    def logits_backward(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        """Return the gradient of a microbatch's hidden states."""
        return self.backward(context, task, inputs)

    def loss(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        """Return sums of no losses."""
        nothing = torch.zeros((), device=self._left[microbatch(task)].device)
        tokens = context.metadata_of(task, inputs).num_tokens()
        return {"loss": HeadSums(nothing, nothing, tokens), "saved": None}

    def loss_backward(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        """Return no gradients of logits."""
        del context, task, inputs
        return {"logits": None}

    def take(self, task: Task, logits_TE: Tensor) -> None:
        if not self._ended:  # and not computed again for backward
            self._routers.setdefault(task.layer, {})[microbatch(task)] = logits_TE

    def router_gradients(self, task: Task) -> list[Tensor]:
        grads = self._router_grads.get(task.layer)
        return [] if grads is None else [grads.pop(microbatch(task))]

    def outputs(self, context: StepContext, statistics: StepStatistics) -> tuple[Tensor, ...]:
        """Return hidden states, the sum of all layers' balance losses, and logits of every layer's router."""
        self._samples = [len(h_BLM) for h_BLM in _in_order(self._left)]
        self._batches = context.batch.tokens
        self._layers = sorted(self._routers)
        batches, routers = self._batches, list[Tensor]()
        for pieces in map(self._routers.pop, self._layers):
            routers.append(_joined({n: self.tokens.whole(each, batches[n]) for n, each in pieces.items()}))
        hidden_BLM = _joined(self._left)
        self._left = {}
        return hidden_BLM, statistics.aux.clone(), *routers

    def slopes(self, *grads: Tensor) -> LossGradients:
        self._ended = True  # not before: a forward half may run again
        hidden_BLM, balance, *routers = grads
        balance = self.meet(balance)
        grads = (hidden_BLM / (self.averaged * self.tokens.place.size)).split(self._samples)
        self._grads = dict(enumerate(grads))
        for layer, grad_TE in zip(self._layers, routers, strict=True):
            parts = (grad_TE / self.averaged).split([each.numel() for each in self._batches])
            pairs = zip(parts, self._batches, strict=True)
            self._router_grads[layer] = dict(enumerate(self.tokens.mean(*pair) for pair in pairs))
        # The balance loss is that of all ranks' samples, and each rank's loss has all of it.
        return LossGradients(loss=balance, balance=balance * (self.ranks / self.averaged))


def _in_order(pieces: Mapping[int, Tensor]) -> list[Tensor]:
    return [pieces[number] for number in sorted(pieces)]


def _joined(pieces: Mapping[int, Tensor]) -> Tensor:
    """Return what microbatches have left in one tensor, for the caller to free: a lane has made it."""
    ordered = _in_order(pieces)
    device_of(ordered[0].device).hand_over(ordered)
    return torch.cat(ordered) if len(ordered) > 1 else ordered[0]
