"""Steps of one device, beside transformers: one configuration, built and trained by both, AdamW included.

Nothing is sent, so no schedule has anything to hide: what is compared is what a step costs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.command import parser_of, run_alone
from benchmarks.layer.measure import Band, in_turns
from penstock import session
from penstock.device import device_of, pick_device
from penstock.words import markdown_table

ROUNDS: Final = 12
SCHEDULES: Final = ("sequential", "flowmoe")
PEER: Final = "transformers"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the models and of a batch.

    Attributes:
        precision: The precision of both models; weights are in float32.
    """

    vocab_size: int = 32_000
    hidden_size: int = 1024
    num_layers: int = 8
    num_heads: int = 16
    num_key_value_heads: int = 4
    num_experts: int = 16
    top_k: int = 2
    moe_ffn_hidden_size: int = 1024
    batch: int = 8
    seq_len: int = 1024
    precision: str = "bfloat16"


SMALL: Final = replace(
    Sizes(),
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_key_value_heads=2,
    num_experts=4,
    moe_ffn_hidden_size=64,
    batch=4,
    seq_len=64,
    precision="float32",
)
"""For a processor."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train one family.

    Attributes:
        ratio: The time of its steps over that of transformers', round by round.
    """

    family: str
    way: str
    step_s: Band
    ratio: Band


@dataclass(frozen=True, kw_only=True)
class OneDevice:
    """All rows, and what they were measured with."""

    device: str
    sizes: Sizes
    rounds: int
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; the key `one_device` tells it from other results."""
        return {"one_device": asdict(self)}


def configurations(sizes: Sizes) -> dict[str, Any]:
    """Return configurations of transformers, by family: Penstock's own decoder, and one of transformers."""
    from transformers import MixtralConfig, Qwen3MoeConfig

    common = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_key_value_heads,
        "num_experts_per_tok": sizes.top_k,
        "max_position_embeddings": sizes.seq_len,
        "head_dim": sizes.hidden_size // sizes.num_heads,
    }
    width = sizes.moe_ffn_hidden_size
    qwen = Qwen3MoeConfig(
        **common, num_experts=sizes.num_experts, moe_intermediate_size=width, norm_topk_prob=True
    )
    mixtral = MixtralConfig(**common, num_local_experts=sizes.num_experts, intermediate_size=width)
    return {"qwen3_moe": qwen, "mixtral": mixtral}


def measure_one_device(sizes: Sizes, rounds: int = ROUNDS) -> OneDevice:
    """Train every family in turns by every way."""
    device, rows = pick_device(0), list[Row]()
    for family, config in configurations(sizes).items():
        with _ways(config, sizes, device) as ways:
            times_s = in_turns(ways, rounds, warmup=4)
        rows += [
            Row(
                family=family,
                way=way,
                step_s=Band.of(way_s),
                ratio=Band.of_ratios(way_s, times_s[PEER]),
            )
            for way, way_s in times_s.items()
        ]
    name = device_of(device).identity(device) or "processor"
    return OneDevice(device=name, sizes=sizes, rounds=rounds, rows=tuple(rows))


@contextmanager
def _ways(config: Any, sizes: Sizes, device: torch.device) -> Iterator[dict[str, Callable[[], float]]]:
    """Yield what trains a step on the same samples, and returns its seconds, by name."""
    generator = torch.Generator().manual_seed(0)
    shape = (sizes.batch, sizes.seq_len + 1)
    text_BN = torch.randint(sizes.vocab_size, shape, generator=generator).to(device)
    tokens_BL, labels_BL = text_BN[:, :-1].contiguous(), text_BN[:, 1:].contiguous()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as open_:
        config.save_pretrained(folder)
        ways = {PEER: _theirs(config, sizes, device, tokens_BL, labels_BL)}
        for schedule in SCHEDULES:
            run = open_.enter_context(session(None, *settings_of(Path(folder), sizes, schedule)))
            loss_of = _Ours(run.model, tokens_BL, labels_BL)
            ways[f"penstock, {schedule}"] = _stepping(loss_of, run.model.parameters(), device)
        yield ways


def settings_of(folder: Path, sizes: Sizes, schedule: str) -> list[str]:
    """Return the settings of a session that trains the configuration in a folder."""
    return [
        f"model.config={folder}",
        f"model.seq_len={sizes.seq_len}",
        f"data.batch_per_device={sizes.batch}",
        f"train.precision={sizes.precision}",
        "moe.aux_loss_coeff=0",  # transformers has none unless it is asked for
        "moe.z_loss_coeff=0",
        f"schedule.name={schedule}",
    ]


@dataclass(frozen=True)
class _Ours:
    """The loss of Penstock's step."""

    model: torch.nn.Module
    tokens_BL: Tensor
    labels_BL: Tensor

    def __call__(self) -> Tensor:
        loss: Tensor = self.model(self.tokens_BL, self.labels_BL)
        return loss


def _theirs(
    config: Any, sizes: Sizes, device: torch.device, tokens_BL: Tensor, labels_BL: Tensor
) -> Callable[[], float]:
    """Return a step of transformers, whose experts are grouped products."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, experts_implementation="grouped_mm"
    ).to(device)
    model.train()

    def loss_of() -> Tensor:
        rounds = sizes.precision == "bfloat16"
        with torch.autocast(device.type, torch.bfloat16, enabled=rounds):
            loss: Tensor = model(tokens_BL, labels=labels_BL, shift_labels=labels_BL).loss
        return loss

    return _stepping(loss_of, model.parameters(), device)


def _stepping(
    loss_of: Callable[[], Tensor], parameters: Iterator[torch.nn.Parameter], device: torch.device
) -> Callable[[], float]:
    """Return a step with AdamW, which returns its seconds, from an idle device to an idle one."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step() -> float:
        device_of(device).synchronize(device)
        start_s = time.perf_counter()
        loss_of().backward()
        optimizer.step()
        optimizer.zero_grad()
        device_of(device).synchronize(device)
        return time.perf_counter() - start_s

    return step


def render_one_device(result: OneDevice) -> str:
    """Say what was measured, and give a table in Markdown."""
    sizes = result.sizes
    head = (
        f"{sizes.num_layers} layers, hidden size {sizes.hidden_size}, {sizes.num_experts} experts of "
        f"{sizes.moe_ffn_hidden_size}, top-{sizes.top_k}; {sizes.batch} x {sizes.seq_len} tokens, "
        f"{sizes.precision}, AdamW; {result.device}"
    )
    how = f"{result.rounds} rounds, in turns; median, 10 % to 90 % of rounds"
    rows = [["family", "way", "step ms", f"step / {PEER}"]]
    rows += [
        [row.family, row.way, row.step_s.text(1e3, ".1f"), row.ratio.text(1, ".2f")] for row in result.rows
    ]
    return "\n".join([head, how, "", *markdown_table(rows)])


def sizes_here() -> Sizes:
    """Return the sizes for this machine: a GPU, or a processor."""
    return Sizes() if device_of(pick_device(0)).is_gpu else SMALL


if __name__ == "__main__":
    about = "Compares steps of one device with those of transformers."
    run_alone(parser_of("one_device", about), lambda _: measure_one_device(sizes_here()), render_one_device)
