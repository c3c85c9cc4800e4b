"""Which ranks share attention and experts: every layout of a model on a cluster, ranked.

All layouts process the same samples per step. They are ranked by quick plans: the first choices of a search,
the choice of Parm's planner, the first that fits where none of these does, and the best with every dispatch.
Only the layout that is taken and the given one get the full search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Final

from penstock.config import ConfigError, IndivisibleError
from penstock.cost import ClusterFile
from penstock.decision import Decision
from penstock.mesh import group_sizes, holders
from penstock.plan.candidate import Candidate, NothingFitsError, Room, evaluate, whole_s
from penstock.plan.predict import interval_s
from penstock.plan.problem import Problem
from penstock.plan.published import parm_choice
from penstock.plan.search import first_choices, sketch
from penstock.plan.space import settled, valid
from penstock.plan.subject import Overrides, Subject, published_problem
from penstock.step.shape import TokenLayout
from penstock.words import change, counted, gib, lane_words, within

NEXT: Final = 2
"""The number of layouts reported besides the best."""

TOKENS: Final[tuple[TokenLayout, ...]] = ("split", "replicated")


@dataclass(frozen=True, kw_only=True)
class LayoutSizes:
    """The sizes of the groups that share attention or experts, and how a group that shares attention holds
    every sample's tokens between blocks."""

    tp_size: int
    ep_size: int
    etp_size: int
    tokens: TokenLayout = "split"

    @property
    def shares(self) -> bool:
        """Whether any ranks share attention or experts."""
        return self.tp_size * self.etp_size > 1


@dataclass(frozen=True, kw_only=True)
class RankedLayout:
    """A layout with the best of its quick plans."""

    sizes: LayoutSizes
    problem: Problem
    best: Candidate

    @property
    def words(self) -> str:
        """The layout in one line of text, with the seconds of a whole iteration, by which it is ranked."""
        dp, own = self.problem.mesh.sizes["dp"], self.sizes
        sizes = f"dp {dp}, tp {own.tp_size}, ep {own.ep_size}, etp {own.etp_size}"
        tokens = f", tokens {own.tokens}" if own.tp_size > 1 else ""
        form = f", expert form {self.best.plan.shape.expert_form}" if own.shares else ""
        seconds = _seconds(self)
        time = within(seconds, interval_s(self.problem, seconds))
        bound = self.best.bound
        limit = "the longest chain of tasks"
        if bound.critical_path_s <= bound.busiest_lane_s:
            limit = lane_words(bound.busiest_lane, nodes=self.problem.has_nodes)
        costs = f"limited by {limit}, {gib(self.best.memory_bytes)} per rank"
        return f"{sizes}{tokens}{form}: {time}, {costs}"


@dataclass(frozen=True, kw_only=True)
class FoundLayouts:
    """The layouts that can run, best first.

    Attributes:
        undivided: The number of layouts in which a size does not divide.
        too_large: The number of layouts that need too much memory.
        refused: Why other layouts are impossible, one reason for each.
        late: The number of layouts that were not looked at, since the time was over.
    """

    ranked: tuple[RankedLayout, ...]
    undivided: int
    too_large: int
    refused: tuple[str, ...] = ()
    late: int = 0

    @property
    def best(self) -> RankedLayout:
        return self.ranked[0]

    @property
    def lines(self) -> tuple[str, ...]:
        """The best layout and its alternatives, as lines of text."""
        first, *others = self.ranked
        lines = [f"layout, by quick plans: {first.words}"]
        lines += [f"next best layout: {each.words} ({self._slower(each)})" for each in others[:NEXT]]
        plain = next((each for each in others[NEXT:] if not each.sizes.shares), None)
        if first.sizes.shares and plain is not None:
            lines.append(f"best without sharing: {plain.words} ({self._slower(plain)})")
        left_out = _left_out(f"{self.undivided} more", self.too_large, self.refused)
        late = f", {self.late} were not looked at: it took too long on this machine" if self.late else ""
        return (*lines, f"{counted(len(self.ranked), 'layout')} compared; {left_out}{late}")

    def _slower(self, other: RankedLayout) -> str:
        return change(_seconds(other), _seconds(self.best))


def layout_sizes(
    ranks: int, per_node: int, num_experts: int, ep_size: int | None = None
) -> Iterator[LayoutSizes]:
    """Yield every layout worth trying, those with less sharing first.

    Args:
        per_node: The ranks of a node; 0 = nodes differ, and nothing is shared.
        ep_size: The only size wanted; None = experts spread over as many ranks as divide them, over the ranks
            of one node, and over none.
    """
    sizes = group_sizes(per_node) if per_node else [1]
    for tp_size, etp_size in sorted(product(sizes, sizes), key=prod):
        spreads = [ep_size] if ep_size else []
        if not spreads:
            valid = [size for size in group_sizes(holders(ranks, etp_size)) if num_experts % size == 0]
            inside = [size for size in valid if size <= holders(per_node, etp_size)] or valid
            spreads = list(dict.fromkeys((valid[-1], inside[-1], 1)))
        for spread, tokens in product(spreads, TOKENS if tp_size > 1 else TOKENS[:1]):
            yield LayoutSizes(tp_size=tp_size, ep_size=spread, etp_size=etp_size, tokens=tokens)


def rank_layouts(
    tried: Iterable[LayoutSizes],
    problems_of: Callable[[LayoutSizes], Sequence[Problem]],
    memory_bytes: int | None = None,
    *,
    key: str = "plan.layout",
    ends: Callable[[], bool] = lambda: False,
) -> FoundLayouts:
    """Return the layouts in the order of their best quick plans.

    Args:
        tried: The layouts to compare.
        problems_of: Returns the step in a layout with every optimiser that is open, of which the fastest
            that fits counts. It raises IndivisibleError for a layout in which a size does not divide, and
            ConfigError for one that is impossible for another reason.
        memory_bytes: The memory of a rank, which plans must fit; None = not known.
        key: The setting that errors name.
        ends: Tells whether the time is over; the best of the layouts compared by then is taken, of one at
            least.

    Raises:
        ConfigError: If no layout fits.
    """
    ranked, undivided, too_large, late, refused = list[RankedLayout](), 0, 0, 0, list[str]()
    for sizes in tried:
        if late or (ranked and ends()):
            late += 1
            continue
        try:
            problems = problems_of(sizes)
        except IndivisibleError:
            undivided += 1
            continue
        except ConfigError as error:
            refused.append(str(error))
            continue
        found = ((each, _best(each, memory_bytes)) for each in problems)
        fit = [RankedLayout(sizes=sizes, problem=each, best=best) for each, best in found if best]
        ranked += sorted(fit, key=_seconds)[:1]
        too_large += not fit
    if not ranked:
        why = f"no layout fits: {_left_out(str(undivided), too_large, refused)}"
        hint = "Use more ranks, or a smaller model or batch." if too_large or not refused else ""
        refusal = NothingFitsError if too_large else ConfigError
        raise refusal(key, "auto", why.rstrip("."), hint)
    ranked.sort(key=_seconds)
    return FoundLayouts(
        ranked=tuple(ranked), undivided=undivided, too_large=too_large, refused=tuple(refused), late=late
    )


def _seconds(layout: RankedLayout) -> float:
    return whole_s(layout.problem, layout.best)


def _left_out(undivided: str, too_large: int, refused: Sequence[str]) -> str:
    """Return text on the layouts left out, with the first reason why one is impossible."""
    counts = f"{undivided} do not divide, {too_large} need more memory"
    return f"{counts}, {len(refused)} cannot be had: {refused[0]}" if refused else counts


def _best(problem: Problem, memory_bytes: int | None) -> Candidate | None:
    """Return the best quick plan that fits, with the dispatch that suits it best; None if none does.

    Plans are compared on a short model, and the best is simulated in full.
    """
    room, short, seconds = Room(problem, memory_bytes), sketch(problem), dict[Decision, float]()

    def best_of(quick: Iterable[Decision]) -> Decision | None:
        for choice in map(room.with_least_recompute, quick):
            if choice is not None and choice not in seconds:
                own = choice if short is problem else replace(choice, partition=None)
                seconds[choice] = evaluate(short, own).predicted_s
        return min(seconds, key=seconds.__getitem__, default=None)

    best = best_of([*first_choices(problem), settled(problem, parm_choice(problem))])
    best = best or best_of(room.first_held)
    if best is None:
        return None
    others = (best.deciding("dispatch", name) for name in problem.dispatches)
    best = best_of(valid(problem, choice) for choice in others)
    assert best is not None, "there was one"
    return evaluate(problem, best)


# ---- published models --------------------------------------------------------------------------------------


def find_layouts(
    name: str,
    file: ClusterFile,
    overrides: Overrides,
    memory_bytes: int | None = None,
    ends: Callable[[], bool] = lambda: False,
    updated: Callable[[Subject], Subject] = lambda subject: subject,
) -> FoundLayouts:
    """Return the layouts of published model `name`, ranked.

    Args:
        memory_bytes: The memory of a rank, which plans must fit; None = not known.
        ends: Tells whether the time is over; then the layouts that are left are not looked at.
        updated: Returns the subject with the optimisers that are open, and what else is to hold.

    Raises:
        ConfigError: If no layout fits.
    """
    usual = published_problem(name, file, replace(overrides, tp_size=None, ep_size=None, etp_size=None))
    work = usual.problem.workload
    tried = layout_sizes(work.world_size, work.devices_per_node, work.num_experts, overrides.ep_size)
    return rank_layouts(
        tried,
        lambda sizes: updated(with_layout(name, file, overrides, sizes)).problems,
        memory_bytes,
        key="--layout",
        ends=ends,
    )


def with_layout(name: str, file: ClusterFile, overrides: Overrides, sizes: LayoutSizes) -> Subject:
    """Return the published model with this layout."""
    own = replace(overrides, tp_size=sizes.tp_size, ep_size=sizes.ep_size, etp_size=sizes.etp_size)
    subject = published_problem(name, file, own)
    problem = subject.problem
    sharing = replace(problem.shape.sharing, tokens=sizes.tokens)
    return replace(subject, problem=replace(problem, shape=replace(problem.shape, sharing=sharing)))
