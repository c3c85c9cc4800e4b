"""Where the tensors of a model's files lie in its parameters.

transformers stacks the experts of a layer when it reads a model, and takes them apart when it writes one.
What it takes apart are views of the parameters, so a checkpoint reads and writes a model in place, by the
names that its files have, and no tensor is in memory twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.overrides import TorchFunctionMode

from penstock.checkpoint.storage import fills
from penstock.families.weights import EXPERT
from penstock.sharding import Sharding


@dataclass(frozen=True)
class Place:
    """Where a tensor of a file lies.

    Attributes:
        source: Name of the parameter or buffer.
        shape: Of the tensor in the file.
        stride: Between its elements in the parameter.
        offset: Of its first element in the parameter.
    """

    source: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the file as a view of its source."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


def places_of(
    model: Any, tensors: Mapping[str, Tensor], spread: Collection[str], first: int, *, original: bool = True
) -> Mapping[str, Place]:
    """Return where the tensors of a model's files lie, by their names.

    Args:
        model: Of transformers. Of its experts it may hold a part alone.
        tensors: Its parameters and buffers that are saved, contiguous, by name.
        spread: Names of parameters that hold a part of the experts.
        first: The number of the first expert of that part.
        original: Whether files have the names of published models, and not those of the model's parameters.
    """
    from transformers.core_model_loading import revert_weight_conversion

    described = {name: torch.empty_like(each, device="meta") for name, each in tensors.items()}
    with _InPlace():
        written = revert_weight_conversion(model, dict(described)) if original else described
    sources = {each.untyped_storage()._cdata: name for name, each in described.items()}
    found: dict[str, dict[str, Place]] = {source: {} for source in sorted(tensors)}  # alike on all ranks
    for name, each in written.items():
        source = sources.get(each.untyped_storage()._cdata)
        if source is not None:
            place = Place(source, tuple(each.shape), each.stride(), int(each.storage_offset()))
            found[source][renumbered(name, first) if source in spread else name] = place
    for source, places in found.items():
        each = described[source]
        boxes = [_box(each, place) for place in places.values()]
        if None in boxes or not fills(each.shape, [box for box in boxes if box is not None]):
            # What is no view is left as the model has it: transformers reads that, too.
            found[source] = {source: Place(source, tuple(each.shape), each.stride(), 0)}
    return {name: place for places in found.values() for name, place in places.items()}


def _box(source: Tensor, place: Place) -> ChunkStorageMetadata | None:
    """Return which box of a tensor lies at a place, as it is or transposed; None if none does."""
    ways = {stride: size for stride, size in zip(place.stride, place.shape, strict=True) if size > 1}
    offsets, sizes, rest = [0] * source.dim(), [1] * source.dim(), place.offset
    for dim in sorted(range(source.dim()), key=source.stride, reverse=True):
        if source.shape[dim] > 1:
            offsets[dim], rest = divmod(rest, source.stride(dim))
            sizes[dim] = ways.get(source.stride(dim), 1)
    box = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    return box if box.sizes.numel() == prod(place.shape) else None


def renumbered(name: str, first: int) -> str:
    """Return the name of an expert's tensor by the expert's number in the whole model."""
    return EXPERT.sub(lambda found: f".experts.{int(found[1]) + first}.", name)


def cut_in_file(cut: Sharding, shape: Sequence[int], whole: Sequence[int]) -> Sharding:
    """Return which part of a file's tensor a rank has that lies in its part of a parameter.

    cut: of the parameter, of one expert. shape, whole: of the file's tensor of one expert, here and in all.
    """
    if (tuple(shape), tuple(whole)) == (cut.part_shape, cut.shape):
        return cut
    (dim,) = (dim for dim, sizes in enumerate(zip(shape, whole, strict=True)) if sizes[0] < sizes[1])
    return Sharding.along(dim, whole, cut.axes, cut.index, cut.count)


class _InPlace(TorchFunctionMode):
    """Leaves out copies: what transformers copies to write it stays a view."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func in (Tensor.contiguous, Tensor.clone, torch.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def saved_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what is saved of a model: every parameter once, and the buffers that its state has."""
    kept = model.state_dict().keys() - set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if name in kept:
            yield name, each
