"""The cluster that a file describes, for the cost of tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, Final, Self

from penstock.cost.cluster import AlphaBeta, ClusterConfig, Inside, as_span
from penstock.cost.cluster_file import PAIR, ClusterFile, LinkModel, TaskModel
from penstock.cost.devices import BETWEEN_S, SHARES, Efficiency, find_device
from penstock.cost.span import Span
from penstock.features.dispatch import DISPATCHES
from penstock.graph import Phase
from penstock.mesh import Axes, Group, holders
from penstock.ops import OPS, Backward, Work
from penstock.ops.core import FLAT, outward

RAGGED: Final = 1.15
"""How many times as long as a ring an all-to-all of a GPU's library takes for as many bytes over a link."""

PEER_S: Final = 1e-6
"""Seconds by which every further peer makes an all-to-all longer: a message's handling, not its way."""


@dataclass(frozen=True, kw_only=True)
class ProfiledCluster(ClusterConfig):
    """Measured models where the file has them, its rates elsewhere.

    Attributes:
        contention: The part of a task's time in which the other side (computation or transfers) is assumed to
            be busy, too; 1 is right where everything overlaps, which orders aim at.
    """

    file: ClusterFile
    contention: float = 1.0

    def __post_init__(self) -> None:
        """Do nothing: the file's rates have been checked where they were read."""

    @staticmethod
    def build(file: ClusterFile, contention: float = 1.0) -> ProfiledCluster:
        rates = {each.name: getattr(file.rates, each.name) for each in fields(ClusterConfig)}
        return ProfiledCluster(**rates, file=file, contention=contention)

    @property
    def has_contention(self) -> bool:
        """Whether any task takes longer beside others; a file that is written by hand need not say so."""
        factors = [self.file.contended_transfers, *(task.contended for task in self.file.tasks)]
        return any(factor not in (None, 1) for factor in (*factors, *(x.contended for x in self.file.links)))

    def contended(self, share: float) -> Self:
        return replace(self, contention=share)

    def faster(self, *, inter: float = 1.0, intra: float = 1.0, compute: float = 1.0) -> Self:
        rates = super().faster(inter=inter, intra=intra, compute=compute)
        return replace(rates, file=self.file.faster(inter=inter, intra=intra, compute=compute))

    def all_to_all(self, group: Span | int, axes: Axes = Group.EXPERT) -> AlphaBeta:
        """Return the model for groups along these axes, or else for those that share experts, or others."""
        kinds = Group.name(axes), Group.name(Group.EXPERT)
        links = [
            link
            for link in self.file.links
            if link.collective == "all_to_all" and (link.nodes is not None or link.group in kinds)
        ]
        return self._of_size(super().all_to_all, group, links, kinds)

    def all_reduce(self, group: Span | int) -> AlphaBeta:
        links = [link for link in self.file.links if link.collective == "all_reduce"]
        links = [link for link in links if link.nodes is not None or not link.stays_inside]
        return self._of_size(super().all_reduce, group, links)

    def parts(self, group: Span | int, axes: Axes = Group.EXPERT) -> AlphaBeta:
        """Return the model; GPUs pass parts on in rings, so that it is half of an all-reduce."""
        if find_device(self.file.device_name) is None:
            return super().parts(group, axes)
        both = self.all_reduce(group)
        return AlphaBeta(alpha_s=both.alpha_s / 2, beta_s_per_byte=both.beta_s_per_byte / 2)

    def leg(self, dispatch: str, op: str, span: Span, axes: Axes = Group.EXPERT) -> AlphaBeta:
        if DISPATCHES[dispatch].hops == FLAT:
            return self.all_to_all(span, axes)
        links = [link for link in self.file.links if (link.collective, link.op) == (dispatch, outward(op))]
        if links and links[0].nodes is None:
            return self._in_steps(links[0].model, links[0])
        return self._of_size(partial(super().leg, dispatch, op), span, links)

    def inside(self, collective: Inside, ranks: int) -> AlphaBeta:
        links = [link for link in self.file.links if (link.collective, link.lane) == (collective, "intra")]
        if collective == "all_reduce" and not links:  # its two halves may have been measured
            both = self.inside("reduce_scatter", ranks), self.inside("all_gather", ranks)
            return AlphaBeta(
                alpha_s=sum(each.alpha_s for each in both),
                beta_s_per_byte=sum(each.beta_s_per_byte for each in both),
            )
        by_rates = super().inside
        return self._of_size(lambda span: by_rates(collective, span.ranks), Span.regular(1, ranks), links)

    @property
    def raggedness(self) -> float:
        return super().raggedness if self._kernels is None else RAGGED

    def _start_s(self, inside: int, abroad: int, passes: int = 0) -> float:
        """Return the start-ups; libraries of GPUs sum along trees, and send to all peers at once."""
        if self._kernels is None:
            return super()._start_s(inside, abroad, passes)
        if passes:
            up, across = (math.ceil(math.log2(others + 1)) for others in (inside, abroad))
            return passes * (up * self.intra_latency_s + across * self.link_latency_s)
        first_s = self.link_latency_s if abroad else self.intra_latency_s if inside else 0.0
        return first_s + PEER_S * (inside + abroad)

    def pair(self, span: Span) -> AlphaBeta | None:
        link = self.file.link(PAIR, Group.name(Group.EXPERT_SHARDS))
        return None if link is None or any(_difference(link, span)) else self._in_steps(link.model, link)

    def prolonged(self, op: str) -> float:
        return next((move.in_steps for move in self.file.moves if move.op == op), 1.0)

    def compute_s(self, op: str, phase: Phase, flops: float, moved_bytes: float, pieces: int = 1) -> float:
        """Return the seconds of a compute task by its measured model, or by the rates.

        Args:
            pieces: The number of parts in which the work is done; where the file was measured, every piece
                has the fixed part of a task.
        """
        model = self._task(op, phase)
        if model is None:
            return super().compute_s(op, phase, flops, moved_bytes)
        fixed_s = model.alpha_s * (pieces if self.file.measured else 1)
        solo_s = fixed_s + model.scale * self.nominal_s(flops, moved_bytes)
        return solo_s * (1 + self.contention * (model.contended - 1))

    def task_s(self, op: str, phase: Phase, work: Work, load: Any = 1.0) -> Any:
        """Return the seconds of a compute task by its measured model, its device's kernels, or the rates.

        Args:
            load: How many times as much work it is, one number or an array.
        """
        kernels = self._kernels
        if kernels is None or self._task(op, phase) is not None:
            return super().task_s(op, phase, work, load)
        if work.kernels is None:  # copies; what backward does by itself is not done twice
            flops_s = work.flops / self.flops_per_s
            times = 2 if phase is Phase.BACKWARD and OPS[op].backward is Backward.TASK else 1
            return self.task_overhead_s + times * load * (
                flops_s + work.copied_bytes / self.memory_bytes_per_s
            )
        between_s = OPS[op].launches * BETWEEN_S
        return self.task_overhead_s + between_s + kernels.seconds(work.kernels, phase, load)

    @cached_property
    def _kernels(self) -> Efficiency | None:
        """What is usual of the file's devices, where it asks for that, at the file's rates."""
        device, precision = find_device(self.file.device_name), self.file.precision
        if self.file.kernels_of == "rates" or device is None:
            return None
        shares = SHARES[device.architecture]
        return Efficiency(
            shares=shares,
            units=device.units,
            peak_flops_per_s=self.flops_per_s / shares.products,
            memory_bytes_per_s=2 * self.memory_bytes_per_s,
            element_bytes=4 if precision == "float32" else 2,
            in_float8=self.file.kernels_of == "device in float8",
        )

    def _task(self, op: str, phase: Phase) -> TaskModel | None:
        """Return the model of an op's tasks; a recomputed task takes as long as the first time."""
        wanted = Phase.FORWARD if phase is Phase.RECOMPUTE else phase
        return next((x for x in self.file.tasks if (x.op, x.phase) == (op, wanted)), None)

    def _of_size(
        self,
        by_rates: Callable[[Span], AlphaBeta],
        group: Span | int,
        links: Sequence[LinkModel],
        kinds: Sequence[str] = (),
    ) -> AlphaBeta:
        """Return the line of a group of this size: measured, scaled from the nearest, or by rates.

        kinds: the names of groups that are preferred, the best first.
        """
        span = as_span(group)
        usable = [link for link in links if link.ranks > 1]
        if span.ranks == 1 or not usable:
            return self._in_steps(by_rates(span))
        nearest = min(usable, key=lambda link: _difference(link, span, kinds))
        if not any(_difference(nearest, span)):
            return self._in_steps(nearest.model, nearest)
        if nearest.nodes is None:
            here, there = by_rates(Span.apart(span.ranks)), by_rates(Span.apart(nearest.ranks))
        else:
            per_node = max(1, holders(nearest.ranks, nearest.nodes))
            at_once = max(1, holders(self.file.ranks_per_node, per_node))
            here, there = by_rates(span), by_rates(Span.regular(nearest.nodes, per_node, at_once))
        alone = AlphaBeta(
            alpha_s=nearest.alpha_s * _times(here.alpha_s, there.alpha_s),
            beta_s_per_byte=nearest.beta_s_per_byte * _times(here.beta_s_per_byte, there.beta_s_per_byte),
        )
        return self._in_steps(alone, nearest)

    def _in_steps(self, alone: AlphaBeta, link: LinkModel | None = None) -> AlphaBeta:
        """Return a transfer's model in a step with the assumed contention, by the factors of its link."""
        usual = self.file.contended_transfers
        beside = usual if link is None or link.contended is None else link.contended
        factor = (1.0 if link is None else link.in_steps) * (1 + self.contention * (beside - 1))
        return AlphaBeta(alpha_s=alone.alpha_s * factor, beta_s_per_byte=alone.beta_s_per_byte * factor)


def _difference(link: LinkModel, span: Span, kinds: Sequence[str] = ()) -> tuple[bool, int, int, int]:
    """Return how far a link's group is from one with this span, the most important first; 0: it is alike.

    kinds: the names of groups that are preferred, the best first.
    """
    nodes = span.nodes if link.nodes is None else link.nodes
    kind = kinds.index(link.group) if link.group in kinds else len(kinds)
    return (nodes > 1) != (span.nodes > 1), kind, abs(nodes - span.nodes), abs(link.ranks - span.ranks)


def _times(here: float, there: float) -> float:
    """Return how many times as long it takes here; 1 if it takes no time there."""
    return here / there if there else 1.0
