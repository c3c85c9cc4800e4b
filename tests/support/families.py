"""Small models of every family with routed experts in transformers that Penstock does not describe."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.adapted import COMMON, EXPERTS, LATENT, LINEAR, LOCAL

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
INKLING = {
    **ROUTED,
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 4,
    "rel_extent": 8,
    "d_rel": 4,
}
INKLING_2 = {**INKLING, "unpadded_vocab_size": 61, "n_layers_per_attn_res_block": 2, "num_hidden_layers": 3}

TAKEN: dict[str, dict[str, Any]] = {
    "aria_text": {"moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 1, "head_dim": 8},
    "axk2": {**INDEXED, "gated_norm_rank": 4, "mlp_layer_types": ["dense", "sparse"]},
    "bailing_hybrid": {
        **LATENT,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 16,
        "num_expert_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "head_dim": 8,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "deepseek_v32": {**INDEXED, **GROUPS, "mlp_layer_types": ["dense", "sparse"]},
    "dots3_note_text": {
        **INDEXED,
        **GROUPS,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "sliding_window": 4,
        "shared_experts_intermediate_size": 16,
        "layer_types": ["indexed_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "per_layer_config": {"01": {"num_attention_heads": 2, "num_key_value_heads": 2}},
    },
    "exaone_moe": {**EXPERTS, **GROUPS, "num_shared_experts": 1, "sliding_window": 4},
    "flint": {**EXPERTS, "shared_expert_intermediate_size": 20, "mlp_only_layers": [0], "head_dim": 8},
    "glm4_moe_lite": LATENT_ROPE,
    "granitemoe_swa": {**LOCAL, "sliding_window": 4},
    "granitemoehybrid": {
        **LOCAL,
        **MAMBA,
        "shared_intermediate_size": 20,
        "layer_types": ["mamba", "attention"],
    },
    "hy_v3": {**EXPERTS, "num_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 8},
    "kimi_linear": {
        **LATENT,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "laguna": {**EXPERTS, "shared_expert_intermediate_size": 20, "head_dim": 8},
    "lara_mini": LINEAR,
    "lfm2_moe": {**EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "mellum": {**LOCAL, "moe_intermediate_size": 16, "head_dim": 8, "sliding_window": 4},
    "mimo_v2_flash": {**ROUTED, **GROUPS, "head_dim": 8, "v_head_dim": 8, "sliding_window": 4},
    "minimax_m2": {**LOCAL, "head_dim": 8},
    "nemotron_h": {
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
    "sarvam_mla": LATENT_ROPE,
    "sarvam_moe": {**ROUTED, "first_k_dense_replace": 1, "head_dim": 8},
    "solar_open": {**ROUTED, **GROUPS, "head_dim": 8},
}
"""By `model_type`, configurations of families that are taken, as their pieces compute what they do whole."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beam": ({**EXPERTS, **GROUPS, "num_hidden_layers": 4, "head_dim": 8}, "the output of layer 3"),
    "deepseek_v4": (
        {
            **ROUTED,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "q_lora_rank": 12,
            "o_groups": 2,
            "o_lora_rank": 8,
            "hc_mult": 2,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 4,
            "sliding_window": 4,
        },
        r"works on hidden states \[2, 7, 2, 32\]",
    ),
    "doge": ({"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2}, "no module of it holds experts"),
    "gemma4_text": (
        {
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
            "head_dim": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 61,
            "layer_types": ["sliding_attention", "full_attention"],
            "per_layer_config": {},
        },
        "its layers call router and experts themselves",
    ),
    "glm_moe_dsa": ({**INDEXED, **GROUPS, "mlp_layer_types": ["dense", "sparse"]}, "returns 2 values"),
    "hy_v4": ({**INDEXED, **GROUPS, "hc_mult": 2}, "returns 2 values"),
    "inkling2_loop_text": (INKLING_2, "changes hidden states between its last layer and norm"),
    "inkling2_text": (INKLING_2, "changes hidden states between its last layer and norm"),
    "inkling_text": (INKLING, "the output of layer 0"),
    "jetmoe": ({**LOCAL, "kv_channels": 8}, "no module of it holds experts"),
    "longcat_flash": (
        {**LATENT_ROPE, "num_layers": 2, "moe_topk": 2, "expert_ffn_hidden_size": 16, "zero_expert_num": 4},
        "no module of it holds experts",
    ),
    "qwen4_exp_text": (
        {
            **LINEAR,
            "hc_count": 2,
            "hc_lowrank": 8,
            "layer_types": ["linear_attention", "indexed_attention"],
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 4,
            "indexer_compress_ratio": 2,
        },
        "it should have one norm after its layers",
    ),
    "zaya": (
        {
            "num_experts": 8,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "head_dim": 8,
            "router_hidden_size": 16,
        },
        "returns 2 values",
    ),
}
"""Configurations of families that are refused, and words of the reason."""


SEEING: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_vl_moe": ("Qwen3VLMoe", {**EXPERTS, "head_dim": 8}),
    "qwen3_5_moe": ("Qwen3_5Moe", LINEAR),
}
"""Families that also see: the beginning of the names of their classes, and a text configuration."""

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}


def seeing(family: str, **changes: Any) -> Any:
    """A model that also sees, with random weights. changes: of its text configuration."""
    import transformers

    name, own = SEEING[family]
    text = {**COMMON, **own, **changes}
    tokens = {f"{what}_token_id": 50 + number for number, what in enumerate(("image", "video"))}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=VISION, **tokens)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).train()


def undescribed(model_type: str, **changes: Any) -> Any:
    """A model of one of these families with random weights."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own = TAKEN[model_type] if model_type in TAKEN else REFUSED[model_type][0]
    config = CONFIG_MAPPING[model_type](**{**COMMON, **own, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "bias" in name and tensor.is_floating_point():
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return model.train()
