"""Layouts of ranks as PyTorch's device meshes, given by a program or made for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Final, Self
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.config import ConfigError
from penstock.mesh import Axes, Group, Mesh, MeshError, holders
from penstock.topology.control import Control
from penstock.topology.groups import Layout

KEY: Final = "mesh"

Meshes = DeviceMesh | Sequence[DeviceMesh] | Mapping[str, DeviceMesh | ProcessGroup]
"""What a program may give: a mesh of all ranks, several (dense parts, experts), or groups by name."""

SIZES: Final[dict[str, tuple[str, Axes]]] = {
    "tp": ("tp_size", Group.TENSOR),
    "mp": ("tp_size", Group.TENSOR),
    "ep": ("ep_size", Group.EXPERT),
    "etp": ("etp_size", Group.SHARDS),
}
"""Dimensions that say a size, and the groups that ranks along them are."""

DATA: Final[dict[str, Axes]] = {
    **dict.fromkeys(("dp", "ddp", "fsdp", "batch", "dp_replicate", "dp_shard", "dp_shard_in_ep"), Group.DATA),
    **dict.fromkeys(("edp", "efsdp", "dp_shard_mod_ep"), Group.EXPERT_DATA),
}
"""Dimensions along which ranks have samples of their own, and the groups of which they are a part."""

ONE: Final = {
    "cp": "ranks that share a sample's tokens share attention, too: that is `tp`",
    "sp": "ranks that share a sample's tokens share attention, too: that is `tp`",
    "pp": "every rank runs all layers, and experts are spread instead: that is `ep`",
}
"""Dimensions that may have one rank alone."""

RULES: Final = {
    Group.TENSOR: (
        "ranks that share attention are consecutive",
        "Make tp the last dimension, in the order of ranks.",
    ),
    Group.SHARDS: (
        "ranks that share every expert are consecutive",
        "Make etp the last dimension, in the order of ranks.",
    ),
    Group.EXPERT: (
        "ranks with different experts are consecutive, or those of one shard with an etp_size",
        "Put data dimensions before ep, in the order of ranks.",
    ),
    Group.DATA: (
        "ranks that share attention have the same samples",
        "Call that dimension tp, or use a tp_size of 1.",
    ),
    Group.EXPERT_DATA: ("others hold other experts", "Put it before ep, or call it dp."),
}
"""Why groups of a kind are as they are, and how to make a mesh that has them."""

FITTING: Final = 'mesh_dim_names=("dp", "ep"), or ("dp", "tp") and an ep_size'


GroupSizes = dict[str, int]
"""Those of `ep_size`, `tp_size` and `etp_size` that are said."""


def sizes_of(given: Meshes, asked: GroupSizes, control: Control, device_type: str) -> GroupSizes:
    """Return the sizes of groups that a mesh says, with those that were asked for besides.

    All ranks call it.

    Args:
        given: This rank's mesh.
        asked: Sizes that were asked for besides.
        device_type: Type of the model's device, which that of the mesh has to be.

    Raises:
        ConfigError: The mesh is no layout of Penstock's ranks, or contradicts a size; all ranks raise it.
    """
    purpose = "comparing device meshes"
    own = control.agreed(lambda: _ranks_by_name(given, control, device_type), purpose)
    every = control.gather(own, purpose)
    for rank, other in enumerate(every):
        if other.keys() != every[0].keys():
            why = f"rank {rank} has dimensions {_listed(other)}, and rank 0 has {_listed(every[0])}"
            raise ConfigError(KEY, _shape(own), why, "Give all ranks the same mesh.")
    shape = _shape(every[0])
    sizes = dict(asked)
    for name, ranks in every[0].items():
        if name not in (*SIZES, *DATA, *ONE):
            dimensions = _listed((*SIZES, *DATA))
            raise ConfigError(KEY, shape, f"no dimension is called {name!r}", f"There are {dimensions}.")
        if name in ONE and len(ranks) > 1:
            raise ConfigError(KEY, shape, f"{name} = {len(ranks)}: {ONE[name]}", f"Use 1, and {FITTING}.")
        if name in SIZES:
            key, size = SIZES[name][0], len(ranks)
            if sizes.setdefault(key, size) != size:
                why = f"the mesh has {size} ranks along {name}"
                raise ConfigError(key, sizes[key], why, f"Leave {key} out, or make the mesh so.")
    problem = _unlike(every, sizes)
    # Ranks between two of `ep` that are one of `tp` share experts, too.
    if problem and "etp_size" not in sizes:
        narrow = {**sizes, "etp_size": sizes.get("tp_size", 1)}
        sizes, problem = (narrow, None) if not _unlike(every, narrow) else (sizes, problem)
    if problem:
        raise ConfigError(KEY, shape, *problem)
    return sizes


class RankMeshes(Mapping[str, DeviceMesh]):
    """The layout of the ranks as device meshes, for a program's own collectives, samplers and DTensors.

    `meshes["ep"]` has one dimension, `meshes["dp", "tp"]` several of the same view. All dimensions are there,
    also where one rank is alone.

    Attributes:
        dense: The mesh dp x tp, of ranks with samples of their own, and ranks that share attention.
        experts: The mesh edp x ep x etp, of replicas, ranks with different experts, and ranks that share
            every expert.
    """

    _made: ClassVar[WeakKeyDictionary[ProcessGroup, dict[tuple[Layout, str], Self]]] = WeakKeyDictionary()
    """By default group: torch keeps the groups of every mesh, so models of one layout share theirs."""

    @classmethod
    def of(cls, layout: Layout, device_type: str, control: Control) -> Self:
        """Return the meshes of a layout; all ranks ask for them together."""
        default = dist.group.WORLD
        assert default is not None, "ranks have joined"
        made = cls._made.setdefault(default, {})
        if (layout, device_type) not in made:
            control.barrier("making device meshes")
            made[layout, device_type] = cls(layout, device_type)
        return made[layout, device_type]

    def __init__(self, layout: Layout, device_type: str) -> None:
        views = {
            ("dp", "tp"): (layout.dp_size, layout.tp_size),
            ("edp", "ep", "etp"): (layout.edp_size, layout.ep_size, layout.etp_size),
        }
        self.dense, self.experts = (
            init_device_mesh(device_type, sizes, mesh_dim_names=names) for names, sizes in views.items()
        )
        self._views = {name: mesh for mesh in (self.dense, self.experts) for name in _names(mesh)}

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        view = self._views[names if isinstance(names, str) else names[0]]
        mesh: DeviceMesh = view[names]
        return mesh

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def __repr__(self) -> str:
        return f"RankMeshes({', '.join(f'{name}={self[name].size()}' for name in self)})"


# ---- reading -----------------------------------------------------------------------------------------------


def _ranks_by_name(given: object, control: Control, device_type: str) -> dict[str, tuple[int, ...]]:
    """Return this rank's group along every dimension, by its name."""
    if isinstance(given, Mapping):
        return {str(name): _members(name, each, control.rank) for name, each in given.items()}
    meshes = [given] if isinstance(given, DeviceMesh) else given
    if not isinstance(meshes, Sequence) or not all(isinstance(each, DeviceMesh) for each in meshes):
        why = "is no DeviceMesh, no sequence of them, and no mapping of names to groups of ranks"
        raise ConfigError(KEY, type(given).__name__, why, f"Make one by init_device_mesh(..., {FITTING}).")
    by_name: dict[str, tuple[int, ...]] = {}
    for mesh in meshes:
        shape = list(mesh.shape)
        if not mesh.mesh_dim_names:
            raise ConfigError(KEY, shape, "its dimensions have no names", f"Give it {FITTING}.")
        if mesh.get_coordinate() is None or mesh.size() != control.world_size:
            why = f"it has {mesh.size()} of {control.world_size} ranks, and all of them train the model"
            hint = 'Give the mesh of all ranks, or single groups by name: {"ep": mesh["ep"]}.'
            raise ConfigError(KEY, shape, why, hint)
        if mesh.device_type != device_type:
            why = f"it is of {mesh.device_type}, and the model is on {device_type}"
            raise ConfigError(KEY, shape, why, "Move the model, or make the mesh of the model's devices.")
        for name in _names(mesh):
            ranks = _members(name, mesh[name], control.rank)
            if by_name.setdefault(name, ranks) != ranks:
                why = f"two meshes have a dimension {name!r}, of other ranks"
                raise ConfigError(KEY, shape, why, "Give them different names.")
    return by_name


def _members(name: object, along: object, rank: int) -> tuple[int, ...]:
    if isinstance(along, DeviceMesh) and along.ndim == 1:
        members = tuple(along.mesh.tolist())
    elif isinstance(along, ProcessGroup):
        members = tuple(dist.get_process_group_ranks(along))
    else:
        why = f"{name!r} is {type(along).__name__}, and no process group or mesh of one dimension"
        raise ConfigError(KEY, {str(name): str(along)}, why, 'Give this rank\'s group: mesh["ep"].')
    if rank not in members:
        why = f"{name!r} of rank {rank} has the ranks {_listed(members)}, which are others"
        raise ConfigError(KEY, {str(name): len(members)}, why, "Give every rank the group that it is in.")
    return members


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or ())


def _unlike(every: Sequence[Mapping[str, tuple[int, ...]]], sizes: GroupSizes) -> tuple[str, str] | None:
    """Return which group is none of the layout with these sizes, and what to do; None: all are."""
    world_size = len(every)
    ep_size = holders(world_size, sizes.get("etp_size", 1))
    try:
        mesh = Mesh(**{"world_size": world_size, "ep_size": ep_size, **sizes})
    except MeshError:
        return None  # what does not divide is refused with the nearest size, mesh or not
    for rank, own in enumerate(every):
        for name, ranks in own.items():
            kind = SIZES[name][1] if name in SIZES else DATA.get(name, Group.ALONE)
            wanted = mesh.members(rank, kind)
            if ranks != wanted if name in SIZES else not set(wanted).issuperset(ranks):
                why, hint = RULES[kind]
                be = "be" if name in SIZES else "be among"
                problem = (
                    f"{name} of rank {rank} are the ranks {_listed(ranks)}, and must {be} {_listed(wanted)}"
                )
                return f"{problem}: {why}", hint
    return None


def _shape(own: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    return {name: len(ranks) for name, ranks in own.items()}


def _listed(each: Iterable[object]) -> str:
    return ", ".join(map(str, each)) or "none"
