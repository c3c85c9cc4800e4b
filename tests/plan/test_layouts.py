"""Layouts of a model on a cluster: which there are, and which is the best."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from penstock.config import ConfigError
from penstock.cost.clusters import find_cluster
from penstock.decision import Decision
from penstock.features.dispatch import DISPATCHES
from penstock.plan import evaluate, published_problem
from penstock.plan.candidate import least_memory, whole_s
from penstock.plan.layouts import LayoutSizes, find_layouts, rank_layouts
from penstock.plan.optimizers import sharing_updates
from penstock.plan.subject import Overrides, Subject
from penstock.words import milliseconds
from tests.plan.problems import problem

TESTBED = find_cluster("fsmoe-testbed-b")
SIZES = Overrides(layers=1, batch=4, seq_len=64, nodes=2)


@pytest.mark.slow
def test_all_layouts_of_a_cluster_work_on_the_same_samples() -> None:
    found = find_layouts("fsmoe/mixtral-7b-layers", TESTBED, SIZES)
    works = [each.problem.workload for each in found.ranked]
    assert {(work.tp_size, work.etp_size) for work in works} == {(m, e) for m in (1, 2, 4) for e in (1, 2, 4)}
    assert {work.ep_size for work in works if work.etp_size == 4} == {2, 1}, "everywhere, or nowhere"
    assert len(works) == (2 + 2 + 2) * (1 + 2 * 2) and found.undivided == found.too_large == 0
    assert len({each.sizes for each in found.ranked}) == len(works)
    assert {work.batch * work.mesh.sizes["dp"] for work in works} == {8}
    seconds = [whole_s(each.problem, each.best) for each in found.ranked]
    assert seconds == sorted(seconds)
    best = found.ranked[0]
    assert evaluate(best.problem, Decision()).predicted_s >= best.best.predicted_s
    assert f"tp {works[0].tp_size}, ep {works[0].ep_size}" in best.words
    lines = "\n".join(found.lines)
    assert best.words in lines and found.ranked[1].words in lines and "0 more do not divide" in lines


@pytest.mark.slow
def test_what_does_not_fit_is_counted() -> None:
    found = find_layouts("fsmoe/mixtral-7b-layers", TESTBED, SIZES)
    sizes = sorted(each.best.memory_bytes for each in found.ranked)
    fewer = find_layouts("fsmoe/mixtral-7b-layers", TESTBED, SIZES, sizes[3])
    assert fewer.too_large and len(fewer.ranked) + fewer.too_large == len(sizes)
    with pytest.raises(ConfigError, match="no layout fits"):
        find_layouts("fsmoe/mixtral-7b-layers", TESTBED, SIZES, 1)


@pytest.mark.slow
def test_a_layout_fits_with_any_optimizer_that_is_open() -> None:
    """What a rank holds shrinks where ranks share updates, here to less than with the plain optimiser."""

    def open_(subject: Subject) -> Subject:
        return replace(subject, sharded=sharing_updates(subject.problem))

    plain = find_layouts("fsmoe/mixtral-7b-layers", TESTBED, SIZES)
    least = min(least_memory(each.problem).total_bytes for each in plain.ranked)
    memory = least - 1
    with pytest.raises(ConfigError, match="no layout fits"):
        find_layouts("fsmoe/mixtral-7b-layers", TESTBED, SIZES, memory)
    found = find_layouts("fsmoe/mixtral-7b-layers", TESTBED, SIZES, memory, updated=open_)
    assert all(each.problem.shape.updating for each in found.ranked)
    assert all(each.best.memory_bytes < least for each in found.ranked)


@pytest.mark.slow
@pytest.mark.parametrize("compared", [1, 3])
def test_the_comparison_of_layouts_ends_by_the_clock_with_what_it_has(compared: int) -> None:
    looks = count(1)
    some = find_layouts("fsmoe/mixtral-7b-layers", TESTBED, SIZES, ends=lambda: next(looks) >= compared)
    assert len(some.ranked) == compared and some.late == (2 + 2 + 2) * (1 + 2 * 2) - compared
    assert f"{some.late} were not looked at" in some.lines[-1]


@pytest.mark.slow
def test_what_does_not_divide_is_left_out_and_named() -> None:
    one = Overrides(layers=1, nodes=2, seq_len=64)
    found = find_layouts("fsmoe/mixtral-7b-layers", TESTBED, one)
    assert found.undivided and {each.sizes.tp_size for each in found.ranked} == {4}
    with pytest.raises(ConfigError, match="samples of a step"):
        published_problem("fsmoe/mixtral-7b-layers", TESTBED, Overrides(tp_size=2))
    with pytest.raises(ConfigError, match="ranks of a node"):
        published_problem("fsmoe/mixtral-7b-layers", TESTBED, Overrides(etp_size=3))


def test_quick_plans_have_the_dispatch_that_suits_the_layout() -> None:
    """Between nodes with one slow card each, a row travels once for all experts of a node."""
    each = problem(dispatches=tuple(DISPATCHES), all_reduce_bytes=0)
    each = replace(each, cluster=replace(each.cluster, link_bytes_per_s=1e7, intra_bytes_per_s=1e11))
    ranked = rank_layouts([LayoutSizes(tp_size=1, ep_size=4, etp_size=1)], lambda _: [each])
    best = ranked.best.best
    assert best.choice.dispatch != "flat"
    assert f": {milliseconds(whole_s(each, best))}, " in ranked.best.words, "by which layouts are ranked"
    assert best.predicted_s < evaluate(each, best.choice.deciding("dispatch", "flat")).predicted_s
