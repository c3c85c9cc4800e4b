"""Samples to draw numbers for: what the tests of everything that hangs on sample numbers share."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from penstock.moe import SampleKeys

SHAPE = (5, 7, 6)
sample_ids = st.lists(st.integers(0, 2**63 - 1), min_size=5, max_size=5, unique=True)
seeds = st.integers(0, 2**32 - 1)


def keys(ids: list[int], seed: int = 0) -> SampleKeys:
    return SampleKeys(seed, torch.tensor(ids, dtype=torch.int64))
