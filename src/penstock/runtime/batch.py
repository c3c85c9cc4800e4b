"""Preparation of a batch: numbers for its samples, and one size on all ranks where slots are fixed.

Ranks may bring different numbers of samples, or none. Dropless routing sends whatever rows there are. With a
fixed number of slots per expert, sizes must be known without asking, so smaller batches are filled up with
samples that are nothing but padding: they go to no expert and count for nothing.

Shapes: B samples of this rank, L tokens per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.device import device_of
from penstock.mesh import Group
from penstock.moe import SampleKeys, Tokens
from penstock.routing.sizes import split_sizes
from penstock.runtime.parts import ModelParts
from penstock.runtime.transport import HostCounts
from penstock.topology import Control, Layout


@dataclass(frozen=True)
class SampleMetadata:
    """The samples of a microbatch on one rank.

    Attributes:
        labels_BL: int64 [B, L]; -100 counts for nothing.
        keys: The keys of the samples' random numbers.
        valid_BL: bool [B, L], False for padding; None if there is none.
        longest: Tokens per sample on the rank that has most, where ranks share the tokens of every sample;
            None: all have equally many.
        stay_whole: Whether every chunk is made of whole samples.
    """

    labels_BL: Tensor
    keys: SampleKeys
    valid_BL: Tensor | None = None
    longest: int | None = None
    stay_whole: bool = False
    _valid_here: HostCounts | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.valid_BL is not None:  # before tasks are issued, for which reading it would wait
            object.__setattr__(self, "_valid_here", HostCounts(self.valid_BL.flatten()))

    @cached_property
    def info(self) -> Tokens:
        """What an MoE layer must know of the samples, the same for every layer."""
        samples, here = len(self.labels_BL), self._valid_here
        return Tokens(
            samples=samples,
            keys=self.keys,
            valid_T=None if self.valid_BL is None else self.valid_BL.flatten(),
            valid_here=None if here is None else lambda: here.numbers,
            most=None if self.longest is None else samples * self.longest,
            stay_whole=self.stay_whole,
        )

    def part(self, rank: int, ranks: int) -> SampleMetadata:
        """Return what is known of this rank's tokens, where `ranks` share those of every sample."""
        length = self.labels_BL.shape[1]
        here = part_of(length, rank, ranks)
        return replace(
            self,
            labels_BL=self.labels_BL[:, here],
            keys=replace(self.keys, first_token=here.start),
            valid_BL=None if self.valid_BL is None else self.valid_BL[:, here],
            longest=max(split_sizes(length, ranks)),
        )

    def num_tokens(self) -> Tensor | int:
        """Return the number of tokens that are not padding."""
        return self.labels_BL.numel() if self.valid_BL is None else self.valid_BL.sum()


def part_of(length: int, rank: int, ranks: int) -> slice:
    """Return where the tokens of `rank`, one of `ranks`, are in a sample of `length` tokens."""
    sizes = split_sizes(length, ranks)
    first = sum(sizes[:rank])
    return slice(first, first + sizes[rank])


@dataclass(frozen=True)
class Batch:
    """One rank's batch, cut into microbatches.

    Attributes:
        tokens: The token ids of every microbatch, int64 [b, L].
        metadata: What else is known of the samples, by microbatch.
        companions: For every microbatch, the number of samples of every rank with which this one exchanges
            samples; () if none move.
    """

    tokens: Sequence[Tensor]
    metadata: Sequence[SampleMetadata]
    companions: Sequence[tuple[int, ...]] = ()

    def part(self, rank: int, ranks: int) -> Batch:
        """Return the batch with this rank's part of the tokens, where `ranks` share those of every sample."""
        here = part_of(self.tokens[0].shape[1], rank, ranks)
        tokens = [tokens_BL[:, here] for tokens_BL in self.tokens]
        return replace(self, tokens=tokens, metadata=[each.part(rank, ranks) for each in self.metadata])


# ---- preparation of a batch -------------------------------------------------------------------------------


NO_LABEL = -100


@dataclass(frozen=True)
class Samples:
    """One rank's batch as it is given.

    Attributes:
        tokens_BL: Token ids, int64 [B, L].
        labels_BL: int64 [B, L]; -100 counts for nothing.
        ids_B: The numbers of the samples, int64 [B].
        valid_BL: bool [B, L], False for padding; None if there is none.
        companions: The number of samples of every rank with which this one exchanges samples; () if none
            move.
        documents_BL: int64 [B, L], where the document of every token begins; None: every sample is one
            document.
    """

    tokens_BL: Tensor
    labels_BL: Tensor
    ids_B: Tensor
    valid_BL: Tensor | None
    companions: tuple[int, ...] = ()
    documents_BL: Tensor | None = None

    def to(self, device: torch.device) -> Samples:
        """Return the samples on a device. A GPU gets those of the host without a wait."""
        there = device_of(device)

        def moved(tensor: Tensor) -> Tensor:
            travels = there.is_gpu and device_of(tensor).is_cpu  # through memory that no caller writes to
            # What comes from a GPU must have come before the host reads it.
            return (
                there.from_host(tensor, device) if travels else tensor.to(device, non_blocking=there.is_gpu)
            )

        return replace(self._each(moved), ids_B=moved(self.ids_B))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Samples:
        """Return these samples with all tensors [B, L] changed."""
        names = ("tokens_BL", "labels_BL", "valid_BL", "documents_BL")
        tensors = {name: tensor for name in names if (tensor := getattr(self, name)) is not None}
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in tensors.items()}
        return replace(self, **changed)

    def cut(self, microbatches: int, seed: int) -> Batch:
        """Cut the batch into microbatches, the larger first; some are empty where samples are fewer."""
        tokens, labels, ids = (
            tensor.tensor_split(microbatches) for tensor in (self.tokens_BL, self.labels_BL, self.ids_B)
        )
        valid, documents = (
            [None] * microbatches if tensor is None else tensor.tensor_split(microbatches)
            for tensor in (self.valid_BL, self.documents_BL)
        )
        pieces = zip(labels, ids, valid, documents, strict=True)
        whole = bool(self.companions)
        metadata = [
            SampleMetadata(
                labels_BL, SampleKeys(seed, ids_B, documents_BL=documents_BL), valid_BL, stay_whole=whole
            )
            for labels_BL, ids_B, valid_BL, documents_BL in pieces
        ]
        sizes = [split_sizes(samples, microbatches) for samples in self.companions]
        return Batch(tokens, metadata, list(zip(*sizes, strict=True)))

    def of_length(self, length: int) -> Samples:
        """Return these samples; an empty batch becomes [0, length]."""
        if len(self.tokens_BL):
            return self
        return self._each(lambda tensor: tensor.new_empty(0, length))

    def filled(self, samples: int, length: int) -> Samples:
        """Return these samples with padding after them, [samples, length]."""
        more = samples - len(self.tokens_BL)
        if more == 0:
            return self
        valid_BL = (
            torch.ones_like(self.tokens_BL, dtype=torch.bool) if self.valid_BL is None else self.valid_BL
        )
        wide = replace(self, valid_BL=valid_BL).of_length(length)
        labels_BL = pad(wide.labels_BL, (0, 0, 0, more), value=NO_LABEL)
        padded = wide._each(lambda tensor: pad(tensor, (0, 0, 0, more)))
        return replace(padded, labels_BL=labels_BL, ids_B=pad(self.ids_B, (0, more)))


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
        numbers = torch.arange(first, first + count, device=device)
        ids_B = numbers * self._layout.dp_size + self._layout.dp_rank
        return ids_B if training else -1 - ids_B


Sizes = Callable[[Samples, int | None], Samples]
"""Returns the batch that this rank will run, where ranks have batches of different sizes, from its samples
and the number of samples of the largest batch of any rank; None: not known. All ranks call it."""


def equal_sizes(control: Control, samples: Samples, largest_batch: int | None) -> Samples:
    """Return the batch filled up with padding to the size of the largest.

    Args:
        largest_batch: Samples of the largest batch of any rank; None: ranks ask each other, by an exchange of
            24 bytes.

    Raises:
        ValueError: On all ranks, if their samples have different lengths; on this one, if it has more samples
            than `largest_batch`.
    """
    batch, length = samples.tokens_BL.shape
    if control.world_size == 1:
        return samples
    if largest_batch is None:
        sizes = (batch, length if batch else -inf, -length if batch else -inf)
        largest, longest, shortest = control.largest(sizes, "comparing the sizes of batches")
        if largest > 0 and longest != -shortest:
            raise ValueError(
                f"ranks have samples of different lengths, {-shortest:.0f} to {longest:.0f} tokens: with "
                "a fixed number of slots per expert all need the same. Fill up with padding and say so "
                "with valid_BL, or route dropless (moe.capacity_factor = none)."
            )
        largest_batch, length = int(largest), int(longest) if largest > 0 else length
    if batch > largest_batch:
        raise ValueError(
            f"largest_batch = {largest_batch}: this rank has a batch of {batch} samples. Give the size "
            "of the largest batch of any rank, the same on all ranks, or leave it out and ranks will ask."
        )
    return samples.filled(largest_batch, length)


Shape = tuple[int, int, bool, bool]
"""A rank's batch: samples, their length, whether padding is marked, whether document starts are."""


def shared_sizes(layout: Layout, control: Control, samples: Samples, largest_batch: int | None) -> Samples:
    """Return the batch with the numbers of samples of its companions.

    Costs an exchange of a few bytes.

    Args:
        largest_batch: Not used: ranks tell each other what they have.

    Raises:
        ValueError: On all ranks, if samples that might meet have different lengths, or if only some ranks
            mark padding or separate documents.
    """
    del largest_batch
    batch, length = samples.tokens_BL.shape
    marks = samples.valid_BL is not None, samples.documents_BL is not None
    # The shapes of every rank, by one exchange of maxima: each is the largest at its place.
    shape, ranks = (batch, length, *marks), layout.world_size
    numbers = [0.0] * (ranks * len(shape))
    numbers[layout.rank * len(shape) : (layout.rank + 1) * len(shape)] = map(float, shape)
    values = iter(control.largest(numbers, "comparing the sizes of batches"))
    everyone: list[Shape] = [
        (int(next(values)), int(next(values)), bool(next(values)), bool(next(values))) for _ in range(ranks)
    ]
    for group in layout.mesh.groups(layout.mesh.all_experts):
        shapes = {rank: everyone[rank] for rank in group if everyone[rank][0]}
        for rank, (_, length_there, marked, separate) in shapes.items():
            first, (_, wanted, marks_padding, separates) = next(iter(shapes.items()))
            if length_there != wanted:
                raise ValueError(
                    f"ranks {first} and {rank} have samples of {wanted} and {length_there} tokens, and "
                    "samples move between them: give all ranks samples of one length, filled up with "
                    "padding (say so with valid_BL), or set placement.samples=none"
                )
            for does, name, here, there in (
                ("marks padding", "valid_BL", marked, marks_padding),
                ("separates documents", "documents_BL", separate, separates),
            ):
                if here != there:
                    raise ValueError(
                        f"rank {rank if here else first} {does} ({name}) and rank {first if here else rank} "
                        f"does not, and samples move between them: give {name} on all ranks, or set "
                        "placement.samples=none"
                    )
    members = layout.mesh.members(layout.rank, layout.mesh.all_experts)
    lengths = [everyone[rank][1] for rank in members if everyone[rank][0]]
    companions = tuple(everyone[rank][0] for rank in members)
    return replace(samples, companions=companions).of_length(lengths[0] if lengths else length)


# ---- checks of what a batch holds -------------------------------------------------------------------------


def check_tensors(
    tokens_BL: Tensor, labels_BL: Tensor, ids_B: Tensor | None, valid_BL: Tensor | None
) -> None:
    """Raise ValueError unless shapes and types of a rank's batch fit together."""
    if tokens_BL.dim() != 2 or labels_BL.shape != tokens_BL.shape:
        shapes = f"{list(tokens_BL.shape)} and {list(labels_BL.shape)}"
        raise ValueError(f"tokens and labels must both be [samples, tokens per sample], not {shapes}")
    if tokens_BL.dtype not in (torch.int64, torch.int32) or labels_BL.dtype != torch.int64:
        raise ValueError(f"tokens and labels must both be int64, not {tokens_BL.dtype} and {labels_BL.dtype}")
    if valid_BL is not None and (valid_BL.shape != tokens_BL.shape or valid_BL.dtype != torch.bool):
        given = f"{valid_BL.dtype} {list(valid_BL.shape)}"
        raise ValueError(
            f"valid_BL must be bool and as large as tokens_BL, {list(tokens_BL.shape)}, not {given}: "
            "True for a token, False for padding"
        )
    if ids_B is not None and (ids_B.shape != tokens_BL.shape[:1] or ids_B.dtype != torch.int64):
        given = f"{ids_B.dtype} {list(ids_B.shape)}"
        raise ValueError(f"sample_ids_B must be int64 [{len(tokens_BL)}], one for each sample, not {given}")


def check_vocabulary(what: str, numbers: Tensor, vocabulary: int, besides: int | None = None) -> None:
    """Raise IndexError unless all numbers are of the vocabulary, or `besides`.

    On a GPU the host would have to wait, so the device itself compares them. It prints the message to
    standard error and stops, as in an embedding of PyTorch. The host learns of it when it waits for the
    device next (`CUDA error: device-side assert triggered`). By then nothing on the device has gone on, so no
    update uses the step.

    Where PyTorch compares them itself, this names what it has refused on a CPU.

    Args:
        what: The name of the numbers, for the message.
        vocabulary: The number of ids, which count from 0.
        besides: Another number that is allowed; None: there is none.
    """
    valid = (numbers >= 0) & (numbers < vocabulary)
    if besides is not None:
        valid |= numbers == besides
    where = f"0 to {vocabulary - 1}" + ("" if besides is None else f", or {besides} for none")
    said = (
        f"is out of bounds: the vocabulary is {where}. Use the model's own tokenizer, or a larger vocabulary"
    )
    if device_of(numbers).is_gpu:
        # The device keeps messages of less than 255 characters.
        torch._assert_async(valid.all(), f"{what} {said}")
    elif not valid.all():
        raise IndexError(f"{what} {int(numbers[~valid][0])} {said}")


def check_sizes(tokens_BL: Tensor, layout: Layout, control: Control) -> None:
    """Raise ValueError, the same on all ranks, if ranks that share attention have batches of other sizes.

    Their tokens would not fit together, and transfers would fail or wait. Costs an exchange of 16 bytes.
    """
    if layout.tp_size == 1:
        return
    everyone = control.gather(tuple(tokens_BL.shape), "comparing the sizes of batches")
    for ranks in layout.mesh.groups(Group.TENSOR):
        for rank in ranks:
            if everyone[rank] != everyone[ranks[0]]:
                raise ValueError(
                    f"ranks {ranks[0]} and {rank} share attention (tp_size = {layout.tp_size}) and were "
                    f"given batches of {list(everyone[ranks[0]])} and {list(everyone[rank])} tokens. Give "
                    "all ranks of a group the same samples: those of layout.dp_rank"
                )


def with_documents(samples: Samples, documents_BL: Tensor | None, parts: ModelParts) -> Samples:
    """Return the samples with the starts of documents.

    Args:
        documents_BL: int64 [B, L], where the document of every token begins; None: every sample is one
            document.

    Raises:
        ValueError: If the model would ignore them.
    """
    tokens_BL = samples.tokens_BL
    if documents_BL is not None and not getattr(parts, "separates_documents", False):
        raise ValueError(
            f"documents_BL: the attention of {type(parts).__name__} does not separate documents. Give one "
            "document per sample, or read keys.documents_BL in embed and mix and set separates_documents"
        )
    if documents_BL is not None and (
        documents_BL.shape != tokens_BL.shape or documents_BL.dtype != torch.int64
    ):
        raise ValueError(
            f"documents_BL must be int64 and as large as tokens_BL, {list(tokens_BL.shape)}, not "
            f"{documents_BL.dtype} {list(documents_BL.shape)}: where the document of every token begins"
        )
    if documents_BL is not None:
        # Every place says its own number or that of the place before, and the first says 0.
        places_L = torch.arange(documents_BL.shape[1], device=documents_BL.device)
        begins_BL = documents_BL == places_L
        goes_on_BL = documents_BL[:, 1:] == documents_BL[:, :-1]
        device_of(documents_BL).check(
            begins_BL[:, :1].all() & (begins_BL[:, 1:] | goes_on_BL).all(),
            "documents_BL must hold, for every token, the place in its sample where its document begins: "
            "0, 0, 0, 3, 3 for documents of three and two tokens. Numbers of documents are something else",
        )
    return replace(samples, documents_BL=documents_BL)
