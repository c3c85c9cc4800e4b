"""Loss-free balance: biases follow what the layer was trained on, and steer it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.moe import (
    ExpertBias,
    MoELayer,
    build_layer,
    update_expert_biases,
)
from penstock.moe.routers import TokenChoice
from tests.support.alone import (
    EXPERTS,
    HIDDEN,
    LENGTH,
    SAMPLES,
    config_of,
    drawn,
    gradients,
    layer_of,
    states,
)

RATE = 0.25


class Chosen:
    """What a gate has chosen in passes that are trained on."""

    def __init__(self, layer: MoELayer) -> None:
        self.counts, self.listening = torch.zeros(EXPERTS), True
        layer.gate.register_forward_hook(self._hear)

    def _hear(self, gate: nn.Module, inputs: Any, choice: TokenChoice) -> None:
        del gate, inputs
        if self.listening:
            self.counts += torch.bincount(choice.experts_Tk.flatten(), minlength=EXPERTS)


def biased_model() -> tuple[nn.Sequential, MoELayer, ExpertBias]:
    layer = build_layer(HIDDEN, config_of("deepseek", expert_bias_rate=RATE))
    model: nn.Sequential = drawn(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), layer, nn.Linear(HIDDEN, 2)))
    assert layer.gate.bias is not None
    return model, layer, layer.gate.bias


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_bias_follows_what_was_trained_on(use_reentrant: bool | None) -> None:
    """Three steps of three accumulated passes, evaluation between them, with and without checkpoints."""
    model, layer, bias = biased_model()
    heard, optimizer = Chosen(layer), torch.optim.SGD(model.parameters(), lr=1e-3)
    value = torch.zeros(EXPERTS)
    for step in range(3):
        heard.counts.zero_()
        for number in range(3):
            x = states(10 * step + number)
            heard.listening = True
            out = model(x) if use_reentrant is None else checkpoint(model, x, use_reentrant=use_reentrant)
            heard.listening = False
            out.square().mean().backward()
            evaluate(model)
        assert bias.counted_E.tolist() == heard.counts.tolist()
        optimizer.step()
        update_expert_biases(model)
        value += RATE * (heard.counts.mean() - heard.counts).sign()
        assert heard.counts.sum() == 3 * SAMPLES * LENGTH * 2
        assert torch.equal(bias.value_E, value)
        assert not bias.counted_E.any()
    assert value.any()


@pytest.mark.parametrize("trained", ["experts", "gate"])
def test_what_trains_a_part_of_a_layer_that_comes_first_counts(trained: str) -> None:
    _, layer, bias = biased_model()
    layer.requires_grad_(False)
    layer.get_submodule(trained).requires_grad_(True)
    heard = Chosen(layer)
    layer(states().detach()).square().mean().backward()
    assert heard.counts.any() and bias.counted_E.tolist() == heard.counts.tolist()


def evaluate(model: nn.Module) -> None:
    """In training mode without gradients; in evaluation mode with gradients of the input."""
    with torch.no_grad():
        model(states(99))
    model.eval()
    x = states(98)
    gradients(model(x).sum(), [x])
    model.train()


def test_a_model_without_biases_has_nothing_to_update() -> None:
    layer = layer_of(config_of("softmax sort"))
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    update_expert_biases(nn.Sequential(layer, nn.Linear(2, 2)))
    assert all(torch.equal(tensor, state[name]) for name, tensor in layer.state_dict().items())
