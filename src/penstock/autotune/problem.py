"""States a training run as a problem for the planner, and which choices the run leaves open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from penstock.autotune.planned import with_choice
from penstock.config import ConfigError
from penstock.cost import ClusterConfig, ClusterFile, ProfiledCluster
from penstock.decision import Decision
from penstock.decision.record import RowForm
from penstock.features.build import build_graph
from penstock.features.dispatch import DISPATCHES, runnable
from penstock.graph import RefusalError
from penstock.models.decoder import on_meta
from penstock.moe import MoEConfig, build_layer
from penstock.moe.experts import ExpertShard
from penstock.moe.permute.merged import MOST_EXPERTS_THERE
from penstock.plan import PlanFile, Problem
from penstock.plan.plan_config import AUTO, FIXED
from penstock.plan.space import in_effect
from penstock.routing.joined import MOST_NODE_SIZE
from penstock.runtime.parts import maker_of
from penstock.topology import Layout, ParallelConfig
from penstock.train.assemble import base_shape, workload
from penstock.train.config import RunConfig


def settled(config: RunConfig, *, sharded: bool) -> RunConfig:
    """Return the run with one of the two optimisers."""
    return replace(config, optimizer=config.optimizer.settled(sharded=sharded))


def settled_as(config: RunConfig, paper: PlanFile) -> RunConfig:
    """Return the run with the optimiser of a plan's file, if it leaves it open."""
    open_ = config.optimizer.zero_stage == AUTO
    return settled(config, sharded=paper.sizes.zero_stage > 0) if open_ else config


def open_runs(config: RunConfig) -> tuple[RunConfig, ...]:
    """Return the run with each optimiser that the configuration leaves open, the plain one first."""
    if config.optimizer.zero_stage != "auto":
        return (config,)
    return settled(config, sharded=False), settled(config, sharded=True)


def run_problem(config: RunConfig, layout: Layout, file: ClusterFile) -> Problem:
    """Return the step of this run on the cluster that `file` describes, in the run's precision.

    Ranks are as slow as in the file, if it is of as many ranks.
    """
    slowness = file.slowness if file.ranks == layout.world_size else ()
    precision = config.train.precision
    file = file if precision == "auto" else file.computing_in(precision)
    return _problem(config, layout, ProfiledCluster.build(file), slowness)


def assumed_problem(config: RunConfig, layout: Layout) -> Problem:
    """Return the step of this run on the cluster that section [cluster] assumes."""
    return _problem(config, layout, config.cluster)


def _problem(
    config: RunConfig, layout: Layout, cluster: ClusterConfig, slowness: tuple[float, ...] = ()
) -> Problem:
    moe = config.moe
    compresses = moe.comm_dtype is None and not moe.one_copy_per_rank and layout.etp_size == 1
    return Problem(
        shape=base_shape(config, layout),
        workload=workload(config, layout),
        cluster=cluster,
        dispatches=tuple(possible_dispatches(config, layout)),
        # "none" = as section [moe] requires.
        comm_dtypes=get_args(RowForm) if config.plan.comm_dtype == AUTO and compresses else ("none",),
        slowness=slowness,
        movable=config.placement.movable,
        placement=config.placement,
        recompute=config.plan.open_recompute,
    )


def given_choice(config: RunConfig, problem: Problem) -> Decision:
    """Return what the sections of a run decide where nothing is searched, without what has no effect."""
    dispatch, recompute = problem.workload.dispatch, config.plan.given_recompute
    return in_effect(problem, config.schedule.decision(dispatch, config.placement, recompute))


def dispatches_of(problem: Problem, choice: Decision) -> list[str]:
    """Return the dispatches with which a given choice can run.

    Raises:
        ConfigError: If it can run with none, for the reason of the first.
        RefusalError: Likewise.
    """
    possible: list[str] = []
    refused: list[ValueError] = []
    for name in problem.dispatches:
        try:
            problem.cut(replace(choice, dispatch=name))
            possible.append(name)
        except (ConfigError, RefusalError) as error:
            refused.append(error)
    if not possible:
        raise refused[0]
    return possible


def possible_dispatches(config: RunConfig, layout: Layout) -> list[str]:
    """Return the dispatches that these ranks can run, and that the configuration leaves open.

    Raises:
        ConfigError: If the configuration names a dispatch that they cannot run.
    """
    moe = config.moe
    if moe.dispatch == "auto":
        if layout.ep_node_size == 1 and config.plan.mode == FIXED:
            return ["flat"]  # the possible gain is not worth the seconds that measuring would take
        moves = config.placement.samples not in ("auto", "none")
        fits = moe.num_experts <= MOST_EXPERTS_THERE * layout.ep_nodes
        joins = moe.can_join and layout.etp_size == 1 and not moves and fits
        return runnable(layout.ep_nodes, layout.ep_node_size, joins=joins)
    if DISPATCHES[moe.dispatch].needs_table:
        layout.require_nodes("moe.dispatch", moe.dispatch)
    if moe.joins_rows:
        # One row serves several experts of a node.
        for key, value, fits in (
            ("placement.samples", config.placement.samples, config.placement.samples in ("auto", "none")),
            ("parallel.etp_size", layout.etp_size, layout.etp_size == 1),
            ("ranks of a node", layout.ep_node_size, layout.ep_node_size <= MOST_NODE_SIZE),
        ):
            if not fits:
                why = f"sends one row for all of a token's experts in a node, which {key} = {value} forbids"
                raise ConfigError("moe.dispatch", config.moe.dispatch, why, "Use hierarchical_2d or flat.")
    return [moe.dispatch]


def hierarchical_among(config: RunConfig, layout: Layout) -> list[str]:
    """Return the candidates with legs of their own to be measured."""
    return [name for name in possible_dispatches(config, layout) if DISPATCHES[name].needs_table]


def check_shared(moe: MoEConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError for parts of a layer that sharing ranks cannot run, whatever a search chooses.

    It considers all expert forms, so a part that only some of them can run is refused, too.
    """
    tensor, shards = parallel.tp_size > 1, parallel.etp_size > 1
    given = "or set plan.mode=fixed and schedule.expert_form"
    if moe.gate == "soft" and tensor:
        why = "mixes all tokens of a sample, and a search looks at expert forms that split them, too"
        raise ConfigError("moe.gate", moe.gate, why, f"Use parallel.tp_size=1, {given}=s2.")
    if moe.one_copy_per_rank and (tensor or shards):
        why = (
            "sends one row for several experts, and a search looks at expert forms that count each by itself"
        )
        hint = "Set it to false" + ("." if shards else f", {given}=gather.")
        raise ConfigError("moe.one_copy_per_rank", True, why, hint)
    if moe.comm_dtype is not None and shards:
        why = "rounds what experts leave, and with parallel.etp_size > 1 those are partial sums"
        raise ConfigError("moe.comm_dtype", moe.comm_dtype, why, "Use none, or parallel.etp_size=1.")


# ---- whether settings go together, before any rank starts --------------------------------------------------


def check_compatible(config: RunConfig, layout: Layout, *, computes: bool = True) -> None:
    """Raise ConfigError or RefusalError for settings with which these ranks could not build a step.

    What a rank builds is built here, too: an MoE layer without memory for its weights, and the graph of a
    step, in no particular order. A plan file is checked whole.

    Args:
        config: A `resolved` configuration.
        layout: The layout of the run, with the ranks of a node.
        computes: Whether ranks have layers; virtual devices have none.
    """
    if config.plan.mode == AUTO:
        check_shared(config.moe, config.parallel)
        possible_dispatches(config, layout)  # raises ConfigError for a dispatch that they cannot run
        return
    for problem, choice in _planned(config, layout):
        try:
            build_graph(problem.cut(choice))
        except ConfigError as error:
            raise error if "." in error.key else error.under("schedule")  # noqa: B904 - the same error
        if computes and any(problem.shape.moe_layers):
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


def _planned(config: RunConfig, layout: Layout) -> Iterator[tuple[Problem, Decision]]:
    """Yield what may run where nothing is searched for: with either optimiser, if that is open."""
    path = config.plan.path
    if path is not None:
        paper = PlanFile.read(path)
        problem = assumed_problem(settled_as(config, paper), layout)
        paper.step_plan(problem, str(path))
        yield problem, paper.choice
        return
    for run in open_runs(config):
        problem = assumed_problem(run, layout)
        yield problem, given_choice(run, problem)
