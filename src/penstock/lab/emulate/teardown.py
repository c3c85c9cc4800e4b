"""Removal of namespaces so that nothing is left, whatever their state."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.lab.emulate.links import BRIDGE, Wiring
from penstock.lab.emulate.system import NAMESPACES, EmulationError, command, remove_hosts

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
        found = path.stat()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return found.st_dev, found.st_ino
