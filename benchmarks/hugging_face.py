"""A decoder of Qwen3-MoE's shape: `penstock.parallelize` beside transformers' own expert parallelism.

The same model and samples, in turns, on real ranks; with --emulate on rate-limited links. A step is the
forward and backward pass, with every gradient synchronised; nothing is updated.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, Final

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here needs the network

import torch
import torch.distributed as dist
from torch import Tensor

import penstock
from benchmarks.command import run_on_ranks
from benchmarks.progress import BOARD
from penstock.bench import BenchConfig
from penstock.bench.table import markdown_table
from penstock.emulate import EmulateConfig
from penstock.topology import Control, Layout

PLANS: Final = ("sequential", "flowmoe", "penstock", "auto")
THEIRS: Final = "transformers"
Step = Callable[[Tensor], Any]


@dataclass(frozen=True, kw_only=True)
class HuggingFaceResult:
    """Seconds of every round's step, by who ran it. parameters: of the whole model."""

    parameters: int
    samples: int
    length: int
    seconds: Mapping[str, tuple[float, ...]]

    def to_dict(self) -> dict[str, Any]:
        return {"hugging_face": asdict(self)}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> HuggingFaceResult:
        """The inverse of `to_dict`. Raises `KeyError` if a key is missing."""
        found = plain["hugging_face"]
        seconds = {name: tuple(times) for name, times in found["seconds"].items()}
        return HuggingFaceResult(**{**found, "seconds": seconds})

    def render(self) -> str:
        """A table: medians, and how many times as fast as transformers' own."""
        medians = {name: median(times) for name, times in self.seconds.items()}
        base = medians[THEIRS]
        rows = [("run by", "step ms", "least to most", "speed-up")]
        rows += [
            (
                name,
                f"{1000 * medians[name]:.0f}",
                f"{1000 * min(times):.0f} to {1000 * max(times):.0f}",
                f"{base / medians[name]:.2f}",
            )
            for name, times in self.seconds.items()
        ]
        head = (
            f"{self.parameters / 1e6:.1f} million parameters, {self.samples} samples of {self.length} tokens "
            f"per rank, {len(next(iter(self.seconds.values())))} rounds"
        )
        return "\n".join([head, "", *markdown_table(rows)])


def measure(bench: BenchConfig, layout: Layout, emulate: EmulateConfig | None) -> HuggingFaceResult:
    """All contenders in turns; every rank calls it."""
    del emulate  # the ranks are on its nodes already
    with redirect_stdout(sys.stderr):  # plans are told as they are made; stdout is the result
        return _compared(bench, layout)


def _compared(bench: BenchConfig, layout: Layout) -> HuggingFaceResult:
    control = Control(layout.rank, layout.world_size)
    generator = torch.Generator().manual_seed(layout.rank)
    size = bench.compare.batch_per_device, bench.model.seq_len
    tokens_BL = torch.randint(bench.model.vocab_size, size, generator=generator)
    BOARD.say("preparing the models")
    with tempfile.TemporaryDirectory(prefix="penstock-hf-") as mine:
        folder = control.gather(mine, "sharing a folder")[0]
        model = _model(bench)
        parameters = sum(p.numel() for p in model.parameters())
        if layout.rank == 0:
            model.save_pretrained(folder)
        control.barrier("saving the model")
        steps: dict[str, Step] = {THEIRS: _of_transformers(folder, layout)}
        steps |= {plan: _scheduled(_model(bench), layout, plan) for plan in PLANS}
        control.barrier("reading the model")
    seconds: dict[str, list[float]] = {name: [] for name in steps}

    def result(rounds: int) -> HuggingFaceResult:
        times = {name: tuple(each[:rounds]) for name, each in seconds.items()}
        return HuggingFaceResult(parameters=parameters, samples=size[0], length=size[1], seconds=times)

    warmup, rounds = bench.compare.warmup, bench.compare.rounds
    for turn in range(warmup + rounds):
        BOARD.say(f"round {turn - warmup + 1} of {rounds}" if turn >= warmup else "warm-up")
        if turn > warmup:
            BOARD.keep(partial(result, turn - warmup))
        for name, step in steps.items():
            control.barrier("beginning a step")
            start_s = time.perf_counter()
            step(tokens_BL)
            control.barrier("ending a step")
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start_s)
    return result(rounds)


def _model(bench: BenchConfig) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    model, moe = bench.model, bench.moe
    torch.manual_seed(bench.compare.seed)
    return AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            moe_intermediate_size=moe.moe_ffn_hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            num_key_value_heads=max(1, model.num_heads // 4),
            head_dim=model.hidden_size // model.num_heads,
            num_experts=moe.num_experts,
            num_experts_per_tok=moe.top_k,
            norm_topk_prob=True,
        )
    )


def _scheduled(model: Any, layout: Layout, plan: str) -> Step:
    penstock.parallelize(model, ep_size=layout.ep_size, plan=plan)
    return lambda tokens_BL: _step(model, tokens_BL)


def _of_transformers(folder: str, layout: Layout) -> Step:
    """Their all-to-all between ranks with samples of their own; attention is sharded and gathered (FSDP2)."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(
        tp_size=1, fsdp_size=dist.get_world_size(), ep_size=layout.ep_size, ep_implementation="all_to_all"
    )
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).train()
    return lambda tokens_BL: _step(model, tokens_BL)


def _step(model: Any, tokens_BL: Tensor) -> None:
    model.zero_grad()
    model(input_ids=tokens_BL, labels=tokens_BL, use_cache=False).loss.backward()


if __name__ == "__main__":
    run_on_ranks(
        "hugging_face",
        "Compare steps of a model of transformers, scheduled by Penstock and as transformers runs them.",
        "--emulate 2x1 --inter-rate 400mbit moe.num_experts=16 moe.top_k=8 moe.moe_ffn_hidden_size=256",
        measure,
        HuggingFaceResult.render,
    )
