"""The check that ranks sharing attention work on the same samples, and that, where none share it, all ranks
minimise the same loss, without an exchange of its own.

The marks of samples stand beside those of parameters (`checks.marks`) in the sums of the statistics task,
weighted so that they cancel where the ranks of every group agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from penstock.device import device_of
from penstock.mesh import Group
from penstock.runtime.batch import Samples
from penstock.runtime.checks.marks import weight_among
from penstock.runtime.handlers import Batch
from penstock.runtime.parts import ModelParts
from penstock.topology import Control, Layout

PRIME, PERIOD, BASE = 2**31 - 1, 8191, 31


def with_samples(marks: Tensor, batch: Batch, layout: Layout, terms: int) -> Tensor:
    """Return `marks` with this rank's samples as the last mark; where no ranks share attention, with `terms`,
    a whole number of the terms of its loss."""
    if layout.mp_size == 1:
        of_terms = float(weight_among(Group.WORLD, layout) * terms)
        return torch.cat([marks[:-1], marks.new_full((1,), of_terms)])
    of_samples = weight_among(Group.TENSOR, layout) * _mark(batch).to(marks)
    return torch.cat([marks[:-1], of_samples.view(1)])


def check_samples(total: Tensor, layout: Layout) -> None:
    """Raise ValueError, the same on all ranks, if the sums over ranks say that samples or losses differ.

    Never raises where a transport sums nothing.
    """
    if float(total[0]) == layout.world_size and float(total[-1]) != 0:
        if layout.mp_size == 1:
            raise ValueError(
                "ranks were asked for different losses: coefficients of the balance and z terms, and the "
                "number by which token losses are divided (num_items_in_batch), must be alike on all"
            )
        raise ValueError(
            f"ranks that share attention (mp_size = {layout.mp_size}) were given different samples. Give all "
            "ranks of a group the same tokens, labels, sample_ids_B, valid_BL and documents_BL: those of "
            "layout.dp_rank"
        )


def check_tensors(
    tokens_BL: Tensor, labels_BL: Tensor, ids_B: Tensor | None, valid_BL: Tensor | None
) -> None:
    """Raise ValueError unless shapes and types of a rank's batch fit together."""
    if tokens_BL.dim() != 2 or labels_BL.shape != tokens_BL.shape:
        shapes = f"{list(tokens_BL.shape)} and {list(labels_BL.shape)}"
        raise ValueError(f"tokens and labels must both be [samples, tokens per sample], not {shapes}")
    if valid_BL is not None and (valid_BL.shape != tokens_BL.shape or valid_BL.dtype != torch.bool):
        given = f"{valid_BL.dtype} {list(valid_BL.shape)}"
        raise ValueError(
            f"valid_BL must be bool and as large as tokens_BL, {list(tokens_BL.shape)}, not {given}: "
            "True for a token, False for padding"
        )
    if ids_B is not None and (ids_B.shape != tokens_BL.shape[:1] or ids_B.dtype != torch.int64):
        given = f"{ids_B.dtype} {list(ids_B.shape)}"
        raise ValueError(f"sample_ids_B must be int64 [{len(tokens_BL)}], one for each sample, not {given}")


def check_sizes(tokens_BL: Tensor, layout: Layout, control: Control) -> None:
    """Raise ValueError, the same on all ranks, if ranks that share attention have batches of other sizes.

    Their tokens would not fit together, and transfers would fail or wait. Costs an exchange of 16 bytes.
    """
    if layout.mp_size == 1:
        return
    everyone = control.gather(tuple(tokens_BL.shape), "comparing the sizes of batches")
    for ranks in layout.mesh.groups(Group.TENSOR):
        for rank in ranks:
            if everyone[rank] != everyone[ranks[0]]:
                raise ValueError(
                    f"ranks {ranks[0]} and {rank} share attention (mp_size = {layout.mp_size}) and were "
                    f"given batches of {list(everyone[ranks[0]])} and {list(everyone[rank])} tokens. Give "
                    "all ranks of a group the same samples: those of layout.dp_rank"
                )


def with_documents(samples: Samples, documents_BL: Tensor | None, parts: ModelParts) -> Samples:
    """Return the samples with the starts of documents. Raises ValueError if the model would ignore these."""
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
        device_of(documents_BL).check(
            _are_beginnings(documents_BL),
            "documents_BL must hold, for every token, the place in its sample where its document begins: "
            "0, 0, 0, 3, 3 for documents of three and two tokens. Numbers of documents are something else",
        )
    return replace(samples, documents_BL=documents_BL)


def _are_beginnings(documents_BL: Tensor) -> Tensor:
    """Return whether every place says its own number or that of the place before, and the first says 0."""
    places_L = torch.arange(documents_BL.shape[1], device=documents_BL.device)
    begins_BL = documents_BL == places_L
    goes_on_BL = documents_BL[:, 1:] == documents_BL[:, :-1]
    return begins_BL[:, :1].all() & (begins_BL[:, 1:] | goes_on_BL).all()


def _mark(batch: Batch) -> Tensor:
    """Return a whole number below `PRIME` that is a hash of all that is known of the samples."""
    found: Tensor = batch.tokens[0].new_zeros(())
    known = batch.passengers
    labels, keys = [each.labels_BL for each in known], [each.keys.sample_ids_B for each in known]
    valid = [each.valid_BL for each in known if each.valid_BL is not None]
    documents = [each.keys.documents_BL for each in known if each.keys.documents_BL is not None]
    for pieces in (batch.tokens, labels, keys, valid, documents):
        found = (found * BASE + _mark_of(pieces, found)) % PRIME
    return found


def _mark_of(pieces: Sequence[Tensor], zero: Tensor) -> Tensor:
    """Return a hash weighted by place, so that samples that have changed places are seen."""
    if not pieces:
        return zero
    numbers = torch.cat([piece.flatten() for piece in pieces]).long()
    places = torch.arange(1, len(numbers) + 1, device=numbers.device) % PERIOD + 1
    return ((numbers + 1) % PRIME * places).sum() % PRIME
