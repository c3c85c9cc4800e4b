"""Which optimiser a plan takes where that is open: the one that fits, or the shorter whole iteration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config import ConfigError
from penstock.cost import ClusterConfig, ProfiledCluster, Span
from penstock.cost.clusters import find_cluster
from penstock.decision import Decision
from penstock.plan import Problem, estimate_memory, evaluate
from penstock.plan.candidate import whole_s
from penstock.plan.effort import Searched
from penstock.plan.memory import trained_bytes
from penstock.plan.optimizers import Find, find_updated, sharing_updates
from penstock.plan.search import FoundPlan
from tests.plan.problems import problem

CHOICE = Decision(schedule="flowmoe", microbatches=2)
ROOM = 1 << 60


def finds(memory_bytes: int, own: Decision = CHOICE) -> Find:
    """The same choice for every problem, or a better one of those to start from, if it fits."""

    def find(each: Problem, starts: tuple[Decision, ...] = (), /) -> FoundPlan:
        tried = [evaluate(each, choice) for choice in (*starts, own)]
        best = min(tried, key=lambda one: one.predicted_s)
        if best.memory_bytes > memory_bytes:
            raise ConfigError("--memory-gib", memory_bytes, "no plan fits", "Use more.")
        searched = Searched(simulated=1, ruled_out=0, left_out=0, placements=1, allowed=1, budget=1.0)
        return FoundPlan(best=best, others=(), lower_bound_s=0.0, searched=searched)

    return find


def needs(each: Problem) -> int:
    return estimate_memory(each, CHOICE).total_bytes


def test_a_rank_saves_the_moments_of_what_others_own() -> None:
    """ZeRO's stage 1: of 8 bytes per weight and rank, one of four; experts without replicas stay."""
    plain, sharded = (estimate_memory(each, CHOICE) for each in (problem(), sharing_updates(problem())))
    assert plain.optimizer_bytes - sharded.optimizer_bytes == 2 * (2 << 20) * 3 // 4
    assert plain.weights_bytes + plain.gradients_bytes == sharded.weights_bytes + sharded.gradients_bytes
    edp = sharing_updates(problem(ranks=8)).shape.updating
    assert edp is not None and edp.edp


def test_given_up_gradients_are_a_share_and_those_of_two_layers() -> None:
    """ZeRO's stage 2: of 4 bytes per replicated weight one of four, beside what waits to be summed."""
    kept, released = (sharing_updates(problem(), releases=each) for each in (False, True))
    before, after = (estimate_memory(each, CHOICE) for each in (kept, released))
    layers = kept.workload.all_reduce_bytes
    waiting = max(sum(layers[i : i + 2]) for i in range(len(layers)))
    assert before.gradients_bytes - after.gradients_bytes == sum(layers) * 3 // 4 - waiting
    assert replace(after, gradients_bytes=before.gradients_bytes) == before


@pytest.mark.parametrize(
    ("memory_bytes_per_s", "link_bytes_per_s", "shares"), [(1e8, 1e11, True), (1e11, 1e7, False)]
)
def test_the_shorter_iteration_is_taken_and_both_are_told(
    memory_bytes_per_s: float, link_bytes_per_s: float, shares: bool
) -> None:
    """Slow memory makes updates dear, a slow link the gathers of parameters."""
    cluster = ClusterConfig(memory_bytes_per_s=memory_bytes_per_s, link_bytes_per_s=link_bytes_per_s)
    plain = problem(cluster=cluster)
    sharded = sharing_updates(plain)
    plain_s, sharded_s = (whole_s(each, evaluate(each, CHOICE)) for each in (plain, sharded))
    chosen, _, line = find_updated(plain, sharded, finds(ROOM))
    assert (sharded_s < plain_s) is shares and chosen is (sharded if shares else plain)
    assert line.count("MiB per rank") == 2 and "with AdamW" in line and "with a sharded AdamW (" in line


def test_of_equal_plans_the_one_of_the_full_search_is_taken() -> None:
    """It knows other plans and a bound."""
    plain = problem()
    full, quick = finds(ROOM), finds(ROOM)
    _, found, _ = find_updated(
        plain,
        sharing_updates(plain),
        lambda each, starts=(), /: replace(full(each, starts), lower_bound_s=0.5),
        quick,
    )
    assert found.lower_bound_s == 0.5


def test_what_a_full_search_has_found_serves_both_optimisers() -> None:
    """Else a quick plan of one would be compared with the best one of the other."""
    plain = problem(cluster=ClusterConfig(memory_bytes_per_s=1e10, link_bytes_per_s=3e8))
    sharded, worse = sharing_updates(plain), Decision(schedule="sequential")
    good, bad = finds(ROOM), finds(ROOM, worse)

    def quick(each: Problem, starts: tuple[Decision, ...] = (), /) -> FoundPlan:
        return bad(each, starts) if each is plain else good(each, starts)

    cases = ((plain, CHOICE), (sharded, CHOICE), (plain, worse))
    taken_s = [whole_s(each, evaluate(each, choice)) for each, choice in cases]
    assert taken_s == sorted(taken_s), "by quick plans the sharded optimiser is the better one"
    chosen, found, _ = find_updated(plain, sharded, good, quick)
    assert chosen is plain and found.best.choice == CHOICE


def test_both_optimisers_count_the_same_updates() -> None:
    """Without anything to wait for, a rank updates its share of what it replicates and all of its experts."""
    cluster = ClusterConfig(
        flops_per_s=1e15,
        memory_bytes_per_s=1e8,
        link_latency_s=1e-9,
        link_bytes_per_s=1e13,
        intra_latency_s=1e-9,
        intra_bytes_per_s=1e13,
        task_overhead_s=1e-9,
    )
    for ranks, shares in ((4, 1), (8, 2)):
        plain = problem(cluster=cluster, ranks=ranks)
        sizes = trained_bytes(plain)
        less = sizes["replicated"] * (1 - 1 / ranks) + sizes["experts"] * (1 - 1 / shares)
        found = [whole_s(each, evaluate(each, Decision())) for each in (plain, sharing_updates(plain))]
        assert found[0] - found[1] == pytest.approx(10 * less / 1e8, rel=1e-2)


def test_on_gpus_sums_of_shares_and_their_gather_take_as_long_as_whole_sums() -> None:
    file = find_cluster("netmoe-a800")
    gpus, cpus = (ProfiledCluster.build(replace(file, device=name)) for name in ("A800", "cpu"))
    span = Span.regular(4, 8)
    assert 2 * gpus.parts(span).seconds(1 << 30) == pytest.approx(gpus.all_reduce(span).seconds(1 << 30))
    assert cpus.parts(span) == cpus.all_to_all(span)


def test_what_fits_is_taken_and_the_last_refusal_is_told_if_nothing_does() -> None:
    plain = problem()
    sharded = sharing_updates(plain)
    chosen, found, line = find_updated(plain, sharded, finds(needs(sharded)))
    assert chosen is sharded and "AdamW does not fit, " in line
    assert found.best.memory_bytes == needs(sharded) < needs(plain)
    with pytest.raises(ConfigError, match="no plan fits"):
        find_updated(plain, sharded, finds(needs(sharded) - 1))
