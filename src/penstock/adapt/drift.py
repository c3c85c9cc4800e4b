"""Comparison of the parameters and buffers that several ranks hold.

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

from penstock.adapt.decoder import CutLayer, Decoder
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


HUGE = 1e30
"""The number that stands for an infinite one: its square is far from the largest float64."""

OTHER_BUFFER = (
    "the buffer {name} differs between ranks that hold the same one, by more than rounding explains: it was "
    "updated on some ranks alone, or by what one rank has seen. Sum what it is computed from over all ranks "
    "(torch.distributed.all_reduce; of routers, the tokens per expert) and update it on all ranks alike, or "
    "register it with persistent=False if it is meant to be each rank's own. Begin again from a checkpoint, "
    "or from the same values on all ranks"
)

STATISTICS = ("torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm", "torch.nn.utils.")
"""Python modules of torch whose classes, and classes made from them, keep statistics of a rank's own forward
passes in buffers."""


def is_due(steps: int) -> bool:
    """Return whether to compare after this number of steps: in the 2nd, 3rd, 5th and so on, then rarely."""
    return steps > 0 and (steps % EVERY == 0 or (steps < EVERY and steps & (steps - 1) == 0))


ROUNDED = (
    "parameters that several ranks hold differ between them by about {found:.0e} of their size: machines of "
    "different kinds round differently (up to {limit:.0e} after {updates} updates is taken for that). If all "
    "are alike, look at how gradients are scaled: clip with penstock.clip_grad_norm_(model, ...)"
)


def check_alike(decoder: Decoder, layout: Layout, control: Control, updates: int) -> None:
    """Raise ValueError, on all ranks, if what several ranks hold differs too much: trained parameters, and
    buffers that are saved with the model, but for those of experts.

    Too much is more than rounding explains after `updates` updates; rank 0 is warned of any difference.
    Experts are compared among the ranks that hold the same ones. All ranks call this function. It reads them
    all, and exchanges 16 bytes, or where they differ 144 for each; for experts that other ranks
    have, too, this much for each rank among which they are spread.
    """
    if control.world_size == 1:
        return
    everywhere = _trained(decoder, decoder.replicated_parameters)
    _compare(_Shared(everywhere, 0, 1, control, _buffers(decoder)), updates)
    if layout.ep_size < layout.world_size:
        experts = _trained(decoder, decoder.expert_parameters)
        _compare(_Shared(experts, layout.ep_rank, layout.ep_size, control, {}), updates)


def _trained(decoder: Decoder, of_layer: Callable[[int], list[nn.Parameter]]) -> list[nn.Parameter]:
    layers = range(len(decoder.parts))
    return list({id(p): p for layer in layers for p in of_layer(layer) if p.requires_grad}.values())


def _buffers(decoder: Decoder) -> dict[str, Tensor]:
    """Return by name the buffers that are saved with the model and that all ranks have alike."""
    device = next(decoder.model.parameters()).device
    cuts = [part.cut for part in decoder.parts if isinstance(part, CutLayer)]
    own = {id(module) for cut in cuts for module in cut.experts.modules()}
    found: dict[str, Tensor] = {}
    for path, module in decoder.model.named_modules():
        if id(module) in own or any(kind.__module__.startswith(STATISTICS) for kind in type(module).__mro__):
            continue
        for name, buffer in module._buffers.items():
            saved = buffer is not None and name not in module._non_persistent_buffers_set
            if saved and not buffer.is_complex():
                found[f"{path}.{name}".lstrip(".")] = buffer.to(device)
    return found


@dataclass(frozen=True)
class _Shared:
    """Tensors that the ranks at one place of `places` hold alike; other places hold other ones."""

    parameters: list[nn.Parameter]
    place: int
    places: int
    control: Control
    buffers: dict[str, Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters, and after them buffers."""
        return [*self.parameters, *self.buffers.values()]

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
    pieces = (piece for p in shared.tensors for piece in p.detach().reshape(-1).split(PIECE))
    smallest, largest = shared.extremes(fingerprint(pieces)[:1].cpu())
    if not smallest.equal(largest):
        _judge(shared, updates)


def _judge(shared: _Shared, updates: int) -> None:
    smallest, largest = shared.extremes(torch.stack([_sketch(each) for each in shared.tensors]))
    norms = largest[..., -1].clamp(min=1e-30)
    spread = ((largest - smallest)[..., :-1].square().mean(dim=-1).sqrt() / norms).nan_to_num(nan=math.inf)
    units = torch.tensor([_unit(each.dtype) for each in shared.tensors], dtype=torch.float64)
    limits = (ROUNDING * units * math.sqrt(max(1, updates))).clamp(max=MOST_ROUNDING).expand_as(spread)
    worst = int((spread / limits).argmax())
    found, limit = float(spread.flatten()[worst]), float(limits.flatten()[worst])
    if found > limit:
        number = worst % len(shared.tensors) - len(shared.parameters)
        raise ValueError(DIFFERENT if number < 0 else OTHER_BUFFER.format(name=list(shared.buffers)[number]))
    if shared.control.rank == 0:
        warnings.warn(ROUNDED.format(found=found, limit=limit, updates=updates), stacklevel=2)


def _unit(dtype: torch.dtype) -> float:
    """Return the precision of a type; integers are exact, up to the sums that stand for them."""
    return torch.finfo(dtype if dtype.is_floating_point else torch.float64).eps


@torch.no_grad()
def _sketch(parameter: Tensor) -> Tensor:
    """Return sums of a parameter's numbers with random signs, and then its norm: float64 [SKETCHES + 1].

    The signs depend on the places of the numbers, and are equal on every machine. What is not finite, as in a
    mask, counts as huge: where ranks have it alike, it makes no difference.
    """
    keys = SampleKeys(0, torch.zeros(1, dtype=torch.int64, device=parameter.device))
    total = torch.zeros(SKETCHES + 1, dtype=torch.float64, device=parameter.device)
    for place, piece in enumerate(parameter.reshape(-1).split(PIECE)):
        bits = uniform_bits(torch.Size([1, len(piece)]), place, keys)[0]
        precise = piece.double().nan_to_num(nan=2 * HUGE, posinf=HUGE, neginf=-HUGE)
        for number in range(SKETCHES):
            total[number] += (precise * (2 * (bits >> number & 1) - 1)).sum()
        total[SKETCHES] += precise.square().sum()
    total[SKETCHES].sqrt_()
    return total.cpu()
