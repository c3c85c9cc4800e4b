"""Models without memory for their weights."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from penstock.models.decoder import on_meta


def test_nothing_is_held_and_nothing_filled() -> None:
    with on_meta():
        layers = nn.ModuleList([nn.Linear(3, 4), nn.Embedding(5, 6), nn.LayerNorm(7)])
    assert all(p.device.type == "meta" for p in layers.parameters())
    assert [tuple(p.shape) for p in layers.parameters()] == [(4, 3), (4,), (5, 6), (7,), (7,)]
    assert nn.Linear(2, 2).weight.device.type == "cpu" and nn.Linear(2, 2).weight.any()


def test_initialisers_with_a_name_for_their_tensor_work() -> None:
    with on_meta():
        weight = torch.empty(2, 3)
        assert nn.init.normal_(tensor=weight, std=0.1) is weight
        assert nn.init.uniform_(weight) is weight


LIGHT = """
import sys
from penstock.cli.train import _check_layout
from penstock.config import load
from penstock.train.config import RunConfig
_check_layout(load(RunConfig, None, []).resolved(2), 2, 2)
print(*sorted({"sympy", "torch._dynamo", "torch.distributed.tensor"} & sys.modules.keys()))
"""


@pytest.mark.slow
def test_starting_ranks_loads_no_compiler_and_no_tensors_of_meshes() -> None:
    """They take seconds, and whoever starts ranks has no use for them."""
    found = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert found.stdout == "\n"
