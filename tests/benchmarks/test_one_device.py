"""Steps beside transformers: both compute the same loss, and the text says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import penstock
from benchmarks.layer.measure import Band
from benchmarks.one_device import (
    PEER,
    SMALL,
    OneDevice,
    Row,
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
    assert json.loads(json.dumps(found.to_dict()))["one_device"]["rounds"] == 2


def test_the_text() -> None:
    band = Band(median=0.08, low=0.07, high=0.09)
    ratio = Band(median=0.8, low=0.7, high=0.9)
    row = Row(family="mixtral", way="penstock, flowmoe", step_s=band, ratio=ratio)
    found = OneDevice(device="processor", sizes=SMALL, rounds=12, rows=(row,))
    assert render_one_device(found).splitlines() == [
        "2 layers, hidden size 64, 4 experts of 64, top-2; 4 x 64 tokens, float32, AdamW; processor",
        "12 rounds, in turns; median, 10 % to 90 % of rounds",
        "",
        "| family  | way               |           step ms | step / transformers |",
        "|---------|-------------------|------------------:|--------------------:|",
        "| mixtral | penstock, flowmoe | 80.0 [70.0, 90.0] |   0.80 [0.70, 0.90] |",
    ]
