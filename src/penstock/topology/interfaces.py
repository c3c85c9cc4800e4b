"""The network interface on which Gloo connects ranks, and those that this machine has."""

from __future__ import annotations

import fcntl
import platform
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from penstock.config import ConfigError

VARIABLE: Final = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR: Final = 0x8915  # from <linux/sockios.h>


def interface_names() -> list[str]:
    """Return the names of this machine's interfaces."""
    return sorted(name for _, name in socket.if_nameindex())


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface; "" if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):
        found = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
        return socket.inet_ntoa(found[20:24])
    return ""


def check_interface(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if Gloo is to use an interface that this machine does not have."""
    there = interface_names()
    for name in filter(None, environ.get(VARIABLE, "").split(",")):  # as Gloo reads it: several are allowed
        if name not in there:
            why = f"{platform.node()} has no interface of that name; it has {listed()}"
            raise ConfigError(VARIABLE, environ[VARIABLE], why, "Name the one that all other ranks reach.")


def listed() -> str:
    """Return this machine's interfaces with their IPv4 addresses, in words."""
    found = {name: address_of(name) for name in interface_names()}
    return ", ".join(f"{name} ({ip})" if ip else f"{name} (no IPv4 address)" for name, ip in found.items())


def in_use(environ: Mapping[str, str]) -> str:
    """Return in words which interface Gloo uses on this machine."""
    given = environ.get(VARIABLE, "")
    if given:
        return f"{VARIABLE}={given}"
    return f"the interface of this machine's name, {platform.node()}, since {VARIABLE} is not set"
