"""A cluster on this machine: created, recorded, changed while a job runs in it, and always removed.

A record is one small file for each cluster, so that any process can find, change and remove it. The file
exists before the first namespace and until after the last one, so no namespace is ever without it.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Final, NoReturn, Self, TypeVar

from penstock.config import Checked, ConfigError, Items, Within, from_dict, read_json
from penstock.lab.emulate import links
from penstock.lab.emulate.links import (
    BRIDGE,
    INTERFACE,
    EmulateConfig,
    Port,
    Uplink,
    UplinkBytes,
    Wiring,
    check_rate,
)
from penstock.lab.emulate.system import (
    NAMESPACES,
    EmulationError,
    check_available,
    command,
    remove_hosts,
    run_inside,
    silence_ipv6,
    write_hosts,
)
from penstock.mesh import place_in_node
from penstock.stops import SIGNALS
from penstock.writing import write_whole

HINT: Final = "Remove the file, and its namespaces with `ip netns delete`."
MOST_BYTES: Final = 1 << 20
Number = Annotated[int, Within(0, 2**62, "the kernel counts no further")]

FOLDER: Final = Path("/run/penstock")  # emptied by a restart, which also ends clusters


@dataclass(frozen=True, kw_only=True)
class Owner(Checked):
    """The process with which a cluster ends. Its start time distinguishes it from later ones with its id."""

    pid: Number
    started_ticks: Number

    @classmethod
    def current(cls) -> Owner:
        """Return this process as an owner."""
        started_ticks = _started_ticks(os.getpid())
        assert started_ticks is not None, "this process is running"
        return cls(pid=os.getpid(), started_ticks=started_ticks)

    @property
    def is_alive(self) -> bool:
        """Whether this very process still runs."""
        return _started_ticks(self.pid) == self.started_ticks


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """The record of a cluster; `owner` is None for a cluster that stays until it is removed."""

    name: str
    owner: Owner | None
    config: EmulateConfig
    namespaces: Annotated[tuple[str, ...], Items(4096, "one per rank and node")]

    @property
    def is_stale(self) -> bool:
        """Whether the owner ended without removing the cluster."""
        return self.owner is not None and not self.owner.is_alive

    @property
    def is_whole(self) -> bool:
        """Whether all its namespaces are there, unlike in one that is, or was, made or removed in part."""
        return all((NAMESPACES / namespace).exists() for namespace in self.namespaces)

    def create(self) -> None:
        """Record a new cluster in one step; raise `EmulationError` if there is one of that name."""
        draft = folder() / f".{self.name}.{os.getpid()}"
        write_whole(draft, json.dumps(asdict(self), indent=1))
        try:
            self._path.hardlink_to(draft)
        except FileExistsError as error:
            raise EmulationError(f"there is an emulated cluster {self.name} already") from error
        finally:
            draft.unlink()

    def forget(self) -> None:
        """Remove the record, if it exists."""
        self._path.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return folder() / f"{self.name}.json"


def clusters() -> tuple[ClusterState, ...]:
    """Return the record of every cluster on this machine, by name."""
    states = []
    for path in sorted(folder().glob("pen*.json")):
        try:
            states.append(from_dict(ClusterState, read_json(path, HINT, MOST_BYTES), str(path)))
        except ConfigError as error:
            if not path.exists():  # it was removed meanwhile
                continue
            raise EmulationError(f"{path} is not the record of an emulated cluster: {error}") from error
    return tuple(states)


def free_name() -> str:
    """Return a name that no recorded cluster has; only this process makes names with its id."""
    taken = {state.name for state in clusters()}
    return next(n for n in (f"pen{os.getpid()}-{i}" for i in itertools.count()) if n not in taken)


def folder() -> Path:
    """Return the folder of records: /run/penstock, or a temporary one where /run cannot be written."""
    place = FOLDER if os.access(FOLDER.parent, os.W_OK) else Path(tempfile.gettempdir()) / "penstock-emulate"
    place.mkdir(mode=0o700, exist_ok=True)
    status = place.lstat()  # records name namespaces that we would remove
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise EmulationError(f"{place} is no folder of this user. Remove it, or run as its owner.")
    return place


def _started_ticks(pid: int) -> int | None:
    """Return a process's start, in clock ticks since boot; None if it does not run (a zombie does not)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name before the last parenthesis may hold anything; fields 3 (state) and 22 (start) follow it.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


T = TypeVar("T")


class Cluster:
    """Namespaces joined by rate-limited links, one for each rank.

    As a context manager it is up inside the block and removed after it, also after an exception and the
    signals of `penstock.stops`. After `kill -9` the next `up` of any process, or `remove_stale`, removes it.

    Attributes:
        persistent: Whether it belongs to no process and stays until `down`.
    """

    def __init__(self, config: EmulateConfig, *, persistent: bool = False, name: str | None = None) -> None:
        self.config = config
        self.persistent = persistent
        self.wiring = Wiring(name=name or free_name(), shape=config.shape)

    @property
    def name(self) -> str:
        """The cluster's name, such as `pen4711-0`: the process that made it, and a number of its own."""
        return self.wiring.name

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespace of each rank."""
        return self.wiring.ranks

    # ---- life ----

    def up(self) -> None:
        """Create the cluster, after removing what other processes left behind. Nothing remains if it fails.

        Costs about 10 ms per rank and 20 ms per node.

        Raises:
            EmulationUnavailable: If this machine or user cannot emulate a cluster.
        """
        check_available()
        remove_stale()
        self._state().create()
        try:
            for namespace in self.wiring.namespaces:
                command("ip", "netns", "add", namespace)
                run_inside(namespace, silence_ipv6)
            names = {self.address(rank): f"rank{rank}" for rank in range(self.config.shape.ranks)}
            for namespace in self.namespaces:
                write_hosts(namespace, names)
            links.build(self.wiring, self.config.mtu_bytes)
            links.set_rate(self._device_ports(), self.config.intra_rate_bit_per_s, verb="add")
            links.set_rate(self._uplink_ports(None), self.config.inter_rate_bit_per_s, verb="add")
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Remove the cluster, and end what still runs in it. Does nothing when the cluster is not up."""
        remove(self.wiring)
        self._state().forget()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            # A request to stop raises SystemExit, as Ctrl-C raises KeyboardInterrupt, so that `finally` runs.
            stack.enter_context(_handled(signal.SIG_DFL, _exit_as_told))
            self.up()
            stack.callback(self._down_undisturbed)
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def _down_undisturbed(self) -> None:
        # A second Ctrl-C would leave half of the cluster; `ip`, which it would reach, ignores it, too.
        with _handled(None, signal.SIG_IGN):
            self.down()

    def _state(self) -> ClusterState:
        owner = None if self.persistent else Owner.current()
        return ClusterState(
            name=self.name, owner=owner, config=self.config, namespaces=self.wiring.namespaces
        )

    # ---- running something in it ----

    def address(self, rank: int) -> str:
        """Return the address of a rank, as all other ranks see it."""
        return self.wiring.address(rank)

    def listen_address(self, rank: int) -> str:
        """Return the address at which a server of `rank` listens for all ranks, and for itself at 127.0.0.1.

        That is every interface of its namespace, which cannot be reached from outside of the cluster.
        """
        self.wiring.rank(rank)
        return "0.0.0.0"

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """Return `argv` as it must be started to be `rank`. The process keeps its id, so signals reach it."""
        return ["ip", "netns", "exec", self.wiring.rank(rank), *argv]

    def environ(self, rank: int) -> dict[str, str]:
        """Return the environment that a process needs to be `rank`, by torchrun's names.

        GPUs are hidden: NCCL would move data between the ranks' GPUs without using the emulated links.
        """
        self.wiring.rank(rank)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.config.shape.ranks),
            "LOCAL_RANK": str(place_in_node(rank, self.config.devices)),
            "LOCAL_WORLD_SIZE": str(self.config.devices),
            "MASTER_ADDR": self.address(0),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "CUDA_VISIBLE_DEVICES": "",
        }

    def wrapper(self) -> list[str]:
        """Return the command that goes on as its arguments, as the rank whose number is its RANK."""
        own = {"LOCAL_RANK": f"$((RANK % {self.config.devices}))"}
        shared = {name: value for name, value in self.environ(0).items() if "RANK" not in name}
        exports = " ".join(f"{name}={value}" for name, value in {**shared, **own}.items())
        namespace = f"{self.name}-n$((RANK / {self.config.devices}))d$LOCAL_RANK"
        return ["sh", "-c", f'export {exports}; exec ip netns exec {namespace} "$@"', "sh"]

    def run_inside(self, rank: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, run by a thread of this process where `rank` is.

        A socket that `work` makes stays there, and so does a thread that it starts.
        """
        return run_inside(self.wiring.rank(rank), work)

    # ---- the links ----

    def set_rate(
        self, *, inter: float | None = None, intra: float | None = None, node: int | None = None
    ) -> None:
        """Change rates at once.

        Args:
            inter: Rate of uplinks, bit/s; None = as it is.
            intra: Rate of devices' own links, bit/s; None = as it is.
            node: The node whose links change; None = all nodes.
        """
        if inter is not None:
            check_rate(inter, "inter")
            links.set_rate(self._uplink_ports(node), inter)
        if intra is not None:
            check_rate(intra, "intra")
            links.set_rate(self._device_ports(node), intra)

    def cut(self, node: int) -> None:
        """Take a node's uplink down: its devices reach only each other."""
        links.set_up(self.wiring.uplink(node)[0], up=False)

    def restore(self, node: int) -> None:
        """Take a node's uplink up again; TCP continues where it was, after its next retry."""
        links.set_up(self.wiring.uplink(node)[0], up=True)

    def bytes_sent(self) -> tuple[UplinkBytes, ...]:
        """Return the bytes over each node's uplink by direction, headers included. Costs 5 ms per node."""
        return links.read_bytes(self.wiring)

    def uplinks(self) -> tuple[Uplink, ...]:
        """Return rate, state and bytes of each node's uplink, from the kernel. Costs 10 ms per node."""
        return links.read_uplinks(self.wiring)

    def _uplink_ports(self, node: int | None) -> list[Port]:
        pairs = list(self.wiring.uplinks()) if node is None else [self.wiring.uplink(node)]
        return [port for pair in pairs for port in pair]

    def _device_ports(self, node: int | None = None) -> list[Port]:
        devices = self.config.devices
        first, count = (
            (0, self.config.shape.ranks) if node is None else (self.wiring.node(node) * devices, devices)
        )
        return [port for rank in range(first, first + count) for port in self.wiring.device_link(rank)]


# ---- clusters there are ------------------------------------------------------------------------------------


def open_cluster(name: str) -> Cluster:
    """Return an existing cluster, of any process.

    Raises:
        ConfigError: If there is no such cluster, naming those that exist.
    """
    states = {each.name: each for each in clusters()}
    if name not in states:
        hint = (
            f"There are: {', '.join(states)}."
            if states
            else "There are none; `penstock emulate up` makes one."
        )
        raise ConfigError("ID", name, "there is no such emulated cluster", hint)
    state = states[name]
    return Cluster(state.config, persistent=state.owner is None, name=name)


def remove_stale() -> tuple[str, ...]:
    """Remove the clusters of processes that were killed; return their names."""
    stale = [state for state in clusters() if state.is_stale]
    for state in stale:
        remove(Wiring(name=state.name, shape=state.config.shape))
        state.forget()
    return tuple(state.name for state in stale)


# ---- signals -----------------------------------------------------------------------------------------------


@contextmanager
def _handled(
    only: signal.Handlers | None, handler: Callable[[int, FrameType | None], NoReturn] | signal.Handlers
) -> Iterator[None]:
    """Set `handler` for all signals that end a process, or for those whose present handler is `only`.

    Python lets only the main thread do that; in another thread signals stay with the main thread's code.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        present = {number: signal.getsignal(number) for number in SIGNALS}
        before = {number: former for number, former in present.items() if only is None or former == only}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _exit_as_told(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    raise SystemExit(128 + number)


GONE_WITHIN_S: Final = 10.0
POLL_S: Final = 0.01


def remove(wiring: Wiring) -> None:
    """Remove the processes, links and names of a cluster, as far as they exist.

    The kernel destroys a namespace some time after its name is gone, and not before the last socket in it is
    closed. Therefore links go first, each of which is gone when `ip` returns: no later cluster can meet them.
    """
    end_processes(wiring.namespaces)
    existing = [namespace for namespace in wiring.namespaces if (NAMESPACES / namespace).exists()]
    for namespace in existing:
        # The other end of a link goes with it. A failure means that there is nothing to delete: the namespace
        # is incomplete, or another process was faster.
        with suppress(EmulationError):
            show = command("ip", "-netns", namespace, "-brief", "link", "show")
            names = [line.split()[0].partition("@")[0] for line in show.splitlines()]
            lines = [f"link delete dev {name}" for name in sorted(names, key=BRIDGE.__ne__) if name != "lo"]
            command("ip", "-netns", namespace, "-force", "-batch", "-", lines=lines)
    for namespace in existing:
        try:
            command("ip", "netns", "delete", namespace)
        except EmulationError:  # if another process was faster, that is no error
            if (NAMESPACES / namespace).exists():
                raise
    for namespace in wiring.ranks:
        remove_hosts(namespace)


def end_processes(namespaces: Sequence[str]) -> None:
    """Kill everything that runs inside, and wait until it is gone. A process there has no other network."""
    deadline_s = time.monotonic() + GONE_WITHIN_S
    while pids := pids_inside(namespaces):
        if time.monotonic() > deadline_s:
            raise EmulationError(f"processes {pids} in an emulated cluster do not end")
        for pid in pids:
            with suppress(ProcessLookupError):  # it has already ended
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def pids_inside(namespaces: Sequence[str]) -> list[int]:
    """Return the processes in any of these namespaces. Reads all of /proc: about 1 ms per 100 processes."""
    wanted = {_identity(NAMESPACES / namespace) for namespace in namespaces} - {None}
    running = [path for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [int(path.name) for path in running if _identity(path / "ns" / "net") in wanted]


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what distinguishes a namespace from others; None if it does not exist (any more)."""
    try:
        status = path.stat()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return status.st_dev, status.st_ino
