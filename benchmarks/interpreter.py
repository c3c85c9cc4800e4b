"""What the interpreter costs: a step in which next to nothing is left to compute, beside plain autograd.

Both run the same modules on the same samples, cut into the same microbatches, and leave the same gradients.
Plain autograd takes one microbatch after the other and enters its engine once for each; the stack runs every
task by itself. What lies between the two, divided by the tasks, is what a task costs the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.command import run_on_ranks
from benchmarks.layer.measure import Band, in_turns, quiet_process, timed
from penstock.decision import ScheduleConfig
from penstock.lab.bench import BenchConfig
from penstock.lab.emulate import EmulateConfig
from penstock.models import ModelConfig, MoEDecoder
from penstock.moe import MoEConfig, SampleKeys
from penstock.runtime import PipelinedStack
from penstock.topology import Layout
from penstock.train.assemble import build_machinery, build_stack
from penstock.train.config import RunConfig
from penstock.words import markdown_table

MICROBATCHES: Final = 4
ROUNDS: Final = 60
CONFIG: Final = RunConfig(
    model=ModelConfig(hidden_size=16, num_layers=8, num_heads=2, seq_len=16, vocab_size=64),
    moe=MoEConfig(num_experts=2, top_k=1, moe_ffn_hidden_size=16, aux_loss_group="microbatch"),
    schedule=ScheduleConfig(name="flowmoe", microbatches=MICROBATCHES),
)
"""Its largest matrix has 1,024 numbers: a processor is done with it before Python asks for the next one.

Balance is judged by microbatch, since plain autograd sees no more at a time.
"""


@dataclass(frozen=True, kw_only=True)
class InterpreterResult:
    """One step, forward and backward, on this many ranks.

    Attributes:
        plain_s: Seconds of plain autograd. None with several ranks, as the next two: their transfers are
            nothing that plain autograd has.
        ratio: Seconds of the step over those of plain autograd, round by round.
        per_task_s: The difference of both over the number of tasks, round by round.
    """

    ranks: int
    tasks: int
    rounds: int
    step_s: Band
    plain_s: Band | None = None
    ratio: Band | None = None
    per_task_s: Band | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; the key `interpreter` tells it from other results."""
        return {"interpreter": asdict(self)}


def measure_interpreter(layout: Layout, config: BenchConfig, rounds: int = ROUNDS) -> InterpreterResult:
    """Measure as one of the ranks; the step and plain autograd take turns. 20 s."""
    stack = build_stack(CONFIG, build_machinery(layout, torch.device("cpu"), config.parallel, "float32"))
    tokens_BL = sample_tokens(layout.rank)
    ways = {"step": partial(step, stack, tokens_BL)}
    if layout.world_size == 1:
        assert isinstance(stack.model, MoEDecoder)
        ways["plain"] = partial(plain_step, stack.model, tokens_BL)
    tasks = len(stack.plan.graph.tasks)

    def result(times_s: Mapping[str, list[float]]) -> InterpreterResult:
        return _summarise(layout.world_size, tasks, **times_s)

    with quiet_process():
        calls = {name: partial(timed, way) for name, way in ways.items()}
        summary = result(in_turns(calls, rounds, result=result))
    stack.close()
    return summary


def _summarise(
    ranks: int, tasks: int, step: list[float], plain: list[float] | None = None
) -> InterpreterResult:
    summary = InterpreterResult(ranks=ranks, tasks=tasks, rounds=len(step), step_s=Band.of(step))
    if plain is None:
        return summary
    between = [(a - b) / tasks for a, b in zip(step, plain, strict=True)]
    ends = {"plain_s": Band.of(plain), "ratio": Band.of_ratios(step, plain), "per_task_s": Band.of(between)}
    return InterpreterResult(ranks=ranks, tasks=tasks, rounds=len(step), step_s=summary.step_s, **ends)


def sample_tokens(seed: int) -> Tensor:
    """Return a sample for each microbatch, [B, L]."""
    model, rng = CONFIG.model, torch.Generator().manual_seed(seed)
    return torch.randint(0, model.vocab_size, (MICROBATCHES, model.seq_len), generator=rng)


def step(stack: PipelinedStack, tokens_BL: Tensor) -> None:
    """Run one step by the stack's plan."""
    stack(tokens_BL, tokens_BL).backward()


def plain_step(model: MoEDecoder, tokens_BL: Tensor) -> None:
    """Run the same step by plain autograd: microbatch by microbatch, gradients accumulate."""
    for m in range(MICROBATCHES):
        part_BL = tokens_BL[m : m + 1]
        keys = SampleKeys(CONFIG.train.seed, torch.tensor([m]))
        h_BLM, losses = model.embed(part_BL, keys), []
        for block in model.parts:
            residual_BLM, x_TM = block.attend(h_BLM, keys)
            assert block.moe is not None
            h_BLM = block.add(residual_BLM, block.moe(x_TM), keys)
            aux = block.moe.losses
            assert aux is not None
            losses.append(CONFIG.moe.aux_loss_coeff * aux.balance + CONFIG.moe.z_loss_coeff * aux.z)
        cross_entropy = model.head(h_BLM, part_BL) / part_BL.numel()
        ((cross_entropy + sum(losses)) / MICROBATCHES).backward()


def render_interpreter(result: InterpreterResult) -> str:
    """Return what was measured, and one row, in Markdown."""
    sizes = f"hidden size {CONFIG.model.hidden_size}, {CONFIG.model.num_layers} layers"
    ranks = f"{result.ranks} process" + ("es" if result.ranks > 1 else "")
    head = f"{sizes}, {MICROBATCHES} microbatches, schedule {CONFIG.schedule.name}, {ranks}, one thread each"
    how = f"{result.rounds} rounds, in turns; median, 10 % to 90 % of rounds"
    titles, cells = ["tasks", "step ms"], [str(result.tasks), result.step_s.text(1e3, ".1f")]
    if result.plain_s and result.ratio and result.per_task_s:
        titles += ["plain autograd ms", "step / plain", "us per task above plain"]
        cells += [
            result.plain_s.text(1e3, ".1f"),
            result.ratio.text(1, ".2f"),
            result.per_task_s.text(1e6, ".0f"),
        ]
    return "\n".join([head, how, "", *markdown_table([titles, cells])])


def measure(config: BenchConfig, layout: Layout, emulate: EmulateConfig | None) -> InterpreterResult:
    """Measure as one of the ranks, which is on no emulated cluster."""
    del emulate
    return measure_interpreter(layout, config)


if __name__ == "__main__":
    run_on_ranks(
        "interpreter",
        "Measures what a task costs the host, beside plain autograd. No other settings are read than those "
        "of [parallel].",
        "parallel.processes=1",
        measure,
        render_interpreter,
    )
