"""The first plan of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.adapt.planning import REMEDY
from penstock.autotune.choose.start import find, overruled, start
from penstock.autotune.problem import assumed_problem
from penstock.cost import ClusterConfig
from penstock.cost.clusters import find_cluster
from penstock.cost.devices import Computing
from penstock.decision import Decision, PlacementConfig, ScheduleConfig
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.plan import PlanFile, evaluate
from penstock.plan.plan_config import PlanConfig
from penstock.topology import Layout
from penstock.train.assemble import build_machinery
from penstock.train.config import RunConfig
from penstock.train.logs import telling

ALONE = Layout(world_size=1, ep_size=1, rank=0)
CONFIG = RunConfig(
    model=ModelConfig(num_layers=1, hidden_size=8, num_heads=2, seq_len=4, vocab_size=11),
    moe=MoEConfig(num_experts=2, moe_ffn_hidden_size=8, dispatch="flat"),
)


@pytest.mark.slow
def test_a_plan_file_says_where_it_overrules_what_was_asked_for(tmp_path: Path) -> None:
    path, problem = tmp_path / "plan.json", assumed_problem(CONFIG, ALONE)
    moving = evaluate(problem, Decision(schedule="sequential", samples="netmoe"))
    PlanFile.of(problem, moving, model="a model", cluster="a cluster").save(path)
    machinery = build_machinery(ALONE, torch.device("cpu"), CONFIG.parallel, "float32")

    def warnings(
        placement: PlacementConfig = CONFIG.placement, schedule: ScheduleConfig = CONFIG.schedule
    ) -> list[str]:
        said: list[str] = []
        config = replace(
            CONFIG, plan=PlanConfig(mode="replay", file=str(path)), placement=placement, schedule=schedule
        )
        with telling(said.append):
            assert start(config, machinery).choice.samples == "netmoe"
        return [line for line in said if line.startswith("warning: ")]

    assert warnings() == warnings(placement=PlacementConfig(samples="netmoe", replica_slots=2)) == []
    (samples,) = warnings(placement=PlacementConfig(samples="none"))
    assert f"placement.samples = none is ignored because the plan in {path} has netmoe" in samples
    (experts,) = warnings(placement=PlacementConfig(experts="planned"))
    assert "placement.experts = planned is ignored" in experts and "has none" in experts
    (schedule,) = warnings(schedule=ScheduleConfig(name="flowmoe", microbatches=1))
    assert "section [schedule] (name flowmoe) is ignored" in schedule
    machinery.lanes.close()


@pytest.mark.parametrize(("asked", "planned", "warns"), [(2, 4, False), (2, 2, False), (2, 3, True)])
def test_a_plan_with_as_many_replica_slots_as_are_weighed_is_what_was_asked_for(
    asked: int, planned: int, warns: bool
) -> None:
    choice = Decision(experts="planned", replica_slots=planned)
    found = overruled(PlacementConfig(replica_slots=asked), choice, Path("plan.json"))
    assert ["placement.replica_slots = 2 is ignored" in line for line in found] == [True] * warns
    (line,) = overruled(
        PlacementConfig(experts="planned", replica_slots=4), replace(choice, replica_slots=8), Path()
    )
    assert "placement.replica_slots = 4 is ignored" in line


@pytest.mark.slow
def test_what_helps_against_rough_measurements_is_said_where_the_plan_is_shown() -> None:
    """A scheduled model of transformers writes no cluster.json, and cannot be told to measure longer."""
    file = replace(find_cluster("fsmoe-testbed-b"), doubts=("a doubt",))

    def caution(*remedy: str) -> str:
        lines = find(assumed_problem(CONFIG, ALONE), file, 0.01, *remedy).lines
        return lines[-1]

    assert "plan.profile_s" in caution() and "cluster.json" in caution()
    assert "plan.profile_s" not in caution(REMEDY) and "cluster.json" not in caution(REMEDY)
    assert caution(REMEDY).endswith(REMEDY)


def test_only_a_cluster_that_is_known_predicts_a_step() -> None:
    """The defaults of section [cluster] are of no machine; what is given there, or by a file, is."""
    machinery = build_machinery(ALONE, torch.device("cpu"), CONFIG.parallel, "float32")
    assert start(CONFIG, machinery).forecast() is None
    given = start(replace(CONFIG, cluster=ClusterConfig(flops_per_s=1e12)), machinery).forecast()
    assert given is not None and "[cluster]" in given.source
    named = replace(CONFIG, plan=PlanConfig(cluster="fsmoe-testbed-b"))
    known = start(named, machinery)
    forecast = known.forecast()
    assert known.file == find_cluster("fsmoe-testbed-b") and named.plan.is_saved
    assert forecast is not None and "cluster.json" in forecast.source
    machinery.lanes.close()


@pytest.mark.parametrize("precision, told", [("float32", 0), ("bfloat16", 1)])
def test_a_run_is_told_that_a_file_has_rates_of_another_precision(precision: Computing, told: int) -> None:
    said: list[str] = []
    machinery = build_machinery(ALONE, torch.device("cpu"), CONFIG.parallel, precision)
    config = replace(CONFIG.computing_in(precision), plan=PlanConfig(cluster="fsmoe-testbed-b"))
    with telling(said.append):
        start(config, machinery)
    machinery.lanes.close()
    assert sum("float32 rate" in line for line in said) == told
