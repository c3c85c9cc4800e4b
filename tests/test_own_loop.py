"""A training loop of one's own, by the short way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import penstock
from tests.support.runs import write_config


def test_a_file_and_settings_make_the_model_that_they_describe(tmp_path: Path) -> None:
    settings = ("moe.num_experts=6", "schedule.name=flowmoe", "schedule.microbatches=2")
    with penstock.session(write_config(tmp_path), *settings) as run:
        assert (run.rank, run.world_size, run.layout.dp_size) == (0, 1, 1)
        assert run.config.moe.num_experts == 6
        tokens = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(0))
        loss = run.model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        assert all(parameter.grad is not None for parameter in run.model.parameters())
        assert run.model.plan.schedule.name == "flowmoe"
    assert not dist.is_initialized()


def test_settings_beside_a_config_are_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"moe.top_k=1: a RunConfig has all settings.*replace"),
        penstock.session(penstock.RunConfig(), "moe.top_k=1"),
    ):
        pass


def test_a_setting_that_cannot_be_used_is_named() -> None:
    with pytest.raises(penstock.ConfigError, match=r"moe\.top_k"), penstock.session(None, "moe.top_k=9"):
        pass


def test_an_error_of_the_loop_comes_out_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), penstock.session(None, "model.num_layers=1"):
        _ = 1 / 0
