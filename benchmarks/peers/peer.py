"""What the comparison sees of a peer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.peers.frame import Frame
from benchmarks.peers.transport import receives_first
from penstock.lab.bench.config import BenchConfig
from penstock.lab.bench.contender import TransportName
from penstock.models import MoEDecoder
from penstock.moe import MoEConfig
from penstock.routing.sizes import capacity_slots
from penstock.runtime.sockets import Sockets
from penstock.topology import Layout
from penstock.trace import TaskRecord

Batch = tuple[Tensor, Tensor]
"""Tokens and labels of this rank, [B, L] each."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every contender works on.

    Attributes:
        model: The model whose weights to start from; it stays as it is.
        max_norm: The norm to which gradients are clipped at the end of an iteration, before an update by the
            peer's own sharded AdamW with a learning rate of 0, as Penstock's do in a comparison; None =
            gradients are left where they are.
    """

    config: BenchConfig
    layout: Layout
    model: MoEDecoder
    batch: Batch
    max_norm: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens of this rank."""
        return self.batch[0].numel()

    @property
    def slots(self) -> int | None:
        """Rows that one rank sends to one expert in Penstock; None if that depends on the routing."""
        moe = self.config.moe
        if moe.capacity_factor is None:
            return None
        return capacity_slots(self.tokens, moe.num_experts, moe.top_k, moe.capacity_factor, moe.min_capacity)


class Peer(ABC):
    """One rank of another system that trains the same decoder on the same batch; a `Contender`.

    Attributes:
        version: The version of its package.
        workarounds: What had to be done to run it here, one sentence each.
        differences: Where its work is not Penstock's, one sentence each.
        transport: `gloo` is as shipped; with `penstock`, receives are posted first and the send buffers of
            its connections are bounded.
    """

    name: str
    workarounds: tuple[str, ...]
    differences: tuple[str, ...]

    def __init__(self, version: str, transport: TransportName, work: Work) -> None:
        self.version, self.transport = version, transport
        self.batch, self._loss, self._clean = work.batch, torch.tensor(torch.nan), True
        before = Sockets.now()
        self.frame = self._build(work)
        if transport == "penstock":
            ours = Sockets.now().since(before)
            ours.limit_send_buffers(work.config.parallel.send_buffer_bytes)

    def prepare(self, number: int = 0) -> None:
        """Clear the gradients of an earlier step, so that `step` has nothing to clear while it is timed."""
        del number  # the same batch every time: all entries do the same work
        self.clear()

    def step(self, number: int = 0) -> None:
        """Forward, backward, the peer's own synchronisation of gradients, and its update where it has one.

        Every rank must call it.

        Gradients of an earlier step are cleared first, unless `clear` has been called since.
        """
        del number  # the same batch every time: all entries do the same work
        if not self._clean:
            self.clear()
        self._clean = False
        with self._inside(), receives_first() if self.transport == "penstock" else nullcontext():
            self._loss = self._run()

    def clear(self) -> None:
        """Clear the gradients, so that `step` has nothing to clear while it is timed."""
        self._clear()
        self._clean = True

    @property
    def loss(self) -> float:
        """Mean token loss of this rank's batch in the last step."""
        return self._loss.item()

    def records(self) -> list[TaskRecord]:
        """Nothing: a peer has no tasks."""
        return []

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Return gradients of the last step by the names of Penstock's model on this rank, in its shapes."""

    @abstractmethod
    def close(self) -> None:
        """Give up process groups and whatever else the peer keeps outside itself. Not collective."""

    @abstractmethod
    def _build(self, work: Work) -> Frame:
        """Return the decoder with this peer's layers, and whatever drives it. Collective."""

    @abstractmethod
    def _inside(self) -> AbstractContextManager[None]:
        """Return a context in which the peer's own code can run."""

    @abstractmethod
    def _run(self) -> Tensor:
        """Run one step and return the loss."""

    @abstractmethod
    def _clear(self) -> None:
        """Clear the gradients."""


def exact_factor(slots: int, tokens: int, moe: MoEConfig) -> float:
    """Return the capacity factor by which ceil(factor * k * tokens / E) is `slots`, however it is rounded."""
    return (slots - 0.5) * moe.num_experts / (moe.top_k * tokens)
