"""Numbers of a rank's experts in its `state_dict`, so that no rank loads another rank's as its own."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

NAME = "held"
KEY = f"{NAME}._extra_state"
ALONE = (
    "state_dict() has {here} of a layer whose {all} experts are spread over ranks. Save it on every rank, "
    "each in a file of its own: what rank 0 alone writes (Trainer, Accelerate, Lightning) lacks the rest"
)
OTHERS = (
    "this state has {found}, and this rank holds {here} of {all}: another rank has saved it, or another "
    "layout. Save model.state_dict() on every rank, each in a file of its own, and load it on the same rank"
)


class HeldExperts(nn.Module):
    """The numbers of a rank's experts, as extra state of its layer; without parameters and buffers.

    Saving on the first rank warns once, since many tools save on that rank alone. Loading raises ValueError
    for the experts of another rank; a state without numbers of experts is accepted.
    """

    def __init__(self, numbers: Sequence[int], num_experts: int, *, first: bool) -> None:
        super().__init__()
        self._numbers, self._all, self._warns = list(numbers), num_experts, first
        self.register_load_state_dict_post_hook(_forgive_missing)

    def get_extra_state(self) -> Tensor:
        if self._warns:
            self._warns = False
            warnings.warn(ALONE.format(here=_words(self._numbers), all=self._all), stacklevel=2)
        return torch.tensor(self._numbers)

    def set_extra_state(self, state: Tensor) -> None:
        if (found := state.tolist()) != self._numbers:
            raise ValueError(OTHERS.format(found=_words(found), here=_words(self._numbers), all=self._all))


def _forgive_missing(module: nn.Module, keys: Any) -> None:
    """Accept a state without numbers of experts: only numbers that it contains are compared."""
    del module
    keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith(KEY)]


def _words(numbers: Sequence[int]) -> str:
    if not numbers:
        return "no experts"
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 2 and list(numbers) == list(range(first, last + 1)):
        return f"experts {first} to {last}"
    return f"experts {', '.join(map(str, numbers))}"
