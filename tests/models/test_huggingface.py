"""Blocks of transformers and the layers made of them: same outputs, same gradients; the rest is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here needs the network

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import penstock
from penstock.models.huggingface import layer_from_hugging_face
from tests.support.adapted import InFloat64
from tests.support.patience import HANG_S

MODELS = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One block and what it is given. groups, limit, shared, scale: DeepSeek-V3's.

    implementation: how transformers runs experts; `eager` is a loop over them.
    """

    model: str
    num_experts: int = 4
    top_k: int = 2
    norm: bool = True
    hidden: int = 12
    width: int = 5
    batch: int = 2
    length: int = 4
    groups: int = 1
    limit: int = 1
    shared: int = 1
    scale: float = 2.5
    implementation: str = "eager"
    act: str = "silu"
    seed: int = 0

    def block(self, dtype: torch.dtype = torch.float32) -> Any:
        """The block of transformers with random weights; the bias is as large as the scores."""
        block = BUILDERS[self.model](self)
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for name, tensor in block.state_dict().items():
                std = 0.5 if name.endswith("bias") else tensor.shape[-1] ** -0.5
                tensor.copy_(std * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
        return block.to(dtype)

    def x(self, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = (self.batch, self.length, self.hidden)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    @property
    def common(self) -> dict[str, Any]:
        """What all configurations call the same."""
        return {
            "hidden_size": self.hidden,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": self.norm,
            "hidden_act": self.act,
            "experts_implementation": self.implementation,
        }

    @property
    def router_is_idle(self) -> bool:
        """Whether the only weight is always one."""
        return self.top_k == 1 and (self.norm or self.model == "mixtral")


# Where they are used: to import transformers takes as long as to collect all tests.


def mixtral(case: Case) -> Any:
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

    config = MixtralConfig(intermediate_size=case.width, num_local_experts=case.num_experts, **case.common)
    return MixtralSparseMoeBlock(config)


def qwen3_moe(case: Case) -> Any:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(moe_intermediate_size=case.width, num_experts=case.num_experts, **case.common)
    return Qwen3MoeSparseMoeBlock(config)


def olmoe(case: Case) -> Any:
    from transformers.models.olmoe.modeling_olmoe import OlmoeConfig, OlmoeSparseMoeBlock

    return OlmoeSparseMoeBlock(
        OlmoeConfig(intermediate_size=case.width, num_experts=case.num_experts, **case.common)
    )


def deepseek_v3(case: Case) -> Any:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE

    config = DeepseekV3Config(
        moe_intermediate_size=case.width,
        n_routed_experts=case.num_experts,
        n_group=case.groups,
        topk_group=case.limit,
        n_shared_experts=case.shared,
        routed_scaling_factor=case.scale,
        **case.common,
    )
    return DeepseekV3MoE(config)


BUILDERS: dict[str, Callable[[Case], Any]] = {
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "olmoe": olmoe,
    "deepseek_v3": deepseek_v3,
}


@st.composite
def cases(draw: st.DrawFn, shortest: int) -> Case:
    """shortest: least tokens per sample. The router's gradient over few of them may all but cancel, and in
    float32 nothing is left of it but rounding."""
    model = draw(st.sampled_from(MODELS))
    deepseek = model == "deepseek_v3"
    groups = draw(st.integers(1, 4)) if deepseek else 1
    size = draw(st.integers(2, 4) if deepseek else st.integers(1, 9))  # transformers sums a group's best two
    limit = draw(st.integers(1, groups))
    return Case(
        model=model,
        num_experts=groups * size,
        top_k=draw(st.integers(1, limit * size)),
        norm=draw(st.booleans()),
        hidden=draw(st.integers(1, 40)),
        width=draw(st.integers(1, 24)),
        batch=draw(st.integers(1, 3)),
        length=draw(st.integers(shortest, 12)),
        groups=groups,
        limit=limit,
        shared=draw(st.integers(1, 3)),
        scale=draw(st.sampled_from([1.0, 2.5])),
        seed=draw(st.integers(0, 2**31)),
    )


def as_ours(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors shaped as the block's parameters, under the names and in the shapes of the layer's."""
    gate_up, width = named["experts.gate_up_proj"], named["experts.down_proj"].shape[2]
    ours = {
        "gate.weight": named["gate.weight"],
        "experts.w_gate": gate_up[:, :width].mT,
        "experts.w_up": gate_up[:, width:].mT,
        "experts.w_down": named["experts.down_proj"].mT,
    }
    for part in ("gate", "up", "down"):
        if f"shared_experts.{part}_proj.weight" in named:
            ours[f"shared.expert.w_{part}"] = named[f"shared_experts.{part}_proj.weight"].mT[None]
    return ours


def run(module: nn.Module, x_BLM: Tensor) -> dict[str, Tensor]:
    """Output and gradients of everything, by name."""
    out_BLM = module(x_BLM)
    direction = torch.randn(out_BLM.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    named = dict(module.named_parameters())
    loss = (out_BLM * direction.to(out_BLM.dtype)).sum()
    grads = torch.autograd.grad(loss, [x_BLM, *named.values()])
    return {"out": out_BLM.detach(), "x": grads[0]} | dict(zip(named, grads[1:], strict=True))


def assume_clear_choice(block: Any, x_BLM: Tensor) -> None:
    """transformers must choose the same when its input is a little off, so that rounding cannot decide."""
    with torch.no_grad():
        x_TM = x_BLM.flatten(0, 1)
        off_TM = 1e-4 * torch.randn(x_TM.shape, generator=torch.Generator().manual_seed(3)).to(x_TM)
        below, chosen, above = (block.gate(x)[2].sort().values for x in (x_TM - off_TM, x_TM, x_TM + off_TM))
    assume(below.equal(chosen) and above.equal(chosen))


def agreement(case: Case, dtype: torch.dtype, *, exact: bool = False) -> dict[str, float]:
    """Relative distances of output and gradients. exact: the block's router computes in float64 too."""
    block, mode = case.block(dtype), InFloat64() if exact else nullcontext()
    assume_clear_choice(block, case.x(dtype))
    ours = run(layer_from_hugging_face(block), case.x(dtype))
    with mode:
        named = run(block, case.x(dtype))
    theirs = {"out": named["out"], "x": named["x"]} | as_ours(named)
    assert ours.keys() == theirs.keys()
    size = {name: float(each.norm()) for name, each in theirs.items()}
    if case.router_is_idle:
        size["gate.weight"] = size["x"]  # its own gradient is zero but for rounding
    return {name: float((ours[name] - theirs[name]).norm()) / max(size[name], 1e-30) for name in theirs}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        *((implementation, torch.float32) for implementation in ("eager", "batched_mm", "grouped_mm")),
        ("eager", torch.float64),
    ],
)
@given(case=cases(shortest=8))
def test_outputs_and_gradients_are_those_of_the_block(
    implementation: str, dtype: torch.dtype, case: Case
) -> None:
    """With float64 the block's router still rounds to float32, so no more than its precision can be asked.
    A grouped product on a CPU takes rows of whole 16 bytes, and no float64."""
    aligned = 4 if implementation == "grouped_mm" else 1
    sized = replace(case, hidden=aligned * case.hidden, width=aligned * case.width)
    found = agreement(replace(sized, implementation=implementation), dtype)
    assert max(found.values()) <= 1e-5, found


@pytest.mark.slow
@given(cases(shortest=1))
def test_with_a_router_in_float64_they_are_exact(case: Case) -> None:
    found = agreement(case, torch.float64, exact=True)
    assert max(found.values()) <= 1e-10, found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_weights_are_copies_of_the_same_type(model: str, dtype: torch.dtype) -> None:
    case = Case(model=model)
    block = case.block(dtype)
    layer = layer_from_hugging_face(block)
    held, wanted = dict(layer.named_parameters()), as_ours(dict(block.named_parameters()))
    assert held.keys() == wanted.keys()
    for name, each in held.items():
        assert each.dtype == dtype and each.is_contiguous() and each.equal(wanted[name])
    assert not storages(block) & storages(layer)
    assert layer(case.x(dtype)).dtype == dtype


def storages(module: nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}


def test_the_bias_keeps_float32_and_stays_until_it_gets_a_rate() -> None:
    case = Case(model="deepseek_v3", num_experts=4, groups=2, limit=2)
    block = case.block()
    wanted = block.gate.e_score_correction_bias.clone()
    block.to(torch.bfloat16).gate.e_score_correction_bias = wanted  # as from_pretrained leaves it
    layer = layer_from_hugging_face(block)
    bias = layer.gate.bias
    assert bias is not None and bias.value_E.equal(wanted)
    for rate, moved in ((0.0, False), (0.1, True)):
        bias.rate = rate
        layer(case.x(torch.bfloat16)).sum().backward()
        layer.update_expert_bias()
        assert bias.value_E.equal(wanted) is not moved


def test_mode_and_frozen_weights_are_kept() -> None:
    block = Case(model="deepseek_v3").block().eval()
    block.experts.gate_up_proj.requires_grad_(False)
    layer = layer_from_hugging_face(block)
    frozen = {name for name, each in layer.named_parameters() if not each.requires_grad}
    assert frozen == {"experts.w_gate", "experts.w_up"}
    assert not any(module.training for module in layer.modules())


# ---- refusals ----------------------------------------------------------------------------------------------


def test_another_class_is_refused() -> None:
    message = "^Linear cannot be taken over; supported: MixtralSparseMoeBlock, Qwen3MoeSparseMoeBlock, Olmoe"
    with pytest.raises(ValueError, match=message):
        layer_from_hugging_face(nn.Linear(2, 2))


@pytest.mark.parametrize("model", MODELS)
def test_another_activation_is_refused(model: str) -> None:
    with pytest.raises(ValueError, match=r"activation GELUActivation of \w+Experts: .* silu only"):
        layer_from_hugging_face(Case(model=model, act="gelu").block())


def test_another_name_of_silu_is_taken() -> None:
    layer_from_hugging_face(Case(model="olmoe", act="swish").block())


def jitter(block: Any) -> None:
    block.jitter_noise = 0.1


def shared_activation(block: Any) -> None:
    block.shared_experts.act_fn = nn.ReLU()


def bias(block: Any) -> None:
    block.shared_experts.up_proj = nn.Linear(12, 5)


def scale_of_quantised_weights(block: Any) -> None:
    block.experts.register_buffer("down_proj_scale", torch.ones(4))


def linear_layers(block: Any) -> None:
    del block.experts.gate_up_proj


def share_of_one_rank(block: Any) -> None:
    block.experts.gate_up_proj = nn.Parameter(block.experts.gate_up_proj[:2])


def settings_elsewhere(block: Any) -> None:
    del block.gate.num_group


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("mixtral", jitter, "jitter_noise = 0.1: "),
        ("deepseek_v3", shared_activation, "activation ReLU of DeepseekV3MLP: "),
        (
            "deepseek_v3",
            bias,
            "DeepseekV3MoE has shared_experts.up_proj.bias, which a layer has no place",
        ),
        ("olmoe", scale_of_quantised_weights, "OlmoeSparseMoeBlock has experts.down_proj_scale, which"),
        ("qwen3_moe", linear_layers, "Qwen3MoeSparseMoeBlock has no experts.gate_up_proj; it must be as in"),
        (
            "mixtral",
            share_of_one_rank,
            "gate_up_proj has shape (2, 10, 12), and the gate's 4 experts need ",
        ),
        ("deepseek_v3", settings_elsewhere, "DeepseekV3TopkRouter has no num_group; it must be as in"),
    ],
)
def test_what_a_layer_cannot_be_is_refused(model: str, change: Callable[[Any], None], message: str) -> None:
    block = Case(model=model).block()
    change(block)
    with pytest.raises(ValueError, match=re.escape(message)):
        layer_from_hugging_face(block)


@pytest.mark.slow
def test_penstock_imports_transformers_only_where_it_has_a_model_of_it() -> None:
    sources = Path(penstock.__file__).parent.rglob("*.py")
    pattern = re.compile(r"^\s*(import|from) transformers", re.MULTILINE)
    found = [path for path in sources if pattern.search(path.read_text())]
    assert {path.parent.name for path in found} == {"adapt", "families"}
    at_once = re.compile("^(import|from) transformers", re.MULTILINE)
    assert {path.name for path in found if at_once.search(path.read_text())} == {"outputs.py", "trained.py"}
    check = "import sys, penstock.adapt; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=HANG_S)
