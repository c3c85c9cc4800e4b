"""Settings of a schedule that are tried before the comparison; the one of best prediction takes part."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from penstock.decision import ScheduleConfig
from penstock.lab.bench.config import BenchConfig
from penstock.lab.bench.naming import Named

MICROBATCHES = (2, 4)
ALL_REDUCE_CHUNK_BYTES = (1 << 20, 1 << 22)


def variants(config: BenchConfig, name: str) -> tuple[ScheduleConfig, ...]:
    """Return settings for schedule `name`: those of [schedule], or with compare.tune all worth a trial.

    Numbers of pieces that do not divide the batch evenly are left out, as long as there are others.
    """
    given = replace(config.schedule, name=Named.of(name).schedule)
    if not config.compare.tune:
        return (given,)
    batch = config.compare.batch_per_device
    pieces = [m for m in MICROBATCHES if batch % m == 0] or [given.microbatches]
    tried = product(pieces, ALL_REDUCE_CHUNK_BYTES)
    return tuple(replace(given, microbatches=m, chunks=m, all_reduce_chunk_bytes=size) for m, size in tried)
