"""The model of a checkpoint of `penstock train`, whole on one process, as transformers takes it.

A decoder that is a Qwen3-MoE becomes one of transformers, and generates with a cache. Any other is wrapped:
it has no cache, and recomputes the whole text for every token.
Shapes: B samples, L tokens per sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from penstock.checkpoint.storage import Part, misfits
from penstock.config import from_dict
from penstock.families.described import quiet, read_generation
from penstock.models import ModelConfig, MoEDecoder
from penstock.models.qwen3_moe import CONFIG, config_json, lack_of
from penstock.moe import MoEConfig
from penstock.topology import Control
from penstock.train.checkpoint import TYPES, open_stored, verify
from penstock.train.resume import check_sizes_given
from penstock.train.run_state import DecoderNaming, of_model


class WrappedDecoder(PreTrainedModel, GenerationMixin):
    """A decoder with MoE layers that no model of transformers has, for text on one process."""

    config_class = PreTrainedConfig

    def __init__(self, model: ModelConfig, moe: MoEConfig, tokenizer_digest: str | None) -> None:
        config = PreTrainedConfig(tie_word_embeddings=model.tie_word_embeddings, use_cache=False)
        config.vocab_size, config.max_position_embeddings = model.vocab_size, model.seq_len
        config.num_hidden_layers, config.tokenizer_digest = model.num_layers, tokenizer_digest
        super().__init__(config)
        self.decoder = MoEDecoder(model, moe)

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.model.embed_tokens

    def forward(self, input_ids: Tensor, **named: Any) -> CausalLMOutputWithPast:
        """Return logits [B, L, V]."""
        del named
        return CausalLMOutputWithPast(logits=self.decoder(input_ids))

    def prepare_inputs_for_generation(self, input_ids: Tensor, **named: Any) -> dict[str, Any]:
        """Return the last tokens, at most as many as a sample had in training."""
        del named
        return {"input_ids": input_ids[:, -self.config.max_position_embeddings :]}


def from_checkpoint(path: Path) -> PreTrainedModel:
    """Return the model of a checkpoint from a run of any layout, whole on this process, for evaluation.

    Args:
        path: The checkpoint's folder.

    Raises:
        DamagedCheckpointError: The checkpoint has changed since it was written.
        ValueError: It holds another model than it says.
    """
    record = verify(path, Control(0, 1))
    if record.settings is None:
        raise ValueError(f"{path} does not say what model it holds")
    check_sizes_given(record.settings, path)
    model: ModelConfig = from_dict(ModelConfig, dict(record.settings["model"]), "model")
    moe: MoEConfig = from_dict(MoEConfig, dict(record.settings["moe"]), "moe")
    stored = open_stored(path)
    saved = {name: each for name, each in stored.whole.items() if of_model(name)}
    with torch.device("meta"):
        decoder = MoEDecoder(model, moe)
        # Compared first, as settings may ask for any number of experts, of which each gets a name below.
        kept = decoder.state_dict(keep_vars=True).values()
        numbers = sum(tensor.numel() for tensor in {id(tensor): tensor for tensor in kept}.values())
        held = sum(prod(shape) for shape, _ in saved.values())
        if numbers != held:
            raise ValueError(
                f"{path} holds another model than its settings say: {held:,} numbers, and they say "
                f"{numbers:,}. Give the path of another checkpoint"
            )
        wanted = {name: Part.of(tensor) for name, tensor, _ in DecoderNaming(decoder).in_files()}
        if (misfit := misfits(wanted, saved, wanted, TYPES)) is not None:
            raise ValueError(
                f"{path} holds another model than its settings say: {misfit}. Give the path of another "
                "checkpoint"
            )
    if lack_of(moe) is None:
        tensors = {
            name: torch.empty(shape, dtype=dtype, device="cpu") for name, (shape, dtype) in saved.items()
        }
        stored.load({name: Part.of(tensor) for name, tensor in tensors.items()})
        like = path if (path / CONFIG).exists() else None
        return as_qwen3_moe(model, moe, tensors, record.tokenizer, like).eval()
    wrapped = WrappedDecoder(model, moe, record.tokenizer)
    stored.load({name: Part.of(tensor) for name, tensor, _ in DecoderNaming(wrapped.decoder).in_files()})
    return wrapped.eval()


def as_qwen3_moe(
    model: ModelConfig,
    moe: MoEConfig,
    tensors: Mapping[str, Tensor],
    tokenizer_digest: str | None = None,
    like: Path | None = None,
) -> Qwen3MoeForCausalLM:
    """Return the model of transformers with the weights of a decoder.

    Args:
        model: Section `[model]` of the run.
        moe: Section `[moe]`.
        tensors: The weights, by their names in checkpoints.
        tokenizer_digest: Sha256 of the text's tokenizer, or `bytes`; None = none is known.
        like: A folder that says what the sections do not: special tokens, positions, and how text is made.
    """
    config = Qwen3MoeConfig(**config_json(model, moe, tokenizer_digest=tokenizer_digest, like=like))
    generation = None if like is None else read_generation(like)
    with quiet():
        made: Qwen3MoeForCausalLM = Qwen3MoeForCausalLM.from_pretrained(
            None, config=config, state_dict=dict(tensors), dtype=torch.float32
        )
    if generation is not None:
        made.generation_config = generation
    return made
