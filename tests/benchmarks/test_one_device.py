"""Steps beside transformers: both compute the same loss, and the text says what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import penstock
from benchmarks.one_device import (
    PEER,
    SMALL,
    configurations,
    measure_one_device,
    render_one_device,
    settings_of,
)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_both_compute_the_same_loss(tmp_path: Path, family: str) -> None:
    """Else the comparison would be one of different work."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configurations(SMALL)[family], dtype=torch.float32)
    model.save_pretrained(tmp_path)
    text_BN = torch.randint(SMALL.vocab_size, (SMALL.batch, SMALL.seq_len + 1))
    tokens_BL, labels_BL = text_BN[:, :-1].contiguous(), text_BN[:, 1:].contiguous()
    wanted = model(tokens_BL, labels=labels_BL, shift_labels=labels_BL).loss
    with penstock.session(None, *settings_of(tmp_path, SMALL, "sequential")) as run:
        assert float(run.model(tokens_BL, labels_BL).detach()) == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.slow
def test_every_way_is_measured() -> None:
    found = measure_one_device(SMALL, rounds=2)
    assert [row.way for row in found.rows] == 2 * [PEER, "penstock, sequential", "penstock, flowmoe"]
    assert all(row.step_s.low > 0 for row in found.rows)
    assert all(row.ratio.median == 1.0 for row in found.rows if row.way == PEER)
    assert "2 rounds, in turns" in render_one_device(found)
