"""Costs of a cluster: alpha-beta models of its links, rates of its devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self, get_args

from penstock.config import Checked, Within
from penstock.config.bounds import types_of
from penstock.cost.span import Span, even_leg
from penstock.features.dispatch import DISPATCHES
from penstock.graph import Lane, Phase
from penstock.mesh import Axes, Group
from penstock.ops import Work
from penstock.ops.core import FLAT
from penstock.timing import Issuing

Speed = Annotated[float, Within(1e6, 1e18, "computers of 1980 did a million a second, and none does 1e18")]
"""Units (operations or bytes) per second of one device."""

LinkRate = Annotated[float, Within(1e3, 1e18, "modems of 1990 sent a thousand bytes a second")]
"""Bytes per second of a link."""

StartUp = Annotated[float, Within(1e-12, 1e2, "light passes a third of a millimetre in the shortest")]
"""Seconds before the first byte moves."""


HostTime = Annotated[float, Within(0, 1, "a second is a thousand times what a slow host takes")]
"""Seconds of the thread that issues tasks to a GPU."""


@dataclass(frozen=True, kw_only=True)
class AlphaBeta:
    """A start-up and a time per byte: `t = alpha + beta * n`."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, size_bytes: float) -> float:
        """Return seconds of a collective of `size_bytes` in its own group; 0 if nothing is to be moved."""
        return self.alpha_s + self.beta_s_per_byte * size_bytes if size_bytes > 0 else 0.0


RateOf = Literal["device", "node"]
Inside = Literal["all_gather", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Checked):
    """Section `[cluster]`: what is assumed of the machines until durations have been measured.

    The defaults describe one core of a server and Gloo over a loopback link.
    """

    flops_per_s: Speed = 3e10
    """One rank's matrix products."""
    memory_bytes_per_s: Speed = 4e9
    """One rank's copies."""
    link_latency_s: StartUp = 2e-4
    """Start-up time of a link between nodes, or between ranks where nodes are not known."""
    link_bytes_per_s: LinkRate = 1e9
    """Rate of a link between nodes, in one direction."""
    link_rate_of: RateOf = "device"
    """Whose rate that is: of every "device", which has a card of its own, or shared by those of a "node"."""
    intra_latency_s: StartUp = 2e-4
    """Start-up time of a link inside a node."""
    intra_bytes_per_s: LinkRate = 1e9
    """Rate of a link inside a node, of one device."""
    task_overhead_s: StartUp = 1e-4
    """Fixed cost of any compute task."""
    issue_task_s: HostTime = 0.0
    """What the thread that hands tasks to a GPU takes for each; 0 on CPUs."""
    issue_kernel_s: HostTime = 0.0
    """What it takes for each operation in a task; 0 on CPUs."""

    @property
    def issuing(self) -> Issuing | None:
        """What handing out tasks takes of one thread; None where every lane has its own."""
        issuing = Issuing(self.issue_task_s, self.issue_kernel_s)
        return issuing if issuing.task_s or issuing.kernel_s else None

    def faster(self, *, inter: float = 1.0, intra: float = 1.0, compute: float = 1.0) -> Self:
        """Return the cluster with these factors on bandwidth between and inside nodes, and speed of devices.

        No rate goes beyond the bounds of a cluster, so that any cluster can be asked what would help.

        Args:
            inter, intra: The factors on the bandwidth between nodes, and inside them.
            compute: The factor on the speed of devices.
        """
        return self.measured(
            flops_per_s=self.flops_per_s * compute,
            memory_bytes_per_s=self.memory_bytes_per_s * compute,
            task_overhead_s=self.task_overhead_s / compute,
            link_bytes_per_s=self.link_bytes_per_s * inter,
            intra_bytes_per_s=self.intra_bytes_per_s * intra,
        )

    def measured(self, **rates: float) -> Self:
        """Return the cluster with these rates; one that lies beyond its bounds is moved to the nearer one."""
        types = types_of(type(self))
        near = {name: get_args(types[name])[1].nearest(value) for name, value in rates.items()}
        return replace(self, **near)

    def contended(self, share: float) -> Self:
        """Return the cluster with tasks that have contention for this share of their time."""
        del share  # rates know of no contention
        return self

    def all_to_all(self, group: Span | int, axes: Axes = Group.EXPERT) -> AlphaBeta:
        """Return the model of an all-to-all; argument: bytes of each rank's send buffer, own share included.

        A rank sends to every other in turn. What leaves a node passes its card while the rest passes the
        devices' links, so the busier of the two counts.

        Args:
            group: A span, or the number of ranks on unknown nodes.
            axes: The axes along which they meet.
        """
        del axes  # the rates are those of links, whoever meets over them
        span = as_span(group)
        abroad, inside = span.ranks - span.most, span.most - 1
        card = (span.ranks - span.fewest) / span.ranks if self.link_rate_of == "device" else span.leaving
        return AlphaBeta(
            alpha_s=self._start_s(inside, abroad),
            beta_s_per_byte=self._busier(inside / span.ranks, card if span.nodes > 1 else 0.0)
            * self.raggedness,
        )

    def leg(self, dispatch: str, op: str, span: Span, axes: Axes = Group.EXPERT) -> AlphaBeta:
        """Return the model of a leg of a dispatch or combine.

        Its argument is the bytes of a rank's rows for all experts.

        Args:
            op: The op of the leg.
            span: The span of the expert group; for a hierarchical dispatch it covers whole nodes.
            axes: The axes along which a flat dispatch meets.
        """
        if DISPATCHES[dispatch].hops == FLAT:
            return self.all_to_all(span, axes)
        leg = even_leg(dispatch, op, span.nodes, span.most)
        if leg.lane is Lane.INTRA:
            start_s, rate, sharing = self._start_s(leg.messages, 0), self.intra_bytes_per_s, 1.0
        else:  # where the rate is the node's, its devices share it
            start_s, rate = self._start_s(0, leg.messages), self.link_bytes_per_s
            sharing = leg.sharing * max(1, span.crossing) if self.link_rate_of == "node" else 1.0
        return AlphaBeta(alpha_s=start_s, beta_s_per_byte=leg.share * sharing / rate * self.raggedness)

    def all_reduce(self, group: Span | int) -> AlphaBeta:
        """Return the model of an all-reduce; its argument is the bytes of the tensor.

        It is hierarchical, as libraries do it: sums are scattered inside nodes, each share is reduced by a
        ring over nodes, and gathered inside them. Pieces follow each other, so the busiest link counts.

        Args:
            group: A span, or the number of ranks on unknown nodes.
        """
        span = as_span(group)
        inside = 2 * (span.most - 1)
        rounds = 2 * (span.nodes - 1)
        groups = 1 / span.fewest if self.link_rate_of == "device" else span.crossing
        return AlphaBeta(
            alpha_s=self._start_s(span.most - 1, span.nodes - 1, passes=2),
            beta_s_per_byte=self._busier(inside / span.most, rounds / span.nodes * groups),
        )

    def parts(self, group: Span | int, axes: Axes = Group.EXPERT) -> AlphaBeta:
        """Return the model of a reduce-scatter, or of an all-gather, that leaves a node; argument: all bytes.

        Every rank sends to every other, as if parts differed.

        Args:
            group: A span, or the number of ranks on unknown nodes.
            axes: The axes along which ranks meet.
        """
        return self.all_to_all(group, axes)

    def inside(self, collective: Inside, ranks: int) -> AlphaBeta:
        """Return the model of a collective among ranks of one node.

        Its argument is the bytes of the gathered output (all_gather), of the input that is summed and
        scattered (reduce_scatter), or of the tensor that is summed (all_reduce, done as the other two).
        """
        times = 2 if collective == "all_reduce" else 1
        share = times * (ranks - 1) / ranks
        start_s = self._start_s(ranks - 1, 0, passes=times)
        return AlphaBeta(alpha_s=start_s, beta_s_per_byte=share / self.intra_bytes_per_s)

    def pair(self, span: Span) -> AlphaBeta | None:
        """Return the model of simultaneous combine and gather (Parm's SAA); None = not known.

        Its argument is the bytes of the buffer that each rank sends.

        Args:
            span: The span of combine.
        """
        del span  # rates do not say how much the two overlap
        return None

    def prolonged(self, op: str) -> float:
        """Return how many times longer an op's transfers take in a run's steps than by their collective."""
        del op  # rates know of none
        return 1.0

    def task_s(self, op: str, phase: Phase, work: Work, load: Any = 1.0) -> Any:
        """Return the seconds of a compute task with this forward work.

        Args:
            load: How many times as much work it is, one number or an array.
        """
        return self.compute_s(op, phase, load * work.flops, load * work.copied_bytes, work.pieces)

    def compute_s(self, op: str, phase: Phase, flops: float, moved_bytes: float, pieces: int = 1) -> float:
        """Return the seconds of a compute task whose forward has these operations and copies.

        Backward is twice forward.

        Args:
            flops, moved_bytes: The operations of the forward, and the bytes that it copies.
            pieces: The number of parts in which the work is done; by assumption they cost nothing, as in
                published planners.
        """
        del op, pieces
        scale = 2 if phase is Phase.BACKWARD else 1  # each half of a split backward counts once
        return self.task_overhead_s + scale * self.nominal_s(flops, moved_bytes)

    def nominal_s(self, flops: float, moved_bytes: float) -> float:
        """Return the seconds of this work by the two rates alone."""
        return flops / self.flops_per_s + moved_bytes / self.memory_bytes_per_s

    @property
    def raggedness(self) -> float:
        """How many times as long an all-to-all takes for its bytes as a ring, whose messages are alike."""
        return 1.0

    def _start_s(self, inside: int, abroad: int, passes: int = 0) -> float:
        """Return the start-ups of a collective in which a rank meets so many others, one after another.

        passes: around all of them, of a ring; 0: it sends each its own.
        """
        times = passes or 1
        return times * (inside * self.intra_latency_s + abroad * self.link_latency_s)

    def _busier(self, inside: float, card: float) -> float:
        """Return the seconds per byte where these shares pass a device's link, and a card."""
        return max(inside / self.intra_bytes_per_s, card / self.link_bytes_per_s)


def as_span(group: Span | int) -> Span:
    """Return a number of ranks on unknown nodes as a span."""
    return Span.apart(group) if isinstance(group, int) else group
