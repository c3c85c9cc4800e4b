"""Whether ranks still have the same parameters, of those that all of them hold.

They drift apart without a word where gradients are scaled, or updates left out, by what one rank has: losses
look plausible for long.
"""

from __future__ import annotations

from penstock.adapt.decoder import Decoder
from penstock.runtime.expert_parallel.alike import fingerprint
from penstock.topology import Control

EVERY = 64
"""Steps from one comparison to the next; the first ones come sooner."""

PIECE = 1 << 20
"""Numbers that are added up at once: their sum needs a copy of twice their size."""

DIFFERENT = (
    "parameters that all ranks hold differ between them: ranks scaled their gradients differently, updated "
    "them differently, or began with different values. Clip with penstock.clip_grad_norm_(model, ...): "
    "torch.nn.utils.clip_grad_norm_ and accelerate's clip_grad_norm_ find another norm on every rank, since "
    "experts differ, and a GradScaler skips steps by rank. Begin again from a checkpoint, or from the same "
    "values on all ranks"
)


def is_due(steps: int) -> bool:
    """Whether to compare in the step after so many: the 2nd, the 3rd, the 5th and so on, then rarely."""
    return steps > 0 and (steps % EVERY == 0 or (steps < EVERY and steps & (steps - 1) == 0))


def check_alike(decoder: Decoder, control: Control) -> None:
    """Raise ValueError, on all ranks, if trained parameters that all of them hold differ in a bit.

    All ranks call it. It reads them all, and exchanges 16 bytes.
    """
    if control.world_size == 1:
        return
    layers = range(len(decoder.parts))
    shared = {id(p): p for layer in layers for p in decoder.replicated_parameters(layer) if p.requires_grad}
    pieces = (piece for p in shared.values() for piece in p.detach().reshape(-1).split(PIECE))
    mark = float(fingerprint(pieces)[0])
    largest, smallest = control.largest((mark, -mark), "comparing parameters")
    if largest != -smallest:
        raise ValueError(DIFFERENT)
