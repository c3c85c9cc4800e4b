"""The MoE layer as an ordinary module: checkpoints, copies, files, precisions, neighbours."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.moe import MoELayer, build_layer
from tests.support.alone import (
    AUX,
    HIDDEN,
    KINDS,
    Z,
    close,
    config_of,
    gradients,
    layer_of,
    losses_of,
    states,
    total_loss,
    weighted,
)


class Witness(torch.autograd.Function):
    """Passes on its input; `alive` tells whether its place in the graph still exists."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alive: list[weakref.ref[Any]]) -> Tensor:
        ctx.mark = nn.Identity()
        alive.append(weakref.ref(ctx.mark))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grads[0], None


def with_losses(layer: MoELayer) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = layer(x)
        return out, losses_of(layer).balance, losses_of(layer).z

    return run


@pytest.mark.every_value
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "noisy"])
def test_checkpointing_changes_nothing(
    kind: str, use_reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two passes of which the first goes backward last; losses and noise included."""
    monkeypatch.setitem(KINDS, "noisy", {"gate": "noisy"})
    layer = layer_of(config_of(kind))
    results = []
    for run in (with_losses(layer), lambda x: checkpoint(with_losses(layer), x, use_reentrant=use_reentrant)):
        torch.manual_seed(7)
        layer.zero_grad()
        inputs = [states(1), states(2)]
        passes = [run(x) for x in inputs]
        for out, balance, z in reversed(passes):
            (weighted(out) + AUX * balance + Z * z).backward()
        results.append([x.grad for x in inputs] + [p.grad for p in layer.parameters()])
    close(results[1], results[0])


def test_losses_read_behind_a_checkpoint_have_gradients() -> None:
    layer, x = layer_of(config_of("softmax sort")), states()
    expected = gradients(total_loss(layer, layer(x)), [x, *layer.parameters()])
    out = checkpoint(layer, x, use_reentrant=False)
    close(gradients(total_loss(layer, out), [x, *layer.parameters()]), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_is_not_kept_alive(use_reentrant: bool) -> None:
    """Losses that the layer remembers would hold all activations before it: the point of a checkpoint."""
    layer, alive = layer_of(config_of("softmax sort")), list[weakref.ref[Any]]()

    def block(x: Tensor) -> Tensor:
        out: Tensor = layer(Witness.apply(x, alive)) + x
        return out.tanh()  # keeps its output for backward: recomputation does not stop in the layer

    values = losses_of_pass(layer)
    loss = weighted(checkpoint(block, states(), use_reentrant=use_reentrant))
    del values
    loss.backward()
    del loss
    assert len(alive) == 2
    assert alive[1]() is None
    assert float(losses_of(layer).z) == pytest.approx(losses_of_pass(layer)[1], rel=1e-12)


def losses_of_pass(layer: MoELayer) -> tuple[float, float]:
    with torch.no_grad():
        layer(states())
    return float(losses_of(layer).balance), float(losses_of(layer).z)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_equal_and_independent(kind: str) -> None:
    """Behind a pass, too, whose losses have a graph."""
    layer, x = layer_of(config_of(kind)), states()
    out = layer(x)
    copied = copy.deepcopy(layer)
    assert copied.losses is None
    assert torch.equal(copied(x), out)
    weighted(copied(x)).backward()
    assert all(parameter.grad is None for parameter in layer.parameters())
    weighted(out).backward()
    for own, its in zip(layer.parameters(), copied.parameters(), strict=True):
        assert own.grad is not None and its.grad is not None
        assert torch.equal(own.grad, its.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_it_gives_the_same(kind: str) -> None:
    """State and whole module; the losses of a pass are in neither."""
    layer, x = layer_of(config_of(kind)), states()
    if layer.gate.bias is not None:
        layer.gate.bias.value_E.copy_(torch.tensor([0.5, -0.5, 0.25, 0.0]))
    out = layer(x)
    file = io.BytesIO()
    torch.save((layer.state_dict(), layer), file)
    file.seek(0)
    state, whole = torch.load(file, weights_only=False)
    fresh = build_layer(HIDDEN, config_of(kind)).double()
    fresh.load_state_dict(state)
    assert torch.equal(fresh(x), out)
    assert torch.equal(whole(x), out)
    assert not any("loss" in name for name in state)


@pytest.mark.parametrize("kind", KINDS)
def test_another_precision(kind: str) -> None:
    layer, x = layer_of(config_of(kind)), states()
    exact = layer(x).detach()
    layer.to(torch.float32)
    single = layer(x.float())
    assert single.dtype == torch.float32
    assert (single - exact).norm() <= 1e-5 * exact.norm()
    layer.to(torch.bfloat16)
    half = layer(x.bfloat16())
    total_loss(layer, half).backward()
    assert half.dtype == torch.bfloat16
    assert {p.grad.dtype for p in layer.parameters() if p.grad is not None} == {torch.bfloat16}
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters() if p.grad is not None)


@pytest.mark.slow
def test_the_layer_loads_torch_when_it_is_asked_for() -> None:
    program = (
        "import penstock, sys; print('torch' in sys.modules); penstock.MoELayer; penstock.ExpertParallel; "
        "print('torch' in sys.modules, penstock.MoELayer.__name__, penstock.ExpertParallel.__name__)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True", "MoELayer", "ExpertParallel"]
