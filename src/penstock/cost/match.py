"""Comparison of a cluster file with the machines that are used now."""

from __future__ import annotations

from dataclasses import fields

from penstock.cost.cluster_file import ClusterFile, Machine

NO_MATTER = ("date",)


def mismatch(file: ClusterFile, machine: Machine, ranks: int, nodes: int) -> str | None:
    """Return why a measured file may not hold here, as one line for a warning; None if it fits.

    machine, ranks, nodes: those used now. A file written by hand describes no measured machine, so it is
    never compared.
    """
    if file.measured is None:
        return None
    pairs = [("ranks", file.ranks, ranks), ("nodes", file.nodes, nodes)]
    pairs += [
        (each.name, getattr(file.measured, each.name), getattr(machine, each.name))
        for each in fields(Machine)
        if each.name not in NO_MATTER
    ]
    differences = [f"{what} {then} (here {now})" for what, then, now in pairs if then != now]
    if not differences:
        return None
    measured = f"cluster file {file.name!r} was measured with {', '.join(differences)}"
    return f"{measured}: its times may not hold; measure again with `penstock profile`"
