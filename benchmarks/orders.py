"""Orders, by simulation: beside the proven best of small steps, and which cut they let a plan choose.

A plan has a cut (microbatches, chunks, pieces) and an order. Rules order some cuts nearly as well as can be
and others badly, so whoever chooses the cut by a rule and orders it afterwards often has the wrong one.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from time import process_time
from typing import Any, Final

from benchmarks.command import parser_of, run_alone
from benchmarks.optimum import shortest_s, small_step
from benchmarks.progress import BOARD
from penstock.cost import ClusterConfig, Workload
from penstock.decision import Decision
from penstock.graph import Graph
from penstock.lab.bench.result import markdown_table
from penstock.plan import Candidate, Problem, evaluate, find_plan
from penstock.plan.effort import Meter
from penstock.plan.space import space
from penstock.plan.successive_halving import FIRST_CUTS, ROUNDS, SuccessiveHalving
from penstock.schedule import SCHEDULES, Schedule
from penstock.step import StepShape
from penstock.timing import Cost, iteration_s

OWN: Final = SCHEDULES["penstock"]
FULL: Final = 30
"""Cuts of a problem that are all searched in full, by rules the best: the best of them counts as found."""

NEAR: Final = 0.001
"""A cut within this part of the best one counts as the best."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One row. name: what was done. gap, largest_gap: how much longer a step takes than the best known, mean
    and largest over cases. hits: share of cases within NEAR of it. work_s: processor time of a case."""

    name: str
    gap: float
    largest_gap: float
    hits: float
    work_s: float

    @staticmethod
    def of(name: str, gaps: Sequence[float], work_s: float) -> Way:
        """Over all cases. work_s: of all of them."""
        hits = sum(gap <= NEAR for gap in gaps) / len(gaps)
        return Way(name=name, gap=mean(gaps), largest_gap=max(gaps), hits=hits, work_s=work_s / len(gaps))


@dataclass(frozen=True, kw_only=True)
class OrdersResult:
    """steps: orders beside the best that there is. cuts: what was chosen by which order."""

    cases: int
    steps: tuple[Way, ...]
    problems: int
    cuts: tuple[Way, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"orders": asdict(self)}


Keep = Callable[[int, tuple[Way, ...]], None]


# ---- one cut: orders beside the best -----------------------------------------------------------------------


def _by_rule(graph: Graph, cost: Cost) -> Schedule:
    rules = [OWN.order(graph, cost, _asking(rule)) for rule in ("critical_path", "all_to_all_first")]
    return min(rules, key=lambda order: iteration_s(order, graph, cost))


def _asking(priority: Any) -> Decision:
    return Decision(schedule=OWN.name, priority=priority)


ORDERS: Final = {
    "the better of two rules": _by_rule,
    "a short search": lambda graph, cost: OWN.quick_order(graph, cost, _asking("search"), ROUNDS[-1][1]),
    "a full search": lambda graph, cost: OWN.order(graph, cost, _asking("search")),
}


def beside_the_best(cases: int, keep: Keep = lambda done, ways: None) -> tuple[Way, ...]:
    """Orders of small steps beside the best that there are, which constraint programming proves.

    keep: told, after every step, how many are done and what they say.
    """
    gaps: dict[str, list[float]] = {name: [] for name in ORDERS}
    work_s = dict.fromkeys(ORDERS, 0.0)
    for seed in range(cases):
        BOARD.say(f"small step {seed + 1} of {cases}")
        graph, seconds = small_step(seed)
        best_s = shortest_s(graph, seconds)
        for name, order in ORDERS.items():
            begin_s = process_time()
            found = order(graph, seconds.__getitem__)
            work_s[name] += process_time() - begin_s
            gaps[name].append(iteration_s(found, graph, seconds.__getitem__) / best_s - 1)
        keep(seed + 1, _ways(gaps, work_s))
    return _ways(gaps, work_s)


def _ways(gaps: Mapping[str, Sequence[float]], work_s: Mapping[str, float]) -> tuple[Way, ...]:
    return tuple(Way.of(name, each, work_s[name]) for name, each in gaps.items() if each)


# ---- all cuts: which is chosen -----------------------------------------------------------------------------


def chosen(problems: int, keep: Keep = lambda done, ways: None) -> tuple[Way, ...]:
    """Cuts that rules and short searches choose, beside the best of all that were searched in full.

    keep: as above.
    """
    gaps: dict[str, list[float]] = {}
    work_s: dict[str, float] = {}
    for seed in range(problems):
        BOARD.say(f"problem {seed + 1} of {problems}")
        for name, (gap, seconds) in _choices(random_problem(seed)).items():
            gaps.setdefault(name, []).append(gap)
            work_s[name] = work_s.get(name, 0.0) + seconds
        keep(seed + 1, _ways(gaps, work_s))
    return _ways(gaps, work_s)


def _choices(problem: Problem) -> dict[str, tuple[float, float]]:
    """By the name of a way: how much longer the cut that it chooses takes, and its processor time."""
    ruled = {choice: evaluate(problem, choice) for choice in space(problem) if choice.schedule == OWN.name}
    drafts = SuccessiveHalving(problem, Meter("usual", 1000.0))
    begin_s = process_time()
    by_draft = drafts.ranked(ruled)
    drafts_s = process_time() - begin_s
    by_rule = _by_their_rules(ruled)
    begin_s = process_time()
    pool = dict.fromkeys([*by_draft, *by_rule[:FULL]])
    full = {choice: evaluate(problem, choice).predicted_s for choice in pool}
    full_s = (process_time() - begin_s) / len(full)
    begin_s = process_time()
    planned_s = find_plan(problem).best.predicted_s
    plan_s = process_time() - begin_s
    best_s = min(planned_s, *full.values())

    def gap(ranked: Sequence[Decision], most: int) -> float:
        return min(full[choice] for choice in ranked[:most]) / best_s - 1

    return {
        "the best cut by rules, then its order": (gap(by_rule, 1), full_s),
        "the best two by rules, then their orders": (gap(by_rule, 2), 2 * full_s),
        f"short searches of {FIRST_CUTS}, then the best one's order": (gap(by_draft, 1), drafts_s + full_s),
        f"short searches of {FIRST_CUTS}, then the best two's": (gap(by_draft, 2), drafts_s + 2 * full_s),
        "the search for a plan": (planned_s / best_s - 1, plan_s),
    }


def _by_their_rules(ruled: Mapping[Decision, Candidate]) -> list[Decision]:
    found = sorted(ruled, key=lambda choice: ruled[choice].predicted_s)
    return list(dict.fromkeys(replace(choice, priority="search") for choice in found))


def random_problem(seed: int) -> Problem:
    """Two to four layers on four ranks of two nodes, with devices and links of very different speeds."""
    rng = random.Random(seed)
    layers = rng.choice([2, 3, 3, 4])

    def rate(low: float, high: float) -> float:
        return float(10 ** rng.uniform(low, high))

    cluster = ClusterConfig(
        flops_per_s=rate(9.7, 10.7),
        link_bytes_per_s=rate(7.7, 8.7),
        task_overhead_s=rate(-5, -4),
        link_latency_s=rate(-5, -3.7),
    )
    work = Workload(
        batch=4,
        seq_len=64,
        hidden_size=128,
        ffn_hidden_size=256,
        vocab_size=64,
        num_experts=4,
        top_k=2,
        expert_matrices=2,
        capacity_factor=None,
        min_capacity=1,
        world_size=4,
        ep_size=4,
        element_bytes=4,
        all_reduce_bytes=(rng.choice([1 << 18, 1 << 20]),) * layers,
        expert_all_reduce_bytes=(0,) * layers,
        dense_ffn_hidden_size=256,
        node_size=2,
    )
    moe_layers = (True, *(rng.random() < 0.8 for _ in range(layers - 1)))
    dispatches = rng.choice([("flat",), ("flat", "hierarchical_2d")])
    shape = StepShape(moe_layers=moe_layers)
    return Problem(shape=shape, workload=work, cluster=cluster, dispatches=dispatches)


# ---- the command -------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> OrdersResult:
    """Both tables."""
    found = OrdersResult(cases=0, steps=(), problems=0, cuts=())

    def with_steps(cases: int, ways: tuple[Way, ...]) -> None:
        nonlocal found
        found = replace(found, cases=cases, steps=ways)
        BOARD.keep(lambda: found)

    def with_cuts(problems: int, ways: tuple[Way, ...]) -> None:
        nonlocal found
        found = replace(found, problems=problems, cuts=ways)

    beside_the_best(options.cases, with_steps)
    chosen(options.problems, with_cuts)
    return found


def render(result: OrdersResult) -> str:
    """Two tables in Markdown."""
    return "\n".join(
        [
            f"{result.cases} small steps; longer than the proven best:",
            "",
            *markdown_table(_rows("order", result.steps)),
            "",
            f"{result.problems} problems; longer than the best of {FULL} cuts, all searched in full:",
            "",
            *markdown_table(_rows("cut", result.cuts)),
        ]
    )


def _rows(what: str, ways: Sequence[Way]) -> list[list[str]]:
    head = [what, "mean", "largest", f"within {100 * NEAR:g} %", "processor time"]
    return [
        head,
        *(
            [
                way.name,
                f"{100 * way.gap:.2f} %",
                f"{100 * way.largest_gap:.1f} %",
                f"{100 * way.hits:.0f} %",
                f"{way.work_s:.2f} s",
            ]
            for way in ways
        ),
    ]


if __name__ == "__main__":
    parser = parser_of("orders", __doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=40, help="small steps (default: 40)")
    parser.add_argument("--problems", type=int, default=8, help="problems (default: 8)")
    run_alone(parser, measure, render)
