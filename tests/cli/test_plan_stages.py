"""`penstock plan` in pipeline stages."""

from __future__ import annotations

import pytest

from penstock.cli.plan_subject import other_layouts
from penstock.cost.clusters import find_cluster
from penstock.plan import published_problem
from penstock.plan.subject import Overrides
from tests.support.cli import Cli

BASE = [
    *("plan", "--model", "flowmoe/gpt2-tiny", "--cluster", "4x2xA100-80GB,net=10gbit"),
    *("--layers", "4", "--batch", "1", "--budget", "0.05"),
]
STAGES, PARTS, UPDATE = "--pipeline-parallel-size", "--virtual-pipeline-parallel-size", "--global-batch"


@pytest.mark.slow
def test_a_plan_in_stages_tells_its_order_its_memory_and_that_it_cannot_run(cli: Cli) -> None:
    words = [STAGES, "4", UPDATE, "32"]
    found = cli.finds([*BASE, *words, PARTS, "1"])
    stages = found["stages"]
    assert not found["executable"]
    assert (stages["pipeline_parallel_size"], stages["microbatches"]) == (4, 16)
    assert sum(stages["layers"]) == 4 and len(stages["memory_bytes_of_stages"]) == 4
    assert stages["memory_bytes"] == max(stages["memory_bytes_of_stages"])
    assert 0 < stages["bubble"] < 1
    tokens = 32 * 256 / stages["update_s"]
    assert found["throughput"]["tokens_per_s"] == pytest.approx(tokens)
    text = cli.prints([*BASE, *words])
    for line in ("Plan ", "Time ", "Bubble ", "Speed ", "Memory ", "Next ", "Note "):
        assert f"\n{line}" in text
    assert "does not execute stages" in text


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ([STAGES, "4"], UPDATE),
        ([STAGES, "3", UPDATE, "32"], STAGES),
        ([STAGES, "8", UPDATE, "32"], STAGES),
        ([STAGES, "0", UPDATE, "32"], STAGES),
        ([PARTS, "2", UPDATE, "32"], PARTS),
        ([STAGES, "4", PARTS, "2", UPDATE, "4"], PARTS),
        ([STAGES, "4", PARTS, "2", UPDATE, "32"], PARTS),
        ([STAGES, "4", UPDATE, "3"], UPDATE),
        ([STAGES, "2", UPDATE, "32", "--ep-size", "8"], "--ep-size"),
        ([STAGES, "2", UPDATE, "32", "--out", "plan.json"], "--out"),
        ([STAGES, "2", UPDATE, "32", "--sweep", "batch=1,2"], "--sweep"),
        ([STAGES, "4", UPDATE, "32", "--price", "nan"], "--price"),
    ],
)
def test_what_no_stages_can_have_is_refused_by_name(words: list[str], key: str, cli: Cli) -> None:
    said = cli.refuses([*BASE, "--layers", "5", *words])
    assert said.startswith((f"penstock: {key} = ", f"penstock: {key}: "))


@pytest.mark.slow
def test_a_plan_without_stages_says_what_they_would_bring(cli: Cli) -> None:
    found = cli.finds([*BASE, UPDATE, "256"])
    hint = found["stages"]
    assert hint["pipeline_parallel_size"] == 4
    assert hint["update_s"] < found["predicted_s"]
    then = cli.finds([*BASE, *hint["options"].split(), UPDATE, "256"])["stages"]
    assert then["update_s"] <= hint["update_s"] * (1 + 1e-9)


@pytest.mark.slow
def test_without_a_size_of_updates_stages_are_weighed_for_the_samples_of_a_step(cli: Cli) -> None:
    words = ["plan", "--model", "olmoe-1b-7b", "--cluster", "4x8xA100-80GB,net=100gbit", "--budget", "0.01"]
    hint = cli.finds(words)["stages"]
    assert hint["options"] == "--global-batch 32 --pipeline-parallel-size 4 --ep-size 8"
    then = cli.finds([*words, *hint["options"].split()])["stages"]
    assert then["update_s"] <= hint["update_s"] * (1 + 1e-9)


@pytest.mark.slow
def test_layouts_are_weighed_in_stages_too(cli: Cli) -> None:
    words = [UPDATE, "64", STAGES, "2", "--nodes", "2", "--layers", "2"]
    given, best = (cli.finds([*BASE, *words, *more])["stages"] for more in ([], ["--layout", "auto"]))
    assert best["update_s"] <= given["update_s"] * 1.05
    one = cli.finds([*BASE, *words, "--layout", "auto", "--ep-size", "1"])["stages"]
    assert one["ep_size"] == 1 != best["ep_size"], "what is given is kept"


@pytest.mark.slow
def test_the_experts_of_a_study_are_those_of_its_cluster_for_as_many_as_a_token_gets(cli: Cli) -> None:
    words = ["plan", "--model", "fsmoe/mixtral-7b-layers", "--cluster", "1x8xA100-80GB", "--top-k", "1"]
    words += ["--layers", "1", "--budget", "0.0001", UPDATE, "16"]
    assert cli.finds(words)["predicted_s"] > 0
    assert cli.finds([*words, STAGES, "2"])["stages"]["update_s"] > 0


def test_other_layouts_of_a_stage_need_not_divide_a_batch_and_keep_what_is_given() -> None:
    sizes = Overrides(batch=1, tp_size=2, ep_size=2)
    subject = published_problem("flowmoe/gpt2-tiny", find_cluster("1x4xA100-80GB"), sizes)
    assert {each["tp_size"] for each in other_layouts(subject)} == {1, 2, 4}
    assert {each["ep_size"] for each in other_layouts(subject, subject.ep_size)} == {2}
