"""Published models that the trainer can build by name: the benchmark models of the FlowMoE study."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.plan.models import MODELS, PublishedModel

HEAD_SIZE = 64
"""Width of an attention head; the study does not give it."""

STUDY = "flowmoe/"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Sizes as published. experts_per_rank: the study scales the number of experts with the ranks."""

    num_layers: int
    batch_per_device: int
    seq_len: int
    hidden_size: int
    moe_ffn_hidden_size: int
    experts_per_rank: int
    top_k: int
    capacity_factor: float | None = 1.0

    def model_sizes(self) -> dict[str, int]:
        """Return the keys of [model]; heads have width 64, as the study does not give it."""
        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_heads": self.hidden_size // HEAD_SIZE,
            "seq_len": self.seq_len,
        }

    def moe_sizes(self, world_size: int) -> dict[str, int | float | str | None]:
        """Return the keys of [moe] on `world_size` ranks."""
        return {
            "num_experts": self.experts_per_rank * world_size,
            "top_k": self.top_k,
            "moe_ffn_hidden_size": self.moe_ffn_hidden_size,
            "expert": "gelu",
            "capacity_factor": self.capacity_factor,
        }


def _preset(model: PublishedModel) -> Preset:
    return Preset(
        num_layers=model.num_layers,
        batch_per_device=model.batch,
        seq_len=model.seq_len,
        hidden_size=model.hidden_size,
        moe_ffn_hidden_size=model.ffn_hidden_size,
        experts_per_rank=model.experts_per_device,
        top_k=model.top_k,
        capacity_factor=model.capacity_factor,
    )


PRESETS: dict[str, Preset] = {
    name: _preset(model) for name, model in MODELS.items() if name.startswith(STUDY)
}
