"""The check that ranks sharing attention work on the same samples, and that all ranks minimise the same loss,
without an exchange of its own.

The mark of samples stands beside those of values (`fingerprints`) in the sums of the statistics task,
weighted so that it cancels where the ranks of every group agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from zlib import crc32

import torch
from torch import Tensor

from penstock.device import device_of
from penstock.mesh import Group
from penstock.runtime.batch import Samples
from penstock.runtime.fingerprints import LOSS, SAMPLES, SLOPE, TRAINING, weight_among
from penstock.runtime.handlers import Batch
from penstock.runtime.parts import ModelParts
from penstock.topology import Control, Layout

PRIME, PERIOD, BASE = 2**31 - 1, 8191, 31


def fact_of_loss(terms: str, seed: int, layout: Layout) -> float:
    """Return what this rank adds to the sum of LOSS. terms: those of its loss.

    seed: of dropout, which ranks that share attention must draw alike; others may have seeds of their own.
    """
    known = crc32(f"{terms} {seed if layout.tp_size > 1 else None}".encode())
    return float(weight_among(Group.WORLD, layout) * known)


def mark_of_samples(batch: Batch, layout: Layout) -> Tensor:
    """Return what this rank adds to the sum of SAMPLES, where ranks share attention."""
    found: Tensor = batch.tokens[0].new_zeros(())
    known = batch.metadata
    labels, keys = [each.labels_BL for each in known], [each.keys.sample_ids_B for each in known]
    valid = [each.valid_BL for each in known if each.valid_BL is not None]
    documents = [each.keys.documents_BL for each in known if each.keys.documents_BL is not None]
    for pieces in (batch.tokens, labels, keys, valid, documents):
        mark = found
        if pieces:  # weighted by place, so that samples that have changed places are seen
            numbers = torch.cat([piece.flatten() for piece in pieces]).long()
            places = torch.arange(1, len(numbers) + 1, device=numbers.device) % PERIOD + 1
            mark = ((numbers + 1) % PRIME * places).sum() % PRIME
        found = (found * BASE + mark) % PRIME
    return weight_among(Group.TENSOR, layout) * found.double()


def mark_of_slope(gradient: Tensor, layout: Layout) -> Tensor:
    """Return what this rank adds to the sum of SLOPE. gradient: of the loss, as a backward pass got it."""
    bits = gradient.detach().reshape(1).double().view(torch.int64)
    return weight_among(Group.WORLD, layout) * (bits % PRIME).double()[0]


def check_losses(facts: Sequence[float]) -> None:
    """Raise ValueError, the same on all ranks, if these sums of facts say that passes or losses differ."""
    if facts[TRAINING]:
        raise ValueError(
            "some ranks train on a batch that others only evaluate, and would wait for them in backward: "
            "call train() or eval() of the model on all ranks alike, and use torch.no_grad() on all or none"
        )
    if facts[LOSS]:
        raise ValueError(
            "ranks were asked for different losses: coefficients of the balance and z terms, the number by "
            "which token losses are divided (num_items_in_batch), whether labels are given and, where ranks "
            "share attention, the seed of dropout must be alike on all"
        )


def check_samples(sums: Sequence[float], layout: Layout) -> None:
    """Raise ValueError, the same on all ranks, if the sums over ranks say that samples or slopes differ."""
    if sums[SLOPE]:
        raise ValueError(
            "ranks multiplied the loss of the last step by different numbers before backward, so its "
            "gradients are sums of parts that were scaled differently. The loss is that of the batch of all "
            "ranks: divide or scale it alike on all, and use no GradScaler, whose scale differs by rank"
        )
    if sums[SAMPLES]:
        raise ValueError(
            f"ranks that share attention (tp_size = {layout.tp_size}) were given different samples. Give all "
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


def check_vocabulary(what: str, numbers: Tensor, vocabulary: int, besides: int | None = None) -> None:
    """Raise IndexError unless all numbers are of the vocabulary, or `besides`.

    what: the numbers, in words. On a GPU the host would have to wait, so the device itself compares them. It
    prints the message to standard error and stops, as in an embedding of PyTorch. The host learns of it when
    it waits for the device next (`CUDA error: device-side assert triggered`). By then nothing on the device
    has gone on, so no update uses the step.
    """
    known = (numbers >= 0) & (numbers < vocabulary)
    if besides is not None:
        known |= numbers == besides
    where = f"0 to {vocabulary - 1}" + ("" if besides is None else f", or {besides} for none")
    if device_of(numbers).is_gpu:
        # The device keeps messages of less than 255 characters.
        torch._assert_async(known.all(), f"{what} is out of bounds: the vocabulary is {where}")
    elif not known.all():
        found = int(numbers[~known][0])
        raise IndexError(f"{what} {found} is out of bounds: the vocabulary is {where}")


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
