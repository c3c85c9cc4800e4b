"""Which ranks form which group: `world = edp x ep`, ranks of one expert group consecutive."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.config import ConfigError
from penstock.graph import Group

LONGEST_TIMEOUT_S = 1e6


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Section `[parallel]`.

    processes: how many local ranks `penstock train` starts, unless somebody else started them.
    ep_size: over how many ranks the experts of a layer are spread; none = all ranks.
    timeout_s: how long a rank waits for the others before it gives up with an error.
    send_buffer_bytes: what may wait for the wire in one connection (CPU ranks); 0 leaves it to the system.
    Too much delays the other side's announcements, less than rate times round trip slows the link down.
    """

    processes: int = 4
    ep_size: int | None = None
    timeout_s: float = 60.0
    send_buffer_bytes: int = 64 * 1024

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise ConfigError("processes", self.processes, "somebody has to train", "Use 1 or more.")
        if self.ep_size is not None and self.ep_size < 1:
            raise ConfigError("ep_size", self.ep_size, "an expert needs a rank", "Use 1 or more, or none.")
        if not 0 < self.timeout_s <= LONGEST_TIMEOUT_S:
            why = f"must be positive and at most {LONGEST_TIMEOUT_S:.0f} (twelve days)"
            raise ConfigError("timeout_s", self.timeout_s, why, "Use 60.")
        if self.send_buffer_bytes < 0:
            hint = "Use 65536, or 0 for what the system thinks best."
            raise ConfigError("send_buffer_bytes", self.send_buffer_bytes, "must not be negative", hint)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """World = edp x ep. Every rank holds num_experts / ep_size experts; edp ranks hold the same ones."""

    world_size: int
    ep_size: int
    rank: int

    @staticmethod
    def build(config: ParallelConfig, world_size: int, rank: int, num_experts: int) -> Layout:
        """Check that experts and ranks divide; name the nearest size that does."""
        ep_size = world_size if config.ep_size is None else config.ep_size
        valid = [n for n in range(1, world_size + 1) if world_size % n == 0 and num_experts % n == 0]
        if ep_size not in valid:
            nearest = min(valid, key=lambda n: (abs(n - ep_size), n))
            if config.ep_size is None:
                why = f"cannot be shared evenly by {world_size} ranks"
                experts = max(1, round(num_experts / world_size)) * world_size
                hint = f"Nearest valid: {experts}; or spread experts over fewer: parallel.ep_size={nearest}."
                raise ConfigError("moe.num_experts", num_experts, why, hint)
            why = f"must divide the number of ranks ({world_size}) and moe.num_experts ({num_experts})"
            raise ConfigError("parallel.ep_size", ep_size, why, f"Nearest valid: {nearest}.")
        return Layout(world_size=world_size, ep_size=ep_size, rank=rank)

    @property
    def ep_rank(self) -> int:
        """Place inside the expert group."""
        return self.rank % self.ep_size

    @property
    def edp_size(self) -> int:
        """How many replicas every expert has."""
        return self.world_size // self.ep_size

    def members(self, group: Group) -> list[list[int]]:
        """Ranks of every group of this kind, in a fixed order."""
        ranks = range(self.world_size)
        if group is Group.WORLD:
            return [list(ranks)]
        if group is Group.EXPERT:
            return [list(ranks[i : i + self.ep_size]) for i in range(0, self.world_size, self.ep_size)]
        if group is Group.EXPERT_REPLICAS:
            return [list(ranks[i :: self.ep_size]) for i in range(self.ep_size)]
        return [[rank] for rank in ranks]


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The device mesh with the axis names that users know: `edp`, `ep`."""
    return init_device_mesh(device_type, (layout.edp_size, layout.ep_size), mesh_dim_names=("edp", "ep"))


def lane_groups(layout: Layout, timeout_s: float) -> dict[Group, dist.ProcessGroup]:
    """Process groups of one communication lane, its own, so that lanes run at the same time.

    All ranks must call this in the same order. Costs one connection per pair of ranks and group.
    """
    found: dict[Group, dist.ProcessGroup] = {}
    for kind in (Group.WORLD, Group.EXPERT, Group.EXPERT_REPLICAS):
        for ranks in layout.members(kind):
            group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
            if layout.rank in ranks:
                assert group is not None
                found[kind] = group
    return found
