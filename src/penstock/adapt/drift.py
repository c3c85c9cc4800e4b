"""Comparison of the parameters that several ranks hold.

Ranks drift apart silently where gradients are scaled, or updates left out, by a condition that is local to a
rank: losses look plausible for long. Machines of different kinds may round updates differently, too: every
update then adds about a unit in the last place, in any direction, and the sum grows as the root of the number
of updates.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.adapt.decoder import Decoder
from penstock.moe import SampleKeys
from penstock.moe.counter import uniform_bits
from penstock.runtime.expert_parallel.alike import fingerprint
from penstock.topology import Control, Layout

EVERY = 64
"""Steps from one comparison to the next; the first comparisons come sooner."""

PIECE = 1 << 20
"""Numbers that are summed at once: the sum needs a copy of twice their size."""

ROUNDING = 8
"""Relative difference that rounding explains after one update, in units of a type's precision."""

MOST_ROUNDING = 0.05
"""Largest relative difference that is taken for rounding, however few digits a type has."""

SKETCHES = 8
"""Sums with random signs that stand for a parameter: they differ by about the norm of the difference."""

DIFFERENT = (
    "parameters that several ranks hold differ between them, by more than rounding explains: ranks scaled "
    "their gradients differently, updated them differently, or began with different values. Clip with "
    "penstock.clip_grad_norm_(model, ...): torch.nn.utils.clip_grad_norm_ and accelerate's clip_grad_norm_ "
    "find another norm on every rank, since experts differ, and a GradScaler skips steps by rank. Begin "
    "again from a checkpoint, or from the same values on all ranks"
)


def is_due(steps: int) -> bool:
    """Return whether to compare after this number of steps: in the 2nd, 3rd, 5th and so on, then rarely."""
    return steps > 0 and (steps % EVERY == 0 or (steps < EVERY and steps & (steps - 1) == 0))


ROUNDED = (
    "parameters that several ranks hold differ between them by about {found:.0e} of their size: machines of "
    "different kinds round differently (up to {limit:.0e} after {updates} updates is taken for that). If all "
    "are alike, look at how gradients are scaled: clip with penstock.clip_grad_norm_(model, ...)"
)


def check_alike(decoder: Decoder, layout: Layout, control: Control, updates: int) -> None:
    """Raise ValueError, on all ranks, if trained parameters that several ranks hold differ too much.

    Too much is more than rounding explains after `updates` updates; rank 0 is warned of any difference.
    Experts are compared among the ranks that hold the same ones. All ranks call this function. It reads all
    parameters, and exchanges 16 bytes, or where they differ 144 per parameter; for experts that other ranks
    have, too, this much for each rank among which they are spread.
    """
    if control.world_size == 1:
        return
    everywhere = _trained(decoder, decoder.replicated_parameters)
    _compare(_Shared(everywhere, 0, 1, control), updates)
    if layout.ep_size < layout.world_size:
        experts = _trained(decoder, decoder.expert_parameters)
        _compare(_Shared(experts, layout.ep_rank, layout.ep_size, control), updates)


def _trained(decoder: Decoder, of_layer: Callable[[int], list[nn.Parameter]]) -> list[nn.Parameter]:
    layers = range(len(decoder.parts))
    return list({id(p): p for layer in layers for p in of_layer(layer) if p.requires_grad}.values())


@dataclass(frozen=True)
class _Shared:
    """Parameters that the ranks at one place of `places` hold alike; other places hold other ones."""

    parameters: list[nn.Parameter]
    place: int
    places: int
    control: Control

    def extremes(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest of every number over the ranks of a place, [places, ...].

        The result is equal on all ranks. NaN counts as infinitely large.
        """
        mine = numbers.nan_to_num(nan=math.inf, posinf=math.inf)
        table = torch.full((2, self.places, *mine.shape), -math.inf, dtype=torch.float64)
        table[:, self.place] = torch.stack([-mine, mine])
        found = self.control.largest(table.flatten().tolist(), "comparing parameters")
        negative, largest = torch.tensor(found, dtype=torch.float64).view_as(table)
        return -negative, largest


def _compare(shared: _Shared, updates: int) -> None:
    pieces = (piece for p in shared.parameters for piece in p.detach().reshape(-1).split(PIECE))
    smallest, largest = shared.extremes(fingerprint(pieces)[:1].cpu())
    if not smallest.equal(largest):
        _judge(shared, updates)


def _judge(shared: _Shared, updates: int) -> None:
    smallest, largest = shared.extremes(torch.stack([_sketch(p) for p in shared.parameters]))
    norms = largest[..., -1].clamp(min=1e-30)
    spread = ((largest - smallest)[..., :-1].square().mean(dim=-1).sqrt() / norms).nan_to_num(nan=math.inf)
    units = torch.tensor([torch.finfo(p.dtype).eps for p in shared.parameters], dtype=torch.float64)
    limits = (ROUNDING * units * math.sqrt(max(1, updates))).clamp(max=MOST_ROUNDING).expand_as(spread)
    worst = int((spread / limits).argmax())
    found, limit = float(spread.flatten()[worst]), float(limits.flatten()[worst])
    if found > limit:
        raise ValueError(DIFFERENT)
    if shared.control.rank == 0:
        warnings.warn(ROUNDED.format(found=found, limit=limit, updates=updates), stacklevel=2)


@torch.no_grad()
def _sketch(parameter: Tensor) -> Tensor:
    """Return sums of a parameter's numbers with random signs, and then its norm: float64 [SKETCHES + 1].

    The signs depend on the places of the numbers, and are equal on every machine.
    """
    keys = SampleKeys(0, torch.zeros(1, dtype=torch.int64, device=parameter.device))
    total = torch.zeros(SKETCHES + 1, dtype=torch.float64, device=parameter.device)
    for place, piece in enumerate(parameter.reshape(-1).split(PIECE)):
        bits = uniform_bits(torch.Size([1, len(piece)]), place, keys)[0]
        precise = piece.double()
        for number in range(SKETCHES):
            total[number] += (precise * (2 * (bits >> number & 1) - 1)).sum()
        total[SKETCHES] += precise.square().sum()
    total[SKETCHES].sqrt_()
    return total.cpu()
