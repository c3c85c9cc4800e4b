"""What a trial of moving tells: what replicas' transfers take in steps, and how far predictions err."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.autotune.planned import Planned
from penstock.autotune.trial import TRIAL_STEPS, Turn, _correction
from penstock.cost import ClusterFile, ProfiledCluster
from penstock.cost.cluster_file import MoveModel, TaskModel
from penstock.decision import Decision, Movable
from penstock.ops import Op
from penstock.plan.moving import weigh
from penstock.plan.plan_file import LostTrial
from penstock.plan.predict import predicted_timeline
from penstock.trace import TaskRecord
from tests.plan.problems import FILE
from tests.plan.test_moving import routed

STILL = Decision(schedule="moe_pipeline")
REPLICAS = replace(STILL, experts="planned", replica_slots=1)
SLOWER = 20.0
"""How many times longer replicas travel than predicted."""


def planned(choice: Decision) -> Planned:
    """A plan on a measured cluster whose transfers feel contention."""
    each = routed("hot_expert,hot_share=0.5", Movable(experts=("none", "planned"), replica_slots=(1,)))
    task = TaskModel(op="X", phase="F", alpha_s=1e-4, scale=1.0, contended=1.2)
    file: ClusterFile = replace(FILE, rates=each.cluster, tasks=(task,), contended_transfers=1.5)
    each = replace(each, cluster=ProfiledCluster.build(file), observed=each.evidence)
    return Planned(problem=each, choice=choice, plan=each.plan(choice), file=file)


def ran(each: Planned, times: dict[str, float]) -> list[TaskRecord]:
    """Two steps as predicted, but with tasks of some ops `times` as long."""
    records = predicted_timeline(each.problem, each.choice, each.plan).records()
    return [
        replace(record, step=step, end_s=record.start_s + times.get(record.task.op, 1.0) * record.duration_s)
        for step in range(2)
        for record in records
    ]


def lesson(
    slower: Planned, faster: Planned, times: dict[str, float], seconds: float
) -> tuple[tuple[MoveModel, ...], LostTrial]:
    records = ran(slower, times)
    runs = (
        Turn(planned=slower, times_s=[seconds] * TRIAL_STEPS),
        Turn(planned=faster, times_s=[1.0] * TRIAL_STEPS),
    )
    return _correction(*runs, records)


@pytest.mark.slow
def test_the_price_of_replicas_is_the_measured_one_and_the_decision_follows_from_it() -> None:
    still, replicas = planned(STILL), planned(REPLICAS)
    assert replicas.predicted_s < still.predicted_s
    times = {Op.REPLICA_PARAMETERS: SLOWER, Op.REPLICA_GRADIENTS: SLOWER, Op.DISPATCH: 3.0}
    moves, trial = lesson(replicas, still, times, 1.1)
    found = {move.op: move.in_steps for move in moves}
    assert found[Op.REPLICA_PARAMETERS] == pytest.approx(SLOWER)
    assert found[Op.REPLICA_GRADIENTS] == pytest.approx(SLOWER)
    assert Op.DISPATCH not in found, "a profile has measured what both plans send"
    assert trial.predicted > 1.0, "by these prices, the replicas that ran lose"
    knowing = replicas.learning(moves, ())
    assert knowing.file is not None and knowing.file.moves == moves
    before, after = (weigh(each.problem, [STILL]) for each in (replicas, knowing))
    assert before.moves and not after.moves, "whatever else the trial says"
    assert trial.measured == 1.1 and trial.moves == ("none", "planned") and trial.against == ("none", "none")


def test_a_price_that_was_known_is_corrected_and_not_forgotten() -> None:
    known = (MoveModel(op=Op.REPLICA_PARAMETERS, in_steps=2.0), MoveModel(op=Op.SAMPLE_MOVE, in_steps=7.0))
    still, replicas = (planned(each).learning(known, ()) for each in (STILL, REPLICAS))
    moves, _ = lesson(replicas, still, {Op.REPLICA_PARAMETERS: 3.0}, 1.1)
    found = {move.op: move.in_steps for move in moves}
    assert found[Op.REPLICA_PARAMETERS] == pytest.approx(6.0) and found[Op.SAMPLE_MOVE] == 7.0


def test_a_plan_that_stops_moving_and_loses_has_no_transfers_of_its_own() -> None:
    still, replicas = planned(STILL), planned(REPLICAS)
    moves, trial = lesson(still, replicas, {}, 1.3)
    assert moves == () and trial.moves == ("none", "none") and trial.against == ("none", "planned")


def test_planners_of_replicas_know_the_price() -> None:
    replicas = planned(REPLICAS)
    dear = replicas.learning((MoveModel(op=Op.REPLICA_PARAMETERS, in_steps=1e4),), ())
    shape = replicas.plan.shape
    (cheap, none) = (each.problem.placed(REPLICAS, shape) for each in (replicas, dear))
    assert cheap is not None and not all(replication.is_empty for replication in cheap.replications)
    assert none is not None and all(replication.is_empty for replication in none.replications)
