"""Finds why a rank does not reach the others at all, in the order in which it can go wrong."""

from __future__ import annotations

import platform

from penstock.doctor.findings import is_loopback
from penstock.topology import ProcessInfo
from penstock.topology.meeting_point import look_at


def why_unreachable(info: ProcessInfo, host: str, port: int, error: str) -> str:
    """Return one sentence for a rank that could not reach the store at `host` and `port`: what to fix."""
    who = f"rank {info.rank} of {info.world_size} ({platform.node()})"
    found = look_at(host, port)
    if found.kind == "unresolved":
        return (
            f"{who} cannot resolve {host}, the host at which ranks meet ({found.why}): add it to /etc/hosts "
            "or DNS, or give its IP address (torchrun --rdzv-endpoint with --local-addr, or MASTER_ADDR)."
        )
    if info.rank == 0:
        return (
            f"{who} cannot open the port {port} of {host} ({error}): choose a free port (MASTER_PORT, "
            "torchrun --rdzv-endpoint)."
        )
    if is_loopback(found.ip) and found.kind != "accepts":
        return (
            f"{who} was told to meet the others at {host} ({found.ip}), which is this machine itself, and "
            "nobody is there: give the network address of rank 0's machine (torchrun --rdzv-endpoint and "
            "--local-addr, or MASTER_ADDR)."
        )
    if found.kind == "accepts":
        return (
            f"{who} reaches {host}:{port}, where something else than the ranks' store answers ({error}): "
            "choose another port."
        )
    return (
        f"{who} finds nobody at {host}:{port} ({found.ip}): look whether rank 0 was started there, and "
        "whether a firewall lets the port through."
    )
