"""Whether a run fits into the memory there is, found out before anything of it is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from penstock.config import ConfigError
from penstock.cost import split_sizes
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.topology import Layout
from penstock.train.assemble import model_of

HELD_COPIES, MOMENTS = 2, 2
"""Weights and gradients; AdamW's moments, of which a rank may own a share. All in float32."""

KEPT_COPIES, KEPT_AGAIN = 8, 1
"""Hidden states per token and block from forward to backward, at the least: all that attention saves, or what
entered the block where it is computed again; see `plan.memory`."""

SMALLEST_ELEMENT_BYTES = 2

RANK_BYTES = 160 << 20
"""What a process with torch has for itself before there is a model. Measured: 190 MiB."""

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes that one rank needs at the least, by the setting that they grow with."""

    vocabulary_bytes: int
    layers_bytes: int
    experts_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.vocabulary_bytes + self.layers_bytes + self.experts_bytes + self.activations_bytes

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer state."""
        return self.total_bytes - self.activations_bytes


def rank_memory(
    model: ModelConfig,
    moe: MoEConfig,
    batch: int,
    layout: Layout,
    *,
    sharded: bool = False,
    again: bool = False,
) -> RankMemory:
    """The estimate for one rank; costs milliseconds, whatever the sizes. Scratch memory is not counted.

    sharded: whether the optimiser is. again: whether blocks are computed again.
    """
    owners, replicas = (layout.dp_size, layout.edp_size) if sharded else (1, 1)
    copies, expert_copies = HELD_COPIES + MOMENTS / owners, HELD_COPIES + MOMENTS / replicas
    moe_layers = sum(model.is_moe(layer) for layer in range(model.num_layers))
    sizes = [_bytes(model, moe, layout, *layers) for layers in ((1, 1), (2, 2), (2, 1))]
    (one, experts), (two, _), (mixed, _) = sizes
    ends, dense = 2 * one - two, mixed - one
    layers = moe_layers * (two - one) + (model.num_layers - moe_layers) * dense
    tokens = min(split_sizes(model.seq_len, layout.mp_size)) if layout.tokens == "split" else model.seq_len
    hidden_bytes = batch * tokens * model.hidden_size * SMALLEST_ELEMENT_BYTES
    return RankMemory(
        vocabulary_bytes=int(copies * ends),
        layers_bytes=int(copies * layers),
        experts_bytes=int(expert_copies * moe_layers * experts),
        activations_bytes=(KEPT_AGAIN if again else KEPT_COPIES) * model.num_layers * hidden_bytes,
    )


def _bytes(model: ModelConfig, moe: MoEConfig, layout: Layout, layers: int, experts: int) -> tuple[int, int]:
    """A rank's bytes of weights of `layers` layers, the first `experts` of them MoE; of a layer's experts.

    Read off the real model, built without memory for its weights.
    """
    small = replace(model, preset=None, num_layers=layers, moe_layers=tuple(range(experts)))
    with torch.device("meta"):
        parts = model_of(small, moe, layout)
    held = sum(p.nbytes for layer in range(layers) for p in parts.replicated_parameters(layer))
    return held, sum(p.nbytes for p in parts.expert_parameters(0))


def check_memory(
    model: ModelConfig,
    moe: MoEConfig,
    batch: int,
    layout: Layout,
    *,
    there_bytes: int,
    sharing: int = 1,
    sharded: bool = False,
    again: bool = False,
) -> None:
    """Refuse a model of which `sharing` ranks do not fit into `there_bytes`. sharded: the optimiser is.

    again: blocks are computed again, or may be.

    Raises ConfigError that names the setting which takes most.
    """
    need = rank_memory(model, moe, batch, layout, sharded=sharded, again=again)
    if sharing * need.total_bytes <= there_bytes:
        return
    parts: dict[str, tuple[int, int]] = {
        "model.vocab_size": (model.vocab_size, need.vocabulary_bytes),
        "model.hidden_size": (model.hidden_size, need.layers_bytes),
        "moe.num_experts": (moe.num_experts, need.experts_bytes),
        "data.batch_per_device": (batch, need.activations_bytes),
    }
    key = max(parts, key=lambda name: parts[name][1])
    ranks = "a rank needs" if sharing == 1 else f"each of {sharing} ranks needs"
    why = (
        f"{ranks} {_gib(need.total_bytes)} at the least (weights, gradients and optimizer state "
        f"{_gib(need.state_bytes)}, activations {_gib(need.activations_bytes)}), and there are "
        f"{_gib(there_bytes)} in all"
    )
    spare = "" if sharded else ", or share moments (optimizer.sharded)"
    spare += "" if again else ", or compute blocks again (plan.recompute=blocks)"
    hint = (
        "Make the model or the batch smaller, or share it among more devices (parallel.mp_size, ep_size, "
        f"esp_size){spare}."
    )
    raise ConfigError(key, parts[key][0], why, hint)


def check_processes(processes: int) -> None:
    """Refuse more local processes than this machine has memory for, before there is a model in them."""
    most = max(1, host_bytes() // RANK_BYTES)
    if processes > most:
        why = f"each takes {RANK_BYTES >> 20} MiB before there is a model, and there are {_gib(host_bytes())}"
        raise ConfigError("parallel.processes", processes, why, f"Use {most} or fewer.")


def host_bytes() -> int:
    """Memory of this machine, or of the container that we are in."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.exists() else "max"
    return min(machine, int(limit)) if limit.isdecimal() else machine


def device_bytes(device: torch.device) -> int:
    """Memory of the device that a rank computes on."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_bytes()


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
