"""The model of a checkpoint of `penstock train`, whole on one process, as transformers takes it.

A decoder that is a Qwen3-MoE becomes one of transformers, and generates with a cache. Any other is wrapped:
it has no cache, and recomputes the whole text for every token.
Shapes: B samples, L tokens per sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

from penstock.adapt.described import quiet
from penstock.adapt.weights import some_of
from penstock.checkpoint.storage import Part
from penstock.config import from_dict
from penstock.models import ModelConfig, MoEDecoder
from penstock.models.qwen3_moe import config_json, in_files, lack_of
from penstock.moe import MoEConfig
from penstock.topology import Control
from penstock.train.checkpoint import open_stored, verify
from penstock.train.resume_settings import check_sizes_given


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
    saved = {name: shape for name, (shape, _) in stored.whole.items() if name.startswith("model.")}
    with torch.device("meta"):
        _check_stored(path, MoEDecoder(model, moe), saved)
    if lack_of(moe) is None:
        tensors = {name: torch.empty(stored.whole[name][0], dtype=stored.whole[name][1]) for name in saved}
        stored.load({name: Part.of(tensor) for name, tensor in tensors.items()})
        named = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        return as_qwen3_moe(model, moe, named, record.tokenizer).eval()
    wrapped = WrappedDecoder(model, moe, record.tokenizer)
    stored.load({f"model.{name}": Part.of(tensor) for name, tensor in _logical(wrapped.decoder)})
    return wrapped.eval()


def as_qwen3_moe(
    model: ModelConfig, moe: MoEConfig, tensors: Mapping[str, Tensor], tokenizer_digest: str | None = None
) -> Qwen3MoeForCausalLM:
    """Return the model of transformers with the weights of a decoder, by their names in checkpoints."""
    config = Qwen3MoeConfig(**config_json(model, moe, tokenizer_digest=tokenizer_digest))
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        there, transposed = in_files(name)
        state[there] = tensor.t() if transposed else tensor
    with quiet():
        made: Qwen3MoeForCausalLM = Qwen3MoeForCausalLM.from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32
        )
    return made


def _check_stored(path: Path, decoder: MoEDecoder, saved: Mapping[str, torch.Size]) -> None:
    """Raise ValueError unless a checkpoint holds the tensors of a decoder. saved: shapes by name."""
    # Compared first, as settings may ask for any number of experts, of which each gets a name below.
    numbers = sum(tensor.numel() for _, tensor in _kept(decoder))
    held = sum(map(prod, saved.values()))
    if numbers != held:
        raise ValueError(
            f"{path} holds another model than its settings say: {held:,} numbers, and they say {numbers:,}. "
            "Give the path of another checkpoint"
        )
    wanted = {f"model.{name}": tuple(tensor.shape) for name, tensor in _logical(decoder)}
    missing, unexpected = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    misshapen = [name for name in saved.keys() & wanted.keys() if saved[name] != wanted[name]]
    if missing or unexpected or misshapen:
        raise ValueError(
            f"{path} holds another model than its settings say: missing {some_of(missing)}, unexpected "
            f"{some_of(unexpected)}, of other shapes {some_of(sorted(misshapen))}. Give the path of another "
            "checkpoint"
        )


def _logical(decoder: MoEDecoder) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a whole decoder under their names in checkpoints: every expert has its own."""
    for name, tensor in _kept(decoder):
        yield from decoder.logical(name, tensor.detach())


def _kept(decoder: MoEDecoder) -> list[tuple[str, Tensor]]:
    """Return the buffers and parameters of a decoder that checkpoints have; those it ties once."""
    kept = decoder.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in decoder.named_buffers() if name in kept]
    return [*buffers, *decoder.named_parameters()]
