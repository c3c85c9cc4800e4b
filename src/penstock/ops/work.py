"""The work that a task asks of a rank, in operations and bytes: the only facts that prices read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from penstock.graph.task import Task

FLOAT32_BYTES: Final = 4
EXPERT_MATRICES: Final = {"gelu": 2, "swiglu": 3}
"""Matrix products of an expert, by its kind."""

Collective = Literal["", "all_to_all", "leg", "all_reduce", "all_gather", "reduce_scatter"]


Part = Literal["attention", "router", "dense", "shared", "experts", "home", "head", "loss", "hidden"]
"""A part of a model with kernels of its own."""


@dataclass(frozen=True, slots=True)
class Product:
    """Products of `rows` x `inner` by `inner` x `columns`.

    Attributes:
        groups: The number of products in one kernel, whose matrices differ.
        number: The number of such kernels in a task, on average.
    """

    rows: float
    inner: float
    columns: float
    groups: int = 1
    number: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What a forward task asks of a device, by the kinds of its kernels.

    Attributes:
        products: The products of matrices.
        score_flops, score_width: The operations of attention between them, and the width of a head.
        moved_bytes: The bytes that everything else reads from memory and writes to it.
    """

    products: tuple[Product, ...] = ()
    score_flops: float = 0.0
    score_width: float = 0.0
    moved_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of a forward task on one rank with even routing; a backward that computes takes twice as much.

    Attributes:
        flops, copied_bytes: The operations, and the bytes copied, where it computes.
        pieces: The number of parts of that computation.
        collective: What the task does on its lane ("leg": one leg of the step's dispatch).
        sent_bytes: The size of the collective, by the convention of ClusterConfig.
        follows_rows: Whether all of the work grows with the rows that a rank's experts receive.
        kernels: The kernels of the computation on a device; None = not known.
    """

    flops: float = 0.0
    copied_bytes: float = 0.0
    pieces: int = 1
    collective: Collective = ""
    sent_bytes: float = 0.0
    follows_rows: bool = False
    kernels: Kernels | None = None


class Sizes(Protocol):
    """The sizes of a step on one rank, as `work` of an op asks for them."""

    num_experts: int
    top_k: int
    tp_size: int
    etp_size: int
    moe_layers: tuple[bool, ...]
    packed_residual: bool
    """Whether rows bring the residual stream of samples that move."""
    num_replica_slots: int
    """Slots for replicas in one layer, summed over the ranks of an expert group."""
    replica_bytes: float
    """Bytes of the parameters of all experts for which a rank has room as replicas in one layer."""

    def tokens(self, task: Task) -> int:
        """Return the tokens of the task's microbatch: this rank's part where ranks share them."""
        ...

    def members(self, task: Task) -> int:
        """Return the number of ranks that meet in the task."""
        ...

    def samples(self, task: Task) -> int:
        """Return the samples of the task's microbatch on a rank."""
        ...

    def rows(self, task: Task) -> float:
        """Return the token copies that a rank sends to all experts in the task's chunk."""
        ...

    def reduced_bytes(self, task: Task) -> int:
        """Return the bytes of gradients in the task's piece of its buffer."""
        ...

    def owners(self, task: Task) -> int:
        """Return the number of ranks that share what the task updates or gathers."""
        ...

    def hidden_bytes(self, rows: float) -> float: ...

    def wire_bytes(self, rows: float) -> float: ...

    def leg_bytes(self, rows: float, *, outward: bool, between: bool) -> float:
        """Return the bytes in one leg of a dispatch, see `Workload.leg_bytes`."""
        ...

    def coding_bytes(self, rows: float) -> float:
        """Return the bytes that encoding or decoding rows reads and writes, where they travel encoded."""
        ...

    def attention_flops(self, tokens: int) -> float: ...

    def router_flops(self, tokens: int) -> float: ...

    def dense_flops(self, tokens: int) -> float: ...

    def shared_flops(self, tokens: int) -> float: ...

    def expert_flops(self, rows: float) -> float: ...

    def head_flops(self, tokens: int) -> float: ...

    def logit_bytes(self, tokens: int) -> float: ...

    def kernels(self, amount: float, *parts: Part, shares: int = 1, beside_bytes: float = 0.0) -> Kernels:
        """Return the kernels of parts of the model.

        Args:
            amount: The number of tokens, or of rows where a part is that of experts.
            shares: The ranks that divide the width of the parts.
            beside_bytes: The bytes that are read and written beside them.
        """
        ...


WorkOf = Callable[[Task, Sizes], Work]

DIGEST_BYTES = 8


def compared(task: Task, sizes: Sizes) -> Work:
    """Return the work of comparing: every rank tells the others a hash of what it has found on its own."""
    return Work(collective="all_gather", sent_bytes=DIGEST_BYTES * sizes.members(task))
