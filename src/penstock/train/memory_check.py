"""Checks whether a run fits into the available memory before anything of it is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from penstock.config import ConfigError
from penstock.device import device_of
from penstock.models import ModelConfig
from penstock.models.meta import on_meta
from penstock.moe import MoEConfig
from penstock.routing.sizes import split_sizes
from penstock.topology import Control, Layout
from penstock.topology.local import memory_limit
from penstock.train.assemble import gradient_bytes, model_of
from penstock.train.config import RunConfig
from penstock.train.optimizer import MOMENTS
from penstock.words import gib

COPIES = 4
"""Copies of a weight: itself, its gradient and AdamW's two moments, all in float32."""

KEPT_COPIES, KEPT_HEADS, KEPT_RECOMPUTED = 4, 3, 1
"""Least number of hidden states kept per token and block from forward to backward, and of numbers for each of
its heads' (of queries and of keys): all that attention saves; or the block's input alone where the block is
recomputed. See `plan.memory`, which also counts what norms keep that are not one kernel."""

SMALLEST_ELEMENT_BYTES, FLOAT32_BYTES = 2, 4

RANK_BYTES = 160 << 20
"""Memory of a process with torch before there is a model. Measured: 190 MiB."""

SPARING = {
    0: ", or share moments (optimizer.zero_stage = 1)",
    MOMENTS: ", or share gradients (optimizer.zero_stage = 2)",
}
"""What else would help, by the number of copies that are shared already."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Least bytes that one rank needs, by the setting with which they grow.

    masks_bytes: where documents are separate, attention keeps in every block which tokens of a sample see
    each other, one number for each pair of tokens.
    """

    vocabulary_bytes: int
    layers_bytes: int
    experts_bytes: int
    activations_bytes: int
    masks_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.state_bytes + self.activations_bytes + self.masks_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state."""
        return self.vocabulary_bytes + self.layers_bytes + self.experts_bytes


def memory_of(config: RunConfig, layout: Layout) -> RankMemory:
    """Estimate the memory of one rank, in milliseconds for any size. Scratch memory is not counted.

    config: `resolved`.
    """
    model, moe, batch = config.model, config.moe, config.data.batch_per_device
    shared_copies = config.optimizer.shared_copies
    whole = COPIES - shared_copies
    copies, expert_copies = whole + shared_copies / layout.dp_size, whole + shared_copies / layout.edp_size
    ends, layers, experts = _bytes(model, moe, layout)
    tokens = min(split_sizes(model.seq_len, layout.tp_size)) if layout.tokens == "split" else model.seq_len
    heads = (model.attention_size + model.key_value_size) // layout.tp_size
    kept = KEPT_COPIES * model.hidden_size + KEPT_HEADS * heads
    again = config.plan.may_repeat_blocks
    token_bytes = SMALLEST_ELEMENT_BYTES * (KEPT_RECOMPUTED * model.hidden_size if again else kept)
    mask_bytes = batch * model.seq_len**2 * SMALLEST_ELEMENT_BYTES if config.data.separate_documents else 0
    return RankMemory(
        vocabulary_bytes=int(copies * ends),
        layers_bytes=int(copies * layers),
        experts_bytes=int(expert_copies * experts),
        activations_bytes=model.num_layers * batch * tokens * token_bytes,
        masks_bytes=model.num_layers * mask_bytes,
    )


def _bytes(model: ModelConfig, moe: MoEConfig, layout: Layout) -> tuple[int, int, int]:
    """Return a rank's weight bytes of the vocabulary, of all layers but their experts, and of all experts.

    They are read from the real model, with one and two layers, built without memory for its weights.
    """
    if model.of_transformers:
        held = gradient_bytes(model, moe, layout, sharded=True)
        matrices = 1 if model.tie_word_embeddings else 2
        ends = matrices * model.vocab_size * model.hidden_size * FLOAT32_BYTES // layout.tp_size
        return ends, sum(held.replicated) + sum(held.partial) - ends, sum(held.experts)
    sizes = []
    for layers, with_experts in ((1, 1), (2, 2), (2, 1)):
        small = replace(model, preset=None, num_layers=layers, moe_layers=tuple(range(with_experts)))
        with on_meta():
            parts = model_of(small, moe, layout)
        sizes.append(sum(p.nbytes for layer in range(layers) for p in parts.replicated_parameters(layer)))
    one, two, mixed = sizes
    experts = sum(p.nbytes for p in parts.expert_parameters(0))
    moe_layers = sum(model.is_moe(layer) for layer in range(model.num_layers))
    others = moe_layers * (two - one) + (model.num_layers - moe_layers) * (mixed - one)
    return 2 * one - two, others, moe_layers * experts


def check_run(config: RunConfig, layout: Layout, *, there_bytes: int, sharing: int = 1) -> None:
    """Raise ConfigError, naming the setting that takes most, if `sharing` ranks exceed `there_bytes`.

    config: `resolved`.
    """
    need = memory_of(config, layout)
    if sharing * need.total_bytes <= there_bytes:
        return
    parts: dict[str, tuple[object, int]] = {
        "model.vocab_size": (config.model.vocab_size, need.vocabulary_bytes),
        "model.hidden_size": (config.model.hidden_size, need.layers_bytes),
        "moe.num_experts": (config.moe.num_experts, need.experts_bytes),
        "data.batch_per_device": (config.data.batch_per_device, need.activations_bytes),
        "data.separate_documents": (True, need.masks_bytes),
    }
    key = max(parts, key=lambda name: parts[name][1])
    ranks = "a rank needs" if sharing == 1 else f"each of {sharing} ranks needs"
    masks = f", masks of documents {gib(need.masks_bytes)}" if need.masks_bytes else ""
    why = (
        f"{ranks} {gib(need.total_bytes)} at the least (weights, gradients and optimizer state "
        f"{gib(need.state_bytes)}, activations {gib(need.activations_bytes)}{masks}), and there are "
        f"{gib(there_bytes)} in all"
    )
    spare = SPARING.get(config.optimizer.shared_copies, "")
    spare += "" if config.plan.may_repeat_blocks else ", or compute blocks again (plan.recompute=blocks)"
    hint = (
        "Masks grow with the square of model.seq_len: lower it or data.batch_per_device, or leave it out."
        if key == "data.separate_documents"
        else "Make the model or the batch smaller, or share it among more devices (parallel.tp_size, "
        f"ep_size, etp_size){spare}."
    )
    raise ConfigError(key, parts[key][0], why, hint)


def check_processes(processes: int) -> None:
    """Raise ConfigError for more local processes than this machine has memory for, even without a model."""
    most = max(1, host_bytes() // RANK_BYTES)
    if processes > most:
        why = f"each takes {RANK_BYTES >> 20} MiB before there is a model, and there are {gib(host_bytes())}"
        raise ConfigError("parallel.processes", processes, why, f"Use {most} or fewer.")


def host_bytes() -> int:
    """Return the memory of this machine, or of the container in which this process runs, in bytes."""
    machine, limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), memory_limit()
    return machine if limit is None else min(machine, limit)


def device_bytes(device: torch.device, control: Control) -> int:
    """Return what this rank may have of the memory of its device, in bytes. All ranks call it together.

    Of a GPU that is what is free, or this rank's part of it; of a machine all.
    """
    kind = device_of(device)
    everyone = control.gather(kind.identity(device), "counting ranks on every GPU")
    mine = everyone[control.rank]
    own_bytes = kind.memory_bytes(device, everyone.count(mine) if mine else 1)
    return host_bytes() if own_bytes is None else own_bytes
