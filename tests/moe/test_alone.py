"""The MoE layer as an ordinary module: against loops over tokens, and in what PyTorch does to modules."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.moe import (
    ExpertBias,
    GeluExperts,
    MergedOrder,
    ModuleExperts,
    MoEConfig,
    MoELayer,
    SigmoidGate,
    SoftmaxGate,
    SortOrder,
    build_layer,
    update_expert_biases,
)
from penstock.moe.choices import TokenChoice
from penstock.moe.config import BalanceGroup
from penstock.moe.layer import LayerLosses
from tests.support.reference import Settings
from tests.support.reference_moe import moe_layer

HIDDEN, EXPERTS, SAMPLES, LENGTH = 6, 4, 3, 5
AUX, Z = 0.3, 0.07
GROUPS: tuple[BalanceGroup, ...] = ("global", "sequence", "microbatch")
CAPACITY = {"capacity_factor": 0.75, "min_capacity": 1}
KINDS: dict[str, dict[str, Any]] = {
    "softmax sort": {},
    "softmax merged": {"one_copy_per_rank": True},
    "softmax index": CAPACITY,
    "softmax einsum": {"order": "einsum", **CAPACITY},
    "raw softmax": {"norm_topk_prob": False, "shared_ffn_hidden_size": 3},
    "cosine": {"gate": "cosine", "gate_proj_size": 5},
    "deepseek": {
        "gate": "sigmoid",
        "num_groups": 2,
        "group_top_k": 1,
        "routed_scaling_factor": 2.5,
        "expert_bias_rate": 0.1,
        "shared_ffn_hidden_size": 3,
    },
    "expert choice": {"gate": "expert_choice", **CAPACITY},
    "soft": {"gate": "soft", "slots_per_expert": 3},
}


def config_of(kind: str, **more: Any) -> MoEConfig:
    return MoEConfig(**{"num_experts": EXPERTS, "top_k": 2, "moe_ffn_hidden_size": 5, **KINDS[kind], **more})


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(module: nn.Module, seed: int = 3) -> Any:
    """The module in float64, with weights large enough that every gradient matters."""
    module = module.double()
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=seed + number))
    return module


def layer_of(config: MoEConfig) -> MoELayer:
    layer: MoELayer = drawn(build_layer(HIDDEN, config))
    return layer


def states(seed: int = 1) -> Tensor:
    return numbers(SAMPLES, LENGTH, HIDDEN, seed=seed).requires_grad_()


def padding() -> Tensor:
    """Uneven over samples, in the middle too, and one sample of nothing else."""
    valid = torch.ones(SAMPLES, LENGTH, dtype=torch.bool)
    valid[0, 1] = valid[1, 3:] = False
    valid[2] = False
    return valid


def settings_of(config: MoEConfig, samples: int, valid: Tensor | None) -> Settings:
    groups = (config.num_groups, config.group_top_k)
    return Settings(
        num_layers=1,
        num_heads=1,
        moe_layers=frozenset({0}),
        num_experts=config.num_experts,
        top_k=config.top_k,
        swiglu=config.expert == "swiglu",
        renormalise=config.renormalise,
        gate=config.gate,
        scale=config.routed_scaling_factor,
        groups=None if None in groups else groups,  # type: ignore[arg-type]  # either none is None or both
        slots_per_expert=config.slots_per_expert,
        modules=False,
        seed=0,
        padding=None if valid is None else ~valid,
        capacity_factor=config.capacity_factor,
        min_capacity=config.min_capacity,
        aux_coeff=AUX,
        aux_group=config.aux_loss_group,
        z_coeff=Z,
        pieces=[list(range(samples))],
    )


def weights_of(layer: MoELayer) -> dict[str, Tensor]:
    return dict(layer.named_parameters())


def losses_of(layer: MoELayer) -> LayerLosses:
    assert layer.losses is not None
    return layer.losses


def total_loss(layer: MoELayer, out: Tensor) -> Tensor:
    losses = losses_of(layer)
    return weighted(out) + AUX * losses.balance + Z * losses.z


def weighted(out: Tensor) -> Tensor:
    return (out * numbers(*out.shape, seed=9)).sum()


def gradients(loss: Tensor, variables: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, variables, materialize_grads=True)


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


# Against loops


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_output_losses_and_gradients_equal_loops(kind: str, padded: bool) -> None:
    """The three balance groups; [B, L, M]."""
    valid = padding() if padded else None
    for group in GROUPS:
        config = config_of(kind, aux_loss_group=group)
        layer, x = layer_of(config), states()
        settings, weights = settings_of(config, SAMPLES, valid), weights_of(layer)
        out = layer(x, valid)
        wanted, extra = moe_layer(x, weights, settings, 0)
        _, balance = moe_layer(x, weights, replace(settings, z_coeff=0.0), 0)
        close(out, wanted)
        close(losses_of(layer).balance * AUX, balance)
        close(losses_of(layer).z * Z, extra - balance)
        variables = [x, *layer.parameters()]
        close(
            gradients(total_loss(layer, out), variables),
            gradients(weighted(wanted) + extra, variables),
        )


def test_the_balance_groups_differ() -> None:
    """Or the test above would not tell them apart."""
    values = []
    for group in ("global", "sequence"):
        layer = layer_of(config_of("softmax sort", aux_loss_group=group))
        layer(states())
        values.append(losses_of(layer).balance.item())
    assert abs(values[0] - values[1]) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_without_samples_all_tokens_are_one(kind: str) -> None:
    config = config_of(kind, aux_loss_group="sequence")
    layer, x_TM = layer_of(config), states()[0]
    valid = padding()[0]
    out = layer(x_TM, valid)
    wanted, extra = moe_layer(
        x_TM.unsqueeze(0), weights_of(layer), settings_of(config, 1, valid.unsqueeze(0)), 0
    )
    assert out.shape == x_TM.shape
    close(out, wanted[0])
    close(AUX * losses_of(layer).balance + Z * losses_of(layer).z, extra)


@pytest.mark.parametrize("kind", KINDS)
def test_what_padding_holds_does_not_matter(kind: str) -> None:
    layer, valid = layer_of(config_of(kind)), padding()
    results = []
    for filling in (0.0, 3.0):
        x = states().detach().masked_fill(~valid.unsqueeze(-1), filling).requires_grad_()
        out = layer(x, valid)
        loss = weighted(out * valid.unsqueeze(-1)) + AUX * losses_of(layer).balance + Z * losses_of(layer).z
        results.append([loss, *gradients(loss, list(layer.parameters()))])
    close(results[0], results[1])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "soft"])
def test_a_batch_of_nothing_but_padding_gives_zeros_and_finite_gradients(kind: str) -> None:
    layer, x = layer_of(config_of(kind)), states()
    out = layer(x, torch.zeros(SAMPLES, LENGTH, dtype=torch.bool))
    loss = total_loss(layer, out)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(loss, [x, *layer.parameters()]))
    if layer.shared is None:
        assert not out.any()
    assert losses_of(layer).balance.item() == losses_of(layer).z.item() == 0.0


# In PyTorch's hands


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
def test_evaluation_equals_training_without_noise(kind: str) -> None:
    layer, x = layer_of(config_of(kind)), states()
    trained = layer(x)
    layer.eval()
    with torch.no_grad():
        out = layer(x)
    assert torch.equal(out, trained)
    assert not out.requires_grad
    assert not losses_of(layer).balance.requires_grad


def test_noise_is_drawn_in_training_only() -> None:
    layer, x = layer_of(MoEConfig(num_experts=EXPERTS, gate="noisy", moe_ffn_hidden_size=5)), states()
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


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


def test_between_other_modules() -> None:
    """In a Sequential, an input that needs no gradient, modules as experts."""
    layer = MoELayer(
        gate=SoftmaxGate(HIDDEN, EXPERTS, 2),
        order=SortOrder(EXPERTS),
        expert=ModuleExperts(
            lambda: nn.Sequential(nn.Linear(HIDDEN, 7), nn.Tanh(), nn.Linear(7, HIDDEN)), EXPERTS
        ),
    )
    for first in (nn.Linear(3, HIDDEN), nn.Identity()):
        model = drawn(nn.Sequential(first, layer, nn.LayerNorm(HIDDEN)))
        x = numbers(SAMPLES, LENGTH, 3 if first is model[0] and isinstance(first, nn.Linear) else HIDDEN)
        h = first(x)
        probability = (h @ layer.gate.get_parameter("weight").T).softmax(-1)
        best = probability.topk(2)
        weights = best.values / best.values.sum(-1, keepdim=True)
        experts = layer.experts.get_submodule("expert_modules")
        made = torch.stack([expert(h) for expert in experts.children()], dim=2)
        chosen = made.gather(2, best.indices.unsqueeze(-1).expand(-1, -1, -1, HIDDEN))
        wanted = model[2]((weights.unsqueeze(-1) * chosen).sum(2))
        variables = list(model.parameters())
        close(gradients(weighted(model(x)), variables), gradients(weighted(wanted), variables))


# Loss-free balance

RATE = 0.25


class Chosen:
    """What a gate has chosen in passes that are trained on."""

    def __init__(self, layer: MoELayer) -> None:
        self.counts, self.listening = torch.zeros(EXPERTS), True
        self.last: TokenChoice | None = None
        layer.gate.register_forward_hook(self._hear)

    def _hear(self, gate: nn.Module, inputs: Any, choice: TokenChoice) -> None:
        del gate, inputs
        self.last = choice
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


def evaluate(model: nn.Module) -> None:
    """In training mode without gradients; in evaluation mode with gradients of the input."""
    with torch.no_grad():
        model(states(99))
    model.eval()
    x = states(98)
    gradients(model(x).sum(), [x])
    model.train()


def test_the_moved_bias_steers_the_next_choice() -> None:
    layer = MoELayer(
        gate=SigmoidGate(HIDDEN, EXPERTS, 2, bias=ExpertBias(EXPERTS, RATE)),
        order=SortOrder(EXPERTS),
        expert=GeluExperts(HIDDEN, 5, EXPERTS),
    )
    drawn(layer)
    heard, x = Chosen(layer), states()
    layer(x).sum().backward()
    update_expert_biases(nn.ModuleList([layer]))
    assert layer.gate.bias is not None
    scores = (x.flatten(0, 1) @ layer.gate.get_parameter("weight").T).sigmoid() + layer.gate.bias.value_E
    before = heard.last
    layer(x)
    assert heard.last is not None
    assert before is not None
    assert torch.equal(heard.last.experts_Tk, scores.topk(2).indices)
    assert not torch.equal(heard.last.experts_Tk, before.experts_Tk)


def test_a_model_without_biases_has_nothing_to_update() -> None:
    layer = layer_of(config_of("softmax sort"))
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    update_expert_biases(nn.Sequential(layer, nn.Linear(2, 2)))
    assert all(torch.equal(tensor, state[name]) for name, tensor in layer.state_dict().items())


# What does not fit


@pytest.mark.parametrize("shape", [(HIDDEN,), (1, 2, 3, HIDDEN)])
def test_x_of_another_dimension(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\[tokens, hidden\] or \[samples, tokens, hidden\], not \["):
        layer_of(config_of("softmax sort"))(torch.zeros(shape))


@pytest.mark.parametrize("kind", KINDS)
def test_another_hidden_size(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"hidden size {HIDDEN + 1}, and \w+Gate was built for {HIDDEN}$"):
        layer_of(config_of(kind))(numbers(4, HIDDEN + 1))


def test_another_failure_of_a_gate_keeps_its_name() -> None:
    layer = layer_of(config_of("softmax sort"))
    layer.gate.register_forward_pre_hook(lambda module, inputs: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        layer(states())


@pytest.mark.parametrize(
    "valid",
    [
        torch.ones(SAMPLES * LENGTH, dtype=torch.bool),
        torch.ones(SAMPLES, LENGTH, dtype=torch.int64),
        torch.zeros(SAMPLES, LENGTH),
    ],
)
def test_a_mask_of_another_shape_or_type(valid: Tensor) -> None:
    with pytest.raises(ValueError, match=rf"bool \[{SAMPLES}, {LENGTH}\] .* not torch\.\w+ \["):
        layer_of(config_of("softmax sort"))(states(), valid)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"expert": GeluExperts(HIDDEN, 5, 3)}, "num_experts = 4, but 1 rank.* 3 experts each hold 3"),
        ({"order": SortOrder(6)}, "SortOrder was built for num_experts = 6, but .* num_experts = 4"),
        ({"order": MergedOrder(4, 2, 2)}, "MergedOrder was built for ranks = 2, but .* ranks = 1"),
    ],
)
def test_parts_of_different_sizes(parts: dict[str, Any], why: str) -> None:
    fitting = {
        "gate": SoftmaxGate(HIDDEN, EXPERTS, 2),
        "order": SortOrder(EXPERTS),
        "expert": GeluExperts(HIDDEN, 5, EXPERTS),
    }
    MoELayer(**fitting)  # type: ignore[arg-type]  # a table of parts
    with pytest.raises(ValueError, match=why):
        MoELayer(**{**fitting, **parts})


def test_the_layer_loads_torch_when_it_is_asked_for() -> None:
    program = (
        "import penstock, sys; print('torch' in sys.modules); penstock.MoELayer; penstock.ExpertParallel; "
        "print('torch' in sys.modules, penstock.MoELayer.__name__, penstock.ExpertParallel.__name__)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True", "MoELayer", "ExpertParallel"]
