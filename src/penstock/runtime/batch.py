"""Preparation of a batch: numbers for its samples, and one size on all ranks where slots are fixed.

Ranks may bring different numbers of samples, or none. Dropless routing sends whatever rows there are. With a
fixed number of slots per expert, sizes must be known without asking, so smaller batches are filled up with
samples that are nothing but padding: they go to no expert and count for nothing.

Shapes: B samples of this rank, L tokens per sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.moe import SampleKeys
from penstock.routing.sizes import split_sizes
from penstock.runtime.handlers import Batch
from penstock.runtime.sample_metadata import SampleMetadata
from penstock.topology import Control, Layout

NO_LABEL = -100


@dataclass(frozen=True)
class Samples:
    """One rank's batch as it is given.

    valid_BL: bool, False for padding; None if there is none. companions: the number of samples of every rank
    with which this one exchanges samples; () = none move. documents_BL: int64, where the document of every
    token begins; None = every sample is one document.
    """

    tokens_BL: Tensor
    labels_BL: Tensor
    ids_B: Tensor
    valid_BL: Tensor | None
    companions: tuple[int, ...] = ()
    documents_BL: Tensor | None = None

    def to(self, device: torch.device) -> Samples:
        """Return the samples on a device. What is in pinned memory of the host travels without a wait."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return replace(
            self,
            tokens_BL=self.tokens_BL.to(device, non_blocking=True),
            labels_BL=self.labels_BL.to(device, non_blocking=True),
            ids_B=self.ids_B.to(device, non_blocking=True),
            valid_BL=moved(self.valid_BL),
            documents_BL=moved(self.documents_BL),
        )

    def cut(self, microbatches: int, seed: int) -> Batch:
        """Cut the batch into microbatches, the larger first; some are empty where samples are fewer."""
        tokens, labels, ids = (
            each.tensor_split(microbatches) for each in (self.tokens_BL, self.labels_BL, self.ids_B)
        )
        valid, documents = (
            [None] * microbatches if each is None else each.tensor_split(microbatches)
            for each in (self.valid_BL, self.documents_BL)
        )
        known = zip(labels, ids, valid, documents, strict=True)
        whole = bool(self.companions)
        metadata = [
            SampleMetadata(
                labels_BL, SampleKeys(seed, ids_B, documents_BL=documents_BL), valid_BL, stay_whole=whole
            )
            for labels_BL, ids_B, valid_BL, documents_BL in known
        ]
        sizes = [split_sizes(samples, microbatches) for samples in self.companions]
        return Batch(tokens, metadata, list(zip(*sizes, strict=True)))

    def of_length(self, length: int) -> Samples:
        """Return these samples; an empty batch becomes [0, length]."""
        if len(self.tokens_BL):
            return self
        tokens_BL, labels_BL = (each.new_empty(0, length) for each in (self.tokens_BL, self.labels_BL))
        valid_BL, documents_BL = (
            None if each is None else each.new_empty(0, length) for each in (self.valid_BL, self.documents_BL)
        )
        return replace(
            self, tokens_BL=tokens_BL, labels_BL=labels_BL, valid_BL=valid_BL, documents_BL=documents_BL
        )

    def filled(self, samples: int, length: int) -> Samples:
        """Return these samples with padding after them, [samples, length]."""
        more = samples - len(self.tokens_BL)
        if more == 0:
            return self
        valid_BL = self.valid_BL
        if valid_BL is None:
            valid_BL = torch.ones_like(self.tokens_BL, dtype=torch.bool)
        wide = replace(self, valid_BL=valid_BL).of_length(length)
        assert wide.valid_BL is not None
        return Samples(
            tokens_BL=pad(wide.tokens_BL, (0, 0, 0, more)),
            labels_BL=pad(wide.labels_BL, (0, 0, 0, more), value=NO_LABEL),
            ids_B=pad(self.ids_B, (0, more)),
            valid_BL=pad(wide.valid_BL, (0, 0, 0, more), value=False),
            documents_BL=None if wide.documents_BL is None else pad(wide.documents_BL, (0, 0, 0, more)),
        )


class SampleNumbers:
    """Numbers for samples that come without: unique over the run, dealt in turn to ranks with other samples.

    Ranks that share attention work on the same samples and give them the same numbers. Training counts up
    from 0, everything else down from -1: an evaluation between two steps does not change the dropout of the
    second step.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._next = {True: 0, False: 0}

    def take(self, count: int, device: torch.device, *, training: bool) -> Tensor:
        """Return this rank's next `count` numbers, [count]. Ranks may take different counts."""
        first = self._next[training]
        self._next[training] += count
        mine = torch.arange(first, first + count, device=device)
        ids_B = mine * self._layout.dp_size + self._layout.dp_rank
        return ids_B if training else -1 - ids_B


class Sizes(Protocol):
    """How the ranks deal with batches of different sizes."""

    def settle(self, samples: Samples, largest_batch: int | None) -> Samples:
        """Return the batch that this rank will run. All ranks call it."""
        ...


class AnySizes:
    """Every rank runs the samples it has: rows are counted before they travel."""

    def settle(self, samples: Samples, largest_batch: int | None) -> Samples:
        del largest_batch
        return samples


class EqualSizes:
    """Every rank runs as many samples as the largest batch has."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def settle(self, samples: Samples, largest_batch: int | None) -> Samples:
        """Return the batch filled up to the largest. Without `largest_batch` it costs an exchange of 24
        bytes.

        Raises ValueError on all ranks if their samples have different lengths.
        """
        batch, length = samples.tokens_BL.shape
        if self._control.world_size == 1:
            return samples
        if largest_batch is None:
            largest_batch, length = self._agree(batch, length)
        if batch > largest_batch:
            raise ValueError(
                f"largest_batch = {largest_batch}: this rank has a batch of {batch} samples. Give the size "
                "of the largest batch of any rank, the same on all ranks, or leave it out and ranks will ask."
            )
        return samples.filled(largest_batch, length)

    def _agree(self, batch: int, length: int) -> tuple[int, int]:
        """Return the samples of the largest batch and the length of every sample."""
        shortest = -length if batch else -inf
        mine = (batch, length if batch else -inf, shortest)
        largest, longest, shortest = self._control.largest(mine, "comparing the sizes of batches")
        if largest == 0:
            return 0, length
        if longest != -shortest:
            raise ValueError(
                f"ranks have samples of different lengths, {-shortest:.0f} to {longest:.0f} tokens: with a "
                "fixed number of slots per expert all need the same. Fill up with padding and say so with "
                "valid_BL, or route dropless (moe.capacity_factor = none)."
            )
        return int(largest), int(longest)


Shape = tuple[int, int, bool, bool]
"""A rank's batch: samples, their length, whether padding is marked, whether document starts are."""


class SharedSizes:
    """Every rank runs the samples it has, and knows how many samples its exchange partners have."""

    def __init__(self, layout: Layout, control: Control) -> None:
        self._layout, self._control = layout, control

    def settle(self, samples: Samples, largest_batch: int | None) -> Samples:
        """Return the batch with the numbers of samples of its companions. Costs an exchange of a few bytes.

        Raises ValueError on all ranks if samples that might meet have different lengths, or padding is marked
        on some ranks only.
        """
        del largest_batch
        batch, length = samples.tokens_BL.shape
        marks = samples.valid_BL is not None, samples.documents_BL is not None
        everyone = self._gathered((batch, length, *marks))
        for ranks in self._layout.mesh.groups(self._layout.mesh.all_experts):
            shapes = {rank: everyone[rank] for rank in ranks if everyone[rank][0]}
            for rank, (_, length_there, marked, separate) in shapes.items():
                first, (_, wanted, marks_padding, separates) = next(iter(shapes.items()))
                if length_there != wanted:
                    raise ValueError(
                        f"ranks {first} and {rank} have samples of {wanted} and {length_there} tokens, and "
                        "samples move between them: give all ranks samples of one length, filled up with "
                        "padding (say so with valid_BL), or set placement.samples=none"
                    )
                if marked != marks_padding:
                    raise ValueError(
                        f"rank {rank if marked else first} marks padding (valid_BL) and rank "
                        f"{first if marked else rank} does not, and samples move between them: give valid_BL "
                        "on all ranks, or set placement.samples=none"
                    )
                if separate != separates:
                    raise ValueError(
                        f"rank {rank if separate else first} separates documents (documents_BL) and rank "
                        f"{first if separate else rank} does not, and samples move between them: give "
                        "documents_BL on all ranks, or set placement.samples=none"
                    )
        members = self._layout.mesh.members(self._layout.rank, self._layout.mesh.all_experts)
        lengths = [everyone[rank][1] for rank in members if everyone[rank][0]]
        companions = tuple(everyone[rank][0] for rank in members)
        return replace(samples, companions=companions).of_length(lengths[0] if lengths else length)

    def _gathered(self, mine: Shape) -> list[Shape]:
        """Return the shapes of every rank, by one exchange of maxima: each is the largest at its place."""
        ranks, size = self._layout.world_size, len(mine)
        numbers = [0.0] * (ranks * size)
        numbers[self._layout.rank * size : (self._layout.rank + 1) * size] = map(float, mine)
        found = iter(self._control.largest(numbers, "comparing the sizes of batches"))
        return [
            (int(next(found)), int(next(found)), bool(next(found)), bool(next(found))) for _ in range(ranks)
        ]
