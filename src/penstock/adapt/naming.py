"""How checkpoints name what a rank has of a model of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from penstock.adapt.decoder import CutLayer, Decoder
from penstock.checkpoint.storage import Named
from penstock.families.adapters import ExpertAxis, InTurn, axes_of
from penstock.families.experts import sharding_of_experts
from penstock.families.in_files import Place, cut_in_file, places_of, saved_tensors
from penstock.families.weights import EXPERT
from penstock.mesh import Group
from penstock.sharding import Sharding, shardings_of
from penstock.topology import Layout


class ModelNaming:
    """The names of tensors of a model of transformers.

    Files have those of transformers; the optimiser's state those of the model, whose experts are stacked.
    original: see `places_of`.
    """

    def __init__(self, layout: Layout, decoder: Decoder, model: nn.Module, *, original: bool = True) -> None:
        self._layout, self._model, self._original = layout, model, original
        self._shardings, self._axes = shardings_of(model), expert_axes(model, decoder)
        placement = next(part.moe.placement for part in decoder.parts if part.moe is not None)
        self._first = placement.held(layout.ep_rank)[0]
        self._places: Mapping[str, tuple[Place, Sharding | None]] | None = None

    def in_files(self) -> Iterator[Named]:
        """Yield views of the model's tensors, as files of transformers have them."""
        tensors = {name: each.detach() for name, each in saved_tensors(self._model)}
        if self._places is None:  # worked out once for a save, which asks several times
            self._places = self._found(tensors)
        for name, (place, each) in self._places.items():
            view = place.view(tensors[place.source])
            if place.source not in self._axes or _is_of_one(name):
                yield name, view, each
            else:
                yield name, *self.part_of(place.source, view, each)

    def _found(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Place, Sharding | None]]:
        """Return where tensors of files lie, with what part this rank has; of experts, of one expert."""
        here = whole = self._places_of(tensors)
        if cut := self._axes.keys() & self._shardings.keys():
            shapes = {name: (len(tensors[name]), *self._shardings[name].shape) for name in cut}
            widened = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
            whole = self._places_of({**tensors, **widened})
        found: dict[str, tuple[Place, Sharding | None]] = {}
        for name, place in here.items():
            each = self._shardings.get(place.source)
            if each is not None and place.source in cut:
                shapes_of_one = (at.shape[0 if _is_of_one(name) else 1 :] for at in (place, whole[name]))
                each = cut_in_file(each, *shapes_of_one)
            found[name] = place, each
        return found

    def _places_of(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Place]:
        return places_of(self._model, tensors, self._axes.keys(), self._first, original=self._original)

    def split(self, name: str, tensor: Tensor, suffix: str = "") -> Iterable[Named]:
        """Return a tensor of a parameter's shape, by the parameter's name."""
        return [(f"{name}{suffix}", *self.part_of(name, tensor))]

    def part_of(
        self, name: str, tensor: Tensor, each: Sharding | None = None
    ) -> tuple[Tensor, Sharding | None]:
        """Return a tensor of a parameter's shape, and what part of the whole that is.

        Experts that lie in turn get their own axis, on one rank, too. each: the part of a tensor of one
        expert, where that is not the parameter's.
        """
        axis, layout, each = self._axes.get(name), self._layout, each or self._shardings.get(name)
        if axis is None:
            return tensor, each
        if not isinstance(axis, InTurn):
            return tensor, sharding_of_experts(tensor.shape, each, layout)
        tensor = tensor.unflatten(1, (axis.rank, -1))
        if layout.ep_size == 1:
            return tensor, None
        whole = (*tensor.shape[:2], tensor.shape[2] * layout.ep_size)
        return tensor, Sharding.along(2, whole, Group.EXPERT, layout.ep_rank, layout.ep_size)


def _is_of_one(name: str) -> bool:
    """Return whether a tensor of a file is of one expert, by its name."""
    return EXPERT.search(name) is not None


def expert_axes(model: nn.Module, decoder: Decoder) -> dict[str, ExpertAxis]:
    """Return how experts lie in all parameters of experts, adapters too, by name."""
    cuts = [part.cut for part in decoder.parts if isinstance(part, CutLayer)]
    for cut in cuts:
        cut.follow()  # adapters may have been put on since the last pass
    axes = {p: axis for cut in cuts for p, axis in axes_of(cut.experts).items()}
    return {name: axes[p] for name, p in model.named_parameters(remove_duplicate=False) if p in axes}
