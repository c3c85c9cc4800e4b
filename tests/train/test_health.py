"""Steps that are not finite: skipped by all ranks, counted, and never the end of what was good before."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch

from penstock.checkpoint.folder import complete_checkpoints
from penstock.checkpoint.storage import first_not_finite
from penstock.cli.train_rank import EXPECTED
from penstock.report import RunSummary
from penstock.runtime import PipelinedStack
from penstock.runtime.buckets import has_gradient
from penstock.train import optimizer as update_module
from penstock.train import run_state
from penstock.train.metrics import StepMetrics
from penstock.train.optimizer import DivergedError
from penstock.train.trainer import Trainer
from tests.support.ranks import Pools
from tests.support.runs import write_config
from tests.support.training import Told, train_on
from tests.train.test_trainer import metrics, run, saved_steps, trainer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("joined")]

SHARDED = ("optimizer.zero_stage=1",)
BALANCED = ("moe.gate=sigmoid", "moe.expert_bias_rate=0.01", "moe.aux_loss_coeff=0")


def break_steps(broken: Trainer, *steps: int) -> None:
    """Let these steps, counted from 1, compute with numbers that are not finite."""
    take_step, attention = broken._step, broken.stack.parts.parts[0].self_attn  # type: ignore[attr-defined]

    def step(number: int) -> StepMetrics:
        if number + 1 not in steps:
            return take_step(number)
        hook = attention.register_forward_pre_hook(lambda _, inputs: (inputs[0] * math.nan, *inputs[1:]))
        try:
            return take_step(number)
        finally:
            hook.remove()

    vars(broken)["_step"] = step


def state_of(broken: Trainer) -> dict[str, torch.Tensor]:
    tensors = run_state.state_of(broken.stack, broken.optimizer, run_state.DecoderNaming(broken.stack.model))
    return {name: tensor.clone() for name, part in tensors.items() for tensor in part.boxes.values()}


def broken_run(folder: Path, steps: tuple[int, ...], *overrides: str) -> RunSummary:
    broken = trainer(folder, *overrides)
    break_steps(broken, *steps)
    return broken.run()


# ---- a skipped step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [(), BALANCED, SHARDED, (*SHARDED, "optimizer.clip_grad_norm=none")])
def test_a_skipped_step_changes_nothing(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """Neither parameters, nor moments and their count, nor the experts' biases and what they count."""
    broken = trainer(tmp_path, *settings)
    break_steps(broken, 2)
    broken._step(0)
    before = state_of(broken)
    skipped = broken._step(1)
    assert skipped.skipped and not math.isfinite(skipped.loss)
    after = state_of(broken)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert not any(map(has_gradient, broken.stack.parameters()))
    third = broken._step(2)
    assert third.skipped is None and math.isfinite(third.loss)
    assert any(not torch.equal(before[name], tensor) for name, tensor in state_of(broken).items())


def test_without_clipping_shares_are_updated_before_gradients_are_judged(tmp_path: Path) -> None:
    """A finite loss and gradients that are not: what has been applied is not trained on."""
    broken = trainer(tmp_path, *SHARDED, "optimizer.clip_grad_norm=none")
    broken._step(0)
    next(broken.stack.parameters()).register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(DivergedError, match=r"Set optimizer\.clip_grad_norm"):
        broken._step(1)


def test_data_and_learning_rate_go_on(tmp_path: Path) -> None:
    """The third step is what it would be in a run that stood still for one step."""
    broken = trainer(tmp_path)
    break_steps(broken, 2)
    found = [broken._step(step) for step in range(3)]
    still = trainer(tmp_path)
    first = still._step(0)
    third = still._step(2)
    assert (found[0].loss, found[2].loss) == (first.loss, third.loss)
    assert found[2].learning_rate == third.learning_rate > found[0].learning_rate


def test_skipped_steps_are_counted_and_named(tmp_path: Path) -> None:
    summary = broken_run(tmp_path, (2, 4, 6), "train.max_skipped_steps=1")
    assert [m.step for m in metrics(tmp_path) if m.skipped] == [2, 4, 6]
    assert summary.skipped_steps == 3
    assert math.isfinite(summary.last_loss) and summary.last_loss == metrics(tmp_path)[4].loss
    assert "3 steps were not finite" in summary.to_text()
    assert json.loads(json.dumps(summary.to_dict(), allow_nan=False))["skipped_steps"] == 3
    assert saved_steps(tmp_path) == [6]


# ---- the end of a run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 2])
def test_too_many_in_a_row_end_the_run(tmp_path: Path, most: int) -> None:
    settings = (f"train.max_skipped_steps={most}", "train.checkpoint_every=1", "train.steps=20")
    with pytest.raises(DivergedError, match=rf"step {4 + most} has loss nan.*step-0*{3 + most}\. A lower"):
        broken_run(tmp_path, tuple(range(4, 20)), *settings)
    assert DivergedError in EXPECTED, "exit code 1 and one line"
    assert saved_steps(tmp_path)[-1] == 3 + most, "a skipped step has the state of the one before"


def test_a_run_in_which_no_step_is_finite_fails(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="none of the steps"):
        broken_run(tmp_path, (1, 2, 3), "train.steps=3")
    assert saved_steps(tmp_path) == []


def test_a_learning_rate_that_breaks_everything_costs_no_checkpoint(tmp_path: Path) -> None:
    """The trial's case: one checkpoint is kept, and every step saves."""
    run(tmp_path, "train.steps=3")
    good = complete_checkpoints(tmp_path / "run" / "checkpoints")
    settings = ("train.resume=true", "train.steps=60", "train.checkpoint_every=1", "train.keep_checkpoints=1")
    with pytest.raises(DivergedError, match=r"the last good checkpoint is \S+step-00000003\."):
        run(tmp_path, *settings, "optimizer.lr=1e30")
    assert complete_checkpoints(tmp_path / "run" / "checkpoints") == good
    assert run(tmp_path, "train.resume=true", "train.steps=4").steps == 4


@pytest.mark.parametrize("every", [0, 1])
def test_every_saved_state_is_one_to_go_on_from(tmp_path: Path, every: int) -> None:
    settings = ("optimizer.lr=1e12", "optimizer.warmup_steps=0", "train.steps=60", "train.keep_checkpoints=9")
    with pytest.raises(DivergedError, match=r"training diverged: .*optimizer\.lr"):
        run(tmp_path, *settings, f"train.checkpoint_every={every}")
    for step in saved_steps(tmp_path):
        good = trainer(tmp_path, *settings)
        good.checkpoints.load(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
        assert first_not_finite(good.stack.named_parameters()) is None
        assert math.isfinite(good._step(step).loss)
    assert every or saved_steps(tmp_path) == []


def test_an_overflow_in_the_very_last_update_fails(tmp_path: Path) -> None:
    """Its loss was finite, and its gradients, too."""
    with pytest.raises(DivergedError, match=r"after step 1 the loss on held-out text is nan.*no checkpoint"):
        run(tmp_path, "optimizer.lr=1e30", "optimizer.warmup_steps=0", "train.steps=1")
    assert saved_steps(tmp_path) == [] and math.isfinite(metrics(tmp_path)[0].loss)


def test_moments_that_overflow_are_not_saved(tmp_path: Path) -> None:
    """The model still works, and what it would go on with does not."""
    broken = trainer(tmp_path, "train.checkpoint_every=2")

    def overflow(step: int, statistics: object) -> None:
        del statistics
        if step == 4:
            parameter = next(broken.stack.parameters())
            broken.optimizer.state[parameter]["exp_avg_sq"].view(-1)[0] = math.inf

    broken.on_step = overflow
    with pytest.raises(DivergedError, match=r"step 4 refused: optimizer\S+exp_avg_sq on rank 0"):
        broken.run()
    assert saved_steps(tmp_path) == [2]


# ---- all ranks together ------------------------------------------------------------------------------------


def one_sees_nan(trainer: Trainer, step: int) -> None:
    """Rank 1 takes the gradient norm of the third step for no number; nobody else does."""
    module = vars(update_module)
    clip = module["clip_grad_norm_"]

    def broken(stack: PipelinedStack, max_norm: float | None) -> torch.Tensor:
        norm: torch.Tensor = clip(stack, max_norm)
        module["clip_grad_norm_"] = clip
        return norm * math.nan

    if step == 2 and trainer.layout.rank == 1:
        module["clip_grad_norm_"] = broken


def parameters_after(rank: int, world_size: int, folder: Path, overrides: list[str]) -> tuple[Told, str]:
    found = hashlib.sha256()

    def watch(trainer: Trainer, step: int) -> None:
        one_sees_nan(trainer, step)
        if step == 6:
            for layer in range(len(trainer.stack.parts.parts)):
                for parameter in trainer.stack.parts.replicated_parameters(layer):
                    found.update(parameter.detach().numpy().tobytes())

    return train_on(rank, world_size, folder, overrides, watch), found.hexdigest()


def test_what_one_rank_sees_all_ranks_skip(ranks: Pools, tmp_path: Path) -> None:
    write_config(tmp_path)
    (first, one), (second, other) = ranks(2).run(parameters_after, 2, tmp_path, ["train.steps=6"])
    assert first.summary is not None and second.summary is not None, first.said
    assert (first.summary.skipped_steps, second.summary.skipped_steps) == (1, 1)
    assert "step 3 skipped" in first.said
    assert one == other, "replicas are still equal"


# ---- finite or not -----------------------------------------------------------------------------------------


def test_the_first_tensor_that_is_not_finite_is_named() -> None:
    fine = {"a": torch.full((3,), 3e38), "empty": torch.zeros(0), "whole": torch.tensor([1])}
    assert first_not_finite(fine.items()) is None and first_not_finite([]) is None
    for value in (math.nan, math.inf, -math.inf):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            broken = torch.tensor([[1.0, 2.0], [3.0, value]], dtype=dtype)
            assert first_not_finite({**fine, "b": broken, "c": broken}.items()) == "b"
