"""Continues the plan of a resumed run, so that its sums are taken in exactly the same order."""

from __future__ import annotations

import logging

from penstock.autotune.deciding import decided
from penstock.autotune.planned import Planned
from penstock.autotune.profile.machine import here
from penstock.autotune.run_problem import assumed_problem, run_problem, settled
from penstock.config import UNSET, ConfigError, to_dict
from penstock.cost import ClusterFile
from penstock.cost.match import mismatch
from penstock.plan import PlanFile
from penstock.plan.plan_file import PlanSizes
from penstock.runtime import Machinery
from penstock.train.config import RunConfig
from penstock.train.output import CLUSTER_FILE, PLAN_FILE
from penstock.train.pilot import Resumption

logger = logging.getLogger(__name__)

PLANNING_AGAIN = (
    "planning again instead of continuing the plan of {path}, because {why}: "
    "losses agree with an uninterrupted run up to rounding"
)

COMPARED = ("plan", "schedule", "placement")
"""Sections of settings on which a plan depends."""


def continued_plan(config: RunConfig, machinery: Machinery, from_: Resumption) -> Planned | None:
    """Return the plan under which a checkpoint was made; None, with the reason printed, if it cannot be used.

    The plan is continued with unchanged settings, as many ranks and the same machines, if its trials and its
    ordering were finished. All ranks call this together.
    """
    try:
        planned = _read(config, machinery, from_)
    except ConfigError as error:
        why = error.why if error.key in COMPARED else str(error).rstrip(".")
        logger.info(PLANNING_AGAIN.format(path=from_.path, why=why))
        return None
    logger.info(f"{planned.name}, continued from {from_.path.name}: {planned.choice.words}")
    return planned


def _read(config: RunConfig, machinery: Machinery, from_: Resumption) -> Planned:
    settings, layout, path = from_.record.settings, machinery.layout, from_.path
    if settings is None or not from_.record.plan_settled:
        raise ConfigError("plan", UNSET, "it was not final yet")
    for section in COMPARED:
        asked = getattr(config, section)
        # A setting that did not exist yet when the checkpoint was made had its default.
        if to_dict(type(asked)()) | settings.get(section, {}) != to_dict(asked):
            raise ConfigError(section, UNSET, f"settings of [{section}] have changed")
    paper, file = decided(machinery.control, lambda: _files(from_), f"reading the plan of {path.name}")
    if config.optimizer.zero_stage == "auto":
        config = settled(config, sharded=paper.sizes.zero_stage > 0)
    if file is None:
        problem = assumed_problem(config, layout)
    else:
        problem = run_problem(config, layout, file)
        other = mismatch(file, here(machinery.device), layout.world_size, layout.nodes)
        if machinery.control.any(other is not None, "comparing machines with those of the plan"):
            raise ConfigError("plan", UNSET, "it was measured on other machines")
    plan = paper.step_plan(problem, str(path / PLAN_FILE))
    planned = Planned(problem=problem, choice=paper.choice, plan=plan, file=file, lines=paper.why)
    return planned.knowing(paper)


def remembering(planned: Planned, machinery: Machinery, from_: Resumption) -> Planned:
    """Return a newly made plan with what the run has learnt before from trials of moving.

    That holds for the same step on the same machines. All ranks call this together.
    """
    control, layout = machinery.control, machinery.layout
    try:
        paper, file = decided(control, lambda: _files(from_), f"reading the plan of {from_.path.name}")
    except ConfigError as error:
        logger.info(f"what the run has learnt from trials of moving cannot be read: {error}")
        return planned
    if file is None or planned.file is None:
        return planned
    other = mismatch(file, here(machinery.device), layout.world_size, layout.nodes) is not None
    if control.any(other or paper.sizes != PlanSizes.of(planned.problem), "comparing machines and steps"):
        return planned
    return planned.learning(file.moves, paper.lost)


def _files(from_: Resumption) -> tuple[PlanFile, ClusterFile | None]:
    cluster = from_.path / CLUSTER_FILE
    return PlanFile.read(from_.path / PLAN_FILE), ClusterFile.read(cluster) if cluster.exists() else None
