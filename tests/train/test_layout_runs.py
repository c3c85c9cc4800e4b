"""Whole runs on ranks that share parameters: the numbers of one process, and going on with others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.train.metrics import StepMetrics, read_metrics
from tests.support.ranks import Pools
from tests.support.training import Told, folder_of, train_on

pytestmark = pytest.mark.slow
STEPS, GLOBAL_BATCH = 6, 8


@dataclass(frozen=True)
class World:
    """Settings of so many ranks, of which `tp` share attention; all have the same global batch."""

    ranks: int
    tp: int
    settings: tuple[str, ...]

    @property
    def overrides(self) -> list[str]:
        batch = GLOBAL_BATCH * self.tp // self.ranks
        usual = [f"train.steps={STEPS}", "train.eval_every=3", "train.checkpoint_every=3"]
        return [*usual, f"data.batch_per_device={batch}", *self.settings]


ALONE = World(1, 1, ())
WORLDS = [
    World(4, 2, ("parallel.tp_size=2", "parallel.etp_size=2")),
    World(4, 2, ("parallel.tp_size=2", "parallel.ep_size=2", "parallel.tokens=replicated")),
    World(2, 2, ("parallel.tensor_parallel_size=2", "parallel.expert_tensor_parallel_size=2")),
]


IN_SHARES = ("optimizer.zero_stage=2",)
PARM = World(4, 2, ("parallel.tp_size=2", "parallel.etp_size=2", "schedule.name=parm_s2"))
SHARDED = World(4, 2, ("parallel.tp_size=2", "parallel.ep_size=2", *IN_SHARES))


@dataclass(frozen=True)
class Run:
    """What a run wrote down and said."""

    folder: Path
    metrics: list[StepMetrics]
    told: Told


Runs = Callable[[World], Run]


@pytest.fixture(scope="module")
def runs(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A layout's run, made when first asked for."""
    found: dict[World, Run] = {}

    def run_of(world: World) -> Run:
        if world not in found:
            folder = folder_of(tmp_path_factory.mktemp("runs"), "one", world.ranks)
            told = ranks(world.ranks).run(train_on, world.ranks, folder, world.overrides, None)
            found[world] = Run(folder, read_metrics(folder / "run" / "metrics.jsonl"), told[0])
        return found[world]

    return run_of


def check_same(ours: list[StepMetrics], theirs: list[StepMetrics]) -> None:
    assert [each.step for each in ours] == [each.step for each in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("loss", "total_loss", "grad_norm", "aux_loss_global", "z_loss"):
            assert getattr(mine, name) == pytest.approx(getattr(other, name), rel=2e-4), (mine.step, name)
        assert (mine.eval_loss or 0) == pytest.approx(other.eval_loss or 0, rel=2e-4), mine.step
        tokens = [each.tokens_per_s * each.iteration_s for each in (mine, other)]
        assert tokens == pytest.approx([GLOBAL_BATCH * 16] * 2), "every token counts once"
        spread = "tokens_per_expert_max_over_mean"
        assert getattr(mine, spread) == pytest.approx(getattr(other, spread), rel=0.05)


@pytest.mark.few(2)
@pytest.mark.parametrize("world", [*WORLDS, SHARDED, PARM], ids=str)
def test_a_run_has_the_numbers_of_one_process(runs: Runs, world: World) -> None:
    ours, alone = runs(world), runs(ALONE)
    check_same(ours.metrics, alone.metrics)
    assert ours.told.summary is not None and alone.told.summary is not None
    assert ours.told.summary.parameters == alone.told.summary.parameters


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (ALONE, WORLDS[0]),
        (WORLDS[1], WORLDS[2]),
        pytest.param(WORLDS[0], ALONE, marks=pytest.mark.soak),
        pytest.param(WORLDS[0], WORLDS[1], marks=pytest.mark.soak),
        (SHARDED, ALONE),
        (WORLDS[2], SHARDED),
    ],
)
def test_a_run_goes_on_under_another_layout(
    ranks: Pools, runs: Runs, tmp_path: Path, first: World, then: World
) -> None:
    folder = folder_of(tmp_path, "again", then.ranks)
    shutil.copytree(runs(first).folder / "run", folder / "run")
    shutil.rmtree(folder / "run" / "checkpoints" / f"step-{STEPS:08d}")
    told = ranks(then.ranks).run(train_on, then.ranks, folder, [*then.overrides, "train.resume=true"], None)
    assert all(each.refused is None for each in told)
    said = " ".join(told[0].said.split())  # lines are folded
    assert "continuing from" in said and "changed since step-00000003" in said
    assert f"processes {first.ranks} -> {then.ranks}" in said or first.ranks == then.ranks
    assert "instead of continuing" in said, "a plan is of one layout"
    assert f"parallel.tp_size {first.tp} -> {then.tp}" in said or first.tp == then.tp
    check_same(read_metrics(folder / "run" / "metrics.jsonl"), runs(ALONE).metrics)


def test_another_global_batch_is_refused_under_another_layout(
    ranks: Pools, runs: Runs, tmp_path: Path
) -> None:
    """Twice the ranks share attention, so half as many samples are in a batch."""
    folder = folder_of(tmp_path, "again", 4)
    shutil.copytree(runs(WORLDS[0]).folder / "run", folder / "run")
    settings = [*WORLDS[0].overrides, "parallel.tp_size=1", "train.resume=true", "train.steps=9"]
    told = ranks(4).run(train_on, 4, folder, settings, None)
    for each in told:
        assert each.refused is not None
        assert each.refused[0] == "data.batch_per_device x (processes / tp_size)"
