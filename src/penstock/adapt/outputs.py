"""What a training step of a scheduled model returns.

Shapes: B samples, L tokens per sample, M hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from penstock.runtime.step import check_no_transform

LOGITS: Any = WeakIdKeyDictionary()
"""By the loss of a step: what makes its logits, or None, and for which places they were asked."""


EVALUATED = (
    "this loss was computed in evaluation mode, where nothing runs by the schedule and ranks sum no "
    "gradients: call model.train() before the forward pass (model.eval() and from_pretrained leave training "
    "mode), or put torch.no_grad() around what only evaluates"
)
STEPPED = (
    "logits and aux_loss of a training step with labels have no gradients, since the step has computed its "
    "loss already: call the model without labels and make the loss of what it returns, or detach() what is "
    "only looked at"
)


def refuse_backward(tensor: Tensor, why: str) -> Tensor:
    """Return a tensor through which no gradient passes: its backward raises ValueError.

    Args:
        tensor: Of this caller alone, since it is not copied.
        why: What is wrong and what to do, as the text of that error.
    """
    check_no_transform()
    return _RefuseBackward.apply(tensor, torch.zeros((), device="cpu", requires_grad=True), why)  # type: ignore[no-any-return]


class _RefuseBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, asks: Tensor, why: str) -> Tensor:
        del asks  # through it backward comes here
        ctx.why = why
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        del grads
        raise ValueError(ctx.why)


class StepOutput(MoeCausalLMOutputWithPast):
    """The output of a step that computes the loss of its labels itself.

    `logits` [B, L, V] refuse to have gradients and are computed when they are read, from the hidden states
    that the step has kept: most who train with labels never read them. None where ranks share attention.
    """

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name != "logits" or value is not None:
            return value
        make, places = LOGITS.get(super().__getattribute__("loss"), (None, None))
        if make is None:
            return None
        logits_BLV = refuse_backward(make(), STEPPED)
        if places is None:
            return logits_BLV
        return logits_BLV[:, -places:] if isinstance(places, int) else logits_BLV[:, places]

    def __getitem__(self, key: Any) -> Any:
        if key == "logits" and (logits_BLV := self.logits) is not None:
            return logits_BLV
        if isinstance(key, int):
            return self[self._named()[key]]
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        return key in self._named()

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self._named() else default

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self[name] for name in self._named())

    def _named(self) -> list[str]:
        """Return the names of what a model's own output has, in its order; the logits are not made."""
        make, _ = LOGITS.get(super().__getattribute__("loss"), (None, None))
        names = list(self.keys())
        return names if make is None or "logits" in names else [*names, "logits"]


class LastOnly(Sequence[Tensor]):
    """Hidden states of all layers, of which a step hands out the last ones alone."""

    def __init__(self, layers: int, last_BLM: Tensor) -> None:
        self._count, self._last_BLM = layers + 1, last_BLM

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        """Return the last hidden states. Raises ValueError for others, which a step does not keep."""
        if place not in (-1, len(self) - 1):
            raise ValueError(
                f"hidden_states[{place}]: a training step hands out those after the last layer, [-1]; for "
                "others use torch.no_grad()"
            )
        return self._last_BLM
