"""Routing: counts that a router could have made, the same on every rank, as uneven as was asked for."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.apportion import Counts, apportion
from penstock.workloads import Routing, RoutingConfig, RoutingSizes, routing_of
from penstock.workloads.catalogue import GENERATED
from penstock.workloads.recorded import RecordedRouting
from penstock.workloads.routing import GeneratedRouting, gini_of, inclusion
from tests.workloads.strategies import generated, recording_of, recordings, routings, sizes

BATCH = RoutingSizes(groups=4, samples=8, seq_len=256, moe_layers=3, num_experts=16, top_k=2, holders=4)


def routing(batch: RoutingSizes = BATCH, **settings: Any) -> GeneratedRouting:
    found = routing_of(RoutingConfig(**settings), batch)
    assert isinstance(found, GeneratedRouting)
    return found


def loads(counts: Counts) -> Counts:
    """[MoE layers, experts] of the whole batch."""
    total: Counts = counts.sum(axis=(0, 1))
    return total


def distance(first: Counts, second: Counts) -> float:
    """Half the summed difference of shares of the whole batch: 0 the same, 1 nothing in common."""
    one, other = loads(first), loads(second)
    return float(np.abs(one - other).sum() / (2 * one.sum()))


# ---- what every routing keeps ------------------------------------------------------------------------------


@given(routings(), st.integers(0, 30))
def test_counts_are_those_of_a_router(made: Routing, step: int) -> None:
    assert isinstance(made, GeneratedRouting | RecordedRouting)
    counts, batch = made.counts(step), made.sizes
    assert counts.dtype == np.int64
    assert counts.shape == batch.shape
    assert (counts >= 0).all()
    assert (counts <= batch.seq_len).all(), "a token's experts are distinct"
    assert (counts.sum(axis=-1) == batch.seq_len * batch.top_k).all()


@given(sizes(), generated(), st.lists(st.integers(0, 30), min_size=1, max_size=3))
def test_a_step_depends_on_nothing_but_seed_and_number(
    batch: RoutingSizes, config: RoutingConfig, earlier: list[int]
) -> None:
    """Not on the steps that were asked for before: ranks may ask in any order."""
    asked, fresh = routing_of(config, batch), routing_of(config, batch)
    for step in earlier:
        asked.counts(step)
    assert (asked.counts(7) == fresh.counts(7)).all()


@pytest.mark.slow
def test_another_process_draws_the_same() -> None:
    program = (
        "from penstock.workloads import RoutingConfig, RoutingSizes, routing_of\n"
        "batch = RoutingSizes(groups=4, samples=8, seq_len=256, moe_layers=3, num_experts=16, top_k=2)\n"
        "routing = routing_of(RoutingConfig(routing='dirichlet', drift=0.3, seed=5), batch)\n"
        "print(routing.counts(11).tobytes().hex()[:20000])\n"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ours = routing(routing="dirichlet", drift=0.3, seed=5).counts(11).tobytes().hex()[:20000]
    assert other.stdout.strip() == ours


@pytest.mark.parametrize("kind", GENERATED)
def test_steps_and_seeds_differ(kind: str) -> None:
    first = routing(routing=kind).counts(0)
    assert (first != routing(routing=kind).counts(1)).any()
    assert (first != routing(routing=kind, seed=1).counts(0)).any()


# ---- how uneven it is --------------------------------------------------------------------------------------


def test_even_routing_is_even_up_to_chance() -> None:
    """A sample's 512 choices among 16 experts: 32 each, with a standard deviation of about 5.3."""
    counts = routing().counts(0)
    assert counts.mean() == 32
    assert 4 < counts.std() < 6.5


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
def test_zipf_popularity_falls_with_the_rank(exponent: float) -> None:
    """Shares of the busiest experts are in the ratios of the law, as far as none is over its limit."""
    batch = replace(BATCH, num_experts=64, top_k=1)
    counts = loads(routing(batch, routing="zipf", zipf_exponent=exponent).counts(0))
    popular = np.sort(counts, axis=-1)[:, ::-1][:, :4]
    law = np.arange(1, 5) ** -exponent
    assert popular / popular[:, :1] == pytest.approx(np.tile(law, (3, 1)), rel=0.15)


@pytest.mark.parametrize(("gini", "top_k"), [(0.0, 1), (0.3, 8), (0.6, 8), (0.9, 1)])
def test_experts_are_as_uneven_as_their_gini_coefficient_says(gini: float, top_k: int) -> None:
    batch = replace(BATCH, num_experts=64, top_k=top_k, seq_len=2048)
    rows_YE = loads(routing(batch, routing="gini", gini=gini).counts(0))
    assert [gini_of(rows_E) for rows_E in rows_YE] == pytest.approx([gini] * 3, abs=0.02)
    assert len({int(rows_E.argmax()) for rows_E in rows_YE}) > 1, "every layer has an order of its own"


def test_gini_coefficient_written_out() -> None:
    assert gini_of(np.array([5, 5, 5, 5])) == 0
    assert gini_of(np.array([0, 0, 0, 8])) == pytest.approx(3 / 4)
    assert gini_of(np.array([3, 1])) == pytest.approx(1 / 4)


def test_layers_have_popular_experts_of_their_own() -> None:
    counts = loads(routing(replace(BATCH, moe_layers=12), routing="zipf").counts(0))
    assert len(set(counts.argmax(axis=-1).tolist())) > 3


def test_zipf_is_alike_for_all_samples_and_dirichlet_is_not() -> None:
    def spread(**settings: Any) -> float:
        """How much samples differ in their share of an expert, beyond what experts do."""
        return float(routing(**settings).counts(0).std(axis=(0, 1)).mean())

    own = spread(routing="dirichlet", dirichlet_concentration=0.1)
    assert own > 3 * spread(routing="zipf")


def test_a_small_concentration_sends_samples_to_few_experts() -> None:
    def share_of_two(concentration: float) -> float:
        counts = routing(routing="dirichlet", dirichlet_concentration=concentration).counts(0)
        return float(np.sort(counts, axis=-1)[..., -2:].sum() / counts.sum())

    few, middle, all_alike = (share_of_two(c) for c in (0.001, 0.3, 1e6))
    assert few > 0.99
    assert few > middle > all_alike
    assert all_alike < 0.2


@given(
    st.lists(st.floats(-700, 700), min_size=1, max_size=9).flatmap(
        lambda logits: st.tuples(st.just(logits), st.integers(1, len(logits)))
    )
)
def test_inclusion_is_a_probability_in_the_order_of_preference(case: tuple[list[float], int]) -> None:
    logits, top_k = np.array(case[0]), case[1]
    chosen = inclusion(logits, top_k)
    assert ((chosen >= 0) & (chosen <= 1)).all()
    assert chosen.sum() == pytest.approx(top_k)
    assert (np.diff(chosen[logits.argsort()]) >= -1e-12).all()


def test_inclusion_written_out() -> None:
    """Weights 4, 1, 1 with two choices: the first is sure, the others share what is left."""
    assert inclusion(np.log([4.0, 1.0, 1.0]), 2) == pytest.approx([1, 0.5, 0.5])
    assert inclusion(np.log([2.0, 1.0, 1.0]), 1) == pytest.approx([0.5, 0.25, 0.25])


# ---- hot spots ---------------------------------------------------------------------------------------------


def shares(counts: Counts) -> Any:
    """Of every layer's experts, [MoE layers, experts]."""
    return loads(counts) / loads(counts).sum(axis=-1, keepdims=True)


@pytest.mark.parametrize(("name", "experts"), [("hot_rank", 4), ("hot_expert", 1)])
def test_the_hot_experts_get_their_share_and_the_others_the_rest(name: str, experts: int) -> None:
    """Up to chance; neighbouring layers have their hot spots at different places."""
    made = routing(routing=name, hot_share=0.4)
    for counts in (made.counts(0), made.counts(500)):
        hot = np.sort(shares(counts), axis=-1)[:, -experts:]
        assert hot.sum(axis=-1) == pytest.approx([0.4] * 3, abs=0.02)
        assert hot == pytest.approx(np.full((3, experts), 0.4 / experts), abs=0.02)
        rest = np.sort(shares(counts), axis=-1)[:, :-experts]
        assert rest == pytest.approx(np.full((3, 16 - experts), 0.6 / (16 - experts)), abs=0.015)
    places = [tuple(np.flatnonzero(layer > 0.08)) for layer in shares(made.counts(0))]
    assert len(set(places)) == 3
    assert all(places[layer][-1] // 4 == places[layer][0] // 4 for layer in range(3)), "of one rank"


def test_no_token_chooses_an_expert_twice_however_hot_it_is() -> None:
    found = shares(routing(routing="hot_expert", hot_share=0.9).counts(0))
    assert all(0.48 < share <= 0.5 for share in found.max(axis=-1)), "one of two choices of every token"


def hot_ranks(counts: Counts) -> list[int]:
    """The rank with most rows, of every layer."""
    found: list[int] = loads(counts).reshape(-1, 4, 4).sum(axis=-1).argmax(axis=-1).tolist()
    return found


def test_a_rotating_hot_spot_goes_round_all_ranks() -> None:
    made = routing(routing="rotating", period=3, hot_share=0.6)
    first = hot_ranks(made.counts(0))
    for step in range(15):
        assert hot_ranks(made.counts(step)) == [(rank + step // 3) % 4 for rank in first]


def test_a_burst_ends_its_period() -> None:
    made = routing(routing="burst", period=5, burst_steps=2, hot_share=0.4)
    hottest = [float(shares(made.counts(step)).max()) for step in range(10)]
    assert [share > 0.3 for share in hottest] == [False, False, False, True, True] * 2
    assert max(share for share in hottest if share <= 0.3) < 0.1


def test_slow_drift_is_zipf_that_drifts() -> None:
    slow, zipf = routing(routing="slow_drift"), routing(routing="zipf", drift=0.01)
    assert (slow.counts(40) == zipf.counts(40)).all()


# ---- how it moves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["zipf", "gini", "dirichlet"])
def test_without_drift_preferences_stay(kind: str) -> None:
    still = routing(routing=kind).preferences
    assert (still.at(0) == still.at(1000)).all()


@pytest.mark.parametrize("kind", ["zipf", "gini", "dirichlet"])
def test_drift_is_continuous(kind: str) -> None:
    """Half the drift, half the way, also over the border from one draw to the next (every 100 steps)."""
    moving = routing(routing=kind, drift=0.01).preferences
    spread = float(moving.at(0).std())
    for step in (0, 50, 99, 100, 101, 250):
        way = np.abs(moving.at(step + 1) - moving.at(step)).max()
        assert 0 < way < 0.4 * spread
    slower = routing(routing=kind, drift=0.005).preferences
    assert slower.at(20) == pytest.approx(moving.at(10))


@pytest.mark.parametrize("kind", ["zipf", "gini", "dirichlet"])
def test_drift_leads_away_and_stays_as_uneven(kind: str) -> None:
    uneven: dict[str, Any] = {"zipf_exponent": 1.5} if kind == "zipf" else {}
    moving = routing(routing=kind, drift=0.01, **uneven)
    batch = [moving.counts(step) for step in (0, 5, 100)]
    if kind == "zipf":
        assert distance(batch[0], batch[1]) < 0.5 * distance(batch[0], batch[2])
    logits = [moving.preferences.at(step) for step in (0, 30, 50, 100)]
    assert [float(each.std()) for each in logits] == pytest.approx([float(logits[0].std())] * 4, rel=0.35)


def test_a_change_comes_at_once_and_once() -> None:
    changing = routing(routing="zipf", zipf_exponent=1.5, change_at=10)
    batch = [changing.counts(step) for step in (8, 9, 10, 11)]
    assert distance(batch[0], batch[1]) < 0.1
    assert distance(batch[1], batch[2]) > 0.3
    assert distance(batch[2], batch[3]) < 0.1
    still = routing(routing="zipf", zipf_exponent=1.5)
    assert (still.counts(9) == batch[1]).all(), "before the change nothing is different"


# ---- recorded loads ----------------------------------------------------------------------------------------


@given(sizes(), st.data())
def test_recorded_loads_are_kept_and_shared_evenly(batch: RoutingSizes, data: st.DataObject) -> None:
    recording = data.draw(recordings(batch))
    recording = replace(recording, samples=(None,) * len(recording.steps))
    made = RecordedRouting(batch, recording)
    for step in range(2 * len(recording.steps)):
        counts = made.counts(step).reshape(-1, batch.moe_layers, batch.num_experts)
        exact = recording.loads_SYE[step % len(recording.steps)].astype(float)
        exact *= len(counts) * batch.copies / exact.sum(axis=-1, keepdims=True)
        assert (np.abs(counts.sum(axis=0) - exact) < 1).all()
        assert (counts.max(axis=0) - counts.min(axis=0) <= 1).all()


def test_recorded_loads_written_out() -> None:
    batch = RoutingSizes(groups=2, samples=1, seq_len=4, moe_layers=1, num_experts=3, top_k=1)
    made = RecordedRouting(batch, recording_of(batch, [[[50, 50, 0]], [[0, 0, 9]]]))
    assert made.counts(0).reshape(2, 3).tolist() == [[2, 2, 0], [2, 2, 0]]
    assert made.counts(1).reshape(2, 3).tolist() == [[0, 0, 4], [0, 0, 4]]
    assert (made.counts(2) == made.counts(0)).all()


@given(sizes(), st.data())
def test_samples_are_routed_as_recorded_ones_in_turn(batch: RoutingSizes, data: st.DataObject) -> None:
    """Scaled to the length that they have here."""
    recording = data.draw(recordings(batch).filter(lambda found: found.samples[0] is not None))
    counts = RecordedRouting(batch, recording).counts(0).reshape(-1, batch.moe_layers, batch.num_experts)
    known = recording.samples[0]
    assert known is not None
    for number, sample in enumerate(counts):
        theirs = known[number % len(known)].astype(float)
        exact = theirs * batch.copies / theirs.sum(axis=-1, keepdims=True)
        assert (np.abs(sample - exact) < 1).all()


# ---- whole numbers in proportion ---------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(0, 10**6), min_size=4, max_size=4), min_size=1, max_size=5),
    st.integers(0, 10**6),
)
def test_shares_sum_up_and_are_near_their_exact_value(rows: list[list[int]], total: int) -> None:
    weights = np.array(rows, dtype=np.int64)
    totals = np.where(weights.any(axis=-1), total, 0)
    shares = apportion(weights, totals)
    assert (shares.sum(axis=-1) == totals).all()
    exact = weights * (totals / np.maximum(weights.sum(axis=-1), 1))[:, None]
    assert (np.abs(shares - exact) < 1 + 1e-6).all()
    assert (shares[weights == 0] == 0).all()


def test_shares_written_out() -> None:
    assert apportion(np.array([1, 1, 1]), 2).tolist() == [1, 1, 0]
    assert apportion(np.array([5, 3, 2]), 4).tolist() == [2, 1, 1]
