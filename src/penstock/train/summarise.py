"""Makes the record from which the summary of a run is written, from the run's history."""

from __future__ import annotations

from pathlib import Path

from penstock.placement import ExpertPlacement
from penstock.report import RunSummary
from penstock.runtime import PipelinedStack
from penstock.runtime.gradients.assignment import assign
from penstock.sharding import shardings_of
from penstock.trace.stragglers import Straggler
from penstock.train.config import RunConfig
from penstock.train.curves import TENSORBOARD_FOLDER
from penstock.train.history import History
from penstock.train.output import CLUSTER_FILE, PLAN_FILE
from penstock.train.source import Source
from penstock.train.tracing import StepAnalysis


def summarise(
    config: RunConfig,
    stack: PipelinedStack,
    source: Source,
    history: History,
    *,
    checkpoint: str | None,
    analysis: StepAnalysis,
    slow: tuple[Straggler, ...],
    loads: str | None,
) -> RunSummary:
    """Return the summary of one start: medians over its steps, first and last losses.

    At least one step must not have been skipped.
    """
    output, layout = config.output, stack.machinery.layout
    first, applied, last = history.first, history.last_applied, history.last
    assert first is not None and applied is not None and last is not None, "a run without such a step fails"
    return RunSummary(
        schedule=config.schedule.name,
        dispatch=config.moe.dispatch,
        steps=last.step,
        first_loss=first.loss,
        last_loss=applied.loss,
        eval_loss=last.eval_loss,
        eval_noise=last.eval_noise,
        unit=source.corpora[0].text.unit.removesuffix("s"),
        unigram_entropy=source.unigram_entropy_nats,
        tokens_per_s=_known(history, "tokens_per_s"),
        iteration_s_median=_known(history, "iteration_s"),
        overlap_efficiency=analysis.overlap_efficiency,
        exposed_communication_s=_known(history, "exposed_communication_s"),
        communication_s=_known(history, "communication_s"),
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
        skipped_steps=history.skipped,
        rank_load_max_over_mean=history.typical("rank_rows_max_over_mean"),
        rows_crossing_nodes=history.typical("rows_crossing_nodes"),
        loads_in_common=history.typical("loads_in_common"),
        loads=loads,
        stragglers=slow,
    )


def _known(history: History, name: str) -> float:
    """Return the median of a number that every step has."""
    found = history.typical(name)
    assert found is not None, name
    return found


def _if_there(path: Path) -> str | None:
    return str(path) if path.exists() else None


def total_parameters(stack: PipelinedStack) -> int:
    """Return the number of parameters of the whole model, every expert counted once."""
    model, assigned = stack.model, assign(stack.parts, stack.model)
    parts = {id(model.get_parameter(name)): cut.count for name, cut in shardings_of(model).items()}
    replicated, local = (
        sum(parameter.numel() * parts.get(id(parameter), 1) for layer in layers for parameter in layer)
        for layers in (assigned.replicated, assigned.experts)
    )
    return replicated + local * stack.machinery.layout.ep_size
