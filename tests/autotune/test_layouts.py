"""Runs that leave open which ranks share attention and experts: what is chosen, said, trained and kept."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.autotune.choose.layouts import check_some_layout, run_layouts, settled_layout, with_layout
from penstock.autotune.problem import check_shared, run_problem
from penstock.checkpoint.folder import Record
from penstock.config import ConfigError, load, to_dict
from penstock.cost import ClusterFile, StateTypes
from penstock.decision import Decision
from penstock.plan import PlanFile, Problem, evaluate
from penstock.plan.candidate import least_memory
from penstock.plan.layouts import FoundLayouts, LayoutSizes
from penstock.plan.plan_config import PlanConfig
from penstock.topology import Control, Layout
from penstock.train.config import RunConfig
from penstock.train.logs import telling
from penstock.train.metrics import read_metrics
from penstock.train.pilot import Ranks, Resumption
from tests.support.cli import Cli
from tests.support.ranks import Pools
from tests.support.runs import write_config
from tests.support.training import Told, folder_of, train_on

AUTO = ("plan.mode=auto", "plan.layout=auto", "plan.budget=0.01", "plan.trials=1", "plan.watch=false")
SIX = ("train.steps=6", "train.checkpoint_every=3", "optimizer.min_lr_ratio=1.0")
RANKS = 4


def config_of(folder: Path, *settings: str) -> RunConfig:
    return load(RunConfig, write_config(folder), settings)


def found_by(config: RunConfig, ranks: int = RANKS, memory_bytes: int | None = None) -> FoundLayouts:
    return run_layouts(config, ClusterFile(name="by hand", nodes=1, ranks_per_node=ranks), memory_bytes)


def shares(found: FoundLayouts) -> set[tuple[int, int]]:
    return {(each.sizes.tp_size, each.sizes.etp_size) for each in found.ranked}


@pytest.mark.slow
def test_layouts_of_a_run_have_its_samples(tmp_path: Path) -> None:
    """Two heads are at most for two ranks; experts of 24 units for any of the four."""
    config = config_of(tmp_path)
    found = found_by(config)
    assert shares(found) == {(tp, etp) for tp in (1, 2) for etp in (1, 2, 4)}
    assert found.undivided == 2 * (2 + 2 + 1), "tp = 4, with tokens of both kinds, by ep for every etp"
    samples = {each.problem.batch * each.problem.mesh.sizes["dp"] for each in found.ranked}
    assert samples == {config.data.batch_per_device * RANKS}
    twice = replace(config, parallel=replace(config.parallel, tp_size=2, ep_size=1))
    assert {each.problem.batch / each.sizes.tp_size for each in found_by(twice).ranked} == {2}
    assert {each.sizes.ep_size for each in found_by(twice).ranked} == {1}


@pytest.mark.slow
def test_a_layout_fits_by_what_is_assumed_and_with_any_optimizer_that_is_open(tmp_path: Path) -> None:
    plain, sharded = (found_by(config_of(tmp_path, f"optimizer.zero_stage={n}")) for n in (0, 1))
    fewest = min(least_memory(each.problem).total_bytes for each in plain.ranked)
    memory = fewest - 1
    left_open = config_of(tmp_path, "optimizer.zero_stage=auto")
    found = found_by(left_open, memory_bytes=memory)
    assert shares(found) <= shares(sharded) and all(each.problem.shape.updating for each in found.ranked)

    def halved(problem: Problem) -> Problem:
        state = StateTypes(parameter_bytes=2, gradient_bytes=2, moment_bytes=2)
        return replace(problem, workload=replace(problem.workload, state=state))

    file = ClusterFile(name="by hand", nodes=1, ranks_per_node=RANKS)
    assert run_layouts(config_of(tmp_path), file, memory, assumed=halved).ranked


@pytest.mark.parametrize(
    ("setting", "possible"),
    [
        ("moe.gate=soft", {(1, etp) for etp in (1, 2, 4)}),
        ("moe.one_copy_per_rank=true", {(1, 1)}),
        ("moe.comm_dtype=bfloat16", {(tp, 1) for tp in (1, 2)}),
    ],
)
def test_layouts_that_a_layer_cannot_run_are_left_out(
    tmp_path: Path, setting: str, possible: set[tuple[int, int]]
) -> None:
    config = config_of(tmp_path, setting)
    found, key = found_by(config), setting.partition("=")[0]
    assert shares(found) == possible
    assert found.refused and all(each.startswith(f"{key} = ") for each in found.refused)
    assert found.lines[-1].endswith(f", {len(found.refused)} cannot be had: {found.refused[0]}")
    with pytest.raises(ConfigError, match=key):
        check_shared(config.moe, replace(config.parallel, tp_size=2, etp_size=2))


def test_impossible_layouts_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plan.mode = fixed searches for none"):
        PlanConfig(layout="auto")
    odd = config_of(tmp_path, "parallel.tp_size=2", "data.batch_per_device=1", *AUTO)
    with pytest.raises(ConfigError, match=r"data.batch_per_device = 1: 1 samples cannot be divided"):
        with_layout(odd, LayoutSizes(tp_size=1, ep_size=4, etp_size=1))
    check_some_layout(odd, RANKS, RANKS, None)
    with pytest.raises(ConfigError, match=r"each of 4 ranks needs"):
        check_some_layout(odd, RANKS, RANKS, 1 << 10)
    alone = replace(odd.model, num_heads=1)
    with pytest.raises(ConfigError, match=r"no layout of 4 ranks divides"):
        check_some_layout(replace(odd, model=alone), RANKS, RANKS, None)
    with pytest.raises(ConfigError, match=r"no layout fits"):
        found_by(config_of(tmp_path), memory_bytes=1)


def test_what_is_wrong_with_every_layout_is_told(tmp_path: Path) -> None:
    """Not that something does not divide, where that is not the reason."""
    legs = config_of(tmp_path, "moe.dispatch=hierarchical_2d")
    why = r"no layout fits: 10 do not divide, 0 need more memory, 15 cannot be had: moe.dispatch = .*flat"
    with pytest.raises(ConfigError, match=why) as caught:
        found_by(legs)
    assert not caught.value.hint, "the reason says what to do"
    wrong = "moe.gate=soft", "parallel.tp_size=2", "data.batch_per_device=1"
    soft = config_of(tmp_path, *wrong, *AUTO)
    with pytest.raises(ConfigError, match=r'moe.gate = "soft": mixes all tokens of a sample'):
        check_some_layout(soft, RANKS, RANKS, None)


def test_a_model_too_large_for_any_layout_is_refused_before_ranks_start(cli: Cli, tmp_path: Path) -> None:
    large = ("model.hidden_size=65536", "model.num_layers=64", "parallel.processes=4")
    error = cli.refuses(["train", write_config(tmp_path), *AUTO, *large])
    assert "each of 4 ranks needs" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "node_size", "settings", "why"),
    [
        (LayoutSizes(tp_size=2, ep_size=4, etp_size=1), 2, (), ""),
        (LayoutSizes(tp_size=4, ep_size=4, etp_size=1), 2, (), "parallel.tp_size = 4: "),
        (LayoutSizes(tp_size=1, ep_size=2, etp_size=2), 0, (), "parallel.etp_size = 2: "),
        (LayoutSizes(tp_size=1, ep_size=2, etp_size=2), 4, ("moe.comm_dtype=int8",), "moe.comm_dtype = "),
    ],
)
def test_a_run_goes_on_with_its_layout_where_that_is_possible(
    tmp_path: Path, sizes: LayoutSizes, node_size: int, settings: tuple[str, ...], why: str
) -> None:
    """Nodes may be of another size than before, and rows may be rounded from now on."""
    file = ClusterFile(name="by hand", nodes=1, ranks_per_node=RANKS)
    file.save(tmp_path / "cluster.json")
    usual = (*AUTO, "model.num_heads=4", f"plan.cluster={tmp_path / 'cluster.json'}")
    asked, now = (config_of(tmp_path, *usual, *more) for more in ((), settings))
    before = with_layout(asked, sizes)
    problem = run_problem(before, Layout.build(before.parallel, RANKS, 0, 4), file)
    some = evaluate(problem, Decision(schedule="sequential"))
    PlanFile.of(problem, some, model="a model", cluster="by hand").save(tmp_path / "plan.json")
    record = Record(step=3, processes=RANKS, identity={}, settings=to_dict(asked), plan_settled=True)
    control, said = Control(0, 1), list[str]()
    control.world_size = RANKS
    ranks = Ranks(control=control, device=torch.device("cpu"), node_size=node_size)
    with telling(said.append):
        config = settled_layout(now, ranks, Resumption(path=tmp_path, record=record, older=(), damaged=()))
    again = [line for line in said if line.startswith("choosing a layout again")]
    assert bool(again) is bool(why) and all(f"({why}" in line for line in again)
    assert bool(why) is (config != with_layout(now, sizes))
    Layout.build(config.parallel, RANKS, 0, 4, node_size)


# ---- real ranks --------------------------------------------------------------------------------------------


def run(ranks: Pools, folder: Path, *settings: str, world_size: int = RANKS) -> list[Told]:
    return ranks(world_size).run(train_on, world_size, folder, [*SIX, *AUTO, *settings], None)


def said_by(told: Told) -> str:
    """On one line. The run must not have been refused."""
    assert told.summary is not None, told.refused
    return " ".join(told.said.split())


def losses(folder: Path) -> list[float]:
    return [each.loss for each in read_metrics(folder / "run" / "metrics.jsonl")]


@pytest.fixture(scope="module")
def alone(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What one process with the samples of all loses."""
    folder = folder_of(tmp_path_factory.mktemp("alone"), "run", 1)
    ranks(1).run(train_on, 1, folder, [*SIX, "data.batch_per_device=16"], None)
    return losses(folder)


@pytest.mark.slow
def test_a_run_gets_the_layout_that_fits_and_keeps_it(
    ranks: Pools, tmp_path: Path, alone: list[float]
) -> None:
    """Only two layouts fit the memory of the cluster file, and both share attention."""
    folder = folder_of(tmp_path, "run", RANKS)
    never = "plan.recompute=none"  # else the memory would do for all layouts, with blocks computed again
    sizes = sorted(found_by(config_of(folder, never)).ranked, key=lambda each: each.best.memory_bytes)
    assert sizes[0].sizes.tp_size == 2 and sizes[0].best.memory_bytes < sizes[-1].best.memory_bytes
    cluster = folder / "cluster.json"
    file = replace(ClusterFile.read(cluster), memory_bytes=sizes[1].best.memory_bytes)
    file.save(cluster)
    named = (f"plan.cluster={cluster}", never)
    first, *others = run(ranks, folder, *named)
    said = said_by(first)
    assert first.summary is not None and first.summary.tp_size == 2
    assert all(other.plans == first.plans for other in others)
    best = found_by(config_of(folder, never), memory_bytes=sizes[1].best.memory_bytes).best
    assert best.words in said and "need more memory" in said
    assert "next best layout" in said and all(not other.said for other in others)
    assert losses(folder) == pytest.approx(alone, rel=2e-4)
    paper = PlanFile.read(folder / "run" / "plan.json")
    assert (paper.sizes.tp_size, paper.sizes.etp_size) == (best.sizes.tp_size, best.sizes.etp_size)
    assert load(RunConfig, folder / "run" / "config.toml").parallel.tp_size == 1, "as it was asked for"
    go_on(ranks, folder, named, best.sizes)


def go_on(ranks: Pools, folder: Path, named: tuple[str, ...], kept: LayoutSizes) -> None:
    """With the same settings the layout stays; asked for another, or on fewer ranks, it is chosen again."""
    resume = ("train.resume=true", "train.steps=8")
    said = said_by(run(ranks, folder, *named, *resume)[0])
    words = f"tp {kept.tp_size}, ep {kept.ep_size}, etp {kept.etp_size}"
    assert f"layout kept from step-00000006: {words}" in said and "layouts compared" not in said
    said = said_by(run(ranks, folder, *named, *resume, "train.steps=9", "parallel.ep_size=1")[0])
    assert "(parallel.ep_size = 1: it has changed)" in said and re.search(r"\d layouts? compared", said)
    file = ClusterFile.read(folder / "cluster.json")
    replace(file, memory_bytes=None).save(folder / "cluster.json")  # or two ranks would not have enough
    eight = "data.batch_per_device=8"
    said = said_by(run(ranks, folder, *named, *resume, "train.steps=10", eight, world_size=2)[0])
    assert "it was of 4 processes" in said
    assert [each.step for each in read_metrics(folder / "run" / "metrics.jsonl")] == list(range(1, 11))


@pytest.mark.soak
def test_two_ranks_measure_and_agree(ranks: Pools, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "run", 2)
    first, second = run(ranks, folder, "plan.profile_s=0.2", "data.batch_per_device=8", world_size=2)
    said = said_by(first)
    assert "to choose a layout" in said
    assert "layout, by quick plans" in said and "per rank" in said
    assert first.plans == second.plans and not second.said
