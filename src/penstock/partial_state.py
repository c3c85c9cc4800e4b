"""State dicts of a rank that holds a share of a model: they say which share, and are checked when loaded.

Parts that are boxes of a whole are DTensors, with the shape of the whole and their place in it, by which
torch's own tools (`torch.distributed.checkpoint`, `get_model_state_dict`, `full_tensor`) know which rank
holds what, on any layout. A module or an optimiser whose parameters are parts gives them out, and takes the
same ones, or whole tensors, of which it keeps its part.

Any other share has the names of the whole, and the shapes of every other share: nothing else tells whose
experts a state dict has. So its module adds an entry `penstock_share` to its state dict, which says in words
what the rank holds, as bytes in a tensor: a mark. It survives copies, prefixes, `torch.save` and casts.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.copies import Mark
from penstock.device import is_dtensor
from penstock.mesh import Axes, Group
from penstock.sharding import Sharding
from penstock.topology.device_mesh import RankMeshes

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

KEY = "penstock_share"
"""Last part of the name of a mark in a state dict; also the attribute of a marked module with the words."""

INSIDE = "penstock_inside"
"""Attribute of a marked module with the beginnings of names of what belongs to the share."""

REMEDY = (
    "Save state_dict() by torch.save on every rank, each in a file of its own, and load it on a rank that "
    "holds the same share. A model of transformers is saved by torch.distributed.checkpoint, too, or whole "
    "by model.save_pretrained(folder) or penstock.save_checkpoint on all ranks, for any number of ranks"
)

SOLE_WRITERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers")
"""Packages that pickle a state dict on one rank, for all ranks."""


class ShareError(RuntimeError):
    """A share of a model was taken for another share, or for the whole model."""


class ShareMark(Tensor):
    """A mark in a state dict: the words for a share, as bytes.

    What `torch.save` writes is an ordinary tensor. Tools that write a state dict of one rank as that of the
    whole model look at every tensor, and get a ShareError from this one: safetensors asks for its address,
    `torch.distributed.checkpoint`, which keeps one of several equal names, for what to write, and a pickle
    for its parts, where one of `SOLE_WRITERS` makes it.
    """

    warned = False  # in this process

    @staticmethod
    def of(share: str) -> ShareMark:
        """Return the mark of a share, given in words."""
        return torch.tensor(list(share.encode()), dtype=torch.uint8, device="cpu").as_subclass(ShareMark)

    def data_ptr(self) -> int:
        for name in torch_callers():
            if name.startswith(("safetensors.", "torch.distributed.checkpoint.")):
                self._refuse(f"a file of {name}")
        return super().data_ptr()

    def __create_write_items__(self, fqn: str, written: object) -> list[object]:
        """Refuse to be planned, in the protocol of `torch.distributed.checkpoint`."""
        del fqn, written
        self._refuse("a file of torch.distributed.checkpoint")

    def __deepcopy__(self, memo: dict[int, Any]) -> ShareMark:
        del memo
        return self.clone().as_subclass(ShareMark)

    def __reduce_ex__(self, protocol: Any) -> Any:
        writer = list(torch_callers())[-1].partition(".")[0]
        if writer in SOLE_WRITERS:
            self._refuse(f"a file of {writer}")
        if not ShareMark.warned and dist.is_initialized() and dist.get_rank() == 0:
            ShareMark.warned = True
            warnings.warn(
                f"rank 0 saves its share of a model, {share_of(self)}: what it alone writes lacks the rest. "
                f"{REMEDY}",
                stacklevel=2,
            )
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def _refuse(self, file: str) -> NoReturn:
        raise ShareError(
            f"this state dict has a rank's share of a model, {share_of(self)}, and would be written as "
            f"{file} as if it were the whole model. {REMEDY}"
        )


def torch_callers() -> Iterator[str]:
    """Yield the modules that have called the caller, through torch, up to the first that is not torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "?")
        yield name
        if name.partition(".")[0] not in ("penstock", "torch", "pickle"):
            return
        frame = frame.f_back


def share_of(mark: Tensor) -> str:
    """Return the words of a mark, which may have been cast to another type or damaged."""
    return bytes(mark.detach().cpu().double().round().clamp(0, 255).byte().tolist()).decode(errors="replace")


def mark_share(module: nn.Module, share: str, inside: Sequence[str] = ("",)) -> None:
    """Mark state dicts of `module` as those of a share, and load no others into it.

    Marking again changes the words alone.

    Args:
        share: What this rank holds, in words that differ between shares.
        inside: Beginnings of the names, in the module, of what belongs to the share; a state dict without any
            of them is not checked.
    """
    is_marked = hasattr(module, KEY)
    setattr(module, KEY, share)  # torch looks up the entries of a state dict as attributes
    if not is_marked:
        setattr(module, INSIDE, tuple(inside))
        module.register_state_dict_post_hook(_write_mark)
        module.register_load_state_dict_pre_hook(_check_mark)


def unmark_share(module: nn.Module) -> None:
    """Let `module`, if it was marked, have the state dicts of a whole module again."""
    if hasattr(module, KEY):
        setattr(module, KEY, "")


def without_marks(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a state dict that are the model's own."""
    return {name: each for name, each in state.items() if name.rpartition(".")[2] != KEY}


def check_marks(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ShareError if a mark in a state dict is not that of this rank, in its own one."""
    for name, mark in own.items():
        if name.rpartition(".")[2] == KEY and name in state:
            check_share(share_of(state[name]), share_of(mark))


def refuse_pickle(what: str) -> NoReturn:
    """Raise TypeError: `what` belongs to this process, with its threads and process groups."""
    raise TypeError(
        f"{what} cannot be pickled (torch.save(model)): it runs on threads and process groups of this "
        f"process. copy.deepcopy copies it here. {REMEDY}"
    )


def _write_mark(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Add the mark to a state dict."""
    del metadata
    if share := getattr(module, KEY):
        state[prefix + KEY] = ShareMark.of(share)


def _check_mark(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Take the mark out of a state dict that is loaded; raise ShareError for that of another share."""
    del others
    here, mark = getattr(module, KEY), state.pop(prefix + KEY, None)
    if not any(name.startswith(tuple(prefix + each for each in getattr(module, INSIDE))) for name in state):
        return
    if mark is None and here:
        raise ShareError(
            f"this rank holds a share of a model, {here}, and the state dict that is loaded does "
            f"not say of which share it is: it is that of a whole model, or {prefix + KEY} was left "
            f"out. {REMEDY}"
        )
    check_share("" if mark is None else share_of(mark), here)


def check_share(found: str, here: str) -> None:
    """Raise ShareError unless a state of the share `found` is loaded into the share `here`."""
    if found != here:
        raise ShareError(
            f"this state has the share of another rank or layout, {found}, and this rank "
            f"holds {here or 'the whole model'}. {REMEDY}"
        )


def mark_states_of_shards(model: nn.Module) -> None:
    """Mark the state dicts of every module of `model` that declares shardings, see `mark_share`."""
    for module in model.modules():
        shardings: dict[str, Sharding] = getattr(module, "shardings", {})
        if shardings:
            mark_share(
                module, "; ".join(sorted({each.in_words for each in shardings.values()})), [*shardings]
            )


PARTS, PART = "penstock_parts", "penstock_part"
"""Attributes of a module with parts, and of a parameter that is one."""

NAMES: dict[Axes, str] = {Group.TENSOR: "tp", Group.EXPERT: "ep", Group.SHARDS: "etp"}
"""The dimensions of meshes along which parameters are cut."""


@dataclass(frozen=True, eq=False)
class Part(Mark):
    """Which part of a whole tensor a rank holds, and who holds the others.

    Attributes:
        sharding: The part.
        meshes: The ranks among which the tensor is cut.
    """

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

        What has another shape is left to torch.

        Args:
            name: The parameter's name in the state dict.
            given: What is loaded.

        Raises:
            ShareError: It is the part of another rank or layout, or has a part's shape and does not say which
                it is.
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
        module.register_state_dict_post_hook(_spread)
        module.register_load_state_dict_pre_hook(_take)
    setattr(module, PARTS, boxes)
    mark_held(module)


def mark_held(model: nn.Module) -> None:
    """Let parameters say again which parts they are: copies, and those that took their place, do not."""
    for module in model.modules():
        parts: Mapping[str, Part] = getattr(module, PARTS, {})
        held = dict(module.named_parameters(remove_duplicate=False)) if parts else {}
        for name in parts.keys() & held.keys():
            setattr(held[name], PART, parts[name])


def _spread(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Make DTensors of parts in a state dict."""
    del metadata
    for name, part in getattr(module, PARTS).items():
        if (held := state.get(prefix + name)) is not None and not held.requires_grad:
            state[prefix + name] = part.spread(held)


def _take(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Take this rank's parts out of what is loaded."""
    del others
    for name, part in getattr(module, PARTS).items():
        if isinstance(given := state.get(prefix + name), Tensor):
            state[prefix + name] = part.of(prefix + name, given)


def taken_state(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's parts of a state dict, without marks.

    Raises:
        ShareError: See `Part.of`.
    """
    taken = without_marks(state)
    mark_held(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in taken and (part := part_of(parameter)) is not None:
            taken[name] = part.of(name, taken[name])
    return taken


def local_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what this rank holds of the entries of a state dict that are the model's own."""
    return {
        name: value.to_local() if is_dtensor(value) else value for name, value in without_marks(state).items()
    }
