"""The fastest plan in pipeline stages: how a stage runs its layers, how many parts it has, and in which order
microbatches pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from penstock.decision import Decision
from penstock.plan.candidate import NothingFitsError
from penstock.plan.memory import MemoryEstimate
from penstock.plan.pipeline import Pipeline
from penstock.plan.problem import Problem
from penstock.plan.search import first_choices
from penstock.plan.space import settled, usual_chunk_bytes, valid
from penstock.plan.stages import Part, PipelinePlan, Stages, placed, stages_memory
from penstock.schedule.sequential import Sequential
from penstock.step.shape import Recompute
from penstock.words import gib

VIRTUAL_SIZES = (1, 2, 4)
"""Parts of a stage that are tried where their number is open."""

TRIED = 2
"""How many ways to run the layers of a stage are simulated in every order of microbatches."""

Memories = tuple[MemoryEstimate, ...]
"""Memory by stage."""

Choices = Callable[[Problem], Sequence[Decision]]
"""Returns choices for a step, the best first."""


@dataclass(frozen=True, kw_only=True)
class FoundPipeline:
    """The fastest plan in stages, and the best of every other order of microbatches."""

    best: PipelinePlan
    others: tuple[PipelinePlan, ...]


def pipelines(
    stages: int, virtual: int | None, layers: int, problem: Problem, node_size: int
) -> list[Pipeline]:
    """Return the orders of microbatches that are possible with as many stages.

    Args:
        virtual: The parts of a stage; None = open.
        layers: The number of layers of the model.
        problem: The step, whose passes are the microbatches of an update. Where its schedule is set to be
            sequential, nothing overlaps, microbatches neither.
        node_size: See `Pipeline`.

    Raises:
        ConfigError: For sizes that are given and impossible.
    """
    one = Pipeline(
        pipeline_parallel_size=stages,
        virtual_pipeline_parallel_size=virtual or 1,
        microbatches=problem.passes,
        node_size=node_size,
    )
    orders = [one]
    for more in VIRTUAL_SIZES[1:] if virtual is None and stages > 1 else ():
        if stages * more <= layers and problem.passes % stages == 0:
            orders.append(replace(one, virtual_pipeline_parallel_size=more))
    may_overlap = stages > 1 and dict(problem.forced).get("schedule") != Sequential.name
    return orders + [replace(each, overlaps=True) for each in orders if may_overlap]


def find_pipeline(
    problem: Problem, tried: Sequence[Pipeline], choices: Choices, memory_bytes: int | None = None
) -> FoundPipeline:
    """Find the fastest plan that fits.

    Args:
        problem: The whole model on the ranks of one stage.
        tried: The orders of microbatches to compare.
        choices: Returns the ways to run the layers of a stage that are tried beside the first choices of a
            search.
        memory_bytes: The memory of a rank, which every stage must fit; None = not known.

    Raises:
        NothingFitsError: If no plan fits.
    """
    problem = replace(problem, passes=1)
    search = _Search(problem, choices, memory_bytes)
    plans = [plan for pipeline in tried if (plan := search.best(pipeline)) is not None]
    if not plans:
        raise search.too_big()
    best, *others = sorted(plans, key=lambda plan: plan.update_s)
    return FoundPipeline(best=best, others=tuple(others))


class _Search:
    """What the orders of microbatches share: the same stages, and searches for the same step."""

    def __init__(self, problem: Problem, choices: Choices, memory_bytes: int | None) -> None:
        self._problem, self._choices, self._memory_bytes = problem, choices, memory_bytes
        self._stages: dict[Decision, Stages] = {}
        self._samples: dict[Decision, Stages] = {}
        self._known: dict[Recompute, list[Decision]] = {}
        self._least: Memories | None = None

    def best(self, pipeline: Pipeline) -> PipelinePlan | None:
        """Return the fastest plan with the least recomputation that fits; None if none does."""
        for recompute in self._problem.recompute:
            sample = replace(sample_of(self._problem, pipeline), recompute=(recompute,))
            plain = self._memory_of(valid(sample, Decision(recompute=recompute)), pipeline)
            if not self._fits(plain, buffers=False):  # other ways to run the layers have other buffers
                continue
            part = Part(range(sample.shape.num_layers))

            # Where forward and backward overlap, those that fit each other best need not be the best alone.
            def seconds(way: Decision, sample: Problem = sample, part: Part = part) -> float:
                stages = self._samples.setdefault(way, Stages(sample, way))
                return max(stages.together_s(part, part)) if pipeline.overlaps else stages.both_s(part)

            if recompute not in self._known:
                first = sorted(first_choices(sample), key=seconds)
                others = (first[0].deciding("dispatch", name) for name in sample.dispatches)
                every = (*self._choices(sample), *first, *(valid(sample, way) for way in others))
                self._known[recompute] = list(dict.fromkeys(every))
            ways = sorted(self._known[recompute], key=seconds)  # the most promising first
            fitting = (way for way in ways if self._fits(self._memory_of(way, pipeline)))
            plans = [placed(self._staged(way), pipeline) for way in islice(fitting, TRIED)]
            if plans:
                return min(plans, key=lambda plan: plan.update_s)
        return None

    def _staged(self, choice: Decision) -> Stages:
        whole = replace(choice, partition=None, all_reduce_chunk_bytes=usual_chunk_bytes(self._problem))
        whole = settled(self._problem, whole)
        return self._stages.setdefault(whole, Stages(self._problem, whole))

    def _memory_of(self, choice: Decision, pipeline: Pipeline) -> Memories:
        stages = self._staged(choice)
        memories = stages_memory(stages, pipeline, stages.parts(pipeline))
        if self._least is None or _largest(memories) < _largest(self._least):
            self._least = memories
        return memories

    def _fits(self, stages: Memories, *, buffers: bool = True) -> bool:
        if self._memory_bytes is None:
            return True
        most = self._memory_bytes
        return all(each.total_bytes - (0 if buffers else each.buffers_bytes) <= most for each in stages)

    def too_big(self) -> NothingFitsError:
        """Return the error for a model of which no stage's memory suffices."""
        assert self._memory_bytes is not None and self._least is not None, "something did not fit"
        size = _largest(self._least)
        stage = next(i for i, each in enumerate(self._least) if each.total_bytes == size)
        name, part = next(iter(self._least[stage].parts.items()))
        why = (
            f"no plan in {len(self._least)} stages fits: stage {stage} needs an estimated {gib(size)} a rank "
            f"at least, most of it for {name} ({gib(part)})"
        )
        hint = "Use more stages, more recomputation, or a smaller batch per rank."
        return NothingFitsError("memory per rank", gib(self._memory_bytes), why, hint)


def _largest(stages: Memories) -> int:
    return max(each.total_bytes for each in stages)


def sample_of(problem: Problem, pipeline: Pipeline) -> Problem:
    """Return the step of a stage in the middle: no embedding, no head, and gradients that are only added."""
    layers = problem.shape.num_layers
    number = max(1, layers // pipeline.pipeline_parallel_size)
    first = (layers - number) // 2
    few = problem.only(tuple(range(first, first + number)))
    zeros = (0,) * number
    return replace(
        few,
        passes=1,
        shape=replace(few.shape, updating=None),
        workload=replace(
            few.workload,
            vocab_size=0,
            all_reduce_bytes=zeros,
            expert_all_reduce_bytes=zeros,
            partial_all_reduce_bytes=zeros,
            partial_by_form=(),
        ),
    )
