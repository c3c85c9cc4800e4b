"""Checks whether the settings of a run go together, before any of its ranks starts."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.autotune.planned import with_choice
from penstock.autotune.run_problem import (
    assumed_problem,
    candidates,
    check_shared,
    given_choice,
    open_runs,
    settled,
)
from penstock.config import ConfigError
from penstock.decision import Decision
from penstock.models.meta import on_meta
from penstock.moe import build_layer
from penstock.moe.experts.base import ExpertShard
from penstock.plan import PlanFile, Problem
from penstock.plan.plan_config import AUTO
from penstock.runtime.makers import maker_of
from penstock.step import build_graph
from penstock.topology import Layout
from penstock.train.config import RunConfig


def check_compatible(config: RunConfig, layout: Layout, *, computes: bool = True) -> None:
    """Raise ConfigError or RefusalError for settings with which these ranks could not build a step.

    config: resolved. layout: with the ranks of a node. computes: whether ranks have layers; virtual devices
    have none. What a rank builds is built here, too: an MoE layer without memory for its weights, and the
    graph of a step, in no particular order. A plan file is checked whole.
    """
    if config.plan.mode == AUTO:
        check_shared(config.moe, config.parallel)
        candidates(config, layout)  # raises ConfigError for a dispatch that they cannot run
        return
    for problem, choice in _planned(config, layout):
        try:
            build_graph(problem.cut(choice))
        except ConfigError as error:
            raise error if "." in error.key else error.under("schedule")  # noqa: B904 - the same error
        if computes and any(problem.shape.moe_layers):
            _check_layer(config, layout, choice)


def _planned(config: RunConfig, layout: Layout) -> Iterator[tuple[Problem, Decision]]:
    """Yield what may run where nothing is searched for: with either optimiser, if that is open."""
    path = config.plan.path
    if path is not None:
        paper = PlanFile.read(path)
        if config.optimizer.zero_stage == AUTO:
            config = settled(config, sharded=paper.sizes.zero_stage > 0)
        problem = assumed_problem(config, layout)
        paper.step_plan(problem, str(path))
        yield problem, paper.choice
        return
    for run in open_runs(config):
        problem = assumed_problem(run, layout)
        yield problem, given_choice(run, problem)


def _check_layer(config: RunConfig, layout: Layout, choice: Decision) -> None:
    """Raise ConfigError for parts of an MoE layer that do not fit each other or the form of their experts."""
    with on_meta():
        layer = build_layer(
            config.model.hidden_size,
            with_choice(config, choice).moe,
            ep_size=layout.ep_size,
            ep_rank=layout.ep_rank,
            node_size=layout.ep_node_size,
            shard=ExpertShard(layout.etp_rank, layout.etp_size),
        )
    maker_of(layer, layout, choice.form)
