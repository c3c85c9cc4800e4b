"""Removes names of hosts and users, addresses and paths from what is to be shown to others."""

from __future__ import annotations

import getpass
import ipaddress
import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

import penstock

HOST_VARIABLES: Final = ("HOSTNAME", "MASTER_ADDR", "SLURMD_NODENAME", "SLURM_LAUNCH_NODE_IPADDR")
USER_VARIABLES: Final = ("USER", "LOGNAME", "SUDO_USER", "SLURM_JOB_USER", "SLURM_JOB_ACCOUNT")
NO_NAMES: Final = frozenset({"", "localhost", "127.0.0.1"})

PATH: Final = re.compile(r"(?<![\w.<>/-])~?(?:/[^\s'\"`,:;(){}<>\[\]|]+)+")
ADDRESS: Final = re.compile(
    r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])"
    r"|(?<![\w:])(?:[0-9a-fA-F]{0,4}:){2,8}(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F]{0,4}):?(?![\w:])"
)
PACKAGES: Final = {Path(module.__file__ or "").parent: module.__name__ for module in (penstock, torch)}
"""Folders whose files may be named, from the package on."""


def names_here() -> dict[str, str]:
    """Return what this machine and its user are called, and what stands for each."""
    found = dict.fromkeys((os.environ.get(name, "") for name in USER_VARIABLES), "<user>")
    with suppress(OSError, KeyError):
        found[getpass.getuser()] = "<user>"
    hosts = {platform.node(), *(os.environ.get(name, "") for name in HOST_VARIABLES)}
    hosts |= {host.partition(".")[0] for host in hosts if not ADDRESS.fullmatch(host)}
    found |= dict.fromkeys(hosts, "<host>")
    return {name: stands for name, stands in found.items() if name not in NO_NAMES}


def without_names(value: Any, names: Mapping[str, str]) -> Any:
    """Return plain data with every text in it cleaned, keys too. names: as `names_here` returns them."""
    if isinstance(value, str):
        longest_first = sorted(map(re.escape, names), key=len, reverse=True)
        text = ADDRESS.sub(_no_address, PATH.sub(_short, value))
        known = rf"(?<![\w<])(?:{'|'.join(longest_first)})(?![\w>])"
        return re.sub(known, lambda found: names[found[0]], text) if names else text
    if isinstance(value, Mapping):
        return {without_names(key, names): without_names(each, names) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_names(each, names) for each in value]
    return value


def _no_address(found: re.Match[str]) -> str:
    """Return what stands for an address, and anything else, such as a time of day, as it is."""
    for end in ("", ":"):  # a colon after an address may belong to the sentence
        with suppress(ValueError):
            ipaddress.ip_address(found[0].removesuffix(end))
            return f"<address>{end}"
    return found[0]


def _short(found: re.Match[str]) -> str:
    """Return `penstock/device.py` for a file of a known package, and no other path."""
    path = Path(found[0])
    for folder, name in PACKAGES.items():
        if ".." not in path.parts and path.is_relative_to(folder):
            return f"{name}/{path.relative_to(folder)}"
    return "<path>"
