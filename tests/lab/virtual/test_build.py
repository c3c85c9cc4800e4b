"""What a virtual device is made of: as the real model would have it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.train.assemble import gradient_bytes
from tests.lab.virtual.test_stack import case_of, virtual_of
from tests.support.parity import Case, stack_of
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow


@cache
def models() -> list[tuple[ModelConfig, MoEConfig]]:
    small = ModelConfig(num_layers=3, hidden_size=16, num_heads=2, seq_len=6, vocab_size=13)
    mixed = replace(small, moe_layers=(1,), ffn_hidden_size=20)
    experts = MoEConfig(num_experts=8, moe_ffn_hidden_size=12)
    return [(m, e) for m in (small, mixed) for e in (experts, replace(experts, expert="gelu"))]


def sizes_of(rank: int, case: Case) -> tuple[Any, Any, Any]:
    real = stack_of(rank, case)
    wanted = gradient_bytes(case.model, case.moe, real.machinery.layout)
    return real.gradients.sizes_bytes, wanted, virtual_of(rank, case).bucket_sizes


@pytest.mark.parametrize(("world_size", "ep_size"), [(1, 1), (2, 2), (2, 1)])
def test_gradients_are_as_large_as_those_of_the_model(ranks: Pools, world_size: int, ep_size: int) -> None:
    for model, moe in models():
        case = replace(case_of(world_size=world_size, ep_size=ep_size), model=model, moe=moe)
        for real, computed, used in ranks(world_size).run(sizes_of, case):
            assert real == computed == used
