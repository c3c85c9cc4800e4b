"""A training loop of one's own, by the short way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import penstock
from penstock.moe import MoELayer, build_layer
from penstock.own_loop import Session
from penstock.topology.faults import ACTIVITY
from tests.support.forked import run_forked
from tests.support.runs import write_config


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_layer_with_other_tasks_is_planned_for() -> None:
    """The plan that the configuration gets has no task for shared experts: it would leave them out."""

    def make_moe(number: int, ep_size: int, ep_rank: int) -> MoELayer:
        del number
        config = penstock.MoEConfig(num_experts=4, moe_ffn_hidden_size=8, shared_ffn_hidden_size=8)
        return build_layer(16, config, ep_size=ep_size, ep_rank=ep_rank)

    config = penstock.RunConfig(
        model=penstock.ModelConfig(num_layers=1, hidden_size=16, num_heads=2, seq_len=8),
        moe=penstock.MoEConfig(num_experts=4, moe_ffn_hidden_size=8),
    )
    with penstock.session(config) as plain:
        other = plain.model.plan
    with penstock.session(config, make_moe=make_moe) as run:
        tokens = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(0))
        run.model(tokens[:, :-1], tokens[:, 1:]).backward()
        shared = [p for name, p in run.model.named_parameters() if ".shared." in name]
        assert shared and all(p.grad is not None and p.grad.any() for p in shared)
        with pytest.raises(ValueError, match="shared_experts is False, and that of the layers is True"):
            run.model.adopt(other)


def test_settings_beside_a_config_are_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"moe.top_k=1: a RunConfig has all settings.*replace"),
        penstock.session(penstock.RunConfig(), "moe.top_k=1"),
    ):
        pass


def test_a_setting_that_cannot_be_used_is_named() -> None:
    with pytest.raises(penstock.ConfigError, match=r"moe\.top_k"), penstock.session(None, "moe.top_k=9"):
        pass


TINY = ("model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "model.seq_len=8")


def stepped(run: Session) -> float:
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(run.device)
    loss: torch.Tensor = run.model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.item()


@pytest.mark.slow
def test_an_error_of_the_loop_comes_out_as_it_was_and_another_session_may_follow() -> None:
    with pytest.raises(ZeroDivisionError), penstock.session(None, *TINY) as run:
        first = stepped(run)
        _ = 1 / 0
    assert not dist.is_initialized()
    with penstock.session(None, *TINY) as run:
        assert stepped(run) == first
        assert ACTIVITY.failure is None
    assert not dist.is_initialized()


def test_a_session_that_cannot_be_closed_is_left() -> None:
    """As on a GPU on which a kernel has failed, where nothing works any more."""

    def fail() -> None:
        raise OSError("of closing")

    with pytest.raises(OSError, match="of closing"), penstock.session(None, *TINY) as run:
        lanes = run.model.machinery.lanes
        close, lanes.close = lanes.close, fail  # type: ignore[method-assign]
        raise ZeroDivisionError
    close()
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_session_may_be_in_another_and_fail_there() -> None:
    with penstock.session(None, *TINY) as run:
        first = stepped(run)
        with penstock.session(None, *TINY) as inner:
            assert stepped(inner) == first
        with pytest.raises(ZeroDivisionError), penstock.session(None, *TINY):
            _ = 1 / 0
        assert ACTIVITY.failure is None, "other ranks were told that this one ends"
        assert dist.is_initialized()
        assert stepped(run) == first
    assert not dist.is_initialized()


SESSIONS = f"""
import os
import torch
import penstock

rank, said = int(os.environ["RANK"]), []
for turn in range(3):
    try:
        with penstock.session(None, *{TINY}, "moe.num_experts=4", "schedule.name=flowmoe") as run:
            tokens = torch.randint(256, (2, 9))
            if turn == 0 and rank == 1:
                raise ZeroDivisionError("of rank 1 alone")
            if turn == 1 and rank == 1:
                continue
            run.model(tokens[:, :-1], tokens[:, 1:]).backward()
            said.append("fine")
    except (RuntimeError, ZeroDivisionError) as error:
        said.append(f"{{type(error).__name__}} {{error}}".splitlines()[0])
os.write(1, f"{{rank}}: {{' | '.join(said)}}\\n".encode())
"""


@pytest.mark.slow
def test_ranks_are_told_why_one_has_left_and_meet_again_in_another_session(tmp_path: Path) -> None:
    program = tmp_path / "sessions.py"
    program.write_text(SESSIONS)
    done = run_forked(2, program=str(program))
    first, second = sorted(done.stdout.splitlines())
    assert "rank 1 had failed: ZeroDivisionError: of rank 1 alone" in first, done
    raised, left, last = first.removeprefix("0: ").split(" | ")
    assert raised.startswith("TaskError ") and left.startswith("TaskError ") and last == "fine"
    assert re.search("RuntimeError: rank 1 (was|does not answer)", left), "it left, and is named"
    assert second == "1: ZeroDivisionError of rank 1 alone | fine"
