"""Finds which ranks share a node, from the local ranks that their launcher assigned."""

from __future__ import annotations

from penstock.topology.control import Control


def find_node_size(control: Control, local_rank: int) -> int:
    """Return the ranks per node; 0 if nodes differ in size, or a node's ranks are not consecutive.

    local_rank: of this rank in its node, as torchrun, Slurm and the emulator count them. All ranks must call
    this.
    """
    places = control.gather(local_rank, "finding out which ranks share a node")
    size = next((rank for rank, place in enumerate(places) if rank and place == 0), len(places))
    regular = len(places) % size == 0 and places == list(range(size)) * (len(places) // size)
    return size if regular else 0
