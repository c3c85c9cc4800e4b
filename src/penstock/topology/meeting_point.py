"""The store at which ranks meet: opened within a time limit, and what is at its address where it is not. The
network interface on which Gloo then connects them, and those that this machine has.

torch waits for the answer of a store's server without any limit: a program that accepts connections and says
nothing, or a server that was stopped, would hold a rank for ever.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import platform
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, Literal, TypeVar

import torch.distributed as dist

# torch.distributed exports it as well, but hides it from type checkers.
from torch._C._distributed_c10d import TCPStore

from penstock.config import ConfigError

T = TypeVar("T")

VARIABLE: Final = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR: Final = 0x8915  # from <linux/sockios.h>
IPV6: Final = Path("/proc/net/if_inet6")

GIVE_ADDRESS: Final = (
    "give the network address of rank 0's machine (MASTER_ADDR, or torchrun's --rdzv-endpoint and "
    "--local-addr)"
)
LOOK_S: Final = 2.0
"""Seconds that a connection may take, to find out what is at an address."""
LOOK_AGAIN_S: Final = 0.1
"""Seconds between two looks at an address where nothing is yet."""

SPARE_S: Final = 1.0
"""Seconds after a timeout in which torch may say itself what it has waited for."""


SPARE_FILES: Final = 256
FILES_PER_RANK: Final = 16
"""Open files for the connections to one other rank, if it is in every group of every lane."""
FEWEST_FILES: Final = 26
FEWEST_FILES_PER_RANK: Final = 3
"""Open files of a rank in the smallest step, as counted on 2 to 8 ranks: with fewer it fails anywhere. Where
NCCL carries what GPUs exchange, the host's group alone connects all pairs of ranks: one file for each."""


def within(timeout_s: float, work: Callable[[], T]) -> T:
    """Return what `work` returns; raise what it raises.

    Nothing ends a thread that waits inside torch: it is left behind, and does not keep the process alive.

    Args:
        timeout_s: Limit of the work, in seconds.
        work: What waits for a store's server.

    Raises:
        DistStoreError: The work takes longer.
    """
    outcome = in_thread(work)
    try:
        return outcome.result(timeout_s)
    except TimeoutError:
        if outcome.done():  # the work itself has raised it
            raise
        raise dist.DistStoreError(f"the store does not answer within {timeout_s:g} s") from None


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Begin `work` in a thread of its own, which does not keep the process alive; return its outcome."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="penstock-within", daemon=True).start()
    return outcome


def open_store(host: str, port: int, timeout_s: float, *, serves: bool = False) -> TCPStore:
    """Return the store at an address, without waiting for other ranks.

    A thread in which torch still tries to connect aborts the process when Python ends. So torch is asked when
    something answers at the address; to serve there, when its name resolves.

    Args:
        timeout_s: Limit in seconds, also of every later wait for a key.
        serves: Whether this process keeps the store.

    Raises:
        RuntimeError: The store cannot be opened in time.
    """
    until_s = time.monotonic() + timeout_s
    wanted = {"accepts", "refused", "unreachable"} if serves else {"accepts"}
    while look_at(host, port, timeout_s).kind not in wanted:
        if time.monotonic() >= until_s:
            raise dist.DistStoreError(f"nothing answers within {timeout_s:g} s")
        time.sleep(LOOK_AGAIN_S)
    return within(
        max(0.0, until_s - time.monotonic()) + SPARE_S,
        lambda: TCPStore(
            host,
            port,
            None,
            serves,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,  # sessions of one process that follow each other meet at the same port
        ),
    )


@dataclass(frozen=True)
class Look:
    """What is at an address.

    Attributes:
        kind: Whether the name does not resolve, a connection is refused, nothing answers, or something
            accepts connections.
        ip: What the name resolves to; "" = nothing.
        why: The system's words about a failure.
    """

    kind: Literal["unresolved", "refused", "unreachable", "accepts"]
    ip: str = ""
    why: str = ""


def look_at(host: str, port: int, most_s: float = LOOK_S) -> Look:
    """Find out what is at an address, within `LOOK_S` or less, and the time that a name takes to resolve."""
    try:
        ip = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        return Look("unresolved", why=error.strerror or str(error))
    try:
        with socket.create_connection((host, port), timeout=min(LOOK_S, most_s)):
            return Look("accepts", ip)
    except ConnectionRefusedError as error:
        return Look("refused", ip, str(error.strerror))
    except OSError as error:
        return Look("unreachable", ip, error.strerror or str(error))


def why_unreachable(host: str, port: int, error: str, *, serves: bool) -> str:
    """Return what is where the ranks' store should be, and what to do about it.

    Args:
        error: Why the store was not opened.
        serves: Whether this process was to keep it.
    """
    look = look_at(host, port)
    if serves and look.kind != "unresolved":
        what = "another program listens there" if look.kind == "accepts" else "this rank cannot listen there"
        other = "Choose another port (MASTER_PORT), and check that MASTER_ADDR is this machine"
        return f"{what} ({error}). {other}"
    if is_loopback(look.ip) and look.kind == "refused":
        return (
            f"{look.ip} is this machine itself, and no program listens there. Check that rank 0 is still "
            f"running; if it is on another machine, {GIVE_ADDRESS}"
        )
    return {
        "unresolved": f"the name {host} does not resolve on this machine ({look.why}). Add it to /etc/hosts "
        f"or DNS, or {GIVE_ADDRESS}",
        "accepts": "a program accepts connections there, and does not answer as the store of these ranks "
        f"does ({error}). Choose another MASTER_PORT, or end that program",
        "refused": f"no program listens there ({look.ip}), or a firewall refuses the port. Check that rank 0 "
        f"is still running, and that this is its machine, or {GIVE_ADDRESS}",
        "unreachable": f"nothing answers at {look.ip} ({look.why}). Check that no firewall closes the port, "
        f"and that this is rank 0's machine, or {GIVE_ADDRESS}",
    }[look.kind]


def is_loopback(address: str) -> bool:
    """Return whether an address reaches only the machine itself; False for a name."""
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def interface_names() -> list[str]:
    """Return the names of this machine's interfaces."""
    return sorted(name for _, name in socket.if_nameindex())


def given_interfaces(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the interfaces that Gloo is to use: several are allowed; [] = it chooses itself."""
    return [name for name in environ.get(VARIABLE, "").split(",") if name]


def address_of(interface: str) -> str:
    """Return an address of an interface: of IPv4, or else of IPv6; "" if it has none that others can use."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):
        answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
        return socket.inet_ntoa(answer[20:24])
    with suppress(OSError):  # of a kernel without IPv6
        for line in IPV6.read_text(encoding="utf-8").splitlines():
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if name == interface and not address.is_link_local:  # which means another link elsewhere
                return str(address)
    return ""


def check_interface(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if Gloo is to use an interface that this machine does not have."""
    there = interface_names()
    for name in given_interfaces(environ):
        if name not in there:
            why = f"{platform.node()} has no interface of that name; it has {listed()}"
            raise ConfigError(VARIABLE, environ[VARIABLE], why, "Name the one that all other ranks reach.")


def open_files(ranks: int) -> int:
    """Return how many files a rank may have open at once, connections included."""
    return SPARE_FILES + FILES_PER_RANK * ranks


def check_open_files(ranks: int, *, by_nccl: bool = False) -> None:
    """Raise this process's soft limit of open files if the smallest step on several ranks needs more.

    Some failures would say so, others that a connection was reset, or they would wait.

    Args:
        by_nccl: Whether NCCL carries what ranks exchange.

    Raises:
        ConfigError: If the hard limit is too low as well.
    """
    fewest = FEWEST_FILES + (1 if by_nccl else FEWEST_FILES_PER_RANK) * ranks
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if ranks == 1 or limit == resource.RLIM_INFINITY or limit >= fewest:  # infinity is a negative number
        return
    wanted = open_files(ranks)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if limit < fewest:
        why = f"each of {ranks} ranks needs more open files, connections included"
        hint = (
            f"Raise the hard limit to {wanted} (limits.conf, LimitNOFILE of the service that starts the job)."
        )
        raise ConfigError("ulimit -n", limit, why, hint)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def listed() -> str:
    """Return this machine's interfaces with their addresses, in words."""
    addresses = {name: address_of(name) for name in interface_names()}
    return ", ".join(f"{name} ({ip})" if ip else f"{name} (no address)" for name, ip in addresses.items())


def in_use(environ: Mapping[str, str]) -> str:
    """Return in words which interface Gloo uses on this machine."""
    given = environ.get(VARIABLE, "")
    if given:
        return f"{VARIABLE}={given}"
    return f"the interface of this machine's name, {platform.node()}, since {VARIABLE} is not set"


def remedy(error: BaseException, environ: Mapping[str, str]) -> str:
    """Return in words what to do where ranks have met and Gloo has not connected them."""
    if os.strerror(errno.EMFILE) in str(error):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"A rank may open {limit} files and connections here: raise that (ulimit -n)"
    return (
        f"Gloo uses {in_use(environ)}; there are {listed()}. Name in {VARIABLE} the interface that all other "
        "ranks reach, and check that no firewall closes ports between them"
    )
