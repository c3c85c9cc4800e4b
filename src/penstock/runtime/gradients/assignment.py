"""The layer with which a parameter's gradient is reduced: every parameter has exactly one.

A parameter that several layers use belongs to the lowest of them. Backward comes there last, and the layer's
reduction waits for it; any other layer would send a gradient to which a layer below has still to add.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from penstock.decision import GradientBytes
from penstock.moe import MoELayer
from penstock.runtime.parts import ModelParts
from penstock.step import StepShape
from penstock.step.shape import FORM_TOKENS

Layers = tuple[tuple[nn.Parameter, ...], ...]


@dataclass(frozen=True)
class Assignment:
    """Parameters by layer, each once. several: ids of expert parameters that several layers use.

    partial: parameters to whose gradients every rank that shares attention adds a part. averaged: ids of
    those partial parameters whose part is the whole gradient, so that the sum is divided.
    """

    replicated: Layers
    experts: Layers
    several: frozenset[int]
    partial: Layers
    averaged: frozenset[int] = frozenset()


def assign(parts: ModelParts, model: nn.Module, shape: StepShape | None = None) -> Assignment:
    """Assign every parameter of `parts` and of `model` to one layer, frozen ones too.

    shape: that of the step that reduces them, which says which ranks share attention; None: none do. A
    parameter that `parts` names in no layer goes to layer 0, whose reduction waits for the whole backward.
    Raises ValueError for a parameter that is an expert's and replicated, and for one that different experts
    share although they are spread over ranks.
    """
    layers = range(len(parts.parts))
    replicated = [parts.replicated_parameters(layer) for layer in layers]
    experts = [parts.expert_parameters(layer) for layer in layers]
    for layer in layers:
        moe = parts.parts[layer].moe
        if moe is not None:
            _check_apart(moe, layer)
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
    partial, averaged = (frozenset[int](),) * 2 if shape is None else _partial(parts, shape)
    uses = Counter(use for each in experts for use in set(map(id, each)))
    return Assignment(
        tuple(tuple(p for p in layer if id(p) not in partial) for layer in lowest),
        _lowest(experts),
        frozenset(use for use, number in uses.items() if number > 1),
        tuple(tuple(p for p in layer if id(p) in partial) for layer in lowest),
        averaged,
    )


def _partial(parts: ModelParts, shape: StepShape) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ids of parameters to whose gradients every rank that shares attention adds a part, and the
    ids of those whose part is the whole gradient."""
    if shape.sharing.tp_size == 1:
        return frozenset(), frozenset()
    parted: list[nn.Parameter] = []
    averaged: list[nn.Parameter] = []
    for layer in range(len(parts.parts)):
        parted += parts.partial_parameters(layer)
        if shape.tokens_of(layer) == "split":
            parted += parts.token_parameters(layer)
        elif shape.copies_differ:
            averaged += parts.token_parameters(layer)
    return frozenset(map(id, (*parted, *averaged))), frozenset(map(id, averaged))


def sizes_bytes(parts: ModelParts, model: nn.Module, shape: StepShape, *, edp: bool) -> GradientBytes:
    """Return the bytes of every layer's trained gradients of each kind, for a plan of any expert form.

    edp: whether experts have replicas, with which their gradients are reduced.
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
    found: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), name)
    for number, parameter in enumerate(others):
        found.setdefault(id(parameter), f"parameter {number} outside the module")
    return found


def _lowest(layers: Sequence[Sequence[nn.Parameter]]) -> Layers:
    seen: set[int] = set()
    kept: list[tuple[nn.Parameter, ...]] = []
    for layer in layers:
        kept.append(tuple({id(p): p for p in layer if id(p) not in seen}.values()))
        seen.update(map(id, layer))
    return tuple(kept)


def _check_apart(moe: MoELayer, layer: int) -> None:
    """Raise ValueError if experts of several ranks share a parameter: its copies would drift apart."""
    if moe.ep_size == 1:
        return
    first_names: dict[int, str] = {}
    for name, parameter in moe.experts.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        if first != name and _numbers(moe, first, parameter) != _numbers(moe, name, parameter):
            raise ValueError(
                f"layer {layer}: experts.{name} is the same parameter as experts.{first} of another expert; "
                f"the layer's experts are spread over {moe.ep_size} ranks, each with a copy that would be "
                "trained differently. Put what experts share into the layer's shared expert."
            )


def _numbers(moe: MoELayer, name: str, parameter: nn.Parameter) -> set[int]:
    """Return the experts that a parameter belongs to under this name."""
    return {number for _, number, _ in moe.experts.split(name, parameter)}
