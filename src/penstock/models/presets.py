"""Published models by name: the benchmark models of the FlowMoE study."""

from __future__ import annotations

from dataclasses import dataclass


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
    capacity_factor: float = 1.0

    def model_sizes(self) -> dict[str, int]:
        """Keys of [model]; heads of 64, which the study does not give."""
        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_heads": self.hidden_size // 64,
            "seq_len": self.seq_len,
        }

    def moe_sizes(self, world_size: int) -> dict[str, int | float | str]:
        """Keys of [moe] on `world_size` ranks."""
        return {
            "num_experts": self.experts_per_rank * world_size,
            "top_k": self.top_k,
            "moe_ffn_hidden_size": self.moe_ffn_hidden_size,
            "expert": "gelu",
            "capacity_factor": self.capacity_factor,
        }


def _preset(layers: int, seq_len: int, hidden: int, ffn: int, experts: int, top_k: int) -> Preset:
    return Preset(
        num_layers=layers,
        batch_per_device=4,
        seq_len=seq_len,
        hidden_size=hidden,
        moe_ffn_hidden_size=ffn,
        experts_per_rank=experts,
        top_k=top_k,
    )


PRESETS: dict[str, Preset] = {
    "GPT2-Tiny-MoE": _preset(12, 256, 256, 512, 1, 2),
    "BERT-Large-MoE": _preset(24, 512, 512, 1024, 2, 1),
    "LLaMA2-MoE": _preset(32, 512, 1024, 4096, 1, 1),
    "LLaMA2-MoE-L": _preset(64, 512, 1024, 4096, 1, 1),
    "DeepSeek-V2-S": _preset(4, 256, 5120, 1536, 2, 8),
    "DeepSeek-V2-M": _preset(7, 256, 5120, 1536, 2, 1),
}
