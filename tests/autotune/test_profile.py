"""Profiling on real ranks: what is in the file, that ranks agree, and what can be measured at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.autotune.problem import run_problem
from penstock.autotune.profile.links import _groups, exchanges, make_pair, measure_links
from penstock.autotune.profile.measure import profile_run, profile_schedules, rates_with_links
from penstock.autotune.profile.sample import GRACE_S, Budget, Limits, median_interval
from penstock.autotune.profile.tasks import _apart, cuts, measure_tasks, sample_of
from penstock.config import load
from penstock.cost import AlphaBeta, ClusterConfig, ClusterFile, ProfiledCluster
from penstock.cost.cluster import RateOf
from penstock.cost.cluster_file import PAIR, LinkModel
from penstock.cost.measured import OVERRAN
from penstock.cost.span import Span, span_of
from penstock.decision import Decision, ScheduleConfig
from penstock.device import Cpu, using
from penstock.graph import Lane
from penstock.mesh import Group, Mesh, stays_inside
from penstock.plan.published.parm import parm_models
from penstock.runtime.machinery import Machinery
from penstock.topology import Layout
from penstock.train.assemble import build_machinery
from penstock.train.config import RunConfig
from penstock.train.logs import telling
from tests.support.card import CardDevice, counted, install
from tests.support.ranks import Pools

TINY = (
    "model.num_layers=3",
    "model.hidden_size=16",
    "model.num_heads=2",
    "model.seq_len=8",
    "moe.num_experts=4",
    "moe.moe_ffn_hidden_size=24",
    "data.batch_per_device=2",
)
BUDGET_S = 0.2
CPU = torch.device("cpu")
COLLECTIVES = {
    "all_to_all",
    "uneven_all_to_all",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "point_to_point",
}
COMPUTED = {"EM.F", "EM.B", "AT.F", "AT.B", "X.F", "X.B", "X.I", "X.W", "U.F", "U.B", "HD.F", "HD.B"}


def tiny(*overrides: str) -> RunConfig:
    return load(RunConfig, None, [*TINY, *overrides])


@contextmanager
def connected(
    config: RunConfig, rank: int, world_size: int = 2, *, node_size: int = 0, device: torch.device = CPU
) -> Iterator[Machinery]:
    """Lanes and groups of a rank, closed behind what is measured."""
    layout = replace(Layout.build(config.parallel, world_size, rank, 4), node_size=node_size)
    machinery = build_machinery(layout, device, config.parallel, "float32")
    yield machinery
    machinery.lanes.close()


def profiled(rank: int, world_size: int, overrides: tuple[str, ...], node_size: int) -> ClusterFile:
    config, limits = tiny(*overrides), Limits(clock=ticking())
    with connected(config, rank, world_size, node_size=node_size) as machinery:
        return profile_run(config, machinery, budget_s=BUDGET_S, name="loopback", limits=limits)


def ticking(step_s: float = 0.01) -> Callable[[], float]:
    """A clock on which time passes when it is looked at, however busy the machine is."""
    looks = count(0.0, step_s)
    return lambda: next(looks)


def check(file: ClusterFile) -> None:
    """Whatever is measured can be used; nothing is missing, unless a busy machine took too long."""
    for link in file.links:
        assert link.alpha_s >= 0 and link.beta_s_per_byte > 0
        assert link.fit is not None and math.isfinite(link.fit.r2)
    for task in file.tasks:
        assert task.alpha_s >= 0 and task.scale > 0 and task.contended >= 1
        assert task.fit is not None and math.isfinite(task.fit.r2)
    assert file.contended_transfers >= 1 and file.jitter >= 0
    if OVERRAN not in file.doubts:
        check_complete(file)
    if file.steps is not None:
        assert file.steps.low <= file.steps.ratio <= file.steps.high and file.steps.steps >= 4
    assert file.measured is not None and file.measured.torch == torch.__version__
    assert file.memory_bytes is not None and file.memory_bytes > 1 << 20


def check_complete(file: ClusterFile) -> None:
    assert all(link.fit is not None and len(link.fit.points) >= 2 for link in file.links)
    assert {f"{task.op}.{task.phase}" for task in file.tasks} >= COMPUTED
    assert all(task.fit is not None and len(task.fit.points) >= 2 for task in file.tasks)
    kernels = {kernel.name: kernel for kernel in file.kernels}
    assert kernels.keys() == {"matmul", "copy", "attention", "permute", "unpermute"}
    assert file.rates.flops_per_s == pytest.approx(1 / kernels["matmul"].beta_s_per_unit)
    assert (file.steps is not None) or file.doubts or file.ranks == 1


@pytest.mark.slow
def test_two_ranks_make_one_file_that_plans_are_made_from(ranks: Pools) -> None:
    first, second = ranks(2).run(profiled, 2, (), 0)
    assert first == second
    check(first)
    assert (first.name, first.nodes, first.ranks_per_node) == ("loopback", 1, 2)
    assert {(link.collective, link.group, link.lane) for link in first.links} == {
        (name, group, "inter") for name in COLLECTIVES for group in ("ep", "world")
    }
    assert {(link.ranks, link.nodes) for link in first.links} == {(2, None)}
    assert "dropless" in first.source
    problem = run_problem(tiny(), Layout(world_size=2, ep_size=2, rank=0), first)
    assert problem.simulate(Decision(), problem.plan(Decision())).iteration_s > 0


def test_what_is_measured_has_drawn_weights() -> None:
    """A sample of the model has fewer layers than a folder that a run begins with."""
    config = RunConfig()
    begun = replace(config, model=replace(config.model, config=Path("config.json")))
    assert sample_of(begun).model.config is None


def test_a_slower_rank_is_told_from_scatter() -> None:
    """Rounds scatter by 2 %; rank 2 takes 1.5 times as long in everything, the others differ by 1 %."""
    rng = np.random.default_rng(0)
    fair = [rng.normal(1.0, 0.02, (4, 5, tasks)) for tasks in (7, 30)]
    assert _apart(fair)[0] == ()
    slow = np.array([1.0, 1.01, 1.5, 0.99])
    slowness, times = _apart([seconds * slow[:, None, None] for seconds in fair])
    assert slowness == pytest.approx(slow, rel=0.03)
    for apart, even in zip(times, fair, strict=True):
        np.testing.assert_allclose(np.median(apart, axis=1), np.median(even, axis=1), rtol=0.05)


def test_two_ranks_of_which_one_is_slower() -> None:
    """The faster of two counts as usual: people read that rank 1 is slower, not that rank 0 is faster."""
    seconds = np.ones((2, 3, 4)) * np.array([1.0, 1.7])[:, None, None]
    assert _apart([seconds])[0] == pytest.approx((1.0, 1.7))


def test_plans_know_the_slower_rank_of_a_file_of_as_many_ranks() -> None:
    file = ClusterFile(name="slow", nodes=1, ranks_per_node=2, slowness=(1.0, 1.7))
    two, four = (Layout(world_size=ranks, ep_size=2, rank=0) for ranks in (2, 4))
    assert run_problem(tiny(), two, file).slowness == (1.0, 1.7)
    assert run_problem(tiny(), four, file).slowness == ()


@pytest.mark.slow
def test_groups_that_share_attention_and_experts_are_measured(ranks: Pools) -> None:
    shares = ("parallel.tp_size=2", "parallel.etp_size=2")
    first, *others = ranks(4).run(profiled, 4, shares, 0)
    assert all(file == first for file in others)
    used = {(link.collective, link.group, link.lane) for link in first.links}
    for group in ("tp", "etp"):
        assert {("all_gather", group, "intra"), ("reduce_scatter", group, "intra")} <= used
    assert {("all_to_all", "ep x etp", "inter"), ("all_reduce", "dp", "inter")} <= used
    pair = first.link(PAIR, "ep x etp")
    assert pair is not None and pair.ranks == 4 and pair.fit is not None and len(pair.fit.points) >= 2
    asked = run_problem(tiny(*shares), Layout(world_size=4, ep_size=2, rank=0, tp_size=2, etp_size=2), first)
    assert parm_models(asked).pair.beta_s_per_byte >= pair.beta_s_per_byte
    kinds = {(task.op, task.phase) for task in first.tasks}
    assert {("TA", "F"), ("GT", "B"), ("HV", "F"), ("HL", "B"), ("X", "B")} <= kinds


def pair_traffic(rank: int, etp_size: int) -> int:
    """Bytes that a rank sends for one pair of which each has 4096 bytes."""
    config = tiny("parallel.tp_size=2", f"parallel.etp_size={etp_size}")
    with connected(config, rank, 4) as machinery:
        machinery.transports.open(_groups(machinery.layout))
        action = make_pair(machinery, 1024)
        before = machinery.transports.traffic.total()
        action()
        return machinery.transports.traffic.total() - before


@pytest.mark.slow
@pytest.mark.parametrize("etp_size", [1, 2])
def test_a_pair_sends_what_a_combine_and_its_gather_do(ranks: Pools, etp_size: int) -> None:
    """Three quarters to other ranks; to the one with the same tokens what is left once shards are added."""
    assert ranks(4).run(pair_traffic, etp_size) == [4096 * 3 // 4 + 4096 // etp_size] * 4


@pytest.mark.slow
def test_nodes_have_links_inside_and_legs(ranks: Pools) -> None:
    first, *others = ranks(4).run(profiled, 4, ("moe.capacity_factor=1.0",), 2)
    assert all(other == first for other in others)
    check(first)
    assert (first.nodes, first.ranks_per_node) == (2, 2)
    groups = {(link.group, link.lane, link.ranks, link.nodes) for link in first.links if not link.op}
    assert groups == {
        ("ep", "inter", 4, 2),
        ("world", "inter", 4, 2),
        ("rail", "inter", 2, 2),
        ("node", "intra", 2, 1),
    }
    legs = {(link.collective, link.op, link.lane) for link in first.links if link.op}
    assert legs == {
        ("hierarchical_1d", "DG", "intra"),
        ("hierarchical_1d", "D", "inter"),
        ("hierarchical_1d", "DS", "intra"),
        ("hierarchical_2d", "DG", "intra"),
        ("hierarchical_2d", "D", "inter"),
        ("node_once", "D", "inter"),
        ("node_once", "DS", "intra"),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.moe_layers=[1]", "moe.shared_ffn_hidden_size=8"),
        ("moe.gate=soft", "data.batch_per_device=1", "schedule.microbatches=1"),
        ("placement.samples=netmoe", "placement.experts=planned"),
    ],
)
def test_one_rank_has_no_links(overrides: tuple[str, ...]) -> None:
    said: list[str] = []
    config = tiny(*overrides)
    with connected(config, 0, 1) as machinery, telling(said.append):
        file = profile_run(config, machinery, budget_s=BUDGET_S)
    check(file)
    assert (file.ranks, file.links, file.contended_transfers) == (1, (), 1.0)
    assert {task.contended for task in file.tasks} == {1.0}
    assert ("S" in {task.op for task in file.tasks}) == (config.moe.shared_ffn_hidden_size > 0)
    assert said[0].startswith("measuring computation on all ranks at once")
    assert said[1].startswith("steps of two layers, round 1 of ") and not any("link" in text for text in said)


def measured_again(rank: int) -> tuple[tuple[LinkModel, ...], bool, int]:
    config = tiny()
    file = ClusterFile(name="rates", nodes=1, ranks_per_node=2, rates=ClusterConfig(flops_per_s=1e12))
    with connected(config, rank) as machinery:
        tasks = measure_tasks(config, machinery, 0.1, file, limits=Limits(clock=ticking()))
        links = measure_links(machinery, (), 0.0, limits=Limits(clock=ticking()))
    return links, tasks.rates.flops_per_s == 1e12, len(tasks.kernels)


@pytest.mark.slow
def test_both_halves_alone_on_no_budget_to_speak_of(ranks: Pools) -> None:
    """Tasks by the rates of another file, so that they can replace its own."""
    first, second = ranks(2).run(measured_again)
    assert first == second
    links, kept, kernels = first
    assert {link.collective for link in links} == COLLECTIVES
    assert kept and kernels == 0


def profiled_by_slow_clocks(rank: int, slow: tuple[int, ...]) -> tuple[ClusterFile, int]:
    """What ranks measure if an hour passes with every look at the clock of some; how often they report it."""
    said: list[str] = []
    config, limits = tiny(), Limits(clock=ticking(3600.0 if rank in slow else 0.0001))
    with connected(config, rank) as machinery, telling(said.append):
        file = profile_run(config, machinery, budget_s=BUDGET_S, limits=limits)
    return file, len(said)


@pytest.mark.parametrize("slow", [(0, 1), (1,)])
def test_measuring_ends_by_the_clock_with_what_there_is(ranks: Pools, slow: tuple[int, ...]) -> None:
    """Though not even the least was measured; ranks end together, whoever's clock it is."""
    (first, said), (second, _) = ranks(2).run(profiled_by_slow_clocks, slow)
    assert first == second
    check(first)
    assert OVERRAN in first.doubts and first.links == () and first.kernels == ()
    assert first.rates.flops_per_s == ClusterConfig().flops_per_s
    assert first.tasks, "at least one step was measured"
    assert said < 10
    problem = run_problem(tiny(), Layout(world_size=2, ep_size=2, rank=0), first)
    assert problem.simulate(Decision(), problem.plan(Decision())).iteration_s > 0


def part_of_links(rank: int) -> tuple[list[LinkModel], bool]:
    """What is measured until the grace is over: each look takes a sixth of it."""
    limits = Limits(clock=ticking(GRACE_S / 6))
    with connected(tiny(), rank) as machinery:
        links = measure_links(machinery, (), 0.0, limits=limits)
    return list(links), limits.overran


def test_what_plans_rest_on_is_measured_first(ranks: Pools) -> None:
    (first, late), second = ranks(2).run(part_of_links)
    assert (first, late) == second and late
    assert {link.collective for link in first} == {"all_to_all"}


def profiled_for_schedules(rank: int) -> ClusterFile:
    config, usual = tiny(), ScheduleConfig(microbatches=2)
    alike = [replace(usual, name="flowmoe", all_reduce_chunk_bytes=size) for size in (1 << 20, 1 << 22)]
    with connected(config, rank) as machinery:
        return profile_schedules(config, machinery, [replace(usual, name="sequential"), *alike], 0.1)


@pytest.mark.slow
def test_for_given_schedules_only_what_they_need_is_measured(ranks: Pools) -> None:
    first, second = ranks(2).run(profiled_for_schedules)
    assert first == second and first.measured is not None and first.kernels == ()
    assert {(link.collective, link.group) for link in first.links} == {
        ("all_to_all", "ep"),
        ("all_reduce", "world"),
    }
    (attention,) = [task for task in first.tasks if (task.op, task.phase) == ("AT", "F")]
    assert attention.fit is not None
    assert len({work for work, _ in attention.fit.points}) == 2  # whole, and in halves once


def test_the_sample_has_one_layer_of_each_kind_and_something_to_cut() -> None:
    sample = sample_of(tiny("model.moe_layers=[1]", "data.batch_per_device=1", "schedule.microbatches=1"))
    assert sample.model.has_experts == (True, False)
    assert sample.data.batch_per_device == 2
    assert (sample.moe.capacity_factor, sample.moe.permutation_name) == (1.0, "index"), "was dropless"
    assert {cut.microbatches for cut in cuts(sample)} == {1, 2}
    for option in ("moe.bound_factor=1.25", "moe.one_copy_per_rank=true"):
        assert sample_of(tiny(option)).moe.capacity_factor == 1.0
    kept = sample_of(tiny("moe.capacity_factor=1.25", "data.batch_per_device=4"))
    assert (kept.moe.capacity_factor, kept.data.batch_per_device) == (1.25, 4)
    assert kept.model.has_experts == (True, True)


# ---- exchanges: as many bytes as the model is told ---------------------------------------------------------


def traffic(rank: int, elements: int) -> dict[str, int]:
    """Bytes that this rank sends in one exchange of each collective."""
    found = {}
    with connected(tiny(), rank, 4, node_size=2) as machinery:
        assert (Lane.INTER, Group.EXPERT) in _groups(machinery.layout)
        transport = machinery.transports.inter
        for name, make in exchanges(transport, Group.EXPERT, rank, CPU).items():
            before = transport.traffic.total()
            make(elements)()
            found[str(name)] = transport.traffic.total() - before
    return found


@pytest.mark.slow
def test_exchanges_move_what_their_models_are_about(ranks: Pools) -> None:
    size, elements = 4 * 1000, 1000
    first, *others = ranks(4).run(traffic, elements)
    assert first == {
        "all_to_all": size * 3 // 4,
        "uneven_all_to_all": size * 3 // 5,
        "all_gather": size * 3 // 4,
        "reduce_scatter": size * 3 // 4,
        "all_reduce": size * 6 // 4,
        "broadcast": size * 3,
        "point_to_point": size,
    }
    for other in others:
        assert other["uneven_all_to_all"] == size * 4 // 5, "the first rank is the popular one"
        assert other["broadcast"] == other["point_to_point"] == 0


# ---- timing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "low", "high"), [(6, 0, 5), (9, 1, 7), (25, 7, 17), (100, 40, 59)])
def test_the_interval_of_a_median_is_made_of_order_statistics(count: int, low: int, high: int) -> None:
    values = [float(value) for value in range(count)]
    assert median_interval(values[::-1]) == (low, high)


def test_few_timings_say_nothing_about_the_median() -> None:
    assert median_interval([1.0] * 5) == (0.0, math.inf)


def uneven_clocks(rank: int) -> tuple[list[float], float]:
    from penstock.topology import Control

    budget = Budget(Control(rank, 2), 100.0 if rank else 50.0)
    times = budget.timed(lambda: None, 3, CPU)
    return times, budget.left_s


@pytest.mark.slow
def test_ranks_agree_on_times_and_on_what_is_left(ranks: Pools) -> None:
    first, second = ranks(2).run(uneven_clocks)
    assert first == second
    assert len(first[0]) == 3 and first[1] <= 50


def line(
    collective: str, ranks: int, bytes_per_s: float, group: str = "ep", nodes: int | None = None
) -> LinkModel:
    return LinkModel(
        collective=collective,
        group=group,
        lane="inter",
        ranks=ranks,
        alpha_s=1e-4,
        beta_s_per_byte=1 / bytes_per_s,
        nodes=nodes,
    )


@pytest.mark.parametrize(("alone", "shared"), [(50e6, True), (45e6, True), (13e6, False), (12.5e6, False)])
def test_a_device_that_is_faster_alone_shares_its_card(alone: float, shared: bool) -> None:
    """Of 4 nodes of 4 devices each sends 12 / 16 of its rows to others, at 12.5 MB/s while all send."""
    links = line("all_to_all", 16, 12.5e6 * 16 / 12, nodes=4), line("point_to_point", 16, alone, nodes=4)
    rates = rates_with_links(ClusterConfig(), links, nodes=4)
    assert rates.link_rate_of == ("node" if shared else "device")
    assert rates.link_bytes_per_s == pytest.approx(50e6 if shared else 12.5e6)
    assert rates.all_to_all(Span.regular(4, 4)).beta_s_per_byte == pytest.approx(links[0].beta_s_per_byte)


def test_several_groups_at_once_tell_nothing_of_cards() -> None:
    links = (
        line("all_to_all", 8, 10e6, nodes=2),
        line("point_to_point", 8, 40e6, nodes=2),
        line("all_reduce", 16, 10e6, group="world", nodes=4),
    )
    assert rates_with_links(ClusterConfig(), links, nodes=4).link_rate_of == "device"
    assert rates_with_links(ClusterConfig(), links[:2], nodes=1).link_rate_of == "device"


def links_by(rates: ClusterConfig, mesh: Mesh, per_node: int) -> Iterator[LinkModel]:
    """The lines that a profile of this layout finds where these rates are the truth."""
    alone = AlphaBeta(alpha_s=rates.link_latency_s, beta_s_per_byte=1 / rates.link_bytes_per_s)
    for group, axes in Group.NAMES.items():
        span = span_of(mesh, axes, per_node)
        lines = {"all_to_all": rates.all_to_all(span), "all_reduce": rates.all_reduce(span)}
        if span.nodes > 1:
            lines["point_to_point"] = alone
        for name, model in lines.items() if span.ranks > 1 else ():
            lane = Lane.INTRA if stays_inside(axes) else Lane.INTER
            found = LinkModel(collective=name, group=group, lane=lane, ranks=span.ranks, **vars(model))
            yield replace(found, nodes=span.nodes)


@pytest.mark.parametrize("whose", ["device", "node"])
@pytest.mark.parametrize(
    "measured",
    [
        Mesh(world_size=16, ep_size=16, ep_local_size=8),
        Mesh(world_size=16, ep_size=8),
        Mesh(world_size=16, ep_size=4, tp_size=4),
        Mesh(world_size=16, ep_size=8, ep_local_size=4, etp_size=2),
    ],
)
def test_what_was_measured_of_one_layout_prices_others(measured: Mesh, whose: RateOf) -> None:
    """Groups inside a node and across nodes, of two nodes and of eight; links are 100 times faster inside."""
    true = ClusterConfig(
        link_latency_s=1e-5,
        link_bytes_per_s=1e9,
        link_rate_of=whose,
        intra_latency_s=1e-6,
        intra_bytes_per_s=1e11,
    )
    links = tuple(links_by(true, measured, 8))
    rates = rates_with_links(ClusterConfig(), links, nodes=2)
    assert rates.link_rate_of == whose
    assert rates.link_bytes_per_s == pytest.approx(true.link_bytes_per_s)
    assert rates.intra_bytes_per_s == pytest.approx(true.intra_bytes_per_s)
    found = ProfiledCluster.build(
        ClusterFile(name="2x8", nodes=2, ranks_per_node=8, rates=rates, links=links)
    )
    for world in (16, 64):
        for axes, mesh in (
            (Group.EXPERT, Mesh(world_size=world, ep_size=world)),
            (Group.EXPERT, Mesh(world_size=world, ep_size=8)),
            (Group.EXPERT, Mesh(world_size=world, ep_size=4)),
            (Group.EXPERT_DATA, Mesh(world_size=world, ep_size=4)),
            (Group.DATA, Mesh(world_size=world, tp_size=4)),
        ):
            span = span_of(mesh, axes, 8)
            for name in ("all_to_all", "all_reduce"):
                seconds, expected = (getattr(each, name)(span).seconds(1 << 26) for each in (found, true))
                assert seconds == pytest.approx(expected, rel=0.05), (name, span)


def issuing_measured(rank: int) -> tuple[float, float, float, bool]:
    """The host's time for a task and an operation, in a profile on a stand-in for a GPU; and on a CPU.

    And whether the clock of a step on the stand-in was stopped when the device had done it.
    """
    config, found = tiny(), []
    for device, kind in ((install(), CardDevice()), (CPU, Cpu())):
        with using(kind), counted() as waits, connected(config, rank, 1, device=device) as machinery:
            file = ClusterFile(name="rates", nodes=1, ranks_per_node=1)
            rates = measure_tasks(config, machinery, 0.1, file, limits=Limits(clock=ticking())).rates
            found.append((rates, {(Path(path).stem, what) for path, _, what in waits}))
    (on_card, waits_on_card), (on_cpu, _) = found
    waited = ("tasks", "wait for the device") in waits_on_card
    return on_card.issue_task_s, on_card.issue_kernel_s, on_cpu.issue_task_s + on_cpu.issue_kernel_s, waited


@pytest.mark.slow
def test_a_profile_knows_how_long_one_thread_hands_out_tasks(cards: Pools) -> None:
    ((task_s, kernel_s, on_cpu_s, waited),) = cards(1).run(issuing_measured)
    assert kernel_s > 0 and task_s >= 0 and on_cpu_s == 0 and waited
