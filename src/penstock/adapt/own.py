"""Penstock's own decoder as a model of transformers: it generates, and is saved and read like other models.

Importing this module registers it with AutoConfig and AutoModelForCausalLM (`model_type` "penstock").
Shapes: B samples, L tokens per sample, M hidden size, V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from penstock.adapt.weights import some_of
from penstock.config import from_dict, shorten, to_dict
from penstock.models import ModelConfig, MoEDecoder
from penstock.moe import MoEConfig, SampleKeys
from penstock.topology import Control
from penstock.train.checkpoint import STEP, open_stored, verify
from penstock.train.resume_settings import check_sizes_given
from penstock.train.storage.owned import MOMENTS
from penstock.train.storage.record import RECORD, Record
from penstock.train.storage.shards import SUFFIX, Outgoing, write_shard
from penstock.train.storage.stored import Entry
from penstock.train.storage.sums import digest_of, write_sums
from penstock.writing import new_folder

NAME = "penstock"
CHANGING = ("position_ids", "inputs_embeds", "past_key_values", "shift_labels")
"""Arguments of models of transformers that would change what this model computes."""


class PenstockConfig(PreTrainedConfig):
    """The sections [model] and [moe] of the run that has trained the model.

    tokenizer_digest: sha256 of the tokenizer.json of its text, or `bytes`; None = not known.
    """

    model_type = NAME

    def __init__(
        self,
        sections: Any = None,
        *,
        tokenizer_digest: str | None = None,
        use_cache: bool = False,
        **named: Any,
    ) -> None:
        tables = {} if sections is None else sections
        if not isinstance(tables, Mapping) or not all(isinstance(each, Mapping) for each in tables.values()):
            raise ValueError(
                f"sections = {shorten(repr(sections))}: write the settings of [model] and [moe] as two tables"
            )
        if not isinstance(tokenizer_digest, str | None):
            raise ValueError(
                f"tokenizer_digest = {shorten(repr(tokenizer_digest))}: must be a text, or left out"
            )
        self.sections = {
            "model": to_dict(from_dict(ModelConfig, dict(tables.get("model", {})), "model")),
            "moe": to_dict(from_dict(MoEConfig, dict(tables.get("moe", {})), "moe")),
        }
        self.tokenizer_digest = tokenizer_digest
        model = self.model_section
        told = {
            "hidden_size": model.hidden_size,
            "num_attention_heads": model.num_heads,
            "num_hidden_layers": model.num_layers,
            "vocab_size": model.vocab_size,
            "max_position_embeddings": model.seq_len,
        }
        for name, value in told.items():
            if (given := named.pop(name, value)) != value:
                raise ValueError(f"{name} = {given}, and sections say {value}: change sections alone")
            setattr(self, name, value)
        named["tie_word_embeddings"] = model.tie_word_embeddings
        super().__init__(use_cache=use_cache, **named)

    @property
    def model_section(self) -> ModelConfig:
        """Section [model]."""
        found: ModelConfig = from_dict(ModelConfig, dict(self.sections["model"]), "model")
        return found

    @property
    def moe_section(self) -> MoEConfig:
        """Section [moe]."""
        found: MoEConfig = from_dict(MoEConfig, dict(self.sections["moe"]), "moe")
        return found


class PenstockForCausalLM(PreTrainedModel, GenerationMixin):
    """A whole decoder on one process.

    It keeps no keys and values: generation recomputes the whole text for every token, from its last
    `max_position_embeddings` tokens.
    """

    config_class = PenstockConfig
    base_model_prefix = "decoder"
    _tied_weights_keys = {"decoder.lm_head.weight": "decoder.model.embed_tokens.weight"}  # noqa: RUF012  # theirs

    def __init__(self, config: PenstockConfig) -> None:
        super().__init__(config)
        self.decoder = MoEDecoder(config.model_section, config.moe_section)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        **named: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, L, V], and with labels [B, L] the mean loss of predicting each next token.

        num_items_in_batch: divisor of the sum of losses, in place of their number. Raises ValueError for
        padding, which attention would see, and for arguments that would be ignored.
        """
        unknown = [name for name in CHANGING if named.get(name) is not None]
        if unknown:
            raise ValueError(f"this model takes input_ids, attention_mask and labels, and no {unknown[0]}")
        if attention_mask is not None and not attention_mask.all():
            raise ValueError("attention of this model knows no padding: give prompts one by one")
        decoder, keys = self.decoder, SampleKeys(0, torch.arange(len(input_ids), device=input_ids.device))
        h_BLM = decoder.embed(input_ids, keys)
        for block in decoder.parts:
            residual_BLM, x_TM = block.attend(h_BLM, keys)
            if block.moe is None:
                out_TM = block.dense(x_TM)
            else:
                out_TM = block.moe(x_TM.view_as(residual_BLM)).flatten(0, 1)
            h_BLM = block.add(residual_BLM, out_TM, keys)
        logits_BLV = decoder.logits(h_BLM).unflatten(0, input_ids.shape)
        loss = None
        if labels is not None:
            vocabulary = logits_BLV.shape[-1]
            loss = self.loss_function(logits_BLV, labels, vocabulary, num_items_in_batch=num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits_BLV)

    def prepare_inputs_for_generation(self, input_ids: Tensor, **named: Any) -> dict[str, Any]:
        """Return the last tokens, at most the number of positions that the model has."""
        del named
        return {"input_ids": input_ids[:, -self.config.max_position_embeddings :]}


AutoConfig.register(NAME, PenstockConfig, exist_ok=True)
AutoModelForCausalLM.register(PenstockConfig, PenstockForCausalLM, exist_ok=True)


def from_checkpoint(path: Path) -> PenstockForCausalLM:
    """Return the model of a checkpoint from a run of any layout, whole on this process, for evaluation.

    path: the checkpoint's folder. Raises DamagedCheckpointError for a checkpoint that has changed since it
    was written, ValueError if it holds another model than it says.
    """
    record = verify(path, Control(0, 1))
    if record.settings is None:
        raise ValueError(f"{path} does not say what model it holds: an earlier version of Penstock wrote it")
    check_sizes_given(record.settings, path)
    config = PenstockConfig(record.settings, tokenizer_digest=record.tokenizer)
    stored = open_stored(path)
    saved = {name: entry for name, entry in stored.entries.items() if name.startswith("model.")}
    with torch.device("meta"):
        _check_stored(path, PenstockForCausalLM(config).decoder, saved)
    model = PenstockForCausalLM(config)
    wanted = {f"model.{name}": tensor for name, tensor in _logical(model.decoder)}
    with torch.no_grad():
        for name, tensor in stored.read(saved):
            wanted[name].copy_(tensor)
    model.eval()
    return model


def _check_stored(path: Path, decoder: MoEDecoder, saved: Mapping[str, Entry]) -> None:
    """Raise ValueError unless a checkpoint holds the tensors of a decoder. saved: what it holds, by name."""
    # Compared first, as settings may ask for any number of experts, of which each gets a name below.
    numbers = sum(tensor.numel() for _, tensor in _kept(decoder))
    held = sum(prod(entry.shape) for entry in saved.values())
    if numbers != held:
        raise ValueError(
            f"{path} holds another model than its settings say: {held:,} numbers, and they say {numbers:,}. "
            "Give the path of another checkpoint"
        )
    wanted = {f"model.{name}": tuple(tensor.shape) for name, tensor in _logical(decoder)}
    missing, unexpected = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    misshapen = [name for name in saved.keys() & wanted.keys() if saved[name].shape != wanted[name]]
    if missing or unexpected or misshapen:
        raise ValueError(
            f"{path} holds another model than its settings say: missing {some_of(missing)}, unexpected "
            f"{some_of(unexpected)}, of other shapes {some_of(sorted(misshapen))}. Give the path of another "
            "checkpoint"
        )


def to_checkpoint(model: PenstockForCausalLM, folder: Path) -> Path:
    """Write a model as the checkpoint of a run in `folder` that has done no step; returns its path.

    `penstock train` continues from it with train.resume=true, on any text, so it holds float32, whatever the
    type of the model. Moments are zero.
    """
    path = folder / "checkpoints" / "step-00000000"
    with new_folder(path) as work:
        work.mkdir()
        _write(model, work)
    return path


def _write(model: PenstockForCausalLM, path: Path) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in _logical(model.decoder)}
    tensors |= {STEP: torch.tensor(0)}
    for name, parameter in model.decoder.named_parameters():
        tensors[f"optimizer.{name}.step"] = torch.tensor(0.0)
        for moment in MOMENTS:
            zeros = torch.zeros_like(parameter, dtype=torch.float32)
            tensors |= dict(_split(model.decoder, f"optimizer.{name}.{moment}", name, zeros))
    shard = f"shard-00001{SUFFIX}"
    digest = write_shard(path / shard, map(_outgoing, tensors.items()))
    settings = model.config.sections
    record = Record(
        step=0,
        processes=1,
        identity={},
        settings=settings,
        plan_settled=False,
        files=[shard],
        tokenizer=model.config.tokenizer_digest,
    )
    record.write(path)
    write_sums(path, {shard: digest, RECORD: digest_of(path / RECORD)})


def _outgoing(named: tuple[str, Tensor]) -> Outgoing:
    name, tensor = named
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    entry = Entry(shape=tuple(tensor.shape), dtype=dtype)
    return Outgoing(name=name, entry=entry, load=lambda: tensor.to(dtype))


def _logical(decoder: MoEDecoder) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a whole decoder under their names in checkpoints: every expert has its own."""
    for name, tensor in _kept(decoder):
        yield from _split(decoder, name, name, tensor.detach())


def _kept(decoder: MoEDecoder) -> list[tuple[str, Tensor]]:
    """Return the buffers and parameters of a decoder that checkpoints have; those it ties once."""
    kept = decoder.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in decoder.named_buffers() if name in kept]
    return [*buffers, *decoder.named_parameters()]


def _split(decoder: MoEDecoder, name: str, of: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Return the tensor of the parameter `of` under its own name or, for experts, one for each."""
    if ".experts." not in of:
        return [(name, tensor)]
    moe = decoder.parts[int(of.split(".")[2])].moe
    assert moe is not None, of
    return moe.by_number(name, tensor)
