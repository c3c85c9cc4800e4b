"""The comparison on virtual devices: computation is slept, transfers are real; ranks may outnumber cores.

Real steps of two layers tell before how long transfers take, and how far predictions err. Nothing is learnt
of computation there, and it slows no transfer down.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch

from penstock.autotune.problem import possible_dispatches, run_problem
from penstock.autotune.profile.measure import LINKS_S, profile_links
from penstock.autotune.profile.sample import PURPOSE, Budget, ignore
from penstock.autotune.profile.steps import (
    TRANSFER,
    Fits,
    RealSteps,
    transferred,
    with_transfers,
    with_whole_steps,
)
from penstock.autotune.profile.tasks import two_layers
from penstock.cost import ClusterFile, ProfiledCluster, RoutedCost
from penstock.cost.measured import listed
from penstock.cost.placed import Evidence
from penstock.decision import Decision, PlacementConfig, ScheduleConfig
from penstock.lab.bench.config import AUTO, BenchConfig, Named, variants
from penstock.lab.bench.contender import Entry, timed
from penstock.lab.bench.field import chosen, layout_words
from penstock.lab.bench.scheduled import run_config_of, run_of
from penstock.lab.virtual import VirtualConfig, VirtualStack, build_virtual
from penstock.lab.virtual.handlers import sleep_until
from penstock.plan import Problem, reasons
from penstock.plan.memory import estimate_memory
from penstock.plan.predict import closing_s
from penstock.runtime import Machinery
from penstock.schedule import SCHEDULES, StepPlan
from penstock.timing import Cost, iteration_s, simulate
from penstock.topology import Layout
from penstock.trace import TaskRecord
from penstock.train.assemble import base_shape, build_machinery, first_plan
from penstock.train.config import RunConfig


@dataclass(frozen=True)
class Slept:
    """Iterations of one virtual device by one plan.

    Attributes:
        closing_s: Seconds of clipping and update.
    """

    stack: VirtualStack
    plan: StepPlan
    placement: PlacementConfig
    closing_s: float

    def prepare(self, number: int) -> None:
        self.stack.use(self.plan, self.placement)
        self.stack.prepare(number)

    def step(self, number: int) -> None:
        self.stack.step(number)
        sleep_until(time.perf_counter() + self.closing_s)

    def records(self) -> list[TaskRecord]:
        return self.stack.records()

    def close(self) -> None:
        self.stack.close()


class VirtualField:
    """Every schedule on the same virtual devices; order and prediction are based on links measured before."""

    def __init__(self, config: BenchConfig, layout: Layout, say: Callable[[str], None] = ignore) -> None:
        """Prepare the entries.

        Args:
            say: Called with what is done before the first step is compared.
        """
        self.label: str | None = config.virtual.label
        self.layout = layout_words(layout)
        self.notes: tuple[str, ...] = ()
        self._memory_bytes: dict[str, int] = {}
        self._bench, self._config, self._layout = config, run_config_of(config), layout
        machinery = build_machinery(layout, torch.device("cpu"), config.parallel, "float32")
        self.control, self._transports = machinery.control, machinery.transports
        self._stack = build_virtual(self._config, config.virtual, machinery)
        say("measuring links, and what traffic costs virtual steps")
        names = config.compare.schedules
        named = [Named.of(name).dispatch for name in names if name != AUTO]
        named += (
            possible_dispatches(self._open, self._layout) if AUTO in names else []
        )  # a search chooses among these
        dispatches = tuple(dict.fromkeys(name for name in named if name is not None))
        budget_s = config.compare.profile_s
        links = profile_links(self._config, machinery, dispatches, budget_s=min(LINKS_S, budget_s))
        self._links = with_virtual_steps(self._config, config.virtual, machinery, links, budget_s)
        self._cluster = self._stack.links = ProfiledCluster.build(self._links)
        self._first_measured = config.compare.warmup
        self._closing_s = closing_s(run_problem(self._config, layout, self._links))
        self.entries = tuple(self._entry(name, say) for name in config.compare.schedules)
        if any(entry.plan and entry.plan.shape.moves for entry in self.entries):
            self.notes += tuple(self._loads_of(entry) for entry in self.entries)
        self.notes += listed(self._links.doubts)

    @property
    def traffic(self) -> Counter[int]:
        return self._transports.traffic

    def compute_solo_s(self, entry: Entry, number: int) -> float:
        """Return the slept seconds of this rank, which are known without running anything."""
        assert entry.plan is not None, "every entry is a schedule"
        self._stack.use(entry.plan, self._placement(entry.name))
        solo_s = self._stack.cost(number).solo_s(entry.plan.graph.tasks)
        return float(solo_s[self._layout.rank]) + self._closing_s

    def close(self) -> None:
        self._stack.close()

    def _entry(self, name: str, say: Callable[[str], None]) -> Entry:
        say(f"{name}: choosing its pieces and their order")
        if name == AUTO:
            # The joint search, of all dispatches, on links as measured and devices as imitated; it assumes
            # even routing, except for memory.
            problem = self._problem(self._open)
            result = chosen(problem, self.control)
            self.notes += reasons(problem, result).lines
            self._memory_bytes[AUTO] = result.best.memory_bytes
            return self._predicted(AUTO, self._stack.adopt(result.best.plan, self._placement(AUTO)))
        tried = [(self._first_plan(name, each), each) for each in variants(self._bench, name)]
        apart = {plan.shape: (plan, each) for plan, each in tried}
        ordered = [(self._ordered(name, plan), each) for plan, each in apart.values()]
        best, schedule = min(ordered, key=lambda pair: pair[0].simulated_s or 0.0)
        assert best.plan is not None, "a schedule has a plan"
        self._stack.adopt(best.plan, self._placement(name))
        # The memory of a device that computes, by formula: a virtual one holds only what it sends.
        problem = self._problem(self._config_of(name, schedule))
        choice = schedule.decision(problem.workload.dispatch, self._placement(name))
        self._memory_bytes[name] = estimate_memory(problem, choice).total_bytes
        return best

    def _problem(self, config: RunConfig) -> Problem:
        """Return the step of a run, whose memory holds the rows of the first measured step."""
        counts, number = self._stack.routing.counts, self._first_measured
        routing = Evidence(counts(max(0, number - 1)), counts(number))
        return replace(run_problem(config, self._layout, self._links), observed=routing)

    def _loads_of(self, entry: Entry) -> str:
        """Describe how evenly experts are loaded in the first measured step, and what crosses nodes."""
        assert entry.plan is not None, "every entry is a schedule"
        tasks, cost = entry.plan.graph.tasks, self._cost(entry.name, entry.plan)
        spread = cost.load_spread(tasks)
        rows = cost.crossing_rows(tasks)
        return (
            f"{entry.label}: busiest rank {cost.imbalance(tasks):.2f} x the mean rows, standard deviation "
            f"{100 * spread:.0f} % of it; {rows:,.0f} rows leave their node forward; a device that computes "
            f"takes {self._memory_bytes[entry.name] / 2**20:,.0f} MiB (estimated)"
        )

    def _placement(self, name: str) -> PlacementConfig:
        return Named.of(name).placement(self._bench.placement)

    def _first_plan(self, name: str, schedule: ScheduleConfig) -> StepPlan:
        config = self._config_of(name, schedule)
        return first_plan(config, self._layout, base_shape(config, self._layout), self._stack.bucket_sizes)

    def _config_of(self, name: str, schedule: ScheduleConfig) -> RunConfig:
        """Return the run of an entry. Raises ConfigError for a dispatch that these ranks cannot run."""
        config = run_of(self._bench, name, schedule)
        possible_dispatches(config, self._layout)
        return config

    @property
    def _open(self) -> RunConfig:
        """The run with the dispatch that the user left open."""
        return replace(self._config, moe=self._bench.moe)

    def _ordered(self, name: str, first: StepPlan) -> Entry:
        system = Named.of(name).schedule
        cost = self._cost(name, first)
        order = SCHEDULES[system].order(first.graph, cost, Decision(schedule=system))
        return self._predicted(name, replace(first, schedule=order))

    def _predicted(self, name: str, plan: StepPlan) -> Entry:
        cost = self._cost(name, plan)
        simulated_s = simulate(plan.schedule, plan.graph, cost, self._layout.mesh).iteration_s
        steps = self._links.steps
        predicted_s = (steps.ratio if steps else 1.0) * simulated_s + self._closing_s
        return Entry(
            name=name,
            transport="penstock",
            contender=Slept(self._stack, plan, self._placement(name), self._closing_s),
            plan=plan,
            simulated_s=predicted_s,
            interval_s=steps.around(predicted_s) if steps else None,
        )

    def _cost(self, name: str, plan: StepPlan) -> RoutedCost:
        self._stack.adopt(plan, self._placement(name))
        return replace(self._stack.cost(self._first_measured), cluster=self._cluster)


REHEARSED: Final = (("sequential", 1), ("flowmoe", 2))
"""Schedules with their number of microbatches: one without overlap, and one with much."""

LEAST_ROUNDS, MOST_ROUNDS = 2, 5
BUDGET_S: Final = 10.0


def with_virtual_steps(
    config: RunConfig, virtual: VirtualConfig, machinery: Machinery, file: ClusterFile, budget_s: float
) -> ClusterFile:
    """Return the file with what steps of two layers on these devices tell of its links and of whole steps.

    All ranks call it together and get the same file.

    Args:
        budget_s: Seconds of these steps; at most `BUDGET_S` are used, and some steps are run in any case.
    """
    recorded = virtual.routing == "recorded"  # recorded routing is that of all layers
    model = config.model if recorded else two_layers(config.model)
    sample = replace(config, model=model, placement=PlacementConfig())
    stack = build_virtual(sample, virtual, machinery)
    plans = [stack.adopt(plan) for plan in _plans(sample, stack)]
    stack.links = ProfiledCluster.build(file)
    budget = Budget(machinery.control, min(BUDGET_S, budget_s))

    def run(plan: StepPlan) -> tuple[float, list[TaskRecord]]:
        stack.use(plan, stack.placement)
        stack.prepare(0)
        machinery.control.barrier(PURPOSE)
        return timed(stack.step, 0), stack.records()

    steps = RealSteps([(plan, Decision()) for plan in plans], run, None, machinery.control)
    for number in range(1 + MOST_ROUNDS):  # the first round opens connections
        if number > 1 and budget.agree() <= 0 and (number > LEAST_ROUNDS or budget.late):
            break
        steps.round(lambda: False, counts=number > 0)
    watched = steps.gathered()
    seen = transferred(watched, lambda each: _cost(stack, each.plan, file), stack.workload)
    fits = Fits(TRANSFER, {kind: [replace(x, share=0.0) for x in each] for kind, each in seen.items()})
    file = with_transfers(replace(file, doubts=tuple(fits.doubts)), fits)
    meets = stack.machinery.layout.mesh
    expected = [
        iteration_s(each.plan.schedule, each.plan.graph, _cost(stack, each.plan, file), meets)
        for each in watched
    ]
    file = with_whole_steps(file, watched, expected)
    return machinery.control.gather(file, "comparing what steps say")[0]


def _plans(config: RunConfig, stack: VirtualStack) -> Iterator[StepPlan]:
    for name, microbatches in REHEARSED:
        pieces = min(microbatches, config.data.batch_per_device)
        cut = replace(config.schedule, name=name, microbatches=pieces, chunks=None, backward_chunks=None)
        run, layout = replace(config, schedule=cut), stack.machinery.layout
        yield first_plan(run, layout, base_shape(run, layout), stack.bucket_sizes)


def _cost(stack: VirtualStack, plan: StepPlan, file: ClusterFile) -> Cost:
    """Return the cost of the first step's tasks, as the simulator has it."""
    stack.use(plan, stack.placement)
    return replace(stack.cost(0), cluster=ProfiledCluster.build(file))
