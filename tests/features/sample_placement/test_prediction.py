"""The conditional table learns where samples go next, and is worth more than popularity."""

from __future__ import annotations

import numpy as np

from penstock.features.sample_placement.assign import ConditionalTable, assign
from penstock.routing.sizes import Ints
from tests.features.problems import even_problem


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
    assert ConditionalTable(2, following=3).predict(np.array([[4, 4]])).tolist() == [[0, 0, 0]]
