"""Small models of every family with routed experts in transformers, which are found by their configurations.

A family that transformers has added, and that Penstock does not describe, needs an entry in `TEXT`; one that
also sees or hears, in `BESIDE` where its other parts cannot be shrunk as those of all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from penstock.families.described import EXPERTS as NAMES
from tests.support.adapted import (
    COMMON,
    EXPERTS,
    GROUPS,
    INDEXED,
    LATENT,
    LATENT_ROPE,
    LINEAR,
    LOCAL,
    MODELS,
    ROUTED,
)

DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse"]}
ROPE_3D = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [1, 1, 2],
    "partial_rotary_factor": 1.0,
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

TEXT: dict[str, dict[str, Any]] = {
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
    "mimo_v2_flash": {**ROUTED, **GROUPS, "head_dim": 8, "v_head_dim": 8, "sliding_window": 4},
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
    "flint": {**EXPERTS, "shared_expert_intermediate_size": 20, "mlp_only_layers": [0], "head_dim": 8},
    "lara_mini": LINEAR,
    "mellum": {**LOCAL, "moe_intermediate_size": 16, "head_dim": 8, "sliding_window": 4},
    "sarvam_mla": LATENT_ROPE,
    "sarvam_moe": {**ROUTED, "first_k_dense_replace": 1, "head_dim": 8},
    "deepseek_v4": {
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
    "doge": {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2},
    "gemma4_text": {
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
    "glm_moe_dsa": {**INDEXED, **GROUPS, "mlp_layer_types": ["dense", "sparse"]},
    "hy_v4": {**INDEXED, **GROUPS, "hc_mult": 2},
    "inkling2_loop_text": INKLING_2,
    "inkling2_text": INKLING_2,
    "inkling_text": INKLING,
    "jetmoe": {**LOCAL, "kv_channels": 8},
    "longcat_flash": {
        **LATENT_ROPE,
        "num_layers": 2,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 4,
    },
    "qwen4_exp_text": {
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
    "zaya": {
        "num_experts": 8,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "router_hidden_size": 16,
    },
    "deepseek_ocr2_text": {**ROUTED, **DENSE_FIRST, "head_dim": 8},
    "diffusion_gemma_text": {
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    },
    "ernie4_5_vl_moe_text": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": [16, 12],
        "rope_parameters": ROPE_3D,
        **DENSE_FIRST,
    },
    "glm4v_moe_text": {**ROUTED, "first_k_dense_replace": 1, "head_dim": 8, "rope_parameters": ROPE_3D},
    "glm5_next_text": {
        **INDEXED,
        **DENSE_FIRST,
        "qk_rope_head_dim": 0,
        "hc_mult": 2,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "head_dim": 0,
        "layer_types": ["linear_attention", "indexed_attention"],
        "index_kpool": 2,
    },
    "hy_v4_vl_text": {**INDEXED, "hc_mult": 2, "rope_parameters": ROPE_3D},
    "mistral4": {**LATENT_ROPE, "first_k_dense_replace": 1, "head_dim": 16},
    "mistral_large4_text": {**INDEXED, **DENSE_FIRST},
    "muse_spark_text": {
        **LOCAL,
        "moe_intermediate_size": 16,
        "moe_hidden_size": 16,
        "head_dim": 8,
        "sliding_window": 4,
    },
    "qwen3_omni_moe_text": {**EXPERTS, "head_dim": 8},
    "qwen3_vl_moe_text": {**EXPERTS, "head_dim": 8},
    "step3p5": {**ROUTED, **DENSE_FIRST, "head_dim": 8, "share_expert_dim": 20, "sliding_window": 4},
    "unlimited_ocr_text": {**ROUTED, **DENSE_FIRST, "head_dim": 8},
}
"""By `model_type` of the configuration of text: settings of families that Penstock does not describe."""

SCALES = {
    "routed_scaling_factor": 1.5,
    "moe_routed_scaling_factor": 1.5,
    "route_scale": 1.5,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 1.5,
    "logits_scaling": 2.0,
}
"""Settings whose usual value, 1, would hide what a layer does."""

PART: dict[str, Any] = {
    "depth": 1,
    "num_layers": 1,
    "num_hidden_layers": 1,
    "encoder_layers": 1,
    "hidden_size": 16,
    "d_model": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "encoder_ffn_dim": 16,
    "mlp_dim": 16,
    "num_local_experts": 4,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "encoder_attention_heads": 2,
    "head_dim": 8,
    "image_size": 16,
    "patch_size": 4,
    "output_dim": 16,
    "out_hidden_size": 32,
    "projection_dim": 16,
    "projector_hidden_size": 16,
    "text_hidden_size": 32,
    "vocab_size": 8,
    "downsample_channels": [16, 16],
    "vision_output_dim": 32,
    "projector_input_dim": 16,
    "projector_output_dim": 32,
    "output_channels": 16,
    "downsample_hidden_size": 8,
    "global_attn_indexes": [0],
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
    "adapter_in_dim": 16,
    "adapter_input_size": 16,
    "adapter_out_dim": 32,
}
"""Settings of the parts of a model that see and hear, as far as a part has them."""

BESIDE_TEXT = re.compile("vision|audio")
BESIDE: dict[str, dict[str, Any]] = {
    "dots3_note": {"vision_config": {"mlp_layer_types": ["sparse"], "per_layer_config": {}}},
    "muse_spark": {
        "audio_config": {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_hidden_layers": 4},
        "vision_config": {"layer_types": ["full_attention"]},
        "out_hidden_size": 16,
        "projector_hidden_size": 16,
    },
    "nemotron_h_omni": {
        "vision_config": {"video_temporal_patch_size": 2},
        "vision_hidden_size": 16,
        "projector_hidden_size": 16,
    },
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 55},
}
"""By `model_type` of a model that also sees or hears: further settings."""


@cache
def found() -> dict[str, str]:
    """The classes of all models of transformers that write text by routed experts, by `model_type`.

    They are those whose configuration, or a part of it, has a number of experts; those of what they see or
    hear do not count. Of a model that also sees it is the class that does: its text alone is another type.
    """
    from transformers.models.auto import modeling_auto as auto

    classes = {**auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    return {name: kind for name, kind in sorted(classes.items()) if any(map(_has_experts, _configs(name)))}


def _configs(model_type: str) -> Iterator[Any]:
    """Yield the usual configuration of a model, and those of its parts."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[model_type]()
    except StrictDataclassError:  # an assistant, which is made to fit another model
        return
    yield config
    yield from (getattr(config, name) for name in config.sub_configs if not BESIDE_TEXT.search(name))


def _has_experts(config: Any) -> bool:
    return any(hasattr(config, name) for name in NAMES)


def text_settings(text: Any) -> dict[str, Any]:
    """Settings of a family's small text part. Raises KeyError for a family that has no entry."""
    name = text.model_type
    scales = {key: value for key, value in SCALES.items() if hasattr(text, key)}
    return {**COMMON, **scales, **(MODELS[name][1] if name in MODELS else TEXT[name])}


def tiny(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model of a family with random weights and biases that are not zero. changes: settings of its text."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    default = CONFIG_MAPPING[model_type]()
    if (text := default.get_text_config()) is default:
        config = type(default)(**{**text_settings(default), **changes})
    else:
        beside, given = BESIDE.get(model_type, {}), {}
        for name in default.sub_configs:
            part = getattr(default, name)
            if part is text:
                given[name] = {"model_type": text.model_type, **text_settings(text), **changes}
            elif part is not None:
                given[name] = {**_shrunk(part), **beside.get(name, {})}
        tokens = [name for name in vars(default) if name.endswith(("_token_id", "_token_index"))]
        given |= {name: number % 3 for number, name in enumerate(tokens)}  # `Batch` has none of these
        given |= {name: value for name, value in beside.items() if name not in given}
        config = type(default)(**given, experts_implementation="eager")
    torch.manual_seed(0)
    model = getattr(transformers, found()[model_type])._from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "bias" in name and tensor.is_floating_point():
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return model.to(dtype).train()


def _shrunk(part: Any) -> dict[str, Any]:
    """Return small settings of a part that sees or hears, and of its own parts."""
    known = {**vars(part), **getattr(type(part), "attribute_map", {})}
    inner = {name: _shrunk(each) for name in part.sub_configs if (each := getattr(part, name)) is not None}
    return {"model_type": part.model_type, **{k: v for k, v in PART.items() if k in known}, **inner}
