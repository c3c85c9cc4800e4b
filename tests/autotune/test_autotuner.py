"""Plans of real runs on two ranks: searched for, replayed, tuned, and changed when something drifts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from penstock.autotune import Autotuner
from penstock.autotune.planned import Planned
from penstock.autotune.refine import TUNING_S, Tuning, best_simulated
from penstock.autotune.trial import TRIAL_STEPS
from penstock.config import ConfigError, load, to_dict
from penstock.cost import ClusterConfig, ClusterFile
from penstock.decision import Decision, Partition
from penstock.decision.partition import TAIL, Portion, Slot
from penstock.plan import PlanFile
from penstock.plan.plan_config import DROPPED_STEPS, PlanConfig
from penstock.plan.tuner import SizeRange
from penstock.runtime.features.expert_replicas.manager import ExpertReplicas
from penstock.topology import Control, Layout
from penstock.train.assemble import gradient_bytes
from penstock.train.config import RunConfig
from penstock.train.measuring import PLAN_DIGITS
from penstock.train.metrics import StepMetrics, read_metrics
from penstock.train.trainer import Trainer
from penstock.words import milliseconds
from tests.autotune.runs import RANKS, SLOW, auto, on_slow_devices, run, slow_rank
from tests.plan.problems import problem, with_sharing
from tests.support.ranks import Pools
from tests.support.runs import write_config
from tests.support.training import Told, folder_of

pytestmark = pytest.mark.slow


def metrics(folder: Path) -> list[StepMetrics]:
    return read_metrics(folder / "run" / "metrics.jsonl")


def losses(folder: Path) -> list[float]:
    return [m.loss for m in metrics(folder)]


@pytest.fixture(scope="module")
def given(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 30 steps by section [schedule]: plain expert parallelism."""
    folder = folder_of(tmp_path_factory.mktemp("given"), "run", RANKS)
    told = run(ranks, folder, "train.steps=30", "schedule.name=sequential", "schedule.refine_after=0")
    assert len(set(told[0].plans)) == 1
    return folder


# ---- searched for and replayed -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planned(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Told]]:
    folder = folder_of(tmp_path_factory.mktemp("auto"), "run", RANKS)
    return folder, run(ranks, folder, *auto(folder), "schedule.microbatches=64")


def test_a_plan_is_chosen_and_explained_in_five_lines(planned: tuple[Path, list[Told]]) -> None:
    """What section [schedule] says is not used, so it may even be impossible."""
    folder, (leader, other) = planned
    paper = PlanFile.read(folder / "run" / "plan.json")
    seconds = milliseconds(paper.predicted_s)
    assert len(paper.why) == 6 and paper.why[5].endswith(" per step predicted")
    assert paper.why[5].startswith(f"plan 1 re-ordered using measured task durations: {seconds}")
    words = " ".join(leader.said.split())
    log = " ".join(leader.logged.split())
    assert f"Plan 1 {paper.choice.words}" in words
    assert re.search(r"Plan 1 .* Time .* per step predicted; .* Limit ", words), "in short"
    assert all(" ".join(line.split()) in log for line in paper.why), "the rest is in the file and the log"
    assert leader.summary is not None and leader.summary.schedule == paper.choice.schedule
    assert leader.plans == other.plans
    assert other.said == ""
    assert "section [schedule] (name flowmoe) is ignored" in words


def test_the_run_leaves_its_cluster_and_its_plan(planned: tuple[Path, list[Told]]) -> None:
    folder, (leader, _) = planned
    assert leader.summary is not None
    outputs = leader.summary.to_dict()["outputs"]
    assert ClusterFile.read(Path(outputs["cluster"])) == ClusterFile.read(folder / "cluster.json")
    assert Path(outputs["plan"]) == folder / "run" / "plan.json"
    saved = load(RunConfig, folder / "run" / "config.toml")
    assert (saved.plan.mode, saved.schedule.microbatches) == ("auto", 64)  # as it was asked for
    assert [m.plan for m in metrics(folder)] == [digest[:PLAN_DIGITS] for digest in leader.plans]


def test_losses_do_not_depend_on_the_plan(planned: tuple[Path, list[Told]], given: Path) -> None:
    folder, _ = planned
    assert losses(folder) == pytest.approx(losses(given)[:8], rel=1e-5)


def test_a_long_run_tries_the_best_plans(ranks: Pools, tmp_path: Path) -> None:
    """Both in turns of six steps, then the faster; all ranks agree, and it is said and saved."""
    folder = folder_of(tmp_path, "run", RANKS)
    told = run(ranks, folder, *auto(folder), "plan.trials=2", "plan.watch=false", "train.steps=120")
    assert told[0].plans == told[1].plans
    first, second = (set(told[0].plans[turn : turn + TRIAL_STEPS]) for turn in (0, TRIAL_STEPS))
    assert len(first) == len(second) == 1 and first != second
    assert set(told[0].plans) == first | second or "re-ordered" in told[0].logged
    words = " ".join(told[0].said.split())
    assert words.count(f"tried for {TRIAL_STEPS} steps each: ") == 1
    paper = PlanFile.read(folder / "run" / "plan.json")
    kept = next(line for line in paper.why if line.startswith("keeping plan "))
    number = kept.removeprefix("keeping plan ")
    row = next(line for line in paper.why if line.split()[0] == number)
    assert row.endswith(paper.choice.words) and kept in words
    assert told[0].summary is not None and told[0].summary.schedule == paper.choice.schedule
    weighed = [line for line in paper.why if line.startswith("Experts ")]
    assert len(weighed) == 1 and " times the mean load" in weighed[0]
    assert ("changing to plan" in words) == (", pays" in " ".join(weighed[0].split()))


def plans_by_its_slack(trainer: Trainer, step: int) -> None:
    """Replicas are planned by what the order in use hides, also after it was computed again.

    And steps in which they are used are predicted by the routing that called for them.
    """
    del step
    planning, planned = trainer.stack.of(ExpertReplicas).moving, trainer.pilot.moving
    assert (planning and planning.slack) == (planned and planned.slack)
    assert isinstance(trainer.pilot, Autotuner)
    assert (trainer.pilot.planned.problem.evidence is None) == (planned is None)


def test_a_run_moves_experts_where_that_pays(ranks: Pools, given: Path, tmp_path: Path) -> None:
    """On devices so slow that a slightly busier rank counts; the losses stay those of a run without moves."""
    folder = folder_of(tmp_path, "run", RANKS)
    on_slow_devices(folder)
    settings = "plan.trials=1", "plan.watch=false", "train.steps=24"
    told = run(ranks, folder, *auto(folder), *settings, on_step=plans_by_its_slack)
    assert told[0].plans == told[1].plans
    paper = PlanFile.read(folder / "run" / "plan.json")
    assert (
        re.search(r"Experts  [^;]*, pays; ", " ".join(paper.why)) and "changing to plan 2: " in told[0].said
    )
    assert paper.explains_choice, "its lines end with the plan that the run has changed to"
    assert paper.choice.num_replica_slots in (1, 2) and paper.choice.experts != "none"
    assert losses(folder) == pytest.approx(losses(given)[:24], rel=1e-4)


def test_a_plan_file_runs_as_it_is(ranks: Pools, planned: tuple[Path, list[Told]], tmp_path: Path) -> None:
    """Also in a run that would freeze its order again: the very order in the file, to the last step."""
    folder, before = planned
    again = folder_of(tmp_path, "again", RANKS)
    told = run(
        ranks,
        again,
        "plan.mode=replay",
        f"plan.file={folder / 'run' / 'plan.json'}",
        "schedule.refine_after=2",
    )
    assert set(told[0].plans) == {before[0].plans[-1]}
    assert "made for cluster by hand" in " ".join(told[0].said.split())
    assert losses(again) == pytest.approx(losses(folder), rel=1e-5)


def test_an_edited_plan_file(ranks: Pools, planned: tuple[Path, list[Told]], tmp_path: Path) -> None:
    folder, _ = planned
    edited = json.loads((folder / "run" / "plan.json").read_text())
    edited |= {"schedule": None, "cluster": "this cluster"}
    edited["choice"] |= {"schedule": "moe_pipeline", "chunks": 3, "backward_chunks": 2}
    (tmp_path / "edited.json").write_text(json.dumps(edited))
    again = folder_of(tmp_path, "again", RANKS)
    told = run(ranks, again, "plan.mode=replay", f"plan.file={tmp_path / 'edited.json'}", "train.steps=3")
    assert told[0].summary is not None and told[0].summary.schedule == "moe_pipeline"
    assert "made for the cluster that its run measured" in " ".join(told[0].said.split())
    assert losses(again) == pytest.approx(losses(folder)[:3], rel=1e-5)


def test_a_plan_with_a_gradient_partition(
    ranks: Pools, planned: tuple[Path, list[Told]], tmp_path: Path
) -> None:
    """FSMoE's: gradients in parts of their own, one of them in a gap, in a new order, and not tuned."""
    folder, _ = planned
    config = load(RunConfig, folder / "tiny.toml", [f"parallel.processes={RANKS}"]).resolved(RANKS)
    layout = Layout.build(config.parallel, RANKS, 0, config.moe.num_experts)
    sizes = gradient_bytes(config.model, config.moe, layout)[0]
    gap = Slot(layer=0, part="moe")
    parts: list[tuple[Portion, ...]] = [(Portion(size_bytes=size, slot=TAIL),) for size in sizes]
    parts[-1] = Portion(size_bytes=4096, slot=gap), Portion(size_bytes=sizes[-1] - 4096, slot=TAIL)
    edited = json.loads((folder / "run" / "plan.json").read_text()) | {"schedule": None}
    fsmoe = {"schedule": "fsmoe", "chunks": 2, "backward_chunks": 1, "microbatches": 1}
    edited["choice"] |= fsmoe | {"partition": to_dict(Partition(tuple(parts)))}
    (tmp_path / "edited.json").write_text(json.dumps(edited))
    again = folder_of(tmp_path, "again", RANKS)
    told = run(ranks, again, "plan.mode=replay", f"plan.file={tmp_path / 'edited.json'}", "plan.tuner=grid")
    assert told[0].refused is None and told[0].summary is not None
    assert told[0].summary.schedule == "fsmoe" and "does not split its all-reduces" in told[0].said
    assert losses(again) == pytest.approx(losses(folder), rel=1e-5)


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ("plan.mode=replay plan.file=nowhere.json", "nowhere.json"),
        ("plan.cluster=fsmoe-testbed-c", "fsmoe-testbed-b"),
        ("plan.cluster=nowhere/cluster.json", "nowhere/cluster.json"),
    ],
)
def test_files_that_are_not_there(ranks: Pools, tmp_path: Path, settings: str, what: str) -> None:
    """Found by rank 0 alone, refused on all."""
    folder = folder_of(tmp_path, "run", RANKS)
    for told in run(ranks, folder, "plan.mode=auto", *settings.split()):
        assert told.refused is not None and what in told.refused[1]
    assert not (folder / "run").exists()


def test_a_plan_for_another_step_is_refused(
    ranks: Pools, planned: tuple[Path, list[Told]], tmp_path: Path
) -> None:
    plan = planned[0] / "run" / "plan.json"
    folder = folder_of(tmp_path, "run", RANKS)
    for told in run(ranks, folder, "plan.mode=replay", f"plan.file={plan}", "data.batch_per_device=6"):
        assert told.refused is not None
        assert told.refused[0].endswith("sizes.batch_per_rank") and "6" in told.refused[1]


def test_a_cluster_file_of_another_machine_warns(ranks: Pools, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "run", RANKS)
    table = ClusterFile.read(folder / "cluster.json")
    words = ("host", "date", "processor", "device", "python", "torch", "penstock")
    measured = dict.fromkeys(words, "elsewhere")
    text = json.loads((folder / "cluster.json").read_text()) | {"measured": measured, "nodes": 3}
    (folder / "cluster.json").write_text(json.dumps(text))
    told = run(ranks, folder, *auto(folder), "train.steps=1")
    assert "warning: " in told[0].said and "elsewhere" in told[0].said
    assert table.name in told[0].said


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ({"samples": 1}, "samples"),
        ({"sample_steps": 2}, "sample_steps"),
        ({"drift_steps": 3}, "drift_steps"),
        ({"drift_threshold": 0.0}, "drift_threshold"),
        ({"profile_s": 0.0}, "profile_s"),
        ({"file": ""}, "file"),
    ],
)
def test_values_that_make_no_sense(setting: dict[str, float], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PlanConfig(**setting)  # type: ignore[arg-type]  # one field each
    assert caught.value.key == key and caught.value.hint


def test_an_unknown_tuner_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plan\.tuner.*bayesian, grid, random"):
        load(RunConfig, write_config(tmp_path), ["plan.tuner=newton"])


# ---- the tuner ---------------------------------------------------------------------------------------------


def test_all_ranks_try_the_same_sizes_at_the_same_steps(ranks: Pools, given: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "run", RANKS)
    tuner = ("plan.tuner=grid", "plan.samples=3", "plan.sample_steps=4")
    size = "schedule.all_reduce_chunk_bytes=8192"
    told = run(ranks, folder, *tuner, size, "schedule.refine_after=2", "train.steps=20")
    assert told[0].plans == told[1].plans
    steps = [(m.all_reduce_chunk_bytes, m.plan) for m in metrics(folder)]
    sizes = [size for size, _ in steps]
    # Two steps until the order is computed again, one after which tuning begins, then samples of four.
    assert set(sizes[:3]) == {8192}
    samples = [set(sizes[first : first + 4]) for first in (3, 7, 11)]
    assert [len(sample) for sample in samples] == [1, 1, 1]
    assert len(set().union(*samples)) == 3 and set(sizes[15:]) < set().union(*samples)
    assert "the fastest of 3 sizes tried (grid)" in told[0].said
    paper = PlanFile.read(folder / "run" / "plan.json")
    assert paper.choice.all_reduce_chunk_bytes == steps[-1][0]
    assert losses(folder) == pytest.approx(losses(given)[:20], rel=1e-5)


def test_a_search_begins_where_the_simulation_sees_the_best_size() -> None:
    """A link on which every transfer starts slowly: the fewer chunks the better."""
    each = problem((True, True), all_reduce_bytes=1 << 22, cluster=ClusterConfig(link_latency_s=0.05))
    choice = Decision(schedule="flowmoe", microbatches=2, all_reduce_chunk_bytes=1 << 16)
    assert best_simulated(each, choice, SizeRange.of(each.workload.all_reduce_bytes), {}) == 1 << 22


def test_the_first_size_may_be_one_of_partial_gradients() -> None:
    """Where attention is frozen they may be all that there is to cut."""
    each = with_sharing(problem((True, True), all_reduce_bytes=0), 2, 2)
    work = replace(each.workload, expert_all_reduce_bytes=(0, 0), partial_all_reduce_bytes=(1 << 22,) * 2)
    each = replace(each, workload=work, cluster=ClusterConfig(link_latency_s=0.05))
    choice = Decision(schedule="flowmoe", microbatches=2, all_reduce_chunk_bytes=1 << 16)
    planned = Planned(problem=each, choice=choice, plan=each.plan(choice))
    tuning = Tuning(PlanConfig(tuner="grid"), planned, {}, Control(0, 1), seed=0)
    assert tuning.turn().choice.all_reduce_chunk_bytes == 1 << 22


def test_tuning_ends_by_the_time_of_its_steps_with_the_sizes_that_were_tried() -> None:
    each = problem((True, True), all_reduce_bytes=1 << 22)
    choice = Decision(schedule="flowmoe", microbatches=2, all_reduce_chunk_bytes=1 << 16)
    planned = Planned(problem=each, choice=choice, plan=each.plan(choice))
    config = PlanConfig(tuner="grid", samples=6, sample_steps=5)
    tuning, ran = Tuning(config, planned, {}, Control(0, 1), seed=0), 0
    tuning.turn()
    while tuning.best is None:
        ran += 1
        if tuning.note(1.0 if ran <= 5 else TUNING_S):
            tuning.turn()
    assert ran == 5 + DROPPED_STEPS + 1
    assert tuning.best.seconds == 1.0 and "4 sizes not tried" in tuning.line


@pytest.mark.soak
def test_the_published_tuner_in_a_run(ranks: Pools, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "run", RANKS)
    tuner = ("plan.tuner=bayesian", "plan.samples=5", "plan.sample_steps=3", "schedule.refine_after=0")
    told = run(ranks, folder, *tuner, "train.steps=18")
    assert "the fastest of 5 sizes tried (bayesian)" in told[0].said
    assert len({m.all_reduce_chunk_bytes for m in metrics(folder)}) >= 4


def test_a_schedule_without_chunks_is_not_tuned(ranks: Pools, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "run", RANKS)
    told = run(ranks, folder, "plan.tuner=grid", "schedule.name=sequential", "schedule.refine_after=0")
    assert told[0].said.count("schedule sequential does not split its all-reduces") == 1
    assert len(set(told[0].plans)) == 1
    assert {m.all_reduce_chunk_bytes for m in metrics(folder)} == {None}


# ---- drift -------------------------------------------------------------------------------------------------


SLOWS_DOWN = partial(slow_rank, after=16)
DRIFT = ("plan.drift_steps=4", "plan.drift_threshold=1.0", "schedule.refine_after=2", "plan.profile_s=0.2")


def test_a_rank_that_slows_down_is_planned_for(ranks: Pools, given: Path, tmp_path: Path) -> None:
    """Noticed, named, planned for behind the same step on all ranks, and the losses are as ever."""
    folder = folder_of(tmp_path, "run", RANKS)
    told = run(ranks, folder, *auto(folder), *DRIFT, "train.steps=30", before=SLOWS_DOWN)
    assert told[0].plans == told[1].plans
    words = " ".join(told[0].said.split())
    assert f"computation on rank 1 takes {SLOW:.2f}x as long as before" in words
    assert ("changing to plan 2: " in words) or ("keeping plan 1 in a new order" in words)
    assert "the step time has changed from 100.0 ms to 400.0 ms" in told[0].said
    assert losses(folder) == pytest.approx(losses(given)[:30], rel=1e-5)


@pytest.mark.soak
def test_without_a_watch_nothing_is_planned_again(ranks: Pools, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "run", RANKS)
    settings = (*auto(folder), *DRIFT, "plan.watch=false", "train.steps=26")
    told = run(ranks, folder, *settings, before=SLOWS_DOWN)
    assert "the step time has changed" not in told[0].said
    assert len(set(told[0].plans[2:])) == 1


@pytest.mark.soak
def test_drift_tunes_again(ranks: Pools, tmp_path: Path) -> None:
    """Where section [schedule] says what runs, the size of its chunks is what there is to change."""
    folder = folder_of(tmp_path, "run", RANKS)
    tuner = ("plan.tuner=random", "plan.samples=2", "plan.sample_steps=3")
    settings = (*DRIFT, "schedule.refine_after=0", "schedule.microbatches=1", "train.steps=32")
    told = run(ranks, folder, *tuner, *settings, before=SLOWS_DOWN)
    assert told[0].said.count("the fastest of 2 sizes tried (random)") == 2
    assert told[0].plans == told[1].plans


def test_a_run_that_goes_on_tunes_again_though_it_has_not_measured_its_order(
    ranks: Pools, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, "run", RANKS)
    tuner = ("plan.tuner=random", "plan.samples=2", "plan.sample_steps=3")
    settings = (*tuner, *DRIFT, "schedule.microbatches=1")
    run(ranks, folder, *settings, "train.steps=12")
    slows_down = partial(slow_rank, after=18)
    told = run(ranks, folder, *settings, "train.steps=30", "train.resume=true", before=slows_down)
    before, changed, _ = told[0].logged.partition("has changed")
    assert ", continued from " in before and changed and "re-ordered" not in before
    assert told[0].said.count("the fastest of 2 sizes tried (random)") == 1
    assert told[0].plans == told[1].plans
