"""The two stages: exhaustive search, the paper's example and volumes, ties, and what moving itself costs."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.features.sample_placement import assign as transport
from penstock.features.sample_placement.assign import (
    SOLVERS,
    ConditionalTable,
    Nearness,
    SampleProblem,
    assign,
    sample_problem,
)
from penstock.placement import ExpertPlacement, Replication
from penstock.routing.sizes import Floats, Ints
from tests.features.problems import even_problem


@st.composite
def problems(draw: st.DrawFn) -> SampleProblem:
    """Up to 3 nodes of up to 3 devices, uneven batches, devices without samples, ties."""
    nodes = np.repeat(np.arange(draw(st.integers(1, 3))), draw(st.integers(1, 3)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    homes = rng.integers(0, len(nodes), draw(st.integers(0, 10)))
    counts, following = rng.integers(0, draw(st.sampled_from((2, 20))), (2, len(homes), 2 * len(nodes)))
    return even_problem(counts, homes, nodes, following, draw(st.integers(0, 4)))


def every_cell(problem: SampleProblem) -> tuple[Ints, Ints]:
    """Rows across and inside nodes of every sample on every device, [I, P]."""
    samples, devices = len(problem.homes), len(problem.node_of_device)
    cells = np.empty((2, samples, devices), np.int64)
    for sample in range(samples):
        own = {
            field: getattr(problem, field)[sample : sample + 1]
            for field in ("combine_rows", "moved_rows", "homes")
        }
        ahead = None if problem.predictions is None else problem.predictions[sample : sample + 1]
        alone = replace(problem, predictions=ahead, **own)
        for device in range(devices):
            cells[:, sample, device] = alone.rows(np.array([device]))
    return cells[0], cells[1]


@given(problem=problems(), solver=st.sampled_from(list(SOLVERS)))
def test_every_device_keeps_as_many_samples_and_no_rows_are_added(
    problem: SampleProblem, solver: str
) -> None:
    homes = assign(problem, solver)
    assert np.bincount(homes, minlength=len(problem.capacity)).tolist() == problem.capacity.tolist()
    assert problem.rows(homes)[0] <= problem.rows(problem.homes)[0]


def test_figure_2_of_the_paper() -> None:
    """4 samples of 4 tokens on 2 nodes of 2: the rows of node 0's samples across nodes fall from 5 to 2."""
    counts = np.array([[0, 0, 3, 1], [2, 1, 1, 0], [0, 1, 2, 1], [3, 0, 0, 1]])
    nodes = np.array([0, 0, 1, 1])
    problem = even_problem(counts, np.arange(4), nodes)

    inter, _ = every_cell(problem)

    def of_node_0(homes: list[int]) -> int:
        return sum(int(inter[sample, home]) for sample, home in enumerate(homes) if nodes[home] == 0)

    assert of_node_0([0, 1, 2, 3]) == 5
    assert of_node_0([3, 1, 2, 0]) == 2
    homes = assign(problem)
    assert problem.rows(homes) == (3, 5) and problem.rows(np.array([3, 1, 2, 0])) == (3, 6)
    assert sorted(np.flatnonzero(nodes[homes] == 0)) == [1, 3]


@pytest.mark.parametrize(("nodes", "inter", "intra"), [(2, 191.07, 168.45), (4, 575.88, 167.07)])
def test_volumes_of_even_routing_are_those_that_the_paper_printed(
    nodes: int, inter: float, intra: float
) -> None:
    """MoE-GPT-S on 16 and 32 devices, MiB of one all-to-all over the cluster (Table 5, SYSTEMS 5.9)."""
    per_node, tokens = 8, 1
    devices = nodes * per_node
    counts = np.full((devices, devices), tokens)
    homes = np.arange(devices)
    problem = even_problem(counts, homes, np.repeat(np.arange(nodes), per_node))
    total_mib = {2: 384.0, 4: 768.0}[nodes]
    across, inside = (total_mib * rows / counts.sum() for rows in problem.rows(homes))
    assert across == pytest.approx(inter, rel=0.04)
    assert inside == pytest.approx(intra, rel=0.04)


def test_two_stages_are_as_good_as_all_assignments_where_nodes_are_far_apart() -> None:
    """8 samples, 4 devices, rows across nodes 4 times as dear; the paper's objective, a sum over all rows."""
    rng = np.random.default_rng(1)
    nodes, every = np.array([0, 0, 1, 1]), np.repeat(np.arange(4), 2)
    all_homes = np.array(sorted(set(itertools.permutations(every.tolist()))))
    worst = 1.0
    for _ in range(40):
        counts = np.array([rng.multinomial(32, rng.dirichlet(np.full(4, 0.5))) for _ in range(8)])
        problem = even_problem(counts, every, nodes)
        inter, intra = every_cell(problem)
        cells = 4 * inter + intra
        best = cells[np.arange(8), all_homes].sum(axis=1).min()
        worst = max(worst, cells[np.arange(8), assign(problem)].sum() / best)
    assert worst < 1.02


def test_ties_keep_everybody_at_home() -> None:
    nodes = np.repeat(np.arange(2), 4)
    homes = np.random.default_rng(0).permutation(np.repeat(np.arange(8), 4))
    even = even_problem(np.full((32, 8), 5), homes, nodes)
    for solver in SOLVERS:
        assert assign(even, solver).tolist() == homes.tolist()


def test_a_sample_moves_only_where_it_saves_more_than_it_costs() -> None:
    """Two samples that save 3 rows each by swapping nodes: not if 4 rows move with each."""
    counts, homes, nodes = np.array([[1, 4], [4, 1]]), np.arange(2), np.arange(2)
    assert assign(even_problem(counts, homes, nodes, moved_rows=2)).tolist() == [1, 0]
    assert assign(even_problem(counts, homes, nodes, moved_rows=4)).tolist() == [0, 1]


def test_a_prediction_that_is_the_same_for_all_samples_changes_nothing() -> None:
    """Global popularity is a constant for every node: the identical placement (SYSTEMS 5.4)."""
    rng = np.random.default_rng(3)
    nodes, homes = np.repeat(np.arange(2), 4), np.repeat(np.arange(8), 4)
    counts = rng.multinomial(64, rng.dirichlet(np.full(8, 0.3)), 32)
    popular = np.broadcast_to(rng.integers(0, 64, 8), (32, 8))
    without = assign(even_problem(counts, homes, nodes))
    assert assign(even_problem(counts, homes, nodes, popular)).tolist() == without.tolist()


def test_a_row_whose_expert_is_a_replica_on_the_device_costs_nothing() -> None:
    """Expert 3 of device 3 is a replica of device 0: its rows stay there, and cross nodes from device 1."""
    nodes = np.array([0, 0, 1, 1])
    replication = Replication.local(ExpertPlacement.even(4, 4), [[3], [-1], [-1], [-1]])
    problem = sample_problem(
        counts=np.zeros((4, 8), np.int64),
        homes=np.arange(4),
        moved_rows=np.zeros(4, np.int64),
        node_of_device=nodes,
        predictions=np.broadcast_to([0, 0, 0, 10], (4, 4)),
        following=Nearness.of(replication, nodes),
    )
    inter, intra = every_cell(problem)
    assert inter[0].tolist() == [0, 10, 0, 0]
    assert intra[0].tolist() == [0, 0, 10, 0]
    assert problem.kept_in_nodes()[0].tolist() == [5, 10]


def test_contradictions_are_refused() -> None:
    fits = even_problem(np.ones((2, 2), np.int64), np.arange(2), np.arange(2), np.ones((2, 2), np.int64))
    with pytest.raises(ValueError, match=r"rows \(2, 1\) and moved rows \(2,\): there are 2 samples and"):
        replace(fits, combine_rows=fits.combine_rows[:, :1])
    with pytest.raises(ValueError, match=r"predictions \(2, 3\) for devices and experts \(2, 2\): there"):
        replace(fits, predictions=np.ones((2, 3), np.int64))
    with pytest.raises(ValueError, match="need each other"):
        replace(fits, following=None)


def placements_of_many() -> str:
    """A hash of the placements of 300 random problems, ties included."""
    rng, digest = np.random.default_rng(7), hashlib.blake2b()
    for _ in range(300):
        nodes = np.repeat(np.arange(rng.integers(1, 5)), rng.integers(1, 5))
        homes = rng.integers(0, len(nodes), rng.integers(0, 40))
        most = rng.choice([2, 3, 1000])
        counts, following = rng.integers(0, most, (2, len(homes), len(nodes)))
        problem = even_problem(counts, homes, nodes, following, moved_rows=int(rng.integers(0, 3)))
        digest.update(assign(problem).tobytes())
    return digest.hexdigest()


@pytest.mark.slow
def test_another_process_places_random_cases_alike_and_loads_no_torch() -> None:
    """It has other addresses and another history of memory; solving changes nothing in its environment."""
    program = (
        "import os, sys; before = dict(os.environ); "
        "from tests.features.sample_placement.test_assign import placements_of_many; "
        "print(placements_of_many(), 'torch' in sys.modules, before == dict(os.environ))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == f"{placements_of_many()} False True\n"


# ---- prediction --------------------------------------------------------------------------------------------


def test_it_predicts_a_fixed_passage_from_expert_to_expert() -> None:
    """Samples of one expert each, which go on to the next expert: what was seen comes out again."""
    counts = 12 * np.eye(4, dtype=np.int64)[[0, 1, 2, 3, 0, 2]]
    table = ConditionalTable(4)
    for _ in range(5):
        table.learn(counts, np.roll(counts, 1, axis=1))
    assert table.predict(counts).tolist() == np.roll(counts, 1, axis=1).tolist()


def test_it_is_worth_more_than_popularity() -> None:
    """Of four kinds of samples: homes chosen by the table leave fewer of the next rows across nodes."""
    rng = np.random.default_rng(0)
    kinds = rng.dirichlet(np.full(8, 0.2), (2, 4))  # [layer, kind, expert]

    def batch() -> tuple[Ints, Ints]:
        kind = rng.integers(0, 4, 32)
        present, following = (np.stack([rng.multinomial(256, layer[k]) for k in kind]) for layer in kinds)
        return present, following

    table = ConditionalTable(8)
    for _ in range(20):
        table.learn(*batch())
    present, following = batch()
    homes, nodes = np.repeat(np.arange(8), 4), np.repeat(np.arange(2), 4)
    nothing = np.zeros_like(following)
    rows = {}
    for name, predicted in (("table", table.predict(present)), ("popular", nothing), ("truth", following)):
        chosen = assign(even_problem(nothing, homes, nodes, predicted))
        rows[name] = even_problem(nothing, homes, nodes, following).rows(chosen)[0]
    assert rows["truth"] <= rows["table"] < 0.8 * rows["popular"]


def test_it_forgets() -> None:
    counts = np.array([[100, 0], [0, 100]])
    table = ConditionalTable(2)
    for _ in range(40):
        table.learn(counts, counts)
    for _ in range(40):
        table.learn(counts, counts[::-1])
    assert table.predict(counts)[0, 1] >= 99


def test_of_an_unseen_expert_nothing_is_said() -> None:
    assert ConditionalTable(2).predict(np.array([[4, 4]])).tolist() == [[0, 0]]


# ---- solvers -----------------------------------------------------------------------------------------------


@st.composite
def assignments(draw: st.DrawFn) -> tuple[Floats, Ints]:
    """Costs [I, C] with many ties, and room [C]."""
    room = np.array(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(any)))
    numbers = st.lists(
        st.integers(0, 4), min_size=int(room.sum()) * len(room), max_size=int(room.sum()) * len(room)
    )
    return np.array(draw(numbers), np.float64).reshape(-1, len(room)), room


def cost(costs: Floats, places: Ints) -> float:
    return float(costs[np.arange(len(places)), places].sum())


@pytest.mark.parametrize("name", SOLVERS)
@given(problem=assignments())
def test_no_arrangement_is_cheaper(name: str, problem: tuple[Floats, Ints]) -> None:
    costs, room = problem
    goers = np.repeat(np.arange(len(room)), room)
    places = SOLVERS[name](costs, room)
    assert np.bincount(places, minlength=len(room)).tolist() == room.tolist()
    assert cost(costs, places) == min(
        cost(costs, np.array(other)) for other in set(itertools.permutations(goers.tolist()))
    )


def test_they_agree_on_large_costs() -> None:
    """Costs as large as those of 4,096 samples of 4,096 tokens, where rounding would show."""
    rng = np.random.default_rng(0)
    room = np.array([40, 0, 30, 50])
    costs = rng.integers(0, 1 << 45, (120, 4)).astype(np.float64)
    first, second = (cost(costs, solve(costs, room)) for solve in SOLVERS.values())
    assert first == second


def test_guessed_prices_change_nothing_but_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for thousands of samples, on assignments small enough to solve the other way."""
    monkeypatch.setattr(transport, "MANY", 0)
    rng = np.random.default_rng(0)
    for most in (2, 50, 1 << 20):
        room = np.array([30, 0, 50, 20])
        costs = rng.integers(0, most, (100, 4)).astype(np.float64)
        places = SOLVERS["network_simplex"](costs, room)
        assert np.bincount(places, minlength=4).tolist() == room.tolist()
        assert cost(costs, places) == cost(costs, SOLVERS["kuhn_munkres"](costs, room))
