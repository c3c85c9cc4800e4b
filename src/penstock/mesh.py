"""A world of ranks seen as named axes. The only place that computes with ranks; it knows no torch.

One world has several views, and the views share its ranks:

    dense    dp x tp                            replicated parameters; tp shares attention
    experts  edp x ep_node x ep_local x etp     experts; `ep` is ep_node x ep_local, etp shards every expert

The last axis of a view changes fastest from rank to rank. Ranks of one node are consecutive, so `ep_local`
stays inside a node and `ep_node` crosses nodes. A group is what remains when all coordinates but those of
some axes are fixed: `members(rank, ("ep_node",))` are the ranks along that rank's rail.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from math import lcm, prod
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

Axes = tuple[str, ...]
"""Names of axes of one view; () = the rank alone."""
Seconds = npt.NDArray[np.float64]
Ranks = TypeVar("Ranks", int, npt.NDArray[np.int64])
"""A rank, or an array of ranks."""


class Group:
    """The kinds of groups that Penstock's own tasks meet in.

    Attributes:
        EXPERT: The ranks that share a layer's experts.
        NODE: Those of an EXPERT group that are in one node.
        RAIL: Those of an EXPERT group that have the same place in their nodes.
        EXPERT_DATA: The replicas of an expert.
        SHARDS: The ranks that share every one of their experts.
        EXPERT_SHARDS: All ranks that hold a part of some expert of a layer.
        TENSOR: The ranks that share attention and see the same samples.
        DATA: The ranks with the same part of attention and other samples.
        WORLD: All ranks.
    """

    ALONE: Final[Axes] = ()
    EXPERT: Final[Axes] = ("ep",)
    NODE: Final[Axes] = ("ep_local",)
    RAIL: Final[Axes] = ("ep_node",)
    EXPERT_DATA: Final[Axes] = ("edp",)
    SHARDS: Final[Axes] = ("etp",)
    EXPERT_SHARDS: Final[Axes] = ("ep", "etp")
    TENSOR: Final[Axes] = ("tp",)
    DATA: Final[Axes] = ("dp",)
    WORLD: Final[Axes] = ("dp", "tp")

    NAMES: Final[dict[str, Axes]] = {
        "ep": EXPERT,
        "node": NODE,
        "rail": RAIL,
        "edp": EXPERT_DATA,
        "world": WORLD,
        "etp": SHARDS,
        "ep x etp": EXPERT_SHARDS,
        "tp": TENSOR,
        "dp": DATA,
    }
    """The names of the groups in cluster files and messages."""

    @classmethod
    def name(cls, axes: Axes) -> str:
        """Return the name of a kind of group for people; its axes where it has no other name."""
        return next((name for name, own in cls.NAMES.items() if own == axes), " x ".join(axes))


INSIDE = frozenset({"ep_local", "tp", "etp"})
"""Axes along which all ranks are in one node."""
VIEWS: dict[str, Axes] = {"dense": ("dp", "tp"), "experts": ("edp", "ep_node", "ep_local", "etp")}
JOINED: dict[str, Axes] = {"ep": ("ep_node", "ep_local")}
"""Axes that stand for several axes of a view."""


class MeshError(ValueError):
    """Axes that do not belong to one view, or sizes that do not fill the world."""


@cache
def resolve(axes: Axes) -> tuple[str, Axes]:
    """Return the view to which `axes` belong and the view's own axes among them.

    Raises:
        MeshError: If axes are unknown, repeated or of different views.
    """
    single = [each for axis in axes for each in JOINED.get(axis, (axis,))]
    if len(set(single)) < len(single):
        raise MeshError(f"axes {', '.join(axes)}: an axis stands twice")
    for view, own in VIEWS.items():
        if set(single) <= set(own):
            return view, tuple(axis for axis in own if axis in single)
    names = [*(axis for own in VIEWS.values() for axis in own), *JOINED]
    if unknown := [axis for axis in axes if axis not in names]:
        raise MeshError(f"no axis is called {unknown[0]!r}; there are {', '.join(names)}")
    views = "; ".join(f"{view}: {' x '.join(own)}" for view, own in VIEWS.items())
    raise MeshError(
        f"axes {', '.join(axes)} belong to different views of the world ({views}): "
        "a group extends along axes of one view"
    )


def stays_inside(axes: Axes) -> bool:
    """Return whether groups along `axes` never leave a node, however ranks are laid out."""
    return INSIDE.issuperset(resolve(axes)[1])


def node_of(rank: Ranks, node_size: int) -> Ranks:
    """Return the node of a rank, or of every one: ranks of a node are consecutive."""
    return rank // node_size


def place_in_node(rank: Ranks, node_size: int) -> Ranks:
    """Return the place of a rank, or of every one, among the ranks of its node."""
    return rank % node_size


def first_of_node(rank: Ranks, node_size: int) -> Ranks:
    """Return the first rank of a rank's node, or of every one's."""
    return rank - rank % node_size


def num_nodes(ranks: int, node_size: int) -> int:
    """Return how many nodes consecutive ranks fill; 1 where the size of a node is not known (0)."""
    return ranks // node_size if node_size else 1


def ranks_per_node(ranks: int, node_size: int) -> int:
    """Return how many of consecutive `ranks` share a node: all unless they fill several whole nodes."""
    return node_size if 0 < node_size < ranks and ranks % node_size == 0 else ranks


def holders(ranks: int, shards: int) -> int:
    """Return how many ranks, or groups of `shards` ranks that share the same, can hold different things."""
    return ranks // shards


def standing_ranks(mesh: Mesh, node_size: int) -> int:
    """Return how many of the first ranks stand for all: of whole expert groups and whole nodes.

    All of them where such ranks share samples with others.

    Args:
        node_size: Consecutive ranks in one node; 0: one node, or not known.
    """
    period = lcm(mesh.ep_size * mesh.etp_size, node_size or 1)
    return mesh.world_size if mesh.world_size % period or period % mesh.tp_size else period


@cache
def partners(rank: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """Return from whom and to whom a rank sends in every round in which each has one partner.

    In round i these are the ranks i places before it and behind it in a ring of all `ranks`.
    """
    return tuple(((rank - steps) % ranks, (rank + steps) % ranks) for steps in range(1, ranks))


def stage_ranks(ranks: int, stages: int) -> int:
    """Return how many consecutive ranks a pipeline stage has.

    Raises:
        MeshError: If stages would have different numbers of ranks.
    """
    if not 1 <= stages <= ranks or ranks % stages:
        raise MeshError(f"{stages} stages do not divide {ranks} ranks")
    return ranks // stages


def stage_nodes(ranks: int, node_size: int) -> tuple[int, int]:
    """Return the nodes of a stage of consecutive ranks, and its ranks in each of them.

    Raises:
        MeshError: If a stage neither fills whole nodes nor shares one with whole stages.
    """
    if ranks <= node_size and node_size % ranks == 0:
        return 1, ranks
    if ranks % node_size:
        raise MeshError(f"{ranks} ranks neither fill nodes of {node_size} nor divide one")
    return ranks // node_size, node_size


def stage_pairs(ranks: int, sender: int, receiver: int) -> list[tuple[int, int]]:
    """Return who sends to whom between two stages of `ranks` each: ranks of the same place in them."""
    return [(sender * ranks + place, receiver * ranks + place) for place in range(ranks)]


def group_sizes(ranks: int) -> list[int]:
    """Return the sizes of groups into which ranks can be divided, ascending."""
    return [size for size in range(1, ranks + 1) if ranks % size == 0]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The sizes of all axes. `edp` and `dp` are what is left of the world.

    Attributes:
        world_size: All ranks.
        ep_size: Ranks among which the experts of a layer are spread.
        ep_local_size: Ranks of such a group in one node; 0: all.
        tp_size: Ranks that share attention.
        etp_size: Ranks that share every expert.
    """

    world_size: int = 1
    ep_size: int = 1
    ep_local_size: int = 0
    tp_size: int = 1
    etp_size: int = 1

    def __post_init__(self) -> None:
        for name, wanted in (("tp", self.tp_size), ("ep x etp", self.ep_size * self.etp_size)):
            if wanted < 1 or self.world_size % wanted:
                raise MeshError(f"{name} = {wanted} does not divide a world of {self.world_size} ranks")
        if self.ep_size % self.local_size:
            raise MeshError(f"ep_local = {self.local_size} does not divide ep = {self.ep_size}")

    @property
    def local_size(self) -> int:
        """Ranks of an expert group in one node."""
        return self.ep_local_size or self.ep_size

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of every axis."""
        return {
            "dp": self.world_size // self.tp_size,
            "tp": self.tp_size,
            "edp": self.world_size // (self.ep_size * self.etp_size),
            "ep_node": self.ep_size // self.local_size,
            "ep_local": self.local_size,
            "etp": self.etp_size,
        }

    @property
    def all_experts(self) -> Axes:
        """The axes of the ranks that together hold all experts of a layer, each a part of some."""
        return Group.EXPERT if self.etp_size == 1 else Group.EXPERT_SHARDS

    def size(self, axes: Axes) -> int:
        """Return the number of ranks in every group along `axes`."""
        return prod(self.sizes[axis] for axis in resolve(axes)[1])

    def place(self, rank: int, axes: Axes) -> int:
        """Return the place of a rank within its group along `axes`."""
        view, own = resolve(axes)
        place = 0
        left, step = rank, self.world_size
        for axis in VIEWS[view]:
            step //= self.sizes[axis]
            coordinate, left = divmod(left, step)
            if axis in own:
                place = place * self.sizes[axis] + coordinate
        return place

    def group(self, rank: int, axes: Axes) -> int:
        """Return which of the groups along `axes` a rank is in, counted as `groups` lists them."""
        view, own = resolve(axes)
        return self.place(rank, tuple(axis for axis in VIEWS[view] if axis not in own))

    def members(self, rank: int, axes: Axes) -> tuple[int, ...]:
        """Return the ranks of a rank's group along `axes`, in the order of their places."""
        return self.groups(axes)[self.group(rank, axes)]

    def groups(self, axes: Axes) -> tuple[tuple[int, ...], ...]:
        """Return all groups along `axes`, each in the order of its places."""
        groups = self._groups.get(axes)
        if groups is None:
            view, own = resolve(axes)
            others = [i for i, axis in enumerate(VIEWS[view]) if axis not in own]
            inner = [i for i, axis in enumerate(VIEWS[view]) if axis in own]
            ranks = np.arange(self.world_size).reshape(self._shape(view)).transpose(others + inner)
            rows = ranks.reshape(-1, self.size(axes)).tolist()
            groups = self._groups[axes] = tuple(map(tuple, rows))
        return groups

    def last_to_come(self, seconds: Seconds, axes: Axes) -> int:
        """Return the rank that saw a collective alone, in the group in which it took longest.

        Ranks that come before the last one of their group wait for it, and see more.

        Args:
            seconds: The seconds that every rank saw, [ranks].
        """
        last = [min(group, key=seconds.__getitem__) for group in self.groups(axes)]
        return max(last, key=seconds.__getitem__)

    def latest(self, times: Seconds, axes: Axes) -> Seconds:
        """Return for every rank the latest time within its group along `axes`.

        Args:
            times: The time of every rank, [ranks].
        """
        if not axes or self.size(axes) == 1:
            return times
        view, own = resolve(axes)
        by_axis = times.reshape(self._shape(view))
        along = tuple(i for i, axis in enumerate(VIEWS[view]) if axis in own)
        latest = by_axis.max(axis=along, keepdims=True)
        return np.broadcast_to(latest, by_axis.shape).reshape(-1)

    @property
    def silent(self) -> frozenset[Axes]:
        """The kinds of groups that have one rank only, so that nothing is sent in them."""
        return frozenset(axes for axes in Group.NAMES.values() if self.size(axes) == 1)

    def _shape(self, view: str) -> tuple[int, ...]:
        return tuple(self.sizes[axis] for axis in VIEWS[view])

    @cached_property
    def _groups(self) -> dict[Axes, tuple[tuple[int, ...], ...]]:
        return {}
