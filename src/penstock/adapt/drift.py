"""Whether ranks still have the same parameters, of those that all of them hold.

They drift apart without a word where gradients are scaled, or updates left out, by what one rank has: losses
look plausible for long. Machines of different kinds may round updates differently, too: every update then
adds about a unit in the last place, in any direction, and the sum grows as the root of their number.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from penstock.adapt.decoder import Decoder
from penstock.moe import SampleKeys
from penstock.moe.counter import uniform_bits
from penstock.runtime.expert_parallel.alike import fingerprint
from penstock.topology import Control

EVERY = 64
"""Steps from one comparison to the next; the first ones come sooner."""

PIECE = 1 << 20
"""Numbers that are added up at once: their sum needs a copy of twice their size."""

ROUNDING = 8
"""Relative difference that rounding explains after one update, in units of a type's precision."""

SKETCHES = 8
"""Sums with random signs that stand for a parameter: they differ by about the norm of the difference."""

DIFFERENT = (
    "parameters that all ranks hold differ between them, by more than rounding explains: ranks scaled their "
    "gradients differently, updated them differently, or began with different values. Clip with "
    "penstock.clip_grad_norm_(model, ...): torch.nn.utils.clip_grad_norm_ and accelerate's clip_grad_norm_ "
    "find another norm on every rank, since experts differ, and a GradScaler skips steps by rank. Begin "
    "again from a checkpoint, or from the same values on all ranks"
)


def is_due(steps: int) -> bool:
    """Whether to compare in the step after so many: the 2nd, the 3rd, the 5th and so on, then rarely."""
    return steps > 0 and (steps % EVERY == 0 or (steps < EVERY and steps & (steps - 1) == 0))


ROUNDED = (
    "parameters that all ranks hold differ between them by about {found:.0e} of their size: machines of "
    "different kinds round differently (up to {limit:.0e} after {updates} updates is taken for that). If all "
    "are alike, look at how gradients are scaled: clip with penstock.clip_grad_norm_(model, ...)"
)


def check_alike(decoder: Decoder, control: Control, updates: int) -> None:
    """Raise ValueError, on all ranks, if trained parameters that all of them hold differ by more than
    rounding in so many updates explains; rank 0 is warned if they differ at all.

    All ranks call it. It reads them all, and exchanges 16 bytes, or where they differ 64 for a parameter.
    """
    if control.world_size == 1:
        return
    layers = range(len(decoder.parts))
    shared = {id(p): p for layer in layers for p in decoder.replicated_parameters(layer) if p.requires_grad}
    pieces = (piece for p in shared.values() for piece in p.detach().reshape(-1).split(PIECE))
    mark = float(fingerprint(pieces)[0])
    largest, smallest = control.largest((mark, -mark), "comparing parameters")
    if largest != -smallest:
        _judge(list(shared.values()), control, updates)


def _judge(shared: list[torch.nn.Parameter], control: Control, updates: int) -> None:
    sketches = torch.stack([_sketch(p) for p in shared])
    numbers = [*sketches.flatten().tolist(), *(-sketches).flatten().tolist()]
    largest, smallest = torch.tensor(control.largest(numbers, "comparing parameters")).double().chunk(2)
    norms = torch.stack([p.detach().double().norm().cpu() for p in shared]).clamp(min=1e-30)
    spread = (largest + smallest).view_as(sketches).square().mean(dim=1).sqrt() / norms
    units = torch.tensor([torch.finfo(p.dtype).eps for p in shared], dtype=torch.float64)
    worst = int((spread / units).nan_to_num(nan=math.inf).argmax())
    found, limit = float(spread[worst]), ROUNDING * float(units[worst]) * math.sqrt(max(1, updates))
    if not found <= limit:  # what is not a number, too
        raise ValueError(DIFFERENT)
    if control.rank == 0:
        warnings.warn(ROUNDED.format(found=found, limit=limit, updates=updates), stacklevel=2)


@torch.no_grad()
def _sketch(parameter: Tensor) -> Tensor:
    """Sums of its numbers with signs that their places say, the same on every machine, float64 [SKETCHES]."""
    keys = SampleKeys(0, torch.zeros(1, dtype=torch.int64, device=parameter.device))
    total = torch.zeros(SKETCHES, dtype=torch.float64, device=parameter.device)
    for place, piece in enumerate(parameter.reshape(-1).split(PIECE)):
        bits = uniform_bits(torch.Size([1, len(piece)]), place, keys)[0]
        for number in range(SKETCHES):
            total[number] += (piece.double() * (2 * (bits >> number & 1) - 1)).sum()
    return total.cpu()
