"""Which ranks form which group: `world = dp x tp = edp x ep x etp`, see `penstock.mesh`.

Groups of GPUs are of the back end of the device alone. They are made one after the other, in the same order
on all ranks, and each has a first exchange at once. So connections are built before the first step, and a
fault of the network names the group and not a task.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Final, Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from penstock.config import Checked, ConfigError, IndivisibleError, Within
from penstock.config.bounds import Ranks
from penstock.device import Gpu, device_of, gpu_of
from penstock.features.dispatch import Place
from penstock.mesh import Axes, Group, Mesh, group_sizes, holders, num_nodes, ranks_per_node
from penstock.step.shape import TokenLayout
from penstock.topology.control import CommunicationError
from penstock.topology.faults import is_watched, reason
from penstock.topology.meeting_point import SPARE_S, in_thread, within

logger = logging.getLogger(__name__)

SUMS: Final = frozenset({Group.WORLD, Group.EXPERT_DATA, Group.DATA})
"""Groups that sum. The others send rows from rank to rank, for which NCCL has connections of another kind."""
UNWATCHED: Final = timedelta(minutes=30)
"""How much later than the watch torch may end an exchange of GPUs."""
ABORT_S: Final = 10.0
"""Seconds after which nobody waits any longer for process groups that are aborted."""


def prepare(device: torch.device, environ: MutableMapping[str, str]) -> None:
    """Set, where they are unset, the variables with which GPUs work best together; does nothing on a CPU.

    It has effect before the first use of the device, in part before its first process group.

    Raises:
        ConfigError: A variable has a value that makes lanes wait for each other.
    """
    kind = device_of(device)
    kind.set_environment(environ)
    for name, (value, why, hint) in kind.refused.items():
        if environ.get(name) == value:
            raise ConfigError(name, value, why, hint)


def options_of(device: torch.device, ranks: tuple[int, ...], timeout: timedelta) -> Mapping[str, Any]:
    """Return with what `new_group` makes a group of a lane.

    Where ranks watch each other, torch's own limit is only for a watch that fails: it counts from when an
    exchange is issued, however busy the device, and may end the process.
    """
    kind = device_of(device)
    if not kind.is_gpu:
        return {"backend": kind.backend, "timeout": timeout}
    timeout += UNWATCHED if is_watched() else timedelta()
    return gpu_of(device).group_options(device, timeout, connects=len(ranks) > 1)


@contextmanager
def left_to_the_watch(device: torch.device, environ: MutableMapping[str, str]) -> Iterator[None]:
    """Let the device's back end not end this process by itself where ranks watch each other.

    It would, with a number in place of the task, before the watch has found out who is lost. A variable that
    a user has set stays as it is; torch's elastic agent, and so torchrun, sets it to 1 for every rank.
    """
    name = device_of(device).ends_process
    given = environ.get(name) if name else None
    by_agent = given == "1" and "TORCHELASTIC_RUN_ID" in environ
    if not name or not is_watched() or not (given is None or by_agent):
        yield
        return
    with with_variable(environ, name, "0"):
        yield


@contextmanager
def with_variable(environ: MutableMapping[str, str], name: str, value: str) -> Iterator[None]:
    """Give a variable this value inside this context."""
    before = environ.get(name)
    environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del environ[name]
        else:
            environ[name] = before


def first_exchange(
    group: ProcessGroup, kind: Axes, ranks: tuple[int, ...], device: torch.device, timeout_s: float
) -> None:
    """Let the ranks of a group exchange a number, in the way that the group is for.

    Args:
        kind: What the group is of.
        ranks: The ranks of the group.
        timeout_s: Limit of the exchange, in seconds.

    Raises:
        CommunicationError: The exchange did not end; the message names the group, which is then aborted.
    """
    if not device_of(device).is_gpu or len(ranks) == 1:
        return
    numbers = torch.zeros(len(ranks), device=device)

    def exchange() -> None:
        device_of(device).make_current(numbers.device)  # of this thread
        if kind in SUMS:
            dist.all_reduce(numbers, group=group)
        else:
            dist.all_to_all_single(torch.empty_like(numbers), numbers, group=group)
        device_of(device).synchronize(numbers.device)

    try:
        with named_failure(kind, ranks, device, timeout_s, "is made, but its first exchange did not end"):
            within(timeout_s, exchange)
    except CommunicationError:
        abort(gpu_of(device), [group])
        raise


def abort(device: Gpu, groups: Sequence[ProcessGroup]) -> None:
    """End exchanges of process groups that have begun; these cannot be used afterwards.

    All at once, as NCCL may wait in one abort for a kernel that only the abort of another group ends. What
    fails or lasts for longer than `ABORT_S` is said in the log, and left behind.
    """
    ended, lasting = wait([in_thread(partial(device.abort, group)) for group in groups], ABORT_S)
    failures = {str(error) for each in ended if (error := each.exception()) is not None}
    if lasting or failures:
        said = "; ".join([*[f"{len(lasting)} did not end within {ABORT_S:g} s"] * bool(lasting), *failures])
        logger.warning("not all of %d process groups could be aborted: %s", len(groups), said)


@contextmanager
def named_failure(
    kind: Axes, ranks: tuple[int, ...], device: torch.device, timeout_s: float, what: str
) -> Iterator[None]:
    """Turn an error of a group of GPUs, inside this context, into a CommunicationError that names the group.

    Args:
        what: A clause about the group that is true of the error.
    """
    try:
        yield
    except RuntimeError as error:
        if not device_of(device).is_gpu:
            raise
        why = "no answer" if isinstance(error, dist.DistStoreError) else reason(error)
        backend = gpu_of(device).collectives
        raise CommunicationError(
            f"rank {dist.get_rank()}: the {backend} group {Group.name(kind)} of ranks "
            f"{', '.join(map(str, ranks))} {what} within {timeout_s:g} s ({why}). Check that these ranks "
            f"run, have a GPU each, and reach each other on the interface that {backend} uses, which "
            "NCCL_DEBUG=INFO shows."
        ) from error


CPU = torch.device("cpu")

LONGEST_TIMEOUT_S = 1e6
Processes = Annotated[int, Within(1, 4096, "they all run on this machine")]
Timeout = Annotated[
    float, Within(0, LONGEST_TIMEOUT_S, "at most a million seconds (twelve days) make sense", above=True)
]
BufferBytes = Annotated[int, Within(0, 1 << 30, "0 leaves it to the system, which takes no more")]
TransportName = Literal["direct", "staged"]
Summation = Literal["native", "in_order"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Checked):
    """Section `[parallel]`: which ranks there are and what they share."""

    ALSO_CALLED: ClassVar[Mapping[str, str]] = {
        "tensor_parallel_size": "tp_size",
        "tensor_model_parallel_size": "tp_size",
        "expert_tensor_parallel_size": "etp_size",
        "expert_model_parallel_size": "ep_size",
    }
    """Settings by Megatron's names."""

    processes: Processes | None = None
    """Local processes, unless another launcher started them; none = one per GPU or processor core."""
    ep_size: Ranks | None = None
    """Ranks over which the experts of a layer are spread; none = all, after `etp_size`."""
    tp_size: Ranks = 1
    """Ranks of a node that share attention, dense feed-forward parts and vocabulary (tensor parallelism),
    with the same samples."""
    etp_size: Ranks = 1
    """Ranks of a node that share every expert, each a part of its hidden width (expert sharding)."""
    tokens: TokenLayout = "split"
    """What the ranks of one `tp` group hold between two blocks: "split" = each a part of every sample's
    tokens (sequence parallelism), "replicated" = all tokens."""
    ranks_per_node: Ranks | None = None
    """Consecutive ranks in a node; none = detected when the ranks join."""
    timeout_s: Timeout = 60.0
    """Seconds to wait for a rank that does not answer."""
    start_timeout_s: Timeout | None = None
    """The same while ranks meet and connect; none = `timeout_s`."""
    checkpoint_timeout_s: Timeout | None = None
    """The same while a checkpoint is written or read; none = `timeout_s`."""
    send_buffer_bytes: BufferBytes = 64 * 1024
    """Send buffer of each connection of a CPU rank; less than rate times round trip slows the link down; 0 =
    the operating system's default ([more](performance.md#the-network-link))."""
    transport: TransportName = "direct"
    """How tensors of GPUs travel: "direct", over NCCL; "staged", through memory of the host and over Gloo, so
    that processes can share a GPU ([more](gpu.md#several-ranks-on-one-gpu)); refused on CPUs."""
    reduce_scatter: Summation = "native"
    """How GPUs sum what each rank keeps a part of (shards and tensor parallelism): "native" = by NCCL where
    all parts have one size, "in_order" = in the order of ranks, in float32 at least: the same bits on every
    machine, but slower. CPUs always add in order."""

    @property
    def start_s(self) -> float:
        """How long a rank waits for the others while they meet and connect."""
        return self.timeout_s if self.start_timeout_s is None else self.start_timeout_s

    @property
    def at_checkpoints(self) -> tuple[float, str]:
        """What `Control.waiting` takes while files of a model are written or read."""
        return self.checkpoint_s, "parallel.checkpoint_timeout_s"

    @property
    def checkpoint_s(self) -> float:
        """How long a rank waits for the others while a checkpoint is written or read."""
        return self.timeout_s if self.checkpoint_timeout_s is None else self.checkpoint_timeout_s


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The place of a rank: world = dp x tp = edp x ep x etp.

    A rank holds its `1 / etp` part of num_experts / ep_size experts.

    Attributes:
        ep_size: Ranks over which the experts of a layer are spread.
        node_size: Consecutive ranks in one node; 0 = all, or not known to be equal everywhere.
        tp_size: Ranks that share attention.
        etp_size: Ranks that share every expert.
        tokens: What ranks that share attention have of every sample's tokens between two blocks.
    """

    world_size: int
    ep_size: int
    rank: int
    node_size: int = 0
    tp_size: int = 1
    etp_size: int = 1
    tokens: TokenLayout = "split"

    @staticmethod
    def build(
        config: ParallelConfig, world_size: int, rank: int, num_experts: int, node_size: int | None = None
    ) -> Layout:
        """Return the layout.

        Args:
            num_experts: Experts of a layer.
            node_size: Detected ranks in a node; 0 = nodes differ in size, None = not detected.

        Raises:
            ConfigError: A size does not divide; the hint names the nearest valid one.
        """
        if config.ranks_per_node is not None:
            node_size = config.ranks_per_node
            _check_divides("ranks_per_node", node_size, world_size, f"the number of ranks ({world_size})")
        for name in ("tp_size", "etp_size"):
            value = getattr(config, name)
            if node_size == 0 and value > 1:
                raise ConfigError(
                    f"parallel.{name}",
                    value,
                    "what it shards is exchanged inside nodes, and nodes hold different numbers of ranks, "
                    "or ranks that are not consecutive, so a group might cross them",
                    f"Say parallel.ranks_per_node={value} if every {value} consecutive ranks share a node.",
                )
            if node_size:
                of = f"the ranks of a node ({node_size}), since what it shards is exchanged inside nodes"
                _check_divides(name, value, node_size, of)
            _check_divides(name, value, world_size, f"the number of ranks ({world_size})")
        spread = holders(world_size, config.etp_size)
        ep_size = spread if config.ep_size is None else config.ep_size
        valid = [size for size in group_sizes(spread) if num_experts % size == 0]
        if ep_size not in valid:
            nearest = min(valid, key=lambda n: (abs(n - ep_size), n))
            if config.ep_size is None:
                shards = f" of {config.etp_size} shards" if config.etp_size > 1 else ""
                why = f"cannot be shared evenly by {spread} {'groups' if shards else 'ranks'}{shards}"
                experts = max(1, round(num_experts / spread)) * spread
                hint = f"Nearest valid: {experts}; or spread experts over fewer: parallel.ep_size={nearest}."
                raise IndivisibleError("moe.num_experts", num_experts, why, hint)
            ranks = f"ranks ({world_size})" if spread == world_size else f"ranks over etp_size ({spread})"
            why = f"must divide the number of {ranks} and moe.num_experts ({num_experts})"
            raise IndivisibleError("parallel.ep_size", ep_size, why, f"Nearest valid: {nearest}.")
        return Layout(
            world_size=world_size,
            ep_size=ep_size,
            rank=rank,
            node_size=node_size or 0,
            tp_size=config.tp_size,
            etp_size=config.etp_size,
            tokens=config.tokens,
        )

    @property
    def nodes(self) -> int:
        """Number of nodes of the cluster; 1 where it is not known."""
        return num_nodes(self.world_size, self.node_size)

    @cached_property
    def ep_rank(self) -> int:
        """Place of this rank inside its expert group."""
        return self.mesh.place(self.rank, Group.EXPERT)

    @cached_property
    def place(self) -> Place:
        """Place of this rank inside its expert group, as a dispatch needs it."""
        return Place(self.ep_rank, self.ep_size, self.ep_node_size)

    @cached_property
    def ep_node_size(self) -> int:
        """Ranks of an expert group in one node: all of them where the group does not span whole nodes."""
        here = ranks_per_node(self.ep_size * self.etp_size, self.node_size)
        return holders(here, self.etp_size)

    @cached_property
    def ep_nodes(self) -> int:
        """Number of nodes that an expert group spans."""
        return self.mesh.size(Group.RAIL)

    def require_nodes(self, key: str, dispatch: str) -> None:
        """Raise ConfigError unless an expert group spans several whole nodes."""
        if self.ep_nodes > 1:
            return
        why = f"a hierarchical dispatch needs an expert group over several nodes; its {self.ep_size} ranks "
        if self.node_size == 0 or self.node_size >= self.ep_size:
            why += "run in one node, or nodes hold different numbers of ranks"
        else:
            why += f"do not fill several whole nodes of {self.node_size} ranks"
        raise ConfigError(key, dispatch, why, "Use flat, or say parallel.ranks_per_node.")

    @cached_property
    def dp_size(self) -> int:
        """Number of groups of ranks that work on samples of their own."""
        return self.mesh.size(Group.DATA)

    @cached_property
    def dp_rank(self) -> int:
        """Place of this rank's group among the groups with samples of their own."""
        return self.mesh.place(self.rank, Group.DATA)

    @cached_property
    def tp_rank(self) -> int:
        """Place of this rank among the ranks that share attention."""
        return self.mesh.place(self.rank, Group.TENSOR)

    @cached_property
    def etp_rank(self) -> int:
        """Place of this rank among the ranks that share every expert."""
        return self.mesh.place(self.rank, Group.SHARDS)

    @cached_property
    def edp_size(self) -> int:
        """Number of replicas of every expert."""
        return self.mesh.size(Group.EXPERT_DATA)

    @cached_property
    def mesh(self) -> Mesh:
        """Ranks as named axes."""
        return Mesh(
            world_size=self.world_size,
            ep_size=self.ep_size,
            ep_local_size=self.ep_node_size,
            tp_size=self.tp_size,
            etp_size=self.etp_size,
        )


def _check_divides(name: str, value: int, total: int, of: str) -> None:
    if value not in group_sizes(total):
        nearest = min(group_sizes(total), key=lambda n: (abs(n - value), n))
        raise IndivisibleError(f"parallel.{name}", value, f"must divide {of}", f"Nearest valid: {nearest}.")


INTER_GROUPS = (Group.WORLD, Group.EXPERT, Group.EXPERT_DATA)
"""Groups that the lane `inter` needs; a dispatch along rails needs rails, too."""


def lane_groups(
    layout: Layout,
    timeout_s: float,
    kinds: tuple[Axes, ...] = INTER_GROUPS,
    device: torch.device = CPU,
    start_s: float | None = None,
) -> dict[Axes, dist.ProcessGroup]:
    """Create the process groups of one communication lane, its own, so that lanes run at the same time.

    All ranks must call this in the same order. It costs one connection per pair of ranks and group.

    Args:
        timeout_s: Limit of every exchange, in seconds.
        kinds: Which groups.
        device: The device whose tensors the groups are for.
        start_s: Limit of making them, in seconds; None = `timeout_s`.

    Returns:
        The group of each kind that this rank is in.

    Raises:
        RuntimeError: The others, or the store at which ranks meet, do not answer in time; on GPUs it is a
            CommunicationError.
    """
    groups: dict[Axes, dist.ProcessGroup] = {}
    timeout, start_s = timedelta(seconds=timeout_s), start_s or timeout_s
    with left_to_the_watch(device, os.environ):
        for kind in kinds:
            for ranks in layout.mesh.groups(kind):
                make = partial(dist.new_group, list(ranks), **options_of(device, ranks, timeout))
                with named_failure(kind, ranks, device, start_s, "could not be made"):
                    group = within(start_s + SPARE_S, make)
                if layout.rank in ranks:
                    assert group is not None
                    groups[kind] = group
            members = layout.mesh.members(layout.rank, kind)
            first_exchange(groups[kind], kind, members, device, start_s)
    return groups
