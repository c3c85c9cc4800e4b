"""TCP transfers between the ranks of an emulated cluster, from threads of the test."""

# ruff: noqa: TID251 - a rate is bytes by time; it is measured until it is as expected

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from penstock.lab.emulate import Cluster
from tests.support.patience import HANG_S, wait_for

PIECE_BYTES = 1 << 18
WARM_UP_S = 0.4
"""Until the links' buckets are empty and TCP has found the rate."""


@dataclass
class Flow:
    """One connection over which as much is sent as goes."""

    sender: socket.socket
    receiver: socket.socket
    received_bytes: int = 0
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        self.threads = [threading.Thread(target=self.send), threading.Thread(target=self.receive)]
        for thread in self.threads:
            thread.start()

    def send(self) -> None:
        piece = bytes(PIECE_BYTES)
        try:
            while True:
                self.sender.sendall(piece)
        except BrokenPipeError:  # `stop` was called
            return

    def receive(self) -> None:
        buffer = bytearray(PIECE_BYTES)
        while count := self.receiver.recv_into(buffer):
            self.received_bytes += count

    @property
    def arrived_bytes(self) -> int:
        """What the kernel has received, read or not: `tcpi_bytes_received`."""
        (count,) = struct.unpack_from(
            "Q", self.receiver.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136), 128
        )
        return int(count)

    def stop(self) -> None:
        """End the connection; what is on its way still arrives."""
        self.sender.shutdown(socket.SHUT_WR)
        for thread in self.threads:
            thread.join()
        for end in (self.receiver, self.sender):
            end.close()


def connect(cluster: Cluster, source: int, target: int) -> Flow:
    """A connection between sockets that were made inside the two namespaces."""
    address = cluster.address(target)
    with cluster.run_inside(target, lambda: socket.create_server((address, 0))) as server:
        where = server.getsockname()
        sender = cluster.run_inside(source, lambda: socket.create_connection(where, timeout=HANG_S))
        receiver, _ = server.accept()
    sender.settimeout(None)
    receiver.settimeout(HANG_S)  # a link that stays down fails the test instead of stopping it
    return Flow(sender=sender, receiver=receiver)


@contextmanager
def flowing(cluster: Cluster, pairs: Sequence[tuple[int, int]]) -> Iterator[list[Flow]]:
    """Transfers between these ranks that go on until the block ends."""
    with ExitStack() as stack:
        flows = [connect(cluster, source, target) for source, target in pairs]
        for flow in flows:
            flow.start()
            stack.callback(flow.stop)
        yield flows


def rates_bit_per_s(flows: Sequence[Flow], window_s: float = 0.5) -> list[float]:
    """What each transfer carries now, without headers, after a warm-up."""
    time.sleep(WARM_UP_S)
    before, start_s = [flow.received_bytes for flow in flows], time.perf_counter()
    time.sleep(window_s)
    after, end_s = [flow.received_bytes for flow in flows], time.perf_counter()
    return [8 * (b - a) / (end_s - start_s) for a, b in zip(before, after, strict=True)]


def wait_until_near(measure: Callable[[], float], expected: float) -> None:
    """Measure until it is between 10 % less and 3 % more; a busy machine may take some attempts."""
    wait_for(lambda: 0.9 * expected <= measure() <= 1.03 * expected, f"a rate near {expected:.3g}")
