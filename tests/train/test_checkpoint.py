"""Checkpoints: what is saved comes back bit for bit, on any layout, or is refused by name."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from penstock.config import ConfigError
from penstock.decision import ScheduleConfig
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.runtime import PipelinedStack
from penstock.train.checkpoint import (
    MOMENTS,
    CheckpointError,
    Checkpoints,
    DamagedCheckpointError,
    NotFiniteError,
    complete_checkpoints,
)
from penstock.train.optimizer import build_adamw, initialise_state
from tests.support.draws import draws
from tests.support.parity import Case, batch_of, logical, stack_of
from tests.support.ranks import Pools
from tests.support.reference_moe import Weights

IDENTITY = {"train.seed": 0, "data.path (sha256 of the text)": "abc"}
CASE = Case(
    world_size=1,
    ep_size=1,
    schedule=ScheduleConfig(microbatches=2),
    model=ModelConfig(num_layers=2, hidden_size=8, num_heads=2, seq_len=5, vocab_size=11),
    moe=MoEConfig(num_experts=4, moe_ffn_hidden_size=8),
    batch=2,
)


def bare(
    rank: int, case: Case, folder: Path, *, keep: int = 2, identity: Mapping[str, object] = IDENTITY
) -> Checkpoints:
    """The checkpoints of a fresh run."""
    stack = stack_of(rank, case)
    optimizer = build_adamw(stack.model.named_parameters(), case.config.optimizer)
    initialise_state(optimizer)
    return Checkpoints(folder, stack, optimizer, keep=keep, identity=identity)


def train(run: Checkpoints, rank: int, case: Case, steps: int) -> list[float]:
    """Losses of so many steps, always of the same batch."""
    tokens, labels = batch_of(case)
    mine = slice(rank * case.batch, (rank + 1) * case.batch)
    losses = []
    for _ in range(steps):
        run.optimizer.zero_grad()
        loss = run.stack(tokens[mine], labels[mine])
        loss.backward()
        run.optimizer.step()
        losses.append(loss.item())
    return losses


def trained(rank: int, case: Case, folder: Path, **settings: Any) -> Checkpoints:
    run = bare(rank, case, folder, **settings)
    train(run, rank, case, 2)
    return run


def state_of(run: Checkpoints) -> Weights:
    """Parameters and optimiser state by logical name."""
    stack: PipelinedStack = run.stack
    named = dict(stack.model.named_parameters())
    found = {f"model.{n}": t for n, t in logical(stack, {n: p.detach() for n, p in named.items()}).items()}
    for moment in MOMENTS:
        moments = {name: run.optimizer.state[p][moment] for name, p in named.items()}
        found |= {f"{moment}.{name}": tensor for name, tensor in logical(stack, moments).items()}
    found |= {f"step.{name}": run.optimizer.state[p]["step"] for name, p in named.items()}
    return {name: tensor.clone() for name, tensor in found.items()}


def check_equal(ours: Weights, theirs: Weights) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


# ---- the round trip ----------------------------------------------------------------------------------------


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    first = trained(0, CASE, tmp_path / "new" / "checkpoints")
    path = first.save(2)
    assert path == tmp_path / "new" / "checkpoints" / "step-00000002"
    second = bare(0, replace(CASE, seed=5), tmp_path / "new" / "checkpoints")
    assert second.newest() == path
    assert second.load(path) == 2
    check_equal(state_of(second), state_of(first))
    # Labels and masks come from the case, so both go on with the same.
    assert train(second, 0, CASE, 3) == train(first, 0, CASE, 3)
    check_equal(state_of(second), state_of(first))


def test_the_random_generator_goes_on(tmp_path: Path) -> None:
    run = trained(0, CASE, tmp_path)
    path = run.save(2)
    expected = torch.rand(4)
    run.load(path)
    assert torch.equal(torch.rand(4), expected)


def test_the_same_step_can_be_saved_again(tmp_path: Path) -> None:
    run = trained(0, CASE, tmp_path)
    run.save(2)
    train(run, 0, CASE, 1)
    path = run.save(2)
    other = bare(0, CASE, tmp_path)
    other.load(path)
    check_equal(state_of(other), state_of(run))


def saved_by(rank: int, case: Case, folder: Path) -> Weights:
    run = trained(rank, case, folder)
    run.save(2)
    return state_of(run)


def loaded_by(rank: int, case: Case, path: Path) -> Weights:
    run = bare(rank, replace(case, seed=5), path.parent)
    assert run.load(path) == 2
    return state_of(run)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_two_ranks_to_one_by_logical_names(ranks: Pools, tmp_path: Path, ep_size: int) -> None:
    case = replace(CASE, world_size=2, ep_size=ep_size)
    first, second = ranks(2).run(saved_by, case, tmp_path)
    whole = bare(0, replace(CASE, seed=5), tmp_path)
    assert whole.load(tmp_path / "step-00000002") == 2
    found = state_of(whole)
    assert [name for name in found if name.endswith("blocks.1.feed_forward.experts.w_up.3")]
    check_equal(found, first | second)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_one_rank_to_two(ranks: Pools, tmp_path: Path, ep_size: int) -> None:
    expected = saved_by(0, CASE, tmp_path)
    case = replace(CASE, world_size=2, ep_size=ep_size)
    first, second = ranks(2).run(loaded_by, case, tmp_path / "step-00000002")
    check_equal(first | second, expected)
    check_equal(second | first, expected)


# ---- which checkpoints there are ---------------------------------------------------------------------------


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    run = trained(0, CASE, tmp_path)
    assert run.newest() is None
    path = run.save(2)
    for name in (".unfinished-00000009", "step-00000003.bak", "step-9", "other"):
        shutil.copytree(path, tmp_path / name)
    shutil.copytree(path, tmp_path / "step-00000004")
    (tmp_path / "step-00000004" / "SHA256SUMS").unlink()
    assert complete_checkpoints(tmp_path) == [path]
    assert run.newest() == path
    assert complete_checkpoints(tmp_path / "nowhere") == []


@pytest.mark.parametrize("keep", [1, 2])
def test_older_ones_go(tmp_path: Path, keep: int) -> None:
    run = trained(0, CASE, tmp_path, keep=keep)
    (tmp_path / ".unfinished-00000001").mkdir()
    (tmp_path / "mine.txt").write_text("stays")
    for step in (2, 10, 9):
        run.save(step)
    kept = [path.name for path in complete_checkpoints(tmp_path)]
    assert kept == ["step-00000009", "step-00000010"], "the one just saved stays, too"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", *kept]


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "moe", "words"),
    [
        ({"hidden_size": 12}, {}, "there and"),
        ({}, {"num_experts": 8}, r"has shape \[4, .* there and \[8, .* here"),
        ({}, {"num_experts": 2}, r"has shape \[4, .* there and \[2, .* here"),
        ({"num_layers": 3}, {}, r"model\.blocks\.2\.\S+ is missing in it"),
        ({"num_layers": 1}, {}, r"blocks\.1\.\S+ exists there and not here"),
    ],
)
def test_another_model_is_refused(
    tmp_path: Path, model: dict[str, Any], moe: dict[str, Any], words: str
) -> None:
    path = trained(0, CASE, tmp_path).save(2)
    other = replace(CASE, model=replace(CASE.model, **model), moe=replace(CASE.moe, **moe))
    run = bare(0, other, tmp_path)
    before = state_of(run)
    with pytest.raises(ConfigError, match=rf"train\.resume.*{path}.*another model: .*{words}"):
        run.load(path)
    check_equal(state_of(run), before)


@pytest.mark.parametrize("key", sorted(IDENTITY))
def test_another_identity_is_refused(tmp_path: Path, key: str) -> None:
    path = trained(0, CASE, tmp_path).save(2)
    run = bare(0, CASE, tmp_path, identity=IDENTITY | {key: "other"})
    before = state_of(run)
    with pytest.raises(ConfigError, match="was made with") as caught:
        run.load(path)
    assert caught.value.key == key
    assert str(path) in str(caught.value)
    check_equal(state_of(run), before)


@pytest.mark.every_value
@pytest.mark.parametrize("pattern", ["*.safetensors", "SHA256SUMS", "checkpoint.json"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_damaged_file_is_named_by_its_folder(tmp_path: Path, pattern: str, share: float) -> None:
    run = trained(0, CASE, tmp_path)
    path = run.save(2)
    (damaged,) = path.glob(pattern)
    damaged.write_bytes(damaged.read_bytes()[: int(damaged.stat().st_size * share)])
    with pytest.raises(DamagedCheckpointError, match=rf"reading {path} failed"):
        run.load(path)


def test_a_missing_file_is_named_by_its_folder(tmp_path: Path) -> None:
    run = trained(0, CASE, tmp_path)
    path = run.save(2)
    (path / "checkpoint.json").unlink()
    with pytest.raises(DamagedCheckpointError, match=rf"{path} failed: checkpoint.json cannot be opened"):
        run.load(path)


# ---- writing fails -----------------------------------------------------------------------------------------


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("mine")
    run = trained(0, CASE, tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="saving the checkpoint of step 2 failed"):
        run.save(2)
    assert (tmp_path / "checkpoints").read_text() == "mine"


def saved_with_little_room(rank: int, case: Case, folder: Path, full: int) -> str:
    """The error of saving where rank `full` may write short files only, as on a full disk."""
    run = trained(rank, case, folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        run.save(3)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return ""


@pytest.mark.parametrize(("world_size", "full"), [(1, 0), (2, 0), (2, 1)])
def test_no_room_leaves_nothing_under_a_final_name(
    ranks: Pools, tmp_path: Path, world_size: int, full: int
) -> None:
    case = replace(CASE, world_size=world_size, ep_size=world_size)
    ranks(world_size).run(saved_by, case, tmp_path)
    errors = ranks(world_size).run(saved_with_little_room, case, tmp_path, full)
    for error in errors:
        assert error.startswith("saving the checkpoint of step 3 failed"), errors
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000002"]
    assert not (tmp_path / "step-00000003").exists()
    ranks(world_size).run(loaded_by, case, tmp_path / "step-00000002")


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


def test_steps_of_nine_digits_are_found(tmp_path: Path) -> None:
    run = trained(0, CASE, tmp_path, keep=3)
    for step in (99_999_999, 100_000_000, 1_000_000_000):
        run.save(step)
    assert run.newest() == tmp_path / "step-1000000000"
    assert run.load(tmp_path / "step-1000000000") == 1_000_000_000


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


def test_large_numbers_are_finite(tmp_path: Path) -> None:
    """Their squares are not."""
    run = trained(0, CASE, tmp_path)
    with torch.no_grad():
        next(run.stack.model.parameters()).fill_(3e38)
    run.save(3)


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


# ---- checkpoints of earlier versions -----------------------------------------------------------------------


def saved_as_before(run: Checkpoints, step: int) -> Path:
    """A checkpoint in the format of earlier versions: torch's own, with a pickle and without checksums."""
    path = run.folder / f"step-{step:08d}"
    torch_save({**run._state(), "train.step": torch.tensor(step)}, checkpoint_id=path, no_dist=True)
    (path / "data.json").write_text(json.dumps(run.identity))
    return path


def test_an_old_checkpoint_is_read(tmp_path: Path) -> None:
    first = trained(0, CASE, tmp_path)
    path = saved_as_before(first, 2)
    second = bare(0, replace(CASE, seed=5), tmp_path)
    assert second.newest() == path
    assert second.load(path) == 2
    check_equal(state_of(second), state_of(first))


def test_an_old_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    path = saved_as_before(trained(0, CASE, tmp_path), 2)
    with pytest.raises(ConfigError, match=r"train\.seed"):
        bare(0, CASE, tmp_path, identity=IDENTITY | {"train.seed": 9}).load(path)
    with pytest.raises(ConfigError, match="another model"):
        bare(0, replace(CASE, model=replace(CASE.model, hidden_size=12)), tmp_path).load(path)


@pytest.mark.every_value
@pytest.mark.parametrize("pattern", ["*.distcp", ".metadata", "data.json"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_damaged_old_checkpoint_is_named(tmp_path: Path, pattern: str, share: float) -> None:
    run = trained(0, CASE, tmp_path)
    path = saved_as_before(run, 2)
    (damaged,) = path.glob(pattern)
    damaged.write_bytes(damaged.read_bytes()[: int(damaged.stat().st_size * share)])
    with pytest.raises(DamagedCheckpointError, match=rf"reading {path} failed"):
        run.load(path)


@pytest.mark.parametrize("old", [False, True])
def test_numbers_of_another_type_are_refused(tmp_path: Path, old: bool) -> None:
    run = trained(0, replace(CASE, double=True), tmp_path)
    path = saved_as_before(run, 2) if old else run.save(2)
    with pytest.raises(ConfigError, match=r"type torch\.float64 there and torch\.float32 here"):
        bare(0, CASE, tmp_path).load(path)
