"""The comparison itself, as every rank runs it: A B C A B C ..., so that noise falls on all alike."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from penstock.bench.config import BenchConfig
from penstock.bench.links import fit_all_reduce, fit_all_to_all
from penstock.bench.memory import peak_bytes, start_peak
from penstock.bench.predict import FittedCluster, PredictedCost, predict
from penstock.bench.silent import SilentTransport
from penstock.cost import MeasuredCost, StepCost
from penstock.graph import Group, Lane, StepShape
from penstock.models import GPT
from penstock.runtime import Machinery, PipelinedStack
from penstock.runtime.lanes import ThreadLanes
from penstock.schedule import SCHEDULES, StepPlan, plan_step
from penstock.simulate import Ranks
from penstock.topology import Layout
from penstock.trace import TaskRecord, occupation, overhead_s
from penstock.train.assemble import build_machinery, workload
from penstock.train.config import RunConfig, TrainConfig
from penstock.train.corpus import DataConfig

SILENT_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One step of one schedule on one rank."""

    iteration_s: float
    busy_s: Mapping[str, float]
    exposed_s: float
    overhead_s: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Everything that was measured, the same on every rank: samples[schedule][rank][round]."""

    samples: Mapping[str, list[list[Sample]]]
    compute_s: list[list[float]]
    traffic: list[Mapping[int, int]]
    simulated_s: Mapping[str, float]
    plans: Mapping[str, StepPlan]


class Comparison:
    """Holds one model on one rank and runs it by several plans in turns."""

    def __init__(self, config: BenchConfig, layout: Layout) -> None:
        self.config, self.layout, compare = config, layout, config.compare
        self.run_config = RunConfig(
            model=config.model,
            moe=config.moe,
            schedule=config.schedule,
            parallel=config.parallel,
            data=DataConfig(batch_per_device=compare.batch_per_device),
            train=TrainConfig(seed=compare.seed),
        )
        device = torch.device("cpu")
        machinery = build_machinery(layout, device, config.parallel, "float32")
        self.control = machinery.control
        model = GPT(config.model, config.moe, ep_size=layout.ep_size, ep_rank=layout.ep_rank)
        model.initialise(compare.seed)
        self.model = model
        self.costs: dict[str, PredictedCost] = {}
        self.stack = self._stack(machinery)
        self.silent = self._stack(_silent(machinery, layout))
        self.batch = self._batch()

    def measure(self) -> Measurements:
        """Calibrate, then run all schedules and the silent computation in turns."""
        compare = self.config.compare
        plans = self._calibrated_plans()
        samples: dict[str, list[Sample]] = {name: [] for name in compare.schedules}
        alone: list[float] = []
        traffic: Mapping[int, int] = {}
        for turn in range(compare.warmup + compare.rounds):
            before = self.stack.machinery.transport.traffic.copy()
            for number, name in enumerate(compare.schedules):
                sample = self._sample(self.stack, plans[name])
                if number == 0:
                    traffic = self.stack.machinery.transport.traffic - before
                if turn >= compare.warmup:
                    samples[name].append(sample)
            whole = self._sample(self.silent, plans[compare.schedules[0]]).iteration_s
            if turn >= compare.warmup:
                alone.append(whole)
        everyone = self.control.gather((samples, alone, dict(traffic)), "collecting measurements")
        return Measurements(
            samples={name: [rank[0][name] for rank in everyone] for name in compare.schedules},
            compute_s=[rank[1] for rank in everyone],
            traffic=[rank[2] for rank in everyone],
            simulated_s={name: self._predict(name, plans[name]) for name in compare.schedules},
            plans=plans,
        )

    def close(self) -> None:
        self.stack.close()
        self.silent.close()

    def _predict(self, name: str, plan: StepPlan) -> float:
        ranks = Ranks(self.layout.world_size, self.layout.ep_size)
        return predict(plan, self.costs[name], ranks)

    def _sample(self, stack: PipelinedStack, plan: StepPlan) -> Sample:
        """One step: forward, backward with synchronised gradients. All ranks start together."""
        stack.plan = plan
        resident = start_peak()
        self.control.barrier("starting a measured step")
        start_s = time.perf_counter()
        stack(*self.batch).backward()
        iteration_s = time.perf_counter() - start_s
        peak = peak_bytes() - resident
        for parameter in self.model.parameters():
            parameter.grad = None
        return _sample_of(stack.records(), plan, iteration_s, peak)

    def _calibrated_plans(self) -> dict[str, StepPlan]:
        """Measure links and computation apart, then freeze every schedule's order from those costs."""
        transport = self.stack.machinery.transport
        dispatch = fit_all_to_all(transport, self.control)
        reduce = fit_all_reduce(transport, self.control)
        cluster, buckets = FittedCluster(dispatch=dispatch, reduce=reduce), self.stack.buckets.sizes_bytes
        sizes = workload(self.run_config, self.layout, *buckets)
        plans = {}
        for name in self.config.compare.schedules:
            plan = self._plan(name, self.stack.base_shape, *buckets)
            cost = PredictedCost(StepCost(plan.graph.shape, sizes, cluster), self._silent_cost(plan))
            self.costs[name] = cost
            better = StepPlan(plan.graph, SCHEDULES[name].order(plan.graph, cost))
            plans[name] = self.stack.adopt(better)
        return plans

    def _plan(
        self, name: str, shape: StepShape, replicated: tuple[int, ...], experts: tuple[int, ...]
    ) -> StepPlan:
        """A first plan, from default costs."""
        sizes = workload(self.run_config, self.layout, replicated, experts)
        pieces = self.config.schedule.pieces(replicated, experts)
        cluster = self.run_config.cluster
        return plan_step(SCHEDULES[name], shape, pieces, lambda cut: StepCost(cut, sizes, cluster))

    def _silent_cost(self, plan: StepPlan) -> MeasuredCost:
        """Medians of the compute tasks of all ranks, running at once, without a network."""
        records: list[TaskRecord] = []
        for number in range(SILENT_ROUNDS + 1):
            self._sample(self.silent, plan)
            if number > 0:
                records += self.silent.records(number)
        everyone = self.control.gather(records, "exchanging measured durations")
        return MeasuredCost.from_records([r for rank in everyone for r in rank], _unknown)

    def _stack(self, machinery: Machinery) -> PipelinedStack:
        make_plan = partial(self._plan, self.config.compare.schedules[0])
        return PipelinedStack(self.model, self.model, self.config.moe, machinery, make_plan)

    def _batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.config.compare.seed + self.layout.rank)
        shape = (self.config.compare.batch_per_device, self.config.model.seq_len)
        tokens, labels = (
            torch.randint(self.config.model.vocab_size, shape, generator=generator) for _ in range(2)
        )
        return tokens, labels


def _silent(machinery: Machinery, layout: Layout) -> Machinery:
    sizes = {
        Group.WORLD: layout.world_size,
        Group.EXPERT: layout.ep_size,
        Group.EXPERT_REPLICAS: layout.edp_size,
    }
    transport = SilentTransport(sizes)
    return replace(machinery, transport=transport, lanes=ThreadLanes(transport.abort))


def _sample_of(records: list[TaskRecord], plan: StepPlan, iteration_s: float, peak: int) -> Sample:
    busy = {
        str(lane): sum(r.duration_s for r in records if r.lane is lane)
        for lane in Lane
        if any(r.lane is lane for r in records)
    }
    return Sample(
        iteration_s=iteration_s,
        busy_s=busy,
        exposed_s=occupation(records).exposed_s,
        overhead_s=overhead_s(records, plan.graph.needs, Lane.COMPUTE),
        peak_bytes=peak,
    )


def _unknown(task: object) -> float:
    raise AssertionError(f"{task} did not run in the silent run")
