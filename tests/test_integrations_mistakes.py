"""Mistakes beside the examples of docs/integrations.md, which would train something else without a word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.partial_state import ShareError
from penstock.runtime import ParameterMismatchError
from tests.support.adapted import as_torchrun_starts_it
from tests.support.pages import blocks, run_block
from tests.support.ranks import Pools
from tests.test_integrations_page import (
    PAGE,
    RANKS,
    Ran,
    Tensors,
    drawn,
    exchange,
    logical,
    run_page,
    scaled_less,
)


def clipped_by_torch(code: str) -> str:
    return code.replace("penstock.clip_grad_norm_(model, ", "nn.utils.clip_grad_norm_(model.parameters(), ")


def called_inside(code: str) -> str:
    clip = "    penstock.clip_grad_norm_(model, 1.0)\n"
    return code.replace("model(x, labels)", "model.module(x, labels)").replace(clip, "")


def compiled_copy(code: str) -> str:
    """A wrapper around what DDP looks for the list of experts in."""
    return code.replace(
        "(penstock.ignore_experts(make_model()))", "(torch.compile(penstock.ignore_experts(make_model())))"
    )


def infinite_on_rank_1(code: str) -> str:
    """Of the experts there, and in the first pass only."""
    poison = "    if torch.distributed.get_rank() and x is batches[0][0]:\n"
    poison += "        model.module.layer.experts.w_up.grad.fill_(torch.inf)\n"
    return scaled_less(code).replace("    scaler.unscale_", f"{poison}    scaler.unscale_")


def looking_alone(code: str) -> str:
    """PyTorch's usual scaler, without clipping, whose infinite norm would tell the others."""
    code = code.replace("import ShardedGradScaler", "import GradScaler as ShardedGradScaler")
    return infinite_on_rank_1(code.replace("    penstock.clip_grad_norm_(model, 1.0)\n", ""))


def run_mistake(rank: int, mistake: Callable[[str], str]) -> str:
    heading = "Autocast and scaled losses" if mistake is looking_alone else "DistributedDataParallel"
    with pytest.raises((ValueError, ParameterMismatchError)) as caught:
        run_page(rank, heading, torch.float32, change=mistake)
    return str(caught.value)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (clipped_by_torch, "gate.weight differs between ranks"),
        (looking_alone, "Scale losses by ShardedGradScaler"),
        (called_inside, "gate.weight differs between ranks"),
        (compiled_copy, "DistributedDataParallel has given every rank the experts of rank 0"),
    ],
)
def test_a_mistake_is_refused_in_the_next_step(
    ranks: Pools, mistake: Callable[[str], str], said: str
) -> None:
    for message in ranks(RANKS).run(run_mistake, mistake):
        assert said in message


def trainer_that_clips(code: str) -> str:
    return code.replace("max_grad_norm=0,", "max_grad_norm=1.0,").replace(
        "callbacks=[Clip()]", "callbacks=[]"
    )


def run_trainer_that_clips(rank: int) -> str:
    with as_torchrun_starts_it(rank, RANKS), pytest.raises(ParameterMismatchError) as caught:
        run_page(rank, "Trainer", change=trainer_that_clips)
    return str(caught.value)


def test_a_trainer_that_clips_is_refused(ranks: Pools) -> None:
    for message in ranks(RANKS).run(run_trainer_that_clips):
        assert "set max_grad_norm=0" in message


def run_infinite(rank: int) -> tuple[Ran, Tensors]:
    """Also what the model begins with."""
    (common,) = blocks(PAGE, "The model")
    begun = drawn(run_block(common)["Model"](exchange()), torch.float32)
    ran = run_page(rank, "Autocast and scaled losses", torch.float32, infinite_on_rank_1)
    return ran, logical(begun, dict(begun.named_parameters()))


def test_an_infinity_on_one_rank_makes_all_leave_the_step_out(ranks: Pools) -> None:
    for ran, begun in ranks(RANKS).run(run_infinite):
        assert ran.norms[0] == float("inf") and 0 < ran.norms[1] < float("inf")
        assert all(torch.isfinite(tensor).all() for tensor in ran.parameters.values())
        assert any(not torch.equal(ran.parameters[name], tensor) for name, tensor in begun.items())


def saved_by_trainer(code: str, folder: Path) -> str:
    return code.replace("trainer.train()", f"trainer.save_model({str(folder)!r})")


def saved_by_lightning(code: str, folder: Path) -> str:
    return f"{code}trainer.save_checkpoint({str(folder / 'model.ckpt')!r})\n"


def run_saved_alone(rank: int, heading: str, folder: Path) -> str:
    """The error of a rank when a trainer saves on rank 0."""
    save = saved_by_trainer if heading == "Trainer" else saved_by_lightning
    with as_torchrun_starts_it(rank, RANKS):
        try:
            run_page(rank, heading, torch.float32, change=lambda code: save(code, folder))
        except ShareError as error:
            if heading == "Lightning":
                torch.distributed.barrier()  # the other rank waits for this one
            return type(error).__name__
    return ""


@pytest.mark.parametrize("heading", ["Trainer", "Lightning"])
def test_no_trainer_saves_the_experts_of_rank_0_alone(ranks: Pools, tmp_path: Path, heading: str) -> None:
    assert ranks(RANKS).run(run_saved_alone, heading, tmp_path) == ["ShareError", ""]
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".safetensors", ".ckpt")]
