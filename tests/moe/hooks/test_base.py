"""Hooks nest, and see the layer's rows where they say."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.moe.experts import GeluExperts
from penstock.moe.hooks import Hook, Moment, scaled_by, two_way
from penstock.moe.layer import MoELayer, hooked
from penstock.moe.permute.merged import MergedPermutation
from penstock.moe.permute.sort import Permutation, SortPermutation
from penstock.moe.routers import SoftmaxRouter

MOMENTS: tuple[Moment, ...] = (
    "before_moe_start",
    "before_dispatch",
    "after_dispatch",
    "before_combine",
    "after_combine",
    "before_moe_end",
)
TOKENS, HIDDEN, CHOICES = 5, 4, 2


class Recording(Hook):
    """Notes what it sees and multiplies it by a number of its own."""

    def __init__(self, name: str, seen: list[tuple[str, str, tuple[int, ...]]], factor: float = 1.0) -> None:
        super().__init__()
        self.name, self.seen, self.factor = name, seen, factor

    def note(self, moment: str, tensor: Tensor) -> Tensor:
        self.seen.append((moment, self.name, tuple(tensor.shape)))
        return tensor * self.factor

    def before_moe_start(self, x_TM: Tensor) -> Tensor:
        return self.note("before_moe_start", x_TM)

    def before_dispatch(self, rows_RM: Tensor) -> Tensor:
        return self.note("before_dispatch", rows_RM)

    def after_dispatch(self, rows_RM: Tensor) -> Tensor:
        return self.note("after_dispatch", rows_RM)

    def before_combine(self, rows_RM: Tensor) -> Tensor:
        return self.note("before_combine", rows_RM)

    def after_combine(self, rows_RM: Tensor) -> Tensor:
        return self.note("after_combine", rows_RM)

    def before_moe_end(self, out_TM: Tensor) -> Tensor:
        return self.note("before_moe_end", out_TM)


def layer_of(*hooks: Hook, permutation: Permutation | None = None) -> MoELayer:
    torch.manual_seed(0)
    gate, expert = SoftmaxRouter(HIDDEN, 3, CHOICES), GeluExperts(HIDDEN, 6, 3)
    permutation = permutation or SortPermutation(3)
    return MoELayer(gate=gate, permutation=permutation, expert=expert, hooks=hooks).double()


@pytest.mark.parametrize("moment", MOMENTS)
def test_before_in_order_and_after_in_reverse(moment: Moment) -> None:
    seen: list[tuple[str, str, tuple[int, ...]]] = []
    hooks = [Recording(name, seen) for name in ("first", "second", "third")]
    hooked(hooks, moment, torch.zeros(1))
    names = [name for _, name, _ in seen]
    wanted = ["first", "second", "third"]
    assert names == (wanted[::-1] if moment.startswith("after") else wanted)


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

    class Zeros(Hook):
        pass

    def silence(tensor: Tensor) -> Tensor:
        return tensor * 0

    hook, x_TM = Zeros(), torch.randn(TOKENS, HIDDEN).double()
    setattr(hook, moment, silence)
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


def test_a_hook_that_overrides_nothing_changes_nothing() -> None:
    tensor = torch.randn(2, 3)
    for moment in MOMENTS:
        assert hooked([Hook(), Hook()], moment, tensor) is tensor


def test_parameters_of_hooks_belong_to_the_layer() -> None:
    hook = Hook()
    hook.scale = torch.nn.Parameter(torch.ones(()))
    assert any(parameter is hook.scale for parameter in layer_of(hook).parameters())


def test_two_way_runs_one_function_forward_and_the_other_backward() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    out = two_way(x, lambda tensor: torch.cat([tensor, tensor.new_zeros(1)]), lambda grad: grad[:2] * 5)
    assert out.tolist() == [1.0, 2.0, 0.0]
    out.backward(torch.tensor([1.0, 10.0, 100.0]))
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 50.0]


class Encoding(Hook):
    """Says that rows are not numbers, and not what they are."""

    encodes_rows = True


def test_encoded_gradients_are_scaled_by_the_hook_that_encodes_them() -> None:
    rows = torch.ones(2, 3)
    assert torch.equal(scaled_by([Hook()], rows, 0.5), rows / 2)
    with pytest.raises(ValueError, match="Encoding encodes rows and does not say how"):
        scaled_by([Hook(), Encoding()], rows, 0.5)
