"""A cluster on this machine: created, changed while a job runs in it, and always removed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import NoReturn, Self, TypeVar

from penstock.config import ConfigError
from penstock.lab.emulate import links, state, teardown
from penstock.lab.emulate.config import EmulateConfig, check_rate
from penstock.lab.emulate.links import INTERFACE, Port, Uplink, UplinkBytes, Wiring
from penstock.lab.emulate.state import ClusterState, Owner
from penstock.lab.emulate.system import check_available, command, run_inside, silence_ipv6, write_hosts
from penstock.mesh import place_in_node
from penstock.stops import SIGNALS

T = TypeVar("T")


class Cluster:
    """Namespaces joined by rate-limited links, one for each rank.

    As a context manager it is up inside the block and removed after it, also after an exception and the
    signals of `penstock.stops`. After `kill -9` the next `up` of any process, or `remove_stale`, removes
    it. A `persistent` cluster belongs to no process and stays until `down`.
    """

    def __init__(self, config: EmulateConfig, *, persistent: bool = False, name: str | None = None) -> None:
        self.config = config
        self.persistent = persistent
        self.wiring = Wiring(name=name or state.free_name(), shape=config.shape)

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

        Costs about 10 ms per rank and 20 ms per node. Raises `EmulationUnavailable` where it cannot work.
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
        teardown.remove(self.wiring)
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
        """Return the address at which a server of `rank` listens for all ranks, and for itself at 127.0.0.1:
        every interface of its namespace, which cannot be reached from outside of the cluster."""
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
        """Change rates (bit/s) at once, for one node or for all; a rate that is not given stays as it is."""
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


def clusters() -> tuple[ClusterState, ...]:
    """Return the record of every cluster on this machine."""
    return state.recorded()


def open_cluster(name: str) -> Cluster:
    """Return an existing cluster, of any process. Raises `ConfigError` naming the existing ones."""
    states = {each.name: each for each in clusters()}
    if name not in states:
        hint = (
            f"There are: {', '.join(states)}."
            if states
            else "There are none; `penstock emulate up` makes one."
        )
        raise ConfigError("ID", name, "there is no such emulated cluster", hint)
    found = states[name]
    return Cluster(found.config, persistent=found.owner is None, name=name)


def remove_stale() -> tuple[str, ...]:
    """Remove the clusters of processes that were killed; return their names."""
    stale = [each for each in clusters() if each.is_stale]
    for each in stale:
        teardown.remove(Wiring(name=each.name, shape=each.config.shape))
        each.forget()
    return tuple(each.name for each in stale)


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
        before = {number: each for number, each in present.items() if only is None or each == only}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)


def _exit_as_told(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    raise SystemExit(128 + number)
