"""The kernel's side: the commands `ip` and `tc`, threads inside a namespace, and whether both work here."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

from penstock.cli.run import BAD_USAGE, CommandError
from penstock.writing import write_setting, write_whole

T = TypeVar("T")

NAMESPACES: Final = Path("/run/netns")  # where `ip netns` keeps the names
HOSTS: Final = Path("/etc/hosts")
OWN_FILES: Final = Path("/etc/netns")  # `ip netns exec` mounts a namespace's files here over /etc
CLONE_NEWNS: Final = 0x00020000  # from <linux/sched.h>
CLONE_NEWNET: Final = 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18  # from <linux/mount.h>
COMMAND_TIMEOUT_S: Final = 30.0
NEEDED_CAPABILITIES: Final = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}


class EmulationError(CommandError):
    """Raised when an emulated cluster could not be created, changed or removed."""


class EmulationUnavailable(EmulationError):  # noqa: N818 - the name says what is the matter
    """Raised when this machine or user cannot emulate a cluster at all; the message says what to do."""

    exit_code = BAD_USAGE


def command(*argv: str, lines: Iterable[str] = ()) -> str:
    """Return the output of a command.

    Args:
        lines: Its standard input.

    Raises:
        EmulationError: If it fails or hangs.
    """
    try:
        done = subprocess.run(
            argv,
            input="\n".join(lines),
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EmulationError(f"`{' '.join(argv)}` failed: {error}") from error
    if done.returncode != 0:
        why = done.stderr.strip() or f"exit code {done.returncode}"
        raise EmulationError(f"`{' '.join(argv)}` failed: {why}")
    return done.stdout


def ip(namespace: str, lines: Sequence[str]) -> None:
    """Run lines of `ip` inside a namespace; one process, however many lines."""
    command("ip", "-netns", namespace, "-batch", "-", lines=lines)


def tc(namespace: str, lines: Sequence[str]) -> None:
    """Run lines of `tc` inside a namespace; one process, however many lines."""
    command("tc", "-netns", namespace, "-batch", "-", lines=lines)


# ---- inside a namespace ------------------------------------------------------------------------------------


def write_hosts(namespace: str, names: Mapping[str, str]) -> None:
    """Give addresses names inside `namespace`, besides those that the machine knows.

    torch asks for the name of every address that it connects to, and warns where there is none: no name
    server can be reached from inside. Where /etc cannot be written, no names are given.

    Args:
        names: The names, by address.
    """
    hosts = HOSTS.read_text(encoding="utf-8") if HOSTS.exists() else ""
    named = {**names, "127.0.0.1": "localhost"}
    lines = [f"{prefix}{address} {name}" for address, name in named.items() for prefix in ("", "::ffff:")]
    with suppress(OSError):
        folder = OWN_FILES / namespace
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / HOSTS.name, "\n".join([hosts.rstrip(), *lines, ""]))


def remove_hosts(namespace: str) -> None:
    """Undo `write_hosts`."""
    (OWN_FILES / namespace / HOSTS.name).unlink(missing_ok=True)
    for folder in (OWN_FILES / namespace, OWN_FILES):
        with suppress(OSError):  # the folder does not exist, or holds something else
            folder.rmdir()


def run_inside(namespace: str, work: Callable[[], T]) -> T:
    """Return the result of `work`, run by a thread of this process inside `namespace`.

    A socket belongs permanently to the namespace in which it was made, and a thread starts in the namespace
    of the thread that started it: servers made by `work` stay reachable there. The thread itself ends, so
    that no mistake can leave the caller inside.
    """
    return _in_thread(lambda: enter(namespace), work)


def enter(namespace: str) -> None:
    """Move this thread, and those that it starts from now on, into `namespace`."""
    hosts = OWN_FILES / namespace / HOSTS.name
    with (NAMESPACES / namespace).open() as file:
        _libc("setns", file.fileno(), CLONE_NEWNET)
    if hosts.exists():
        # This thread and those that it starts see the file there, as `ip netns exec` has it.
        _libc("unshare", CLONE_NEWNS)
        _libc("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
        _libc("mount", bytes(hosts), bytes(HOSTS), None, MS_BIND, None)


def _in_thread(begin: Callable[[], None], work: Callable[[], T]) -> T:
    def begin_and_work() -> T:
        begin()
        return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(begin_and_work).result()


def _libc(name: str, *arguments: int | bytes | None) -> None:
    """Call a function of the C library; Python has some of them from 3.12 on."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def silence_ipv6() -> None:
    """Switch IPv6 off in this thread's namespace: its router solicitations would be counted as traffic."""
    for scope in ("all", "default"):
        path = Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6")
        if path.exists():  # a kernel without IPv6 has nothing to switch off
            write_setting(path, "1")


# ---- whether it works here ---------------------------------------------------------------------------------


@cache
def check_available() -> None:
    """Check that clusters can be emulated here.

    The kernel has the last word: a shaped link is made in a namespace without a name. Costs about 10 ms the
    first time.

    Raises:
        EmulationUnavailable: If they cannot; the message says what to do.
    """
    if sys.platform != "linux":
        raise EmulationUnavailable(f"emulated clusters are made of Linux namespaces; this is {sys.platform}")
    for name in ("ip", "tc"):
        if shutil.which(name) is None:
            hint = "Install iproute2: `apt-get install iproute2` or `dnf install iproute-tc`."
            raise EmulationUnavailable(f"emulated clusters need the command `{name}`. {hint}")
    missing = [name for name, bit in NEEDED_CAPABILITIES.items() if not _effective_capabilities() >> bit & 1]
    if missing:
        hint = "Run the command as root (sudo), or the container with --privileged."
        raise EmulationUnavailable(f"emulated clusters need {' and '.join(missing)}. {hint}")
    try:
        # In a new namespace without a name, which vanishes with the thread.
        _in_thread(lambda: _libc("unshare", CLONE_NEWNET), _try_a_link)
    except (EmulationError, OSError) as error:
        hint = "Load the kernel modules veth, bridge and sch_tbf (`modprobe`), or use a kernel that has them."
        raise EmulationUnavailable(f"this kernel cannot emulate a cluster: {error}. {hint}") from error


def _effective_capabilities() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return int(line.split()[1], 16)


def _try_a_link() -> None:
    command("ip", "-batch", "-", lines=("link add name bridge0 type bridge", "link add name net0 type veth"))
    command("tc", "-batch", "-", lines=("qdisc add dev net0 root tbf rate 1mbit burst 64kb latency 50ms",))
