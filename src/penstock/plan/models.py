"""Models by name: open ones, and those of published studies with the sizes that these give. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.config import in_any_case, is_missing


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """A model's sizes as published.

    Attributes:
        batch: Samples per device, and per node where `sharded`.
        experts_per_device, experts_per_node: Where the number of experts grows with the cluster; one of them
            is 0.
        capacity_factor: None = dropless.
        num_heads: None = not given.
        sharded: Whether the devices of a node share attention and every expert (FSMoE's MP = ESP).
        on: The sizes that differ on a cluster, by the cluster's name.
        note: A remark on the numbers for users.
    """

    num_layers: int
    batch: int
    seq_len: int
    hidden_size: int
    ffn_hidden_size: int
    experts_per_device: int = 0
    experts_per_node: int = 0
    top_k: int
    capacity_factor: float | None = 1.0
    num_heads: int | None = None
    expert: Literal["gelu", "swiglu"] = "gelu"
    sharded: bool = False
    on: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    note: str = ""


def _flowmoe(layers: int, seq_len: int, hidden: int, ffn: int, experts: int, top_k: int) -> PublishedModel:
    return PublishedModel(
        num_layers=layers,
        batch=4,
        seq_len=seq_len,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        experts_per_device=experts,
        top_k=top_k,
    )


def _fsmoe(layers: int, hidden: int, ffn: int, heads: int, **more: Any) -> PublishedModel:
    return PublishedModel(
        num_layers=layers,
        batch=1,
        seq_len=1024,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        experts_per_node=1,
        top_k=2,
        capacity_factor=1.2,
        num_heads=heads,
        sharded=True,
        **more,
    )


def _pro_prophet(layers: int, hidden: int) -> PublishedModel:
    return PublishedModel(
        num_layers=layers,
        batch=4,
        seq_len=256,
        hidden_size=hidden,
        ffn_hidden_size=2 * hidden,
        experts_per_device=1,
        top_k=1,
        capacity_factor=None,
        note="the study gives 1024 tokens per device and both top-1 and top-2; used here: 4 samples of 256, "
        "top-1",
    )


TESTBED_B = "fsmoe-testbed-b"

MODELS: dict[str, PublishedModel] = {
    "flowmoe/gpt2-tiny": _flowmoe(12, 256, 256, 512, 1, 2),
    "flowmoe/bert-large": _flowmoe(24, 512, 512, 1024, 2, 1),
    "flowmoe/llama2-layers": _flowmoe(32, 512, 1024, 4096, 1, 1),
    "flowmoe/llama2-layers-l": _flowmoe(64, 512, 1024, 4096, 1, 1),
    "flowmoe/deepseek-v2-layers-s": _flowmoe(4, 256, 5120, 1536, 2, 8),
    "flowmoe/deepseek-v2-layers-m": _flowmoe(7, 256, 5120, 1536, 2, 1),
    "fsmoe/gpt2-xl": _fsmoe(
        24,
        1600,
        6400,
        25,
        note="24 layers taken, the study does not say whether 24 or 48",
        on={TESTBED_B: {"seq_len": 256}},
    ),
    "fsmoe/mixtral-7b-layers": _fsmoe(
        32, 4096, 14336, 32, expert="swiglu", on={TESTBED_B: {"num_layers": 7, "seq_len": 256}}
    ),
    "fsmoe/mixtral-22b-layers": _fsmoe(
        33, 6144, 16384, 48, expert="swiglu", note="the study trains it on fsmoe-testbed-a only"
    ),
    "pro-prophet/moe-gpt-s": _pro_prophet(12, 512),
    "pro-prophet/moe-gpt-m": _pro_prophet(12, 1024),
    "pro-prophet/moe-gpt-l": _pro_prophet(12, 2048),
    "pro-prophet/moe-gpt-ds": _pro_prophet(24, 512),
    "pro-prophet/moe-gpt-dm": _pro_prophet(24, 1024),
}
"""Published sizes as study/name; `layers` in a name: layers as wide as that model's, not the model."""

OPEN = Path(__file__).parent / "open_models"
"""Configurations of open models, in the form of transformers, without what plans do not need."""


def open_models() -> dict[str, Path]:
    """Return the configurations of open models that come with Penstock, by name."""
    return {path.stem: path for path in sorted(OPEN.glob("*.json"))}


def model_name(text: str) -> str:
    """Return the name of a model that comes with Penstock if `text` means one, else `text`.

    It does in any case, and as a name on the hub: `Qwen/Qwen3-30B-A3B-Instruct-2507` is `qwen3-30b-a3b`, and
    `openai/gpt-oss-20b` is `gpt-oss-20b`. What looks like a path of this machine is none.
    """
    canonical = in_any_case(text, (*open_models(), *MODELS))
    owner, slash, repository = text.rpartition("/")
    is_path = "/" in owner or owner in (".", "..", "~") or not is_missing(Path(text))
    if canonical != text or not slash or is_path:
        return canonical
    begins = [name for name in open_models() if f"{repository.lower()}-".startswith(f"{name}-")]
    return max(begins, key=len, default=text)
