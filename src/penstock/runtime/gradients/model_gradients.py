"""The gradient buckets of a model, rebuilt when the model has changed between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from penstock.cost import HeldBytes
from penstock.decision import GradientBytes
from penstock.mesh import Group
from penstock.moe.experts import Experts
from penstock.ops.gradients import GRADIENT_KINDS, KindName
from penstock.runtime.fingerprints import Entry, Marks, Replicated, Snapshot, buffers_of
from penstock.runtime.gradients.assignment import Assignment, Layers, assign, names_of, sizes_bytes
from penstock.runtime.gradients.buckets import (
    Buckets,
    FlatGradients,
    GradientBucket,
    ReleasedGradients,
    ScatteredGradients,
)
from penstock.runtime.gradients.in_place import BackwardPass, InPlace
from penstock.runtime.parts import ModelParts
from penstock.sharding import sharding_of
from penstock.step import StepShape
from penstock.step.shape import FORM_TOKENS
from penstock.topology import Layout


@dataclass(frozen=True)
class _Known:
    """A parameter as it was taken up."""

    parameter: nn.Parameter
    name: str
    dtype: torch.dtype
    shape: torch.Size

    def is_still(self, parameter: nn.Parameter, name: str) -> bool:
        same = self.parameter is parameter and self.name == name
        return same and (self.dtype, self.shape) == (parameter.dtype, parameter.shape)


class Gradients:
    """The gradients of a model, and the layer with which each is reduced. `holds` is asked before every step;
    `renew` follows where it says no.

    buckets: trained parameters only; frozen ones keep whatever gradient they have. snapshot: the model that
    they were made for. marks: what ranks compare;
    to_sum: the marks as numbers, see `Marks.numbers`. taken_up: names of parameters that are new in a step.
    """

    def __init__(
        self, model: nn.Module, parts: ModelParts, layout: Layout, device: torch.device, shape: StepShape
    ) -> None:
        self.model, self._parts, self._layout, self._device = model, parts, layout, device
        self._shape = self._base = shape
        apart = isinstance(parts, nn.Module) and parts is not model
        self._modules = (model, cast(nn.Module, parts)) if apart else (model,)
        self._known: dict[int, _Known] = {}
        self.taken_up: tuple[str, ...] = ()
        self._in_place = InPlace()
        self.prepare()

    def holds(self, shape: StepShape) -> bool:
        """Return whether model and buckets still belong together, under a plan of this shape."""
        as_made = self._splits(shape) == self._splits(self._shape)
        if self.marks is None or not as_made:
            return False
        # The plan reduces every bucket that holds something.
        buckets = self.buckets
        pairs = (
            *zip(shape.all_reduce_chunks, buckets.of("replicated"), strict=True),
            *zip(shape.expert_all_reduce_chunks, buckets.of("experts"), strict=True),
            *zip(shape.partial_all_reduce_chunks, buckets.of("partial"), strict=True),
        )
        return all(chunks or not bucket.flats for chunks, bucket in pairs) and self.snapshot.holds()

    @staticmethod
    def _splits(shape: StepShape) -> tuple[object, ...]:
        """Return what decides which gradients are partial. Asked before every step, so without layers."""
        return shape.sharing, FORM_TOKENS[shape.expert_form], shape.copies_differ

    def prepare(self) -> None:
        """Make buckets for the model as it is now, before there is a plan."""
        self.marks: Marks | None = None
        assigned = self._look()
        self._fill(assigned.replicated, assigned.experts, assigned.partial, assigned.several)

    def renew(self, shape: StepShape) -> None:
        """Make buckets for the model as it is now, and for a plan of this shape; costs a look at new values.

        Raises ValueError for a change that cannot be taken up, naming the parameter.
        """
        self._shape = shape
        assigned = self._look()
        replicated, _ = _covered(assigned.replicated, shape.all_reduce_chunks, self._names)
        partial, _ = _covered(assigned.partial, shape.partial_all_reduce_chunks, self._names)
        experts, moved = assigned.experts, frozenset[int]()
        if self._sums_experts:
            experts, moved = _covered(experts, shape.expert_all_reduce_chunks, self._names)
        marked = experts if self._has_edp else ()
        everywhere = tuple((*own, *parts) for own, parts in zip(replicated, partial, strict=True))
        parameters = [p for layer in (*everywhere, *marked) for p in layer]
        names, known = self._names, self._known
        new = [p for p in parameters if id(p) not in known or not known[id(p)].is_still(p, names[id(p)])]
        found = {id(p): _Known(p, names[id(p)], p.dtype, p.shape) for p in new}
        self._known = {id(p): found.get(id(p)) or known[id(p)] for p in parameters}
        self.taken_up = tuple(names[id(p)] for p in new)
        self.marks = Marks(self._entries(everywhere), self._entries(marked))
        self.to_sum = self.marks.numbers(self._layout)
        self._fill(replicated, experts, partial, moved | assigned.several)

    @property
    def sizes_bytes(self) -> GradientBytes:
        """Bytes of every layer's gradients of each kind as they are now, from which a plan is made."""
        return sizes_bytes(self._parts, self.model, self._base, edp=self._sums_experts)

    @property
    def held(self) -> HeldBytes:
        """Bytes of weights on this rank as they are now, for a plan's memory."""
        everything = {id(p): p for module in self._modules for p in module.parameters()}
        experts = [p for layer in assign(self._parts, self.model, self._base).experts for p in layer]
        return HeldBytes(
            weights=sum(p.nbytes for p in everything.values()),
            trained_experts=sum(p.nbytes for p in experts if p.requires_grad),
        )

    @property
    def _has_edp(self) -> bool:
        return self._layout.edp_size > 1

    @property
    def _sums_experts(self) -> bool:
        """Whether expert gradients lie in buckets: those of replicas, or all that a step updates itself."""
        return self._has_edp or self._base.updating is not None

    @property
    def in_shares(self) -> bool:
        """Whether steps sum gradients in shares, for a sharded optimiser."""
        return self._base.updating is not None

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the parameter's first name in the model."""
        return self._names[id(parameter)]

    def replicated(self) -> list[Replicated]:
        """Return what ranks hold alike: parameters, also frozen ones, buffers, and replicas of experts."""
        assigned = assign(self._parts, self.model, self._shape)
        everywhere = [p for each in (assigned.replicated, assigned.partial) for layer in each for p in layer]
        names = names_of(self.model, everywhere)
        buffers = buffers_of(self.model, self.experts_by_layer, self._device)
        found = [
            Replicated(Group.WORLD, {names[id(p)]: p for p in everywhere if sharding_of(p) is None}, buffers),
            Replicated(Group.DATA, {names[id(p)]: p for p in everywhere if sharding_of(p) is not None}),
        ]
        if self._has_edp:
            names = names_of(self.model, experts := [p for layer in assigned.experts for p in layer])
            found.append(Replicated(Group.EXPERT_DATA, {names[id(p)]: p for p in experts}))
        return found

    @property
    def experts_by_layer(self) -> list[Experts]:
        """The experts of this rank, of every MoE layer."""
        return [part.moe.experts for part in self._parts.parts if part.moe is not None]

    @property
    def versions(self) -> int:
        """How often the parameters that ranks compare were changed in place, as far as tensors count it."""
        known = (each.parameter for each in self._known.values())
        return sum(p._version for p in known if not p.is_inference())

    def experts(self) -> list[nn.Parameter]:
        """Return the trained parameters of this rank's experts, each once."""
        return [p for layer in self._experts for p in layer if p.requires_grad]

    def watched(self) -> GradientBucket:
        """Return a bucket of experts without replicas that have hooks on their accumulated gradient.

        It is not reduced, but tells if a hook took a gradient away before the last microbatch.
        """
        experts = [] if self._sums_experts else self.experts()
        return GradientBucket([p for p in experts if p._post_accumulate_grad_hooks])

    def backward_pass(self, buckets: Buckets) -> BackwardPass:
        """Return the handling of gradients in a backward pass. buckets: those of its forward pass."""
        experts = [] if self._sums_experts else self.experts()
        apart = [p for p in experts if not p._post_accumulate_grad_hooks]
        return BackwardPass((*buckets.all, self.watched()), self._in_place, apart, self.name_of)

    def _look(self) -> Assignment:
        """Look at the model as it is now, check it, and return the assignment of its parameters."""
        snapshot, assigned = Snapshot(self._modules), assign(self._parts, self.model, self._shape)
        kinds = assigned.replicated, assigned.partial, assigned.experts
        everything = [p for layers in kinds for layer in layers for p in layer]
        names = names_of(self.model, everything)
        for parameter in everything:
            name = names[id(parameter)]
            if hasattr(parameter, "placements"):
                raise ValueError(
                    f"{name} is a DTensor: steps place and reduce parameters themselves. Do not shard the "
                    "model around them (fully_shard); for sharded layers use MoELayer with ExpertParallel "
                    "instead."
                )
            if not parameter.is_leaf:
                raise ValueError(
                    f"{name} is computed from other tensors (functional_call does that): steps reduce "
                    "gradients of parameters. Give it parameters, or use torch.nn.utils.parametrize."
                )
            here, device = parameter.device, self._device
            if here.type != device.type or device.index not in (None, here.index):
                raise ValueError(
                    f"{name} is on {here}, and the model's steps run on {device}: move the model back, or "
                    "schedule another one that is on the other device from the beginning."
                )
        for layer in assigned.experts:
            for parameter in layer:
                parameter.allreduce = False  # type: ignore[attr-defined]  # the tag that other tools read
        self.snapshot, self._names, self._experts = snapshot, names, assigned.experts
        self._shares = dict.fromkeys(assigned.averaged, 1 / self._layout.tp_size)
        return assigned

    def _fill(self, replicated: Layers, experts: Layers, partial: Layers, at_once: frozenset[int]) -> None:
        reduced = experts if self._sums_experts else ((),) * len(experts)
        layers: dict[KindName, Layers] = {"replicated": replicated, "partial": partial, "experts": reduced}
        shares = {"partial": self._shares}

        def buckets(kind: KindName) -> list[GradientBucket]:
            kept = self._kept(kind)
            return [GradientBucket(_trained(layer), shares.get(kind), kept) for layer in layers[kind]]

        self.buckets = Buckets({kind: buckets(kind) for kind in GRADIENT_KINDS}, at_once=at_once)

    def _kept(self, kind: KindName) -> type[FlatGradients]:
        """Return the kind of buffer for gradients of this kind. A sole owner keeps all."""
        updating, mesh = self._base.updating, self._layout.mesh
        if updating is None:
            return FlatGradients
        owners = mesh.size(GRADIENT_KINDS[kind].axes_of(sharing=self._layout.tp_size > 1))
        return ReleasedGradients if updating.releases and owners > 1 else ScatteredGradients

    def _entries(self, layers: Layers) -> tuple[Entry, ...]:
        found = []
        for layer, parameters in enumerate(layers):
            for p in parameters:
                known = self._known[id(p)]
                kind = str(p.dtype).removeprefix("torch.")
                found.append(Entry(known.name, layer, p.requires_grad, kind, tuple(p.shape)))
        return tuple(found)


def _trained(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if p.requires_grad]


def _covered(layers: Layers, chunks: Sequence[int], names: dict[int, str]) -> tuple[Layers, frozenset[int]]:
    """Return every trained parameter in a layer that the plan reduces, its own or the next below, and the ids
    of moved ones.

    A plan has no reduction for a layer that was frozen when it was made. A lower layer's comes later.
    """
    found: list[list[nn.Parameter]] = [[] for _ in layers]
    moved: set[int] = set()
    for layer, parameters in enumerate(layers):
        homes = [lower for lower in range(layer + 1) if chunks[lower]]
        for p in parameters:
            home = layer if chunks[layer] or not p.requires_grad else max(homes, default=None)
            if home is None:
                raise ValueError(
                    f"{names[id(p)]} is trained now, and the plan reduces no gradients of layer {layer} or "
                    "below: they were frozen when it was made. Call stack.replan() on every rank."
                )
            found[home].append(p)
            if home != layer:
                moved.add(id(p))
    return tuple(map(tuple, found)), frozenset(moved)
