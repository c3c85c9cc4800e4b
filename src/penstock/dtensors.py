"""Parts of a model in state dicts: DTensors, with the shape of the whole and their place in it.

By them torch's own tools (`torch.distributed.checkpoint`, `get_model_state_dict`, `full_tensor`) know which
rank holds what, on any layout. A module or an optimiser whose parameters are parts gives them out, and takes
the same ones, or whole tensors, of which it keeps its part.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from penstock.mesh import Axes, Group
from penstock.partial_state import REMEDY, ShareError, mark_share, unmark_share, without_marks
from penstock.sharding import Sharding
from penstock.topology.device_mesh import RankMeshes

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PARTS, PART = "penstock_parts", "penstock_part"
"""Attributes of a module with parts, and of a parameter that is one."""

NAMES: dict[Axes, str] = {Group.TENSOR: "tp", Group.EXPERT: "ep", Group.SHARDS: "etp"}
"""The dimensions of meshes along which parameters are cut."""


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return whether a tensor is spread over a mesh.

    No DTensor exists before its module has been loaded, which takes a second.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@dataclass(frozen=True, eq=False)
class Part:
    """Which part of a whole tensor a rank holds, and who holds the others."""

    sharding: Sharding
    meshes: RankMeshes

    def spread(self, part: Tensor) -> DTensor:
        """Return a part as that of the whole; both have the same memory."""
        from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

        cuts = {NAMES[axes]: dim for axes, dim in self.sharding.cuts}
        mesh = self.meshes.dense if "tp" in cuts else self.meshes.experts
        placements: list[Placement] = [
            Shard(cuts[name]) if name in cuts else Replicate() for name in mesh.mesh_dim_names or ()
        ]
        whole = torch.empty(self.sharding.shape, device="meta")
        return DTensor.from_local(
            part.detach(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def of(self, name: str, given: Tensor) -> Tensor:
        """Return this rank's part of what is loaded: the same part, by its DTensor, or the whole.

        What has another shape is left to torch. Raises ShareError for the part of another rank or layout,
        and for a tensor of a part's shape that does not say which.
        """
        shape = self.sharding.part_shape
        if not is_dtensor(given):
            if given.shape == self.sharding.shape:
                return self.sharding.part(given.contiguous())
            if given.shape == shape:
                self._refuse(
                    f"{name} {list(shape)} is a part of {list(self.sharding.shape)}, and does not say which"
                )
            return given
        if given.shape != self.sharding.shape:
            return given
        own = self.spread(torch.empty(shape, device="meta"))
        if self._where(given) != self._where(own):
            there = given.device_mesh
            self._refuse(f"{name} is the part at {there.get_coordinate()} of {there}, {given.placements}")
        return given.to_local()

    def _where(self, tensor: DTensor) -> tuple[object, ...]:
        """Return the mesh and placements of a tensor, and its place along the dimensions that are cut."""
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate() or ()
        cut = [at for at, each in zip(coordinate, tensor.placements, strict=False) if not each.is_replicate()]
        return mesh.mesh.tolist(), tensor.placements, cut

    def _refuse(self, found: str) -> None:
        raise ShareError(f"{found}; this rank holds {self.sharding.in_words}. {REMEDY}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        """Return this very object: a copy of a parameter is the same part."""
        del memo
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle a mark as an empty OrderedDict, a type that torch.load always accepts."""
        return OrderedDict, ()


def part_of(parameter: Tensor) -> Part | None:
    """Return which part of a whole a parameter is; None for a whole one, or one that nobody has declared."""
    part = getattr(parameter, PART, None)
    return part if isinstance(part, Part) else None


def spread_states(module: nn.Module, parts: Mapping[str, Sharding], meshes: RankMeshes) -> None:
    """Let state dicts of a module have its parts as DTensors, and load only what is known to be these.

    Parts that are no single box of the whole (those of fused matrices, say) are given out as they are, with a
    mark, see `mark_share`: no placement of a DTensor describes them to `torch.distributed.checkpoint`.
    """
    boxes = {name: Part(each, meshes) for name, each in parts.items() if each.offset is not None}
    unmark_share(module)
    if marked := parts.keys() - boxes.keys():
        mark_share(module, "; ".join(sorted({parts[name].in_words for name in marked})), [*marked])
    if not hasattr(module, PARTS):
        module.register_state_dict_post_hook(_Spread())
        module.register_load_state_dict_pre_hook(_Take())
    setattr(module, PARTS, boxes)
    for name, part in boxes.items():
        setattr(module.get_parameter(name), PART, part)


class _Spread:
    """Makes DTensors of parts in a state dict; a class, as hooks are copied with a module."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        del metadata
        for name, part in getattr(module, PARTS).items():
            if (held := state.get(prefix + name)) is not None and not held.requires_grad:
                state[prefix + name] = part.spread(held)


class _Take:
    """Takes this rank's parts out of what is loaded."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        del others
        for name, part in getattr(module, PARTS).items():
            if isinstance(given := state.get(prefix + name), Tensor):
                state[prefix + name] = part.of(prefix + name, given)


def taken_state(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's parts of a state dict, without marks. Raises ShareError as `Part.of` does."""
    found = without_marks(state)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in found and (part := part_of(parameter)) is not None:
            found[name] = part.of(name, found[name])
    return found


def local_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what this rank holds of the entries of a state dict that are the model's own."""
    return {
        name: each.to_local() if is_dtensor(each) else each for name, each in without_marks(state).items()
    }
