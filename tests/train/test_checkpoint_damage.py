"""Nothing is loaded that has changed since it was written, and nothing saved that is not finite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.storage import DamagedCheckpointError
from penstock.train.checkpoint import Checkpoints, NotFiniteError
from tests.support.checkpoints import CASE, check_equal, state_of, trained
from tests.support.draws import draws
from tests.support.parity import Case
from tests.support.ranks import Pools

# ---- what has changed since it was written -----------------------------------------------------------------


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file, counted over all of it and around."""
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


@draws(30)
@given(number=st.integers(0, 9), bit=st.integers(0, 1 << 30))
def test_a_flipped_bit_is_noticed_wherever_it_is(
    saved_run: tuple[Checkpoints, Path], number: int, bit: int
) -> None:
    run, path = saved_run
    before = state_of(run)
    files = sorted(path.iterdir())
    damaged = files[number % len(files)]
    flip(damaged, bit)
    try:
        with pytest.raises(DamagedCheckpointError, match=str(path)):
            run.load(path)
    finally:
        flip(damaged, bit)
    check_equal(state_of(run), before)
    assert run.load(path) == 2


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoints, Path]:
    run = trained(0, CASE, tmp_path_factory.mktemp("saved"))
    return run, run.save(2)


def flipped_by_one(rank: int, case: Case, folder: Path) -> str:
    run = trained(rank, case, folder)
    path = run.save(2)
    if rank == 0:
        flip(path / "shard-00002.safetensors", 12345)
    run.stack.machinery.control.barrier("damaging")
    try:
        run.load(path)
    except DamagedCheckpointError as error:
        return str(error)
    return ""


def test_all_ranks_hear_of_a_flipped_bit(ranks: Pools, tmp_path: Path) -> None:
    case = replace(CASE, world_size=2, ep_size=2)
    for error in ranks(2).run(flipped_by_one, case, tmp_path):
        assert "shard-00002.safetensors has changed since it was written" in error


def test_a_list_of_checksums_that_was_cut_is_noticed(tmp_path: Path) -> None:
    run = trained(0, CASE, tmp_path)
    path = run.save(2)
    lines = (path / "SHA256SUMS").read_text().splitlines(keepends=True)
    for left_out in range(len(lines)):
        (path / "SHA256SUMS").write_text("".join(lines[:left_out] + lines[left_out + 1 :]))
        with pytest.raises(DamagedCheckpointError):
            run.load(path)


def test_a_renamed_checkpoint_is_noticed(tmp_path: Path) -> None:
    run = trained(0, CASE, tmp_path)
    path = run.save(2).rename(tmp_path / "step-00000005")
    with pytest.raises(DamagedCheckpointError, match="it holds step 2"):
        run.load(path)


# ---- what is not finite ------------------------------------------------------------------------------------


@pytest.mark.every_value
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["parameter", "exp_avg", "exp_avg_sq", "step"])
def test_nothing_is_saved_that_is_not_finite(tmp_path: Path, value: float, where: str) -> None:
    run = trained(0, CASE, tmp_path, keep=1)
    good = run.save(2)
    parameter = list(run.stack.model.parameters())[-1]
    with torch.no_grad():
        tensor = parameter if where == "parameter" else run.optimizer.state[parameter][where]
        tensor.view(-1)[-1] = value
    with pytest.raises(NotFiniteError, match=r"step 3 refused: \S+ on rank 0 is not finite"):
        run.save(3)
    assert list(tmp_path.iterdir()) == [good]
    run.load(good)
    assert all(parameter.isfinite().all() for parameter in run.stack.parameters())


def test_a_model_whose_squares_overflow_is_not_saved(tmp_path: Path) -> None:
    """Its norms would make zeros of it, with a finite loss, and no gradient could mend it."""
    run = trained(0, CASE, tmp_path)
    weight = next(run.stack.model.parameters())
    with torch.no_grad():
        weight.fill_(1e18)
    run.save(3)
    with torch.no_grad():
        weight.fill_(1e25)
    with pytest.raises(NotFiniteError, match="its square is not"):
        run.save(4)


def poisoned_on_one(rank: int, case: Case, folder: Path) -> str:
    run = trained(rank, case, folder)
    if rank == 1:
        with torch.no_grad():
            run.stack.parts.expert_parameters(0)[0].view(-1)[0] = float("nan")
    try:
        run.save(3)
    except NotFiniteError as error:
        return str(error)
    return ""


def test_one_rank_of_two_keeps_both_from_saving(ranks: Pools, tmp_path: Path) -> None:
    case = replace(CASE, world_size=2, ep_size=2)
    first, second = ranks(2).run(poisoned_on_one, case, tmp_path)
    assert first == second and "on rank 1 is not finite" in first
    assert list(tmp_path.iterdir()) == []
