"""`optimizer.zero_stage=auto`: the optimiser of the shorter whole iteration, or the one that fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.autotune.choose.start import _fastest
from penstock.autotune.problem import open_runs, run_problem
from penstock.cost import ClusterConfig, ClusterFile
from penstock.decision import Decision
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.plan import PlanFile, Problem, estimate_memory
from penstock.plan.candidate import whole_s
from penstock.plan.plan_config import PlanConfig
from penstock.topology import Layout
from penstock.train.config import RunConfig
from penstock.train.logs import telling
from penstock.train.metrics import read_metrics
from penstock.train.optimizer import OptimizerConfig
from tests.support.ranks import Pools
from tests.support.training import folder_of, train_on

pytestmark = pytest.mark.slow

CONFIG = RunConfig(
    model=ModelConfig(num_layers=2, hidden_size=256, num_heads=4, seq_len=64),
    moe=MoEConfig(num_experts=4, top_k=1, moe_ffn_hidden_size=64),
    optimizer=OptimizerConfig(zero_stage="auto"),
    plan=PlanConfig(recompute="none"),  # else what does not fit could be computed again instead
)
LAYOUT = Layout(world_size=4, ep_size=4, rank=0)


def problems(file: ClusterFile) -> list[Problem]:
    return [run_problem(run, LAYOUT, file) for run in open_runs(CONFIG)]


def chosen(file: ClusterFile) -> tuple[int, list[str]]:
    said: list[str] = []
    with telling(said.append):
        number, solved = _fastest(problems(file), file, 0.02)
    lines, found = solved.lines, solved.found
    assert "with a sharded AdamW (" in lines[-1]
    wanted = "forward and backward" if number == 0 else "the step, updates included"
    assert f"predicted for {wanted}" in lines[1]
    assert whole_s(problems(file)[number], found.best) >= found.best.predicted_s
    return number, said


def test_slow_memory_wants_shares_and_a_slow_start_of_transfers_does_not() -> None:
    rates = ClusterConfig(flops_per_s=1e12, link_bytes_per_s=1e9, link_latency_s=1e-5)
    file = ClusterFile(name="four", nodes=4, ranks_per_node=1, rates=rates)
    assert chosen(replace(file, rates=replace(rates, memory_bytes_per_s=1e8))) == (1, [])
    late = replace(rates, memory_bytes_per_s=1e12, link_latency_s=1e-2)
    assert chosen(replace(file, rates=late)) == (0, [])


def test_what_fits_only_in_shares_is_sharded() -> None:
    late = ClusterConfig(memory_bytes_per_s=1e12, link_latency_s=1e-2)
    file = ClusterFile(name="four", nodes=4, ranks_per_node=1, rates=late)
    plain, shared = map(least_memory, problems(file))
    between = (plain + shared) // 2
    assert shared < between
    assert chosen(replace(file, memory_bytes=between)) == (1, [])


def least_memory(problem: Problem) -> int:
    choices = (Decision(schedule="flowmoe", microbatches=n) for n in (1, 2, 4))
    return min(estimate_memory(problem, choice).total_bytes for choice in choices)


def test_a_run_keeps_what_was_chosen(ranks: Pools, tmp_path: Path) -> None:
    """The plan file says which optimiser its step has, and a run from it has that one."""
    folder = folder_of(tmp_path, "auto", 2)
    cluster = ClusterFile(
        name="slow memory", nodes=1, ranks_per_node=2, rates=ClusterConfig(memory_bytes_per_s=1e7)
    )
    cluster.save(folder / "cluster.json")
    usual = ["train.steps=3", "optimizer.zero_stage=auto", "optimizer.min_lr_ratio=1.0"]
    found = [
        "plan.mode=auto",
        f"plan.cluster={folder / 'cluster.json'}",
        "plan.trials=1",
        "plan.budget=0.02",
    ]
    (first, _) = ranks(2).run(train_on, 2, folder, [*usual, *found], None)
    assert "predicted whole iterations" in first.said
    assert PlanFile.read(folder / "run" / "plan.json").sizes.zero_stage == 1
    losses = [each.loss for each in read_metrics(folder / "run" / "metrics.jsonl")]
    again = folder_of(tmp_path, "again", 2)
    replayed = ["plan.mode=replay", f"plan.file={folder / 'run' / 'plan.json'}"]
    (second, _) = ranks(2).run(train_on, 2, again, [*usual, *replayed], None)
    assert second.refused is None
    ours = [each.loss for each in read_metrics(again / "run" / "metrics.jsonl")]
    assert ours == pytest.approx(losses, rel=1e-5)
