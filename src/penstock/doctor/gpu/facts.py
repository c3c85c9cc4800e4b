"""What every rank finds about its card, its software and its network cards, and whether ranks agree."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from penstock.device import device_of
from penstock.doctor.facts import versions
from penstock.doctor.gpu.here import Here
from penstock.doctor.gpu.outcome import Outcome, Verdict, together
from penstock.words import counted, gib

RELEVANT: Final = (
    *("NCCL_", "CUDA_", "TORCH_NCCL_", "GLOO_", "OMP_NUM_THREADS", "PYTORCH_", "HIP_", "RCCL_"),
    *("TORCH_ALLOW_", "NVIDIA_TF32_"),
)
"""Beginnings of the variables that change how GPUs and their network work."""

SLOWING: Final = {
    ("CUDA_DEVICE_MAX_CONNECTIONS", "1"): "two lanes of communication share one queue of the device",
    ("CUDA_LAUNCH_BLOCKING", "1"): "the host waits for every kernel",
    ("NCCL_P2P_DISABLE", "1"): "GPUs of a node exchange through the host's memory",
    ("NCCL_IB_DISABLE", "1"): "nodes exchange over TCP instead of InfiniBand",
}
"""Settings that make steps slower, and why."""

NETWORK: Final = Path("/sys/class/net")
INFINIBAND: Final = Path("/sys/class/infiniband")
SMI_S: Final = 20.0


def run(here: Here) -> Outcome:
    """Gather this rank's facts, without a word to others: they may not be reachable."""
    environ = {name: value for name, value in os.environ.items() if name.startswith(RELEVANT)}
    figures: dict[str, Any] = {
        "device": device_of(here.device).facts(here.device),
        "driver": _smi("--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "topology": _smi("topo", "-m").splitlines(),
        "versions": versions(),
        "cores": len(os.sched_getaffinity(0)),
        "network": list(_network_cards()),
        "environment": environ,
    }
    slow = [f"{name}={value}: {why}" for (name, value), why in SLOWING.items() if environ.get(name) == value]
    card, versions_here = figures["device"], figures["versions"]
    memory = f", {gib(card['memory_bytes'])}" if "memory_bytes" in card else ""
    capability = f", capability {card['capability']}" if "capability" in card else ""
    software = [f"torch {versions_here['torch']}"]
    software += [f"CUDA {card['toolkit']}", f"NCCL {card['nccl']}"] if "toolkit" in card else []
    software += [f"driver {figures['driver']}"] if figures["driver"] else []
    nics = [f"{each['name']} {each['rate']}".strip() for each in figures["network"]]
    lines = [f"{card['name']}{memory}{capability}; {counted(figures['cores'], 'core')}", ", ".join(software)]
    lines.append(f"network: {', '.join(nics) or 'none found'}")
    if environ.get("NVIDIA_TF32_OVERRIDE") == "1":
        lines.append("NVIDIA_TF32_OVERRIDE=1: products in float32 have 10 bits, too few for numerics")
    return Outcome.of(lines, figures, slow="; ".join(slow))


def judge(outcomes: Mapping[int, Outcome]) -> Outcome:
    """Compare the facts of all ranks: with different software their results mean nothing."""
    outcome = together(outcomes)
    if outcome.verdict is Verdict.FAIL:
        return outcome
    everyone = {rank: own.figures for rank, own in sorted(outcomes.items())}
    first = min(everyone)
    figures = {"ranks": [{"rank": rank, **own} for rank, own in everyone.items()]}
    wrong = []
    for rank, own in everyone.items():
        mine, theirs = (
            each["versions"] | {"NCCL": each["device"].get("nccl")} for each in (own, everyone[first])
        )
        wrong += [
            f"rank {rank} has {what} {_shown(mine.get(what))}, and rank {first} {_shown(theirs.get(what))}"
            for what in sorted(mine.keys() | theirs.keys())
            if mine.get(what) != theirs.get(what)
        ]
    slow = "" if wrong or outcome.verdict is not Verdict.SLOW else outcome.reason
    cards = {own["device"]["name"] for own in everyone.values()}
    if len(cards) > 1:
        slow = "; ".join(filter(None, [slow, f"ranks have different cards: {', '.join(sorted(cards))}"]))
    return Outcome.of(outcome.lines, figures, slow=slow, wrong="; ".join(wrong))


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def _smi(*words: str) -> str:
    """Return what NVIDIA's own program says; "" without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [program, *words], capture_output=True, text=True, timeout=SMI_S, check=True, errors="replace"
        )
        return done.stdout.strip()
    return ""


def _network_cards() -> Iterator[dict[str, str]]:
    """Yield interfaces with their rates as the kernel states them."""
    for card in sorted(NETWORK.iterdir()) if NETWORK.is_dir() else []:
        if card.name != "lo":
            speed = _read(card / "speed")
            yield {"name": card.name, "rate": f"{speed} Mbit/s" if speed.isdecimal() else ""}
    for card in sorted(INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []:
        for port in sorted((card / "ports").glob("*")):
            yield {"name": f"{card.name}:{port.name}", "rate": _read(port / "rate")}


def _read(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):  # an interface that is down has no speed
        return path.read_text(encoding="utf-8").strip()
    return ""
