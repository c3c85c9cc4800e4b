"""Small models of transformers, and one step of them: as they are, and scheduled by Penstock."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here needs the network

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import penstock
from penstock.mesh import Group
from penstock.sharding import Sharding, StackedSharding, sharding_of

COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "experts_implementation": "eager",
}
"""What configurations of all families know."""

DEEPSEEK: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
LINEAR: dict[str, Any] = {
    **EXPERTS,
    "shared_expert_intermediate_size": 20,
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
LOCAL: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}

ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
GROUPS = {"n_group": 2, "topk_group": 1}
LATENT_ROPE = {**ROUTED, **LATENT, "num_key_value_heads": 4, "head_dim": 8}
"""DeepSeek's attention where `head_dim` is the width of its positions."""

INDEXED = {**LATENT_ROPE, "index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**LOCAL, "sliding_window": 5}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0], "head_dim": 8}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 20}),
    "qwen3_next": ("Qwen3Next", LINEAR),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", LINEAR),
    "olmoe": ("Olmoe", {**EXPERTS, "norm_topk_prob": False}),
    "flex_olmo": ("FlexOlmo", {**EXPERTS}),
    "deepseek_v2": ("DeepseekV2", {**DEEPSEEK, **LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", {**DEEPSEEK, **LATENT, "norm_topk_prob": True}),
    "glm4_moe": ("Glm4Moe", {**DEEPSEEK, "head_dim": 8, "norm_topk_prob": True}),
    "dots1": ("Dots1", {**DEEPSEEK, "head_dim": 8, "norm_topk_prob": True}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 16,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "gpt_oss": ("GptOss", {**LOCAL, "head_dim": 8, "sliding_window": 4}),
    "phimoe": ("Phimoe", {**LOCAL, "router_jitter_noise": 0.01, "input_jitter_noise": 0.0}),
    "granitemoe": (
        "GraniteMoe",
        {**LOCAL, "residual_multiplier": 0.5, "embedding_multiplier": 1.5, "logits_scaling": 2.0},
    ),
    "minimax": (
        "MiniMax",
        {
            **LOCAL,
            "head_dim": 8,
            "block_size": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_alpha_factor": 1.1,
            "mlp_beta_factor": 0.9,
        },
    ),
    "jamba": (
        "Jamba",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "dbrx": (
        "Dbrx",
        {
            "d_model": 32,
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        },
    ),
    "llama4_text": (
        "Llama4Text",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 1,
            "head_dim": 8,
            "intermediate_size_mlp": 24,
            "moe_layers": [1],
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 4,
        },
    ),
    "granitemoeshared": (
        "GraniteMoeShared",
        {**LOCAL, "residual_multiplier": 0.5, "shared_intermediate_size": 20},
    ),
    "beam": (
        "Beam",
        {**EXPERTS, "num_hidden_layers": 4, "n_group": 2, "topk_group": 1, "head_dim": 8},
    ),
    "exaone_moe": (
        "ExaoneMoe",
        {"routed_scaling_factor": 1.5, **EXPERTS, **GROUPS, "num_shared_experts": 1, "sliding_window": 4},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {
            **LATENT_ROPE,
            "routed_scaling_factor": 1.5,
        },
    ),
    "granitemoe_swa": ("GraniteMoeSWA", {"residual_multiplier": 0.5, **LOCAL, "sliding_window": 4}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            "residual_multiplier": 0.5,
            **LOCAL,
            **MAMBA,
            "shared_intermediate_size": 20,
            "layer_types": ["mamba", "attention"],
        },
    ),
    "hy_v3": ("HYV3", {**EXPERTS, "num_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 8}),
    "kimi_linear": (
        "KimiLinear",
        {
            **LATENT,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 16,
            "head_dim": 8,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "laguna": (
        "Laguna",
        {"moe_routed_scaling_factor": 1.5, **EXPERTS, "shared_expert_intermediate_size": 20, "head_dim": 8},
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "routed_scaling_factor": 1.5,
            **EXPERTS,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention"],
        },
    ),
    "minimax_m2": ("MiniMaxM2", {**LOCAL, "head_dim": 8}),
    "nemotron_h": (
        "NemotronH",
        {
            "routed_scaling_factor": 1.5,
            **ROUTED,
            "moe_shared_expert_intermediate_size": 20,
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 4,
            "use_mamba_kernels": False,
        },
    ),
    "solar_open": ("SolarOpen", {"routed_scaling_factor": 1.5, **ROUTED, **GROUPS, "head_dim": 8}),
    "afmoe": (
        "Afmoe",
        {**EXPERTS, "head_dim": 8, "num_dense_layers": 1, "num_shared_experts": 1, "sliding_window": 5},
    ),
    "kolibri1": ("Kolibri1", {**EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 20}),
    "axk1": ("AXK1", {**DEEPSEEK, **LATENT, "norm_topk_prob": True}),
    "cohere2_moe": ("Cohere2Moe", {**EXPERTS, "head_dim": 8, "num_shared_experts": 1, "sliding_window": 5}),
    "minimax_m3_vl_text": (
        "MiniMaxM3VLText",
        {**LOCAL, "head_dim": 8, "shared_intermediate_size": 20, "routed_scaling_factor": 1.5},
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": 8, "moe_topk": 2, "head_dim": 8}),
}
"""By family: the beginning of the names of its classes, and a configuration."""


DIVISIBLE: dict[str, Any] = {"vocab_size": 64, "num_key_value_heads": 4}
"""Sizes that four ranks can share."""


def small(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A model of a family with random weights, the same for a seed, of which biases are not zero."""
    import transformers

    name, own = MODELS[family]
    settings = {**COMMON, **own, **changes}
    config = getattr(transformers, f"{name}Config")(**settings)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for tensor_name, tensor in model.state_dict().items():
            if "bias" in tensor_name and tensor.is_floating_point():
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return model.to(dtype).train()


def pair(family: str) -> tuple[Any, Any]:
    """A model as it is, and the same one scheduled."""
    return small(family), penstock.parallelize(small(family), plan="flowmoe")


def with_adapters(model: Any) -> Any:
    """LoRA on attention; the same numbers every time, none of them zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(7)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, config)


class InFloat64(TorchFunctionMode):
    """Every request for float32 is one for float64: transformers always routes and norms in it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        func = torch.Tensor.double if func is torch.Tensor.float else func
        if len(args) == 1 and not kwargs:  # most are attributes
            return func(*args)
        args = [torch.float64 if each is torch.float32 else each for each in args]
        items = (kwargs or {}).items()
        return func(*args, **{key: torch.float64 if each is torch.float32 else each for key, each in items})


class DrawnFromScores(TorchFunctionMode):
    """What Phi-3.5-MoE draws for a token follows from the token's scores, on any rank, in any microbatch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.empty_like:
            return args[0].detach().clone()
        if func is torch.Tensor.exponential_:
            return args[0].copy_(0.05 + (7 * args[0].nan_to_num(neginf=0.0)).sin().square())
        if func is torch.rand_like:
            return (7 * args[0]).sin().square()
        if func is torch.Tensor.uniform_:  # of what rand_like has returned
            return args[0]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Batch:
    """Samples of all ranks. padded: the last sample has padding at its beginning, as fine-tuning has it."""

    samples: int = 4
    length: int = 12
    padded: bool = False
    seed: int = 5

    def inputs(self, first: int = 0, stop: int | None = None) -> dict[str, Tensor]:
        """The arguments of a model for these samples."""
        generator = torch.Generator().manual_seed(self.seed)
        tokens_BL = torch.randint(3, 61, (self.samples, self.length), generator=generator)
        labels_BL = tokens_BL.clone()
        labels_BL[0, :3] = -100
        given = {"input_ids": tokens_BL, "labels": labels_BL}
        if self.padded:
            mask_BL = torch.ones_like(tokens_BL)
            mask_BL[-1, :4] = 0
            labels_BL[-1, :4] = -100  # the last padding predicts the first token
            given["attention_mask"] = mask_BL
        return {name: each[first:stop] for name, each in given.items()}


def exactly(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Inside, models compute in this type throughout, their fixed casts to float32 included."""
    return InFloat64() if dtype == torch.float64 else nullcontext()


def grads_of(model: Any) -> dict[str, Tensor]:
    """The gradients of all parameters that have one, by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def choices(model: Any, given: Mapping[str, Any]) -> list[Tensor]:
    """The experts that every token chooses, layer by layer, in evaluation."""
    found: list[Tensor] = []
    experts = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    hooks = [e.register_forward_pre_hook(lambda e, a: found.append(_choice(e, *a))) for e in experts]
    with torch.no_grad():
        model.eval()(**given)
    model.train()
    for hook in hooks:
        hook.remove()
    return found


def _choice(experts: Any, x: Tensor, *routed: Tensor) -> Tensor:
    """In ascending order; where all experts get all tokens, weighed, of every one which it was chosen for."""
    if routed:
        return routed[0].sort().values
    chosen_ET: Tensor = x.unflatten(0, (len(experts.down_proj), -1)).any(-1)
    return chosen_ET


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative norm of the difference."""
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))


def share_of(whole: Tensor, mine: Tensor, rank: int) -> Tensor:
    """What a rank has of a gradient: all, or that of its experts."""
    return whole if whole.shape == mine.shape else whole[rank * len(mine) : (rank + 1) * len(mine)]


def part_of(parameter: Tensor, whole: Tensor, rank: int) -> Tensor:
    """What a rank has of the gradient of a parameter, of which it may have its heads or its experts."""
    return cut(parameter, sharding_of(parameter), whole, rank)


def cut(mine: Tensor, sharding: Sharding | None, whole: Tensor, rank: int) -> Tensor:
    """What a rank has of a tensor: its experts, the part that a sharding says, or both. rank: among those
    that have different experts."""
    if sharding is None:
        return share_of(whole, mine, rank)
    if sharding.axes == Group.SHARDS:
        sharding = StackedSharding.of(sharding, len(mine), len(whole), rank)
    return sharding.part(whole)


def check_grads(found: Any, wanted: Any, rank: int = 0, within: float = 1e-5) -> None:
    """Gradients are those of one process, `wanted`; of either, a model or its gradients by name."""
    grads, expected = (each if isinstance(each, dict) else grads_of(each) for each in (found, wanted))
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert distance(grad, share_of(expected[name], grad, rank)) < within, name


def without_labels(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each for name, each in given.items() if name != "labels"}


@contextmanager
def as_torchrun_starts_it(rank: int, world: int) -> Iterator[None]:
    """Inside, accelerate sees the processes that have joined already."""
    from accelerate.state import AcceleratorState

    with pytest.MonkeyPatch.context() as environ:
        told: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
        told |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 29500}
        for name, value in told.items():
            environ.setenv(name, str(value))
        AcceleratorState._reset_state(True)
        yield
    AcceleratorState._reset_state(True)
