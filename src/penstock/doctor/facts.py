"""What one rank finds about itself and its machine: nothing here asks another rank."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import torch

import penstock
from penstock.config import asked, is_missing
from penstock.topology import ProcessInfo
from penstock.topology.local import Places, free_memory_bytes
from penstock.topology.meeting_point import address_of, given_interfaces, interface_names

PACKAGES: Final = ("torch", "numpy", "safetensors", "tokenizers", "transformers")
"""Packages that compute, or handle files that ranks share. One that is installed nowhere does not matter."""

ABSENT: Final = "none"


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder to which a run writes: free bytes on its disk, and why it cannot be written, "" if it can."""

    path: str
    free_bytes: int
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one rank has found.

    Attributes:
        machine: The same for ranks that reach each other over the loopback interface.
        host: The machine's name.
        host_ip: What that name resolves to here, "" if it does not.
        interface: GLOO_SOCKET_IFNAME or "".
        address: The address of that interface, of the first of several, or of the one towards rank 0; "" if
            there is none.
        problem: Why there is no address, "" if there is one.
        memory_bytes: Free memory of the machine or the container.
        open_files: The soft and the hard limit of open files.
        cores: Cores for ranks; 0 on a machine with GPUs.
        gpus: GPUs of the machine.
    """

    rank: int
    local_rank: int
    host: str
    machine: str
    versions: Mapping[str, str]
    host_ip: str
    interface: str
    address: str
    problem: str
    memory_bytes: int
    folders: Sequence[Folder]
    open_files: tuple[int, int]
    cores: int
    gpus: int

    @property
    def kernel(self) -> str:
        """The same for ranks that share a system, whatever their namespaces."""
        return self.machine.partition(" ")[0]


def find_facts(info: ProcessInfo, towards: str, folders: Sequence[Path]) -> Facts:
    """Gather the facts of this rank.

    Args:
        towards: The host of rank 0.
        folders: Folders to which a run would write; none is created.
    """
    address, problem = _address(towards)
    places = Places.here()
    return Facts(
        rank=info.rank,
        local_rank=info.local_rank,
        host=platform.node(),
        machine=_machine(),
        versions=versions(),
        host_ip=_resolved(platform.node()),
        interface=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        address=address,
        problem=problem,
        memory_bytes=free_memory_bytes(),
        folders=[_folder(each) for each in folders],
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        cores=0 if places.gpus else places.number,
        gpus=places.number if places.gpus else 0,
    )


def versions() -> dict[str, str]:
    """Return versions of Python, relevant packages, and Penstock's source, since checkouts differ."""
    by_name = {"penstock": penstock.__version__, "source": _source(), "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            by_name[name] = version(name)
    by_name["torch"] = torch.__version__
    return by_name


@cache
def _source() -> str:
    """Return a short digest of Penstock's own files."""
    root, digest = Path(penstock.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:8]


def _machine() -> str:
    """Return what identifies kernel and network: namespaces of one machine count as several machines."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    return platform.node()


def _resolved(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def _address(towards: str) -> tuple[str, str]:
    """Return the address at which other ranks reach this one, and what is wrong with the interface."""
    given = given_interfaces(os.environ)
    if not given:  # that from which this machine reaches the others' host; nothing is sent
        with suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(towards, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0]), ""
        return "", ""
    there = interface_names()
    for name in given:
        if name not in there:
            return "", f"has no interface {name}; it has {', '.join(there)}"
        if not address_of(name):
            return "", f"has no address on {name} that others can use"
    return address_of(given[0]), ""


def nearest(path: Path) -> Path:
    """Return the path, or the nearest folder above it of which the system tells that it is there."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if asked(each.exists))


def _folder(path: Path) -> Folder:
    """Return the facts of a folder. path: made by the run; until then the folder above it counts."""
    place, problem = nearest(path), ""
    if not place.is_dir():
        problem = f"{place} is a file"
    elif not os.access(place, os.W_OK | os.X_OK):
        problem = f"{place} cannot be written"
    elif place != path.absolute() and not is_missing(path):
        problem = f"{path} cannot be opened"
    return Folder(path=str(path), free_bytes=shutil.disk_usage(place).free, problem=problem)
