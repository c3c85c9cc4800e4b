"""Hooks nest, and see the layer's rows where they say."""

from __future__ import annotations

from functools import partial
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.moe.experts import GeluExperts
from penstock.moe.hooks import Hook, Moment, scaled_by
from penstock.moe.layer import MoELayer
from penstock.moe.permute.merged import MergedPermutation
from penstock.moe.permute.sort import Permutation, SortPermutation
from penstock.moe.routers import SoftmaxRouter

MOMENTS: tuple[Moment, ...] = get_args(Moment)
TOKENS, HIDDEN, CHOICES = 5, 4, 2


class Recording(Hook):
    """Notes what it sees, and when."""

    def __init__(self, name: str, seen: list[tuple[str, str, tuple[int, ...]]]) -> None:
        super().__init__()
        self.name, self.seen = name, seen
        for moment in MOMENTS:
            setattr(self, moment, partial(self.note, moment))

    def note(self, moment: str, tensor: Tensor) -> Tensor:
        self.seen.append((moment, self.name, tuple(tensor.shape)))
        return tensor


def layer_of(*hooks: Hook, permutation: Permutation | None = None) -> MoELayer:
    torch.manual_seed(0)
    gate, expert = SoftmaxRouter(HIDDEN, 3, CHOICES), GeluExperts(HIDDEN, 6, 3)
    permutation = permutation or SortPermutation(3)
    return MoELayer(gate=gate, permutation=permutation, expert=expert, hooks=hooks).double()


def test_a_layer_calls_every_moment_once_and_in_order() -> None:
    seen: list[tuple[str, str, tuple[int, ...]]] = []
    layer_of(Recording("outer", seen), Recording("inner", seen))(torch.randn(TOKENS, HIDDEN).double())
    rows, tokens = (TOKENS * CHOICES, HIDDEN), (TOKENS, HIDDEN)
    shapes = (tokens, rows, rows, rows, rows, tokens)
    names = {"before": ("outer", "inner"), "after": ("inner", "outer")}
    assert seen == [
        (moment, name, shape)
        for moment, shape in zip(MOMENTS, shapes, strict=True)
        for name in names[moment.split("_")[0]]
    ]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_layer_goes_on_with_what_a_hook_returns(moment: Moment) -> None:
    """Checked where it is simple: a hook that returns zeros silences what comes after."""

    hook, x_TM = Hook(), torch.randn(TOKENS, HIDDEN).double()
    setattr(hook, moment, torch.zeros_like)
    assert layer_of()(x_TM).abs().sum() > 0
    assert layer_of(hook)(x_TM).abs().sum() == 0


def test_a_hook_sees_hidden_states_alone_also_of_a_row_for_several_experts() -> None:
    class Bounded(Hook):
        def before_dispatch(self, rows_RM: Tensor) -> Tensor:
            return F.normalize(rows_RM)

        def after_dispatch(self, rows_RM: Tensor) -> Tensor:
            return rows_RM.tanh()

    x_TM = torch.randn(TOKENS, HIDDEN).double()
    of_one, of_several = (
        layer_of(Bounded(), permutation=each)(x_TM) for each in (None, MergedPermutation(3, CHOICES, 1))
    )
    torch.testing.assert_close(of_several, of_one, rtol=1e-10, atol=1e-12)


class Encoding(Hook):
    """Says that rows are not numbers, and not what they are."""

    encodes_rows = True


def test_encoded_gradients_are_scaled_by_the_hook_that_encodes_them() -> None:
    rows = torch.ones(2, 3)
    assert torch.equal(scaled_by([Hook()], rows, 0.5), rows / 2)
    with pytest.raises(ValueError, match="Encoding encodes rows and does not say how"):
        scaled_by([Hook(), Encoding()], rows, 0.5)
