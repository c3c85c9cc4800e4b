"""Finds why a rank does not reach the others at all, in the order in which it can go wrong."""

from __future__ import annotations

import platform
import socket
from contextlib import suppress

from penstock.doctor.findings import is_loopback
from penstock.topology import ProcessInfo

CONNECT_S = 5.0


def why_unreachable(info: ProcessInfo, host: str, port: int, error: str) -> str:
    """Return one sentence for a rank that could not reach the store at `host` and `port`: what to fix."""
    who = f"rank {info.rank} of {info.world_size} ({platform.node()})"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as trouble:
        why = trouble.strerror or str(trouble)
        return (
            f"{who} cannot resolve {host}, the host at which ranks meet ({why}): add it to /etc/hosts or "
            "DNS, or give its IP address (torchrun --rdzv-endpoint with --local-addr, or MASTER_ADDR)."
        )
    ip = str(found[4][0])
    if info.rank == 0:
        return (
            f"{who} cannot open the port {port} of {host} ({error}): choose a free port (MASTER_PORT, "
            "torchrun --rdzv-endpoint)."
        )
    if is_loopback(ip):
        return (
            f"{who} was told to meet the others at {host} ({ip}), which is this machine itself, and nobody "
            "is there: give the network address of rank 0's machine (torchrun --rdzv-endpoint and "
            "--local-addr, or MASTER_ADDR)."
        )
    with suppress(OSError), socket.create_connection((ip, port), timeout=CONNECT_S):
        return (
            f"{who} reaches {host}:{port}, where something else than the ranks' store answers ({error}): "
            "choose another port."
        )
    return (
        f"{who} finds nobody at {host}:{port} ({ip}): look whether rank 0 was started there, and whether a "
        "firewall lets the port through."
    )
