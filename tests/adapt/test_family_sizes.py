"""The operations that plans count of a model of transformers are those that it computes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from penstock.cost.model_flops import PASSES, ModelFlops
from penstock.decision import GradientBytes
from penstock.families.inspection import look
from penstock.families.known import FAMILIES, family_of
from penstock.topology import Layout
from tests.support.families import found as known
from tests.support.families import tiny

TOKENS = 24
PRODUCTS = ("mm", "addmm")
"""What linear layers are made of; heads compare in batches of products."""

ALL_TOKENS = "llama4_text"
"""Its experts get all tokens, in a batch of products."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() & known().keys()))
def test_every_product_of_a_family_is_counted(name: str) -> None:
    model = tiny(name)
    family = family_of(model)
    assert family is not None
    found = look(model, family)
    with FlopCounterMode(display=False) as counter:
        model.eval()(input_ids=torch.arange(TOKENS)[None] % 50)
    there = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    computed = sum(flops for op, flops in there.items() if op.removeprefix("aten.") in PRODUCTS)
    layout, gradients = Layout(world_size=1, ep_size=1, rank=0), GradientBytes((0,), (0,), (0,))
    work = found.sizes.workload(layout, gradients, 1, TOKENS)
    moe_layers = [block is not None for block in found.blocks]
    scores = len(moe_layers) * work.heads.score_flops(TOKENS)
    counted = ModelFlops.of(work, moe_layers, None).per_token / PASSES - scores
    if name == ALL_TOKENS:
        counted -= sum(moe_layers) * work.expert_flops(work.top_k)
    assert TOKENS * counted == pytest.approx(computed, rel=0.05)
