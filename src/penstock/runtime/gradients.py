"""The gradients of a model: the layer with which each is reduced, its buckets, and gradients from outside of
steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.autograd.variable import Variable

from penstock.cost import HeldBytes
from penstock.decision import GradientBytes
from penstock.graph import Lane
from penstock.mesh import Axes, Group
from penstock.moe import MoELayer
from penstock.moe.experts import Experts
from penstock.ops.core import GRADIENT_KINDS, KindName
from penstock.runtime.buckets import (
    BackwardPass,
    Bucket,
    Buckets,
    FlatGradients,
    InPlace,
    ReleasedGradients,
    ScatteredGradients,
    bucket_of,
)
from penstock.runtime.fingerprints import Entry, Marks, Replicated, Snapshot, buffers_of
from penstock.runtime.machinery import Machinery
from penstock.runtime.parts import ModelParts
from penstock.sharding import sharding_of
from penstock.step import StepShape
from penstock.step.shape import FORM_TOKENS
from penstock.topology import Layout

# ---- the layer with which a parameter's gradient is reduced: every parameter has exactly one --------------
#
# A parameter that several layers use belongs to the lowest of them. Backward comes there last, and the
# layer's reduction waits for it; any other layer would send a gradient to which a layer below has still to
# add.


Layers = tuple[tuple[nn.Parameter, ...], ...]


@dataclass(frozen=True)
class Assignment:
    """Parameters by layer, each once.

    Attributes:
        replicated: Parameters outside experts that are not partial.
        several: Ids of expert parameters that several layers use.
        partial: Parameters to whose gradients every rank that shares attention adds a part.
        averaged: Ids of the partial parameters whose part is the whole gradient, so that the sum is divided.
    """

    replicated: Layers
    experts: Layers
    several: frozenset[int]
    partial: Layers
    averaged: frozenset[int] = frozenset()


def assign(parts: ModelParts, model: nn.Module, shape: StepShape | None = None) -> Assignment:
    """Assign every parameter of `parts` and of `model` to one layer, frozen ones too.

    A parameter that `parts` names in no layer goes to layer 0, whose reduction waits for the whole backward.

    Args:
        shape: The shape of the step that reduces them, which says which ranks share attention; None: none do.

    Raises:
        ValueError: If a parameter is both an expert's and replicated, or if different experts share it
            although they are spread over ranks.
    """
    layers = range(len(parts.parts))
    replicated = [parts.replicated_parameters(layer) for layer in layers]
    experts = [parts.expert_parameters(layer) for layer in layers]
    for layer in layers:
        moe = parts.parts[layer].moe
        if moe is None or moe.ep_size == 1:
            continue
        first_names: dict[int, str] = {}
        for name, parameter in moe.experts.named_parameters(remove_duplicate=False):
            first = first_names.setdefault(id(parameter), name)
            if first != name and _numbers(moe, first, parameter) != _numbers(moe, name, parameter):
                raise ValueError(
                    f"layer {layer}: experts.{name} is the same parameter as experts.{first} of another "
                    f"expert; the layer's experts are spread over {moe.ep_size} ranks, each with a copy that "
                    "would be trained differently. Put what experts share into the layer's shared expert."
                )
    of_experts = {id(p) for each in experts for p in each}
    for layer in layers:
        for parameter in replicated[layer]:
            if id(parameter) in of_experts:
                name = names_of(model).get(id(parameter), f"a parameter of layer {layer}")
                raise ValueError(
                    f"{name} is used by an expert, which one rank holds, and by a part that all ranks hold: "
                    "its gradient would be summed over ranks in one place and not in the other. Give the "
                    "expert a parameter of its own, or move what is shared into the shared expert."
                )
    named = {id(p) for each in (*replicated, *experts) for p in each}
    replicated[0] = [*replicated[0], *(p for p in model.parameters() if id(p) not in named)]
    lowest = _lowest(replicated)
    parted: list[nn.Parameter] = []  # those to whose gradients every rank that shares attention adds a part
    averaged: list[nn.Parameter] = []  # those of them whose part is the whole gradient
    if shape is not None and shape.sharing.tp_size > 1:
        for layer in layers:
            parted += parts.partial_parameters(layer)
            if shape.tokens_of(layer) == "split":
                parted += parts.token_parameters(layer)
            elif shape.copies_differ:
                averaged += parts.token_parameters(layer)
    partial = set(map(id, (*parted, *averaged)))
    uses = Counter(use for each in experts for use in set(map(id, each)))
    return Assignment(
        tuple(tuple(p for p in layer if id(p) not in partial) for layer in lowest),
        _lowest(experts),
        frozenset(use for use, number in uses.items() if number > 1),
        tuple(tuple(p for p in layer if id(p) in partial) for layer in lowest),
        frozenset(map(id, averaged)),
    )


def sizes_bytes(parts: ModelParts, model: nn.Module, shape: StepShape, *, edp: bool) -> GradientBytes:
    """Return the bytes of every layer's trained gradients of each kind, for a plan of any expert form.

    Args:
        edp: Whether experts have replicas, with which their gradients are reduced.
    """
    assigned = assign(parts, model, shape)
    forms = FORM_TOKENS if shape.sharing.tp_size > 1 else ()
    layers = [part.moe.experts for part in parts.parts if part.moe is not None]
    sizes = (sum(p.nbytes for p in layer.parameters()) // layer.num_local_experts for layer in layers)
    return GradientBytes(
        _trained_bytes(assigned.replicated),
        _trained_bytes(assigned.experts if edp else ((),) * len(assigned.experts)),
        _trained_bytes(assigned.partial),
        tuple(
            (form, _trained_bytes(assign(parts, model, replace(shape, expert_form=form)).partial))
            for form in forms
        ),
        max(sizes, default=0),
    )


def _trained_bytes(layers: Layers) -> tuple[int, ...]:
    return tuple(sum(p.nbytes for p in parameters if p.requires_grad) for parameters in layers)


def names_of(model: nn.Module, others: Iterable[nn.Parameter] = ()) -> dict[int, str]:
    """Return the first name of every parameter, by id; `others` may be parameters that `model` lacks."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    for number, parameter in enumerate(others):
        names.setdefault(id(parameter), f"parameter {number} outside the module")
    return names


def _lowest(layers: Sequence[Sequence[nn.Parameter]]) -> Layers:
    seen: set[int] = set()
    kept: list[tuple[nn.Parameter, ...]] = []
    for layer in layers:
        kept.append(tuple({id(p): p for p in layer if id(p) not in seen}.values()))
        seen.update(map(id, layer))
    return tuple(kept)


def _numbers(moe: MoELayer, name: str, parameter: nn.Parameter) -> set[int]:
    """Return the experts that a parameter belongs to under this name."""
    return {number for _, number, _ in moe.experts.split(name, parameter)}


# ---- the gradient buckets of a model, rebuilt when the model has changed between two steps ----------------


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
    """The gradients of a model, and the layer with which each is reduced.

    `holds` is asked before every step; `renew` follows where it says no.

    Attributes:
        taken_up: Names of parameters that are new in a step.
        buckets: The gradients of trained parameters; frozen ones keep whatever gradient they have.
        snapshot: The model that the buckets were made for.
        marks: What ranks compare.
        to_sum: The marks as numbers, see `Marks.numbers`.
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
        # Filled when first asked for, since parameters are marked as parts only after this object is made.
        self._alike: dict[Axes, dict[str, nn.Parameter]] | None = None
        self.prepare()

    def holds(self, shape: StepShape) -> bool:
        """Return whether model and buckets still belong together, under a plan of this shape."""
        if self.marks is None:
            return False
        if shape is not self._shape:
            # A plan serves that has the same partial gradients, and reduces them all.
            splits = [(s.sharing, FORM_TOKENS[s.expert_form], s.copies_differ) for s in (shape, self._shape)]
            if splits[0] != splits[1] or any(
                bucket and not pieces
                for kind, numbers in shape.pieces.items()
                for pieces, bucket in zip(numbers, self.buckets.by_kind[kind], strict=True)
            ):
                return False
        self._shape = shape
        return self.snapshot.holds()

    def prepare(self) -> None:
        """Make buckets for the model as it is now, before there is a plan.

        Raises:
            ValueError: If steps cannot train the model.
        """
        if torch.is_inference_mode_enabled():
            raise ValueError(
                "inside torch.inference_mode() no model can be scheduled: its steps train what is made now. "
                "Call parallelize outside of that context; forward passes inside are run as they are"
            )
        self.marks: Marks | None = None
        assigned = self._look()
        self._fill(assigned.replicated, assigned.experts, assigned.partial, assigned.several)

    def renew(self, shape: StepShape) -> None:
        """Make buckets for the model as it is now, and for a plan of this shape; costs a look at new values.

        Raises:
            ValueError: If a change cannot be taken up; it names the parameter, also when asked again.
        """
        self._shape, self.marks = shape, None
        assigned = self._look()
        replicated, _ = _covered(assigned.replicated, shape.pieces["replicated"], self._names)
        partial, _ = _covered(assigned.partial, shape.pieces["partial"], self._names)
        experts, moved = assigned.experts, frozenset[int]()
        if self._sums_experts:
            experts, moved = _covered(experts, shape.pieces["experts"], self._names)
        marked = experts if self._has_edp else ()
        everywhere = tuple((*own, *parts) for own, parts in zip(replicated, partial, strict=True))
        parameters = [p for layer in (*everywhere, *marked) for p in layer]
        names, before = self._names, self._known
        new = [p for p in parameters if id(p) not in before or not before[id(p)].is_still(p, names[id(p)])]
        added = {id(p): _Known(p, names[id(p)], p.dtype, p.shape) for p in new}
        self._known = {id(p): added.get(id(p)) or before[id(p)] for p in parameters}
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
        held = self.snapshot.holds()
        alike = self._alike if held else None
        if alike is None:
            assigned = assign(self._parts, self.model, self._shape)
            dense = [p for layer in (*assigned.replicated, *assigned.partial) for p in layer]
            experts = [p for layer in assigned.experts for p in layer]
            names = names_of(self.model, (*dense, *experts))
            alike = {Group.WORLD: {}, Group.DATA: {}}
            for parameter in dense:
                axes = Group.WORLD if sharding_of(parameter) is None else Group.DATA
                alike[axes][names[id(parameter)]] = parameter
            if self._has_edp:
                alike[Group.EXPERT_DATA] = {names[id(p)]: p for p in experts}
            self._alike = alike if held else None
        buffers = buffers_of(self.model, self.experts_by_layer, self._device)
        return [
            Replicated(axes, named, buffers if axes == Group.WORLD else {}) for axes, named in alike.items()
        ]

    @property
    def experts_by_layer(self) -> list[Experts]:
        """The experts of this rank, of every MoE layer."""
        return [part.moe.experts for part in self._parts.parts if part.moe is not None]

    @property
    def versions(self) -> int:
        """How often the parameters that ranks compare were changed in place, as far as tensors count it."""
        return sum(each.parameter._version for each in self._known.values())

    def experts(self) -> list[nn.Parameter]:
        """Return the trained parameters of this rank's experts, each once."""
        return [p for layer in self._experts for p in layer if p.requires_grad]

    def backward_pass(self, buckets: Buckets) -> BackwardPass:
        """Return the handling of gradients in a backward pass.

        Args:
            buckets: The buckets of its forward pass.
        """
        experts = [] if self._sums_experts else self.experts()
        apart = [p for p in experts if not p._post_accumulate_grad_hooks]
        # Where a parameter has a hook, the pass checks whether it took a gradient away before the last
        # microbatch; such gradients are not reduced here.
        watched = bucket_of(p for p in experts if p._post_accumulate_grad_hooks)
        return BackwardPass([*buckets.all, *watched], self._in_place, apart, self.name_of)

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
            if parameter.is_inference():
                raise ValueError(
                    f"{name} was made inside torch.inference_mode(), and no backward pass may use it: make "
                    "the model outside of that context"
                )
            if parameter.requires_grad and parameter.grad_dtype not in (None, parameter.dtype):
                raise ValueError(
                    f"{name} is {parameter.dtype} and its gradient was to be {parameter.grad_dtype} "
                    "(grad_dtype): steps sum gradients in the types of parameters. Set its grad_dtype to "
                    "None; for sums in float32 keep parameters in float32, and compute under autocast"
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
        self._alike = None
        self._shares = dict.fromkeys(assigned.averaged, 1 / self._layout.tp_size)
        return assigned

    def _fill(self, replicated: Layers, experts: Layers, partial: Layers, at_once: frozenset[int]) -> None:
        reduced = experts if self._sums_experts else ((),) * len(experts)
        layers: dict[KindName, Layers] = {"replicated": replicated, "partial": partial, "experts": reduced}
        shares, updating, mesh = {"partial": self._shares}, self._base.updating, self._layout.mesh

        def buckets(kind: KindName) -> list[Bucket]:
            flat = FlatGradients
            if updating is not None:  # a sole owner keeps all
                owners = mesh.size(GRADIENT_KINDS[kind].axes_of(sharing=self._layout.tp_size > 1))
                flat = ReleasedGradients if updating.releases and owners > 1 else ScatteredGradients
            trained = ([p for p in layer if p.requires_grad] for layer in layers[kind])
            return [bucket_of(each, shares.get(kind), flat) for each in trained]

        self.buckets = Buckets({kind: buckets(kind) for kind in GRADIENT_KINDS}, at_once=at_once)

    def _entries(self, layers: Layers) -> tuple[Entry, ...]:
        entries = []
        for layer, parameters in enumerate(layers):
            for p in parameters:
                record = self._known[id(p)]
                kind = str(p.dtype).removeprefix("torch.")
                entries.append(Entry(record.name, layer, p.requires_grad, kind, tuple(p.shape)))
        return tuple(entries)


def _covered(layers: Layers, chunks: Sequence[int], names: dict[int, str]) -> tuple[Layers, frozenset[int]]:
    """Return every trained parameter in a layer that the plan reduces, its own or the next below, and the ids
    of moved ones.

    A plan has no reduction for a layer that was frozen when it was made. A lower layer's comes later.
    """
    covered: list[list[nn.Parameter]] = [[] for _ in layers]
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
            covered[home].append(p)
            if home != layer:
                moved.add(id(p))
    return tuple(map(tuple, covered)), frozenset(moved)


# ---- gradients of parameters that a model's own code uses outside of steps: of a head on hidden states,
# say
#
# Autograd makes them with this rank's samples alone, and would put them where a step puts sums over ranks. So
# they are caught before they are accumulated. The step whose backward comes next adds them to its own, and
# sums both; where none comes, as with layers that are frozen, they are summed when the backward pass ends.


_ENGINE = Variable._execution_engine


class _Caught(dict[nn.Parameter, Tensor]):
    """Gradients that a backward pass has caught; a plain dict could not be referred to weakly."""


class OutsideGradients:
    """Catches gradients that a model's own code makes outside of steps, and sums them over ranks.

    Attributes:
        averaged: The number of ranks over which gradients are averaged; 1: they are summed.
    """

    def __init__(self, gradients: Gradients, machinery: Machinery) -> None:
        self._gradients, self._machinery = gradients, machinery
        self.averaged = machinery.layout.dp_size
        # The nodes that accumulate gradients, and shapes: while a node is kept, autograd makes no other.
        self._watched: dict[nn.Parameter, tuple[Node, torch.Size]] = {}
        # Autograd's callback at the end of a pass keeps it, so it goes with a pass that fails.
        self._caught = ref(_Caught())
        self._apart = 0
        self._ends = -1  # the backward pass at whose end the rest is summed

    def begin(self, parameters: Iterable[nn.Parameter], *, averaged: int) -> None:
        """Begin a forward pass that uses these parameters outside of a step, and no others.

        Args:
            averaged: The number of ranks over which their gradients are averaged; 1: they are summed.
        """
        self.averaged = averaged
        watched, self._watched = self._watched, {}
        for parameter in parameters:
            if not (parameter.requires_grad and parameter.is_leaf) or parameter.is_inference():
                continue  # steps refuse the latter
            before, shape = watched.get(parameter, (None, None))
            if shape != parameter.shape:
                before = None
                watched.pop(parameter, None)  # once it is gone, autograd makes a node of the present shape
            node = get_gradient_edge(parameter).node
            if before is not node:
                node.register_prehook(partial(self._catch, parameter))
            self._watched[parameter] = node, parameter.shape

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let gradients be accumulated inside this context, where a step makes them."""
        self._apart += 1
        try:
            yield
        finally:
            self._apart -= 1

    def add(self, averaged: int | None) -> None:
        """Add what was caught to gradients that a step will sum.

        Args:
            averaged: See `Ending`.
        """
        self.averaged = averaged or self._machinery.layout.dp_size  # also of what comes after the step
        caught = self._caught() or _Caught()
        while caught:
            parameter, grad = caught.popitem()
            _accumulate(parameter, grad, self._share(parameter, averaged))

    def _share(self, parameter: nn.Parameter, averaged: int | None) -> float:
        """Return what part of the sum over the ranks that hold a parameter is its gradient.

        Ranks that share samples make a loss of all of them each, and their mean counts.
        """
        layout = self._machinery.layout
        copies = 1 if sharding_of(parameter) is not None else layout.tp_size
        return 1 / ((averaged or layout.dp_size) * copies)

    def _catch(self, parameter: nn.Parameter, grads: tuple[Tensor | None, ...]) -> Any:
        (grad,) = grads
        if self._apart or grad is None:
            return None  # accumulated as usual
        caught = self._caught()
        if caught is None:
            caught = _Caught()
            self._caught = ref(caught)
        earlier = caught.get(parameter)
        caught[parameter] = grad.detach() if earlier is None else earlier + grad
        if self._ends != (task := torch._C._current_graph_task_id()):
            self._ends = task
            _ENGINE.queue_callback(partial(self._finish, caught))
        return (None,)

    @torch.no_grad()
    def _finish(self, left: _Caught) -> None:
        """Sum over ranks what no step has taken; all ranks come here with gradients of the same."""
        self._ends = -1
        caught = dict(left)
        left.clear()  # a pass around this one goes on
        if not caught:
            return
        if self._gradients.in_shares:
            raise RuntimeError(
                f"{self._name_of(next(iter(caught)))} is trained by a loss that no step of the "
                "model is a part of, and a sharded optimizer knows gradients of steps alone: use another "
                "optimizer"
            )
        names = {self._name_of(parameter): parameter for parameter in caught}
        transports = self._machinery.transports
        axes = {name: Group.WORLD if sharding_of(p) is None else Group.DATA for name, p in names.items()}
        transports.open((Lane.INTER, each) for each in axes.values())
        what = f"summing gradients of {min(names)} and {len(names) - 1} more"
        for name in sorted(names):
            total = caught[names[name]].clone(memory_format=torch.contiguous_format)
            add = partial(transports.of(Lane.INTER, axes[name]).all_reduce, total, axes[name])
            self._machinery.exchange(what, add)
            _accumulate(names[name], total, self._share(names[name], self.averaged))

    def _name_of(self, parameter: nn.Parameter) -> str:
        """Return the name in the model as it is now: no step may have taken the parameter up."""
        return names_of(self._gradients.model, [parameter])[id(parameter)]


def _accumulate(parameter: nn.Parameter, grad: Tensor, share: float) -> None:
    """Add a share of what may be another's tensor."""
    if parameter.grad is None:
        parameter.grad = grad * share
    else:
        parameter.grad.add_(grad, alpha=share)
