"""Curves as `penstock profile` measures them, which are a cluster file; then larger collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, Final

import torch

from penstock.autotune.profile.measure import profile_run
from penstock.config import to_dict
from penstock.cost import ClusterFile
from penstock.doctor.gpu.here import Here, given_machinery, settled, timed
from penstock.doctor.gpu.outcome import Outcome
from penstock.graph import Lane
from penstock.mesh import Group
from penstock.routing.sizes import split_sizes
from penstock.runtime import Machinery
from penstock.words import bit_rate, counted, flop_rate

NAME: Final = "gpu"
LEAST_LARGE_BYTES: Final = 1 << 26
TIMES: Final = 5
SHOWN: Final = ("all_to_all", "all_reduce")
FLOAT_BYTES: Final = 4
MOST_DOUBTS: Final = 2
"""Doubts in the text; all are in the file."""


def run(here: Here) -> Outcome:
    """Measure; the cluster file is in the figures, the same on all ranks."""
    machinery = given_machinery(here)
    file = profile_run(settled(here), machinery, budget_s=here.scale.budget_s, name=NAME)
    large = list(_large(here, machinery))
    machinery.close()
    if file.measured is not None:
        file = replace(file, measured=replace(file.measured, host=""))
    return outcome_of(file, large, judged=here.scale.judged)


def outcome_of(file: ClusterFile, large: Sequence[dict[str, Any]], *, judged: bool) -> Outcome:
    """Return the curves for people and for plans.

    Args:
        file: The curves.
        large: Larger collectives, one dictionary each.
        judged: Whether doubts about the curves count.
    """
    lines = [
        f"{name}: {1e6 * link.alpha_s:.0f} us, {bit_rate(1 / link.beta_s_per_byte)} of what a rank has"
        for name in SHOWN
        if (link := next((each for each in file.links if each.collective == name), None)) is not None
    ]
    if file.peak_flops_per_s is not None:
        lines.append(
            f"products: {flop_rate(file.peak_flops_per_s)} at most; "
            f"transfers beside computation take {file.contended_transfers:.2f} times as long"
        )
    if large:
        last = large[-1]
        rate = bit_rate(last["bytes"] / last["seconds"])
        lines.append(f"{last['collective']} of {last['bytes'] >> 20} MiB: {rate}")
    figures = {"cluster": to_dict(file), "large": list(large)}
    doubts = "; ".join([*file.doubts[:MOST_DOUBTS], *(["and more"] if file.doubts[MOST_DOUBTS:] else [])])
    if doubts and not judged:
        lines.append(f"{counted(len(file.doubts), 'doubt')}, listed in the file")
    return Outcome.of(lines, figures, slow=doubts if judged else "")


def _large(here: Here, machinery: Machinery) -> Iterator[dict[str, Any]]:
    """Yield seconds of collectives beyond the sizes of a profile, over all ranks, up to the largest."""
    size_bytes = LEAST_LARGE_BYTES
    transport = machinery.transports.of(Lane.INTER)
    ranks = here.world_size
    while ranks > 1 and size_bytes <= here.scale.largest_bytes:
        splits = [min(split_sizes(size_bytes // FLOAT_BYTES, ranks))] * ranks
        values = torch.zeros(sum(splits), device=here.device)
        actions: dict[str, Callable[[], object]] = {
            "all_reduce": partial(transport.all_reduce, values, Group.WORLD),
            "all_to_all": partial(transport.all_to_all, values, splits, splits, Group.WORLD),
        }
        for collective, action in actions.items():
            times = [timed(here, action)[1] for _ in range(TIMES)]
            slowest = here.control.largest([median(times[1:])], "comparing large collectives")
            yield {"collective": collective, "bytes": size_bytes, "seconds": slowest[0]}
        size_bytes *= 4
