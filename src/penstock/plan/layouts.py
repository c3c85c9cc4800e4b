"""Which ranks share attention and experts: every layout of a published model on a cluster, the best first.

All layouts work on the same samples per step. They are ranked by quick plans: the first choices of a search
and what Parm's planner takes; the full search is for the one that is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from penstock.config import ConfigError
from penstock.cost import ClusterFile
from penstock.decision import Decision
from penstock.mesh import group_sizes
from penstock.plan.memory import MemoryBudget
from penstock.plan.problem import Problem
from penstock.plan.published import parm_choice
from penstock.plan.search import Candidate, evaluate
from penstock.plan.starts import first_choices
from penstock.plan.subject import Overrides, Subject, published_problem
from penstock.step.shape import Sharing, TokenLayout
from penstock.words import gib, milliseconds

NEXT: Final = 2
"""Layouts that are told beside the best."""

TOKENS: Final[tuple[TokenLayout, ...]] = ("split", "replicated")


@dataclass(frozen=True, kw_only=True)
class RankedLayout:
    """A layout with the best of its quick plans."""

    subject: Subject
    best: Candidate

    @property
    def words(self) -> str:
        """The layout in a line."""
        work, sharing = self.subject.problem.workload, self.subject.problem.shape.sharing
        sizes = f"dp {work.mesh.sizes['dp']}, mp {work.mp_size}, ep {work.ep_size}, esp {work.esp_size}"
        tokens = f", tokens {sharing.tokens}" if work.mp_size > 1 else ""
        form = "" if sharing.is_none else f", expert form {self.best.plan.shape.expert_form}"
        costs = f"{milliseconds(self.best.predicted_s)}, {gib(self.best.memory_bytes)} per rank"
        return f"{sizes}{tokens}{form}: {costs}"


@dataclass(frozen=True, kw_only=True)
class FoundLayouts:
    """Those that can run, the best first.

    undivided: the number of those in which something does not divide; too_large: of those that need too much
    memory.
    """

    ranked: tuple[RankedLayout, ...]
    undivided: int
    too_large: int

    @property
    def best(self) -> Subject:
        """The first, with what is to be known of the others."""
        first, *others = self.ranked
        notes = [f"layout, by quick plans: {first.words}"]
        notes += [f"next best layout: {each.words}" for each in others[:NEXT]]
        left_out = f"{self.undivided} more do not divide, {self.too_large} need more memory"
        notes.append(f"{len(self.ranked)} layouts compared; {left_out}")
        return replace(first.subject, notes=(*first.subject.notes, *notes))


def find_layouts(
    name: str, file: ClusterFile, overrides: Overrides, memory: MemoryBudget | None = None
) -> FoundLayouts:
    """Every layout of model `name`. Raises ConfigError if none fits."""
    ranked, undivided, too_large = [], 0, 0
    for each in _tried(file, overrides):
        for tokens in TOKENS if each.mp_size != 1 else TOKENS[:1]:
            try:
                subject = published_problem(name, file, each)
            except ConfigError:
                undivided += 1
                continue
            found = _ranked(_with_tokens(subject, tokens), memory)
            ranked += [found] if found else []
            too_large += found is None
    if not ranked:
        why = f"no layout fits: {undivided} do not divide, {too_large} need more memory"
        raise ConfigError("--layout", "auto", why, "Use more ranks, or a smaller model or batch.")
    ranked.sort(key=lambda layout: layout.best.predicted_s)
    return FoundLayouts(ranked=tuple(ranked), undivided=undivided, too_large=too_large)


def _tried(file: ClusterFile, overrides: Overrides) -> Iterator[Overrides]:
    sizes = group_sizes(overrides.ranks_per_node or file.ranks_per_node)
    for mp_size, esp_size in product(sizes, sizes):
        yield replace(overrides, mp_size=mp_size, esp_size=esp_size)


def _with_tokens(subject: Subject, tokens: TokenLayout) -> Subject:
    problem = subject.problem
    sharing: Sharing = replace(problem.shape.sharing, tokens=tokens)
    return replace(subject, problem=replace(problem, shape=replace(problem.shape, sharing=sharing)))


def _ranked(subject: Subject, memory: MemoryBudget | None) -> RankedLayout | None:
    """The layout with its best quick plan that fits; None if none does."""
    candidates = [evaluate(subject.problem, choice) for choice in _quick(subject.problem)]
    fitting = [each for each in candidates if memory is None or each.memory_bytes <= memory.bytes]
    if not fitting:
        return None
    return RankedLayout(subject=subject, best=min(fitting, key=lambda each: each.predicted_s))


def _quick(problem: Problem) -> list[Decision]:
    return list(dict.fromkeys([*first_choices(problem), parm_choice(problem)]))
