"""From the history of a run to the record that its summary is written from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median

from penstock.placement import ExpertPlacement
from penstock.report import RunSummary
from penstock.runtime import PipelinedStack
from penstock.runtime.gradients.assignment import assign
from penstock.sharding import shardings_of
from penstock.train.config import RunConfig
from penstock.train.curves import TENSORBOARD_FOLDER
from penstock.train.metrics import StepMetrics
from penstock.train.output import CLUSTER_FILE, PLAN_FILE
from penstock.train.source import Source
from penstock.train.tracing import StepAnalysis

WARM_UP_STEPS = 2
"""First steps allocate buffers and open connections; medians leave them out."""


def summarise(
    config: RunConfig,
    stack: PipelinedStack,
    source: Source,
    history: Sequence[StepMetrics],
    *,
    checkpoint: str | None,
    analysis: StepAnalysis,
    loads: str | None,
) -> RunSummary:
    """The summary of one start: medians over its steps, first and last losses.

    At least one step was not skipped.
    """
    output, last, layout = config.output, history[-1], stack.machinery.layout
    applied = [each for each in history if not each.skipped]
    steady = history[WARM_UP_STEPS:] or history
    return RunSummary(
        schedule=config.schedule.name,
        dispatch=config.moe.dispatch,
        steps=last.step,
        first_loss=applied[0].loss,
        last_loss=applied[-1].loss,
        eval_loss=last.eval_loss,
        eval_noise=last.eval_noise,
        unit=source.corpora[0].text.unit.removesuffix("s"),
        unigram_entropy=source.unigram_entropy_nats,
        tokens_per_s=median(m.tokens_per_s for m in steady),
        iteration_s_median=median(m.iteration_s for m in steady),
        overlap_efficiency=analysis.overlap_efficiency,
        exposed_communication_s=median(m.exposed_communication_s for m in steady),
        communication_s=median(m.communication_s for m in steady),
        processes=layout.world_size,
        mp_size=layout.mp_size,
        esp_size=layout.esp_size,
        num_experts=config.moe.num_experts,
        num_local_experts=ExpertPlacement.even(config.moe.num_experts, layout.ep_size).slots,
        parameters=total_parameters(stack),
        corpus=source.words,
        checkpoint=checkpoint,
        metrics=str(output.dir / "metrics.jsonl"),
        trace=str(output.dir / "trace.json") if output.trace_steps else None,
        tensorboard=_if_there(output.dir / TENSORBOARD_FOLDER) if output.tensorboard else None,
        simulated_iteration_s=analysis.simulated_s,
        interrupted=last.step < config.train.steps,
        plan=_if_there(output.dir / PLAN_FILE) if config.plan.is_saved else None,
        cluster=_if_there(output.dir / CLUSTER_FILE) if config.plan.is_saved else None,
        skipped_steps=len(history) - len(applied),
        rank_load_max_over_mean=_typical(m.rank_rows_max_over_mean for m in steady),
        rows_crossing_nodes=_typical(m.rows_crossing_nodes for m in steady),
        loads_in_common=_typical(m.loads_in_common for m in steady),
        loads=loads,
    )


def _typical(steps: Iterable[Sequence[float] | None]) -> float | None:
    """The median over steps of what MoE layers have on average; None where no step says it."""
    known = [fmean(layers) for layers in steps if layers]
    return median(known) if known else None


def _if_there(path: Path) -> str | None:
    return str(path) if path.exists() else None


def total_parameters(stack: PipelinedStack) -> int:
    """Parameters of the whole model, every expert once."""
    model, assigned = stack.model, assign(stack.parts, stack.model)
    parts = {id(model.get_parameter(name)): cut.count for name, cut in shardings_of(model).items()}
    replicated, local = (
        sum(parameter.numel() * parts.get(id(parameter), 1) for layer in layers for parameter in layer)
        for layers in (assigned.replicated, assigned.experts)
    )
    return replicated + local * stack.machinery.layout.ep_size
