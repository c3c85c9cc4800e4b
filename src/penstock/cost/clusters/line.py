"""A cluster in one line, such as `4x8xA100-80GB,net=100gbit`, by the data sheets of its devices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

from penstock.config import ConfigError
from penstock.cost.cluster import ClusterConfig
from penstock.cost.cluster_file import ClusterFile
from penstock.cost.devices import DEVICES, FLOAT8, HAS_FLOAT8, SHARES, Device, find_device, usable_bytes
from penstock.words import bit_rate, whole_number

EXAMPLE: Final = "4x8xA100-80GB,net=100gbit"
FORM: Final = re.compile(r"(?:(\d+)x)?(\d+)x([A-Za-z][^,]*)((?:,[^,]*)*)", re.IGNORECASE)
MEMORY: Final = re.compile(r"[\s_-](\d{1,9})\s*(?:gb|gib)$", re.IGNORECASE)
RATE: Final = re.compile(r"(?:(\d{1,9})x)?(\d{1,9}(?:\.\d{1,9})?)\s*([A-Za-z]+(?:/s)?)")
BYTES_OF: Final = {
    **dict.fromkeys(("gbit", "Gbit", "gbit/s", "Gbit/s", "gbps", "Gbps", "Gb", "Gb/s"), 1e9 / 8),
    **dict.fromkeys(("GB/s", "gb/s", "GB"), 1e9),
}
"""Bytes by unit. Cards are sold as 100Gb, which are bits; a lower-case gb alone could be either."""

LINKS: Final = {"NVLink": 0.7, "Infinity Fabric": 0.6, "PCIe": 0.7, "PCIe through the host": 0.4}
"""Share of a link's rate in one direction that collectives reach; every byte through the host crosses its
memory."""
FABRICS: Final = {"": 0.8, "ib": 0.85, "ethernet": 0.7, "efa": 0.21}
"""Share of the network cards' rate, by what joins them; "" = not said. That of EFA, whose all-to-all of small
messages is slow, is fitted to one measured step (docs/calibration.md)."""
START_S: Final = {"NVLink": 8e-6, "Infinity Fabric": 8e-6, "PCIe": 1e-5, "PCIe through the host": 2e-5}
NETWORK_START_S, TASK_S, ISSUE_S = 2e-5, 1e-5, 1e-5
"""Seconds before a message leaves a node, of a task on a device, and of the thread that hands over an
operation of PyTorch (5 to 30 microseconds where it was measured)."""
KEYS: Final = ("net", "fabric", "inside", "nvlink", "products", "graphs")


def in_line(text: str) -> ClusterFile | None:
    """Return the cluster that a line describes; None for a text that is none.

    The line is `[NODESx]DEVICESxNAME[-MEMORYgb][,net=[CARDSx]RATE][,fabric=ib|ethernet|efa][,inside=RATE]
    [,nvlink=DEVICES][,products=float8][,graphs=full]`; a rate is in gbit or GB/s. `net` is of a node, or of
    each of its cards. `nvlink`: how many devices its links join, where these are several nodes'; then they
    count as one node. `products`: what they are computed in by others, where Penstock is compared with
    them; `graphs`: a step of theirs is one CUDA graph, which no thread issues by operations.

    Raises:
        ConfigError: If the line has an unknown device, memory, key or rate, or no network between nodes.
    """
    match = FORM.fullmatch(text.strip())
    if match is None:
        return None
    nodes, per_node = whole_number(match[1] or "1"), whole_number(match[2])
    if not nodes or not per_node:
        _refuse(text, "nodes and devices must be whole numbers from 1 up, of few digits")
    device, memory_gb = _device(text, match[3])
    given = _options(text, match[4], device)
    fabric, in_float8 = given.get("fabric", ""), "products" in given
    joined = _joined(text, given.get("nvlink", str(per_node)), nodes, per_node)
    if nodes * per_node > joined and "net" not in given:
        _refuse(text, f"no rate joins its {nodes} nodes")
    if nodes == 1 and "net" in given:
        _refuse(text, f"net joins nodes, and this is one of {per_node} devices")
    cards, net = _rate(text, given["net"]) if "net" in given else (1, 1e9)
    inside = _rate(text, given["inside"])[1] if "inside" in given else 1e9 * device.link_gb_per_s
    of_device = cards >= per_node or joined > per_node  # then each has a card of its own
    peak, shares = device.bfloat16_tflops or device.float32_tflops, SHARES[device.architecture]
    of_cards = f"{cards} x " if cards > 1 else ""
    network = "" if nodes == 1 else f"{of_cards}{bit_rate(net)} per node at "  # as it is understood
    with _refusing(text):
        rates = ClusterConfig(
            flops_per_s=shares.products * peak * 1e12,
            memory_bytes_per_s=shares.memory * device.memory_gb_per_s * 1e9 / 2,  # read and written
            link_latency_s=NETWORK_START_S,
            link_bytes_per_s=FABRICS[fabric] * net * (cards / per_node if of_device else cards),
            link_rate_of="device" if of_device else "node",
            intra_latency_s=START_S[device.link],
            intra_bytes_per_s=LINKS[device.link] * inside,
            task_overhead_s=TASK_S,
            issue_kernel_s=0.0 if "graphs" in given else ISSUE_S,
        )
    return ClusterFile(
        name=text.strip(),
        nodes=nodes * per_node // joined,
        ranks_per_node=joined,
        rates=rates,
        memory_bytes=usable_bytes(memory_gb),
        device=device.name,
        precision=device.usual,
        kernels_of="device in float8" if in_float8 else "device",
        source=f"data sheet of {device.name}: {peak:g} TFLOP/s in {device.usual}, {memory_gb} GB, "
        f"{device.memory_gb_per_s:g} GB/s, {device.link} {inside / 1e9:g} GB/s; default efficiency of "
        f"{device.architecture}: {shares.words}, links {100 * LINKS[device.link]:.0f}, "
        f"network {network}{100 * FABRICS[fabric]:.0f} %; nothing measured"
        + f"; products in float8, as Penstock does not compute them: {FLOAT8:g} times as fast"
        * in_float8,
    )


def _options(text: str, parts: str, device: Device) -> dict[str, str]:
    """Return what follows the devices, by key; values that are words are known ones."""
    given: dict[str, str] = {}
    for part in filter(None, parts.split(",")):
        key, _, value = (each.strip() for each in part.partition("="))
        if key not in KEYS or key in given:
            _refuse(text, f"{part!r} is not one of {', '.join(KEYS)}, or is given twice")
        given[key] = value
    if (fabric := given.get("fabric", "")) not in FABRICS:
        _refuse(text, f"{fabric!r} is none of {', '.join(filter(None, FABRICS))}")
    if (products := given.get("products")) is not None and (
        products != "float8" or device.architecture not in HAS_FLOAT8
    ):
        _refuse(text, f"products={products} is not float8, or {device.name} has no units for it")
    if (graphs := given.get("graphs", "full")) != "full":
        _refuse(text, f"graphs={graphs} is not full")
    return given


def _device(text: str, name: str) -> tuple[Device, int]:
    """Return a device and its memory in 1e9 bytes."""
    size, name = MEMORY.search(name), MEMORY.sub("", name)
    device = find_device(name)
    if device is None:
        names = ", ".join(each.name for each in DEVICES)
        _refuse(text, f"{name!r} is no device with a data sheet here; there are {names}")
    if size is None:
        return device, max(device.memory_gb)
    memory_gb = int(size[1])
    if memory_gb not in device.memory_gb:
        sold = " and ".join(f"{each}GB" for each in device.memory_gb)
        _refuse(text, f"{device.name} has {sold}, and not {memory_gb}GB")
    return device, memory_gb


def _joined(text: str, value: str, nodes: int, per_node: int) -> int:
    """Return how many devices the links inside nodes join."""
    joined = whole_number(value) or 0
    if joined < per_node or joined % per_node or nodes * per_node % joined:
        _refuse(text, f"nvlink={value} is no whole number of its nodes of {per_node}, or does not divide all")
    return joined


def _rate(text: str, value: str) -> tuple[int, float]:
    """Return a number of cards, and the bytes per second of each."""
    match = RATE.fullmatch(value)
    if match is None or match[3] not in BYTES_OF:
        _refuse(text, f"{value!r} is no rate such as 100gbit, 8x400gbit or 25GB/s")
    cards, rate = int(match[1] or 1), float(match[2])
    if not cards * rate:
        _refuse(text, f"nothing arrives at {value}")
    return cards, rate * BYTES_OF[match[3]]


@contextmanager
def _refusing(text: str) -> Iterator[None]:
    """Turn the refusal of a rate that was derived from a line into one of the line itself."""
    try:
        yield
    except ConfigError as error:
        _refuse(text, f"its {error.key} of {error.value} {error.why}")


def _refuse(text: str, why: str) -> NoReturn:
    raise ConfigError("--cluster", text, why, f"Write it like {EXAMPLE}, or give a cluster file.")
