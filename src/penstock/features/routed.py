"""What tasks of a feature do rank by rank, once it is known how a step is routed. No torch.

Shapes: P ranks of the world; W ranks that meet in a task; those of `penstock.routing.rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.apportion import Counts
from penstock.graph.task import Phase, Task
from penstock.mesh import Axes, Mesh, node_of
from penstock.ops.work import Collective, Work
from penstock.placement import ExpertPlacement
from penstock.routing.links import Links
from penstock.routing.rows import BatchCut, Placed
from penstock.routing.sizes import Floats
from penstock.step.shape import StepShape


class Batch(Protocol):
    """The sizes of a step, as prices of features ask for them. `cost.Workload` is one."""

    @property
    def batch(self) -> int: ...

    @property
    def seq_len(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def top_k(self) -> int: ...

    @property
    def shared_ffn_hidden_size(self) -> int: ...

    @property
    def one_copy_per_rank(self) -> bool: ...

    @property
    def tp_size(self) -> int: ...

    @property
    def etp_size(self) -> int: ...

    @property
    def ep_size(self) -> int: ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def placement(self) -> ExpertPlacement: ...

    @property
    def ranks_per_node(self) -> int:
        """Ranks of an expert group in one node."""
        ...

    @property
    def devices_per_node(self) -> int:
        """Ranks of the cluster in one node; 0 = not known."""
        ...

    @property
    def known_per_node(self) -> int:
        """Ranks of the world in one node; 0 = not known."""
        ...

    @property
    def expert_bytes(self) -> float:
        """Bytes of the parameters of one expert, or of a rank's shard of it."""
        ...

    def cut(self, shape: StepShape) -> BatchCut:
        """Return how the batch of a step of this shape is cut into pieces of rows."""
        ...

    def tokens(self, microbatch: int, microbatches: int, shares: int = 1) -> int:
        """Return the tokens of one microbatch on one rank.

        Args:
            shares: The ranks that cut every sample.
        """
        ...

    def expert_flops(self, rows: float) -> float: ...

    def attention_flops(self, tokens: int) -> float: ...

    def hidden_bytes(self, rows: float) -> float: ...

    def wire_bytes(self, rows: float) -> float: ...


class Rates(Protocol):
    """The rates of a cluster, as prices of features ask for them. `cost.ClusterConfig` is one."""

    @property
    def link_bytes_per_s(self) -> float: ...

    @property
    def intra_bytes_per_s(self) -> float: ...

    @property
    def link_rate_of(self) -> str:
        """Whose the link between nodes is: of a "node", or of a "device"."""
        ...

    def compute_s(
        self, op: str, phase: Phase, flops: float, moved_bytes: float, pieces: int = 1
    ) -> float: ...

    def prolonged(self, op: str) -> float:
        """Return how many times as long as by its bytes a transfer takes in a step."""
        ...


class RoutedStep(Protocol):
    """A step whose routing is known, as prices of features ask for it. `cost.moves.RowMoves` is one."""

    @property
    def shape(self) -> StepShape: ...

    @property
    def sizes(self) -> Batch: ...

    @property
    def placed(self) -> Placed:
        """Where samples and replicas are."""
        ...

    @property
    def columns(self) -> tuple[int, ...]:
        """By MoE layer, the layer of the rows that stands for it; () = each has its own."""
        ...

    def work(self, task: Task) -> Work:
        """Return what the task asks of a rank with even routing."""
        ...

    def moe_layer(self, task: Task) -> int:
        """Return the number of the task's layer among MoE layers."""
        ...

    def column(self, task: Task) -> int:
        """Return the layer of the rows that stands for the task's layer."""
        ...

    def brought(self, task: Task) -> Counts:
        """Return the rows that every rank brings in the slices that a task has, [P, C, E]."""
        ...

    def table(self, task: Task) -> Counts:
        """Return rows of the task's microbatch and chunk as they travel, [G, S, H, T, N]."""
        ...

    def argument(self, sent_PP: Floats) -> Floats:
        """Return the buffer of an even all-to-all that takes as long as each rank's links do here, [P]."""
        ...


@dataclass(frozen=True)
class Move:
    """Buffers that a task hands to the transport on one rank.

    Attributes:
        collective: What the transport does with them; "" = nothing.
        group: The axes along which the ranks meet.
        input_splits: The rows to every member of the group; for an all-gather and an all-reduce this rank's
            rows.
        output_splits: The rows from every member.
        row_bytes: The bytes of a row.
    """

    collective: Collective
    group: Axes
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]
    row_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Bytes of the buffer that is handed over."""
        return sum(self.input_splits) * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class Routed:
    """What an op's tasks do on every rank, beside what `work` says of even routing.

    Attributes:
        move: Returns what a rank hands to the transport; None = by `sizes`, or nothing is known of it.
        sizes: Returns the rows of every member of a task's group, by rank, [P, W], for an op that moves rows.
        load: Returns how many times the bytes of even routing a task sends, by the links of every rank, [P],
            where samples or experts move; None = as many.
        seconds: Returns a task's seconds on all ranks, given those by its work, where samples or experts
            move; None = these.
        crossing: Returns what moves from rank to rank, in rows, [P, P], where it counts against what a move
            saves; None = nothing.
    """

    move: Callable[[RoutedStep, Task, int], Move] | None = None
    sizes: Callable[[RoutedStep, Task], Counts] | None = None
    load: Callable[[RoutedStep, Task], Floats] | None = None
    seconds: Callable[[RoutedStep, Task, float], float] | None = None
    crossing: Callable[[RoutedStep, Task], Floats] | None = None


def within(collective: Collective, group: Axes, sizes: tuple[int, ...], place: int, row_bytes: int) -> Move:
    """Return the move of a collective whose whole tensor has rows of these sizes, one size per member.

    Args:
        place: The place of this rank among the members.
    """
    own = (sizes[place],)
    match collective:
        case "all_gather":
            return Move(collective, group, own, sizes, row_bytes)
        case "reduce_scatter":  # every member gets parts and adds them, on GPUs in a ring of as many bytes
            return Move("all_to_all", group, sizes, own * len(sizes), row_bytes)
        case "all_reduce":
            return Move(collective, group, (sum(sizes),), (sum(sizes),), row_bytes)
    return Move("", group, (), (), row_bytes)


def gathered(step: RoutedStep, task: Task, rows: int, row_bytes: int) -> Move:
    """Return the move of an all-gather to which every rank brings as many rows.

    Args:
        rows: The rows of every rank.
    """
    return Move("all_gather", task.axes, (rows,), (rows,) * step.sizes.mesh.size(task.axes), row_bytes)


def exchanged(step: RoutedStep, task: Task, rank: int, sent_WW: Counts, row_bytes: int) -> Move:
    """Return the move of an exchange between the members of a task's group.

    Args:
        rank: The rank whose move it is.
        sent_WW: The rows from member to member in this task; what stays is not handed over.
    """
    own = step.sizes.mesh.place(rank, task.axes)
    there, back = (
        tuple(0 if place == own else rows for place, rows in enumerate(row_W.tolist()))
        for row_W in (sent_WW[own], sent_WW[:, own])
    )
    return Move("all_to_all", task.axes, there, back, row_bytes)


def nodes_of(work: Batch, ranks: Sequence[int]) -> Counts:
    """Return the node of every one of these ranks, counted from 0."""
    per_node = work.devices_per_node or work.ranks_per_node * work.etp_size
    nodes = [node_of(rank, per_node) for rank in ranks]
    return np.unique(nodes, return_inverse=True)[1].astype(np.int64)


def links_of(work: Batch, cluster: Rates, ranks: Sequence[int]) -> Links:
    """Return the links between these ranks, by the cluster's rates."""
    return Links(
        nodes=tuple(nodes_of(work, ranks).tolist()),
        across_s_per_byte=1 / cluster.link_bytes_per_s,
        inside_s_per_byte=1 / cluster.intra_bytes_per_s,
        card_per_rank=cluster.link_rate_of == "device",
    )
