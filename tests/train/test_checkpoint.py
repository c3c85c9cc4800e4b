"""Checkpoints: what is saved comes back bit for bit, on any layout, or is refused by name."""

from __future__ import annotations

import json
import re
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.checkpoint import folder
from penstock.checkpoint.folder import RECORD, complete_checkpoints, digest_of, read_sums, write_sums
from penstock.checkpoint.storage import CheckpointError, DamagedCheckpointError
from penstock.config import ConfigError
from penstock.device import Cpu, using
from penstock.train.checkpoint import Checkpoints, NotFiniteError
from penstock.train.optimizer import build_adamw, initialise_state
from tests.support.checkpoints import (
    CASE,
    IDENTITY,
    bare,
    check_equal,
    state_of,
    train,
    trained,
)
from tests.support.draws import draws
from tests.support.killed import left_by_kills
from tests.support.parity import Case, stack_of
from tests.support.ranks import Pools

# ---- the round trip ----------------------------------------------------------------------------------------


@pytest.mark.slow
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


class WithGenerator(Cpu):
    """A device that draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def random_state(self, device: torch.device) -> Tensor:
        del device
        return self.generator.get_state()

    def set_random_state(self, state: Tensor, device: torch.device) -> None:
        del device
        self.generator.set_state(state)


def test_the_generator_of_the_device_goes_on(tmp_path: Path) -> None:
    device = WithGenerator()
    with using(device):
        run = trained(0, CASE, tmp_path)
        path = run.save(2)
        expected = torch.rand(4, generator=device.generator)
        run.load(path)
        assert torch.equal(torch.rand(4, generator=device.generator), expected)
    other = bare(0, CASE, tmp_path)
    assert other.load(path) == 2  # on a device without one


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step-00000002", "step-000000002"])
def test_a_kill_at_any_moment_leaves_the_old_state_or_the_new_one(tmp_path: Path, name: str) -> None:
    """Also after a kill that left a checkpoint under a longer name. Others that are removed stay whole."""
    folder = tmp_path / "checkpoints"
    run = trained(0, CASE, folder, keep=1)
    run.save(1)
    saved, reader = run.save(2), bare(0, replace(CASE, seed=5), folder)
    saved.rename(folder / name)
    old = state_of(run)
    train(run, 0, CASE, 1)
    new, outcomes = state_of(run), []
    for copy in left_by_kills(folder, lambda: run.save(2), tmp_path / "copies"):
        reader.folder = copy
        newest = reader.newest()
        assert newest is not None
        assert reader.load(newest) == 2
        found = state_of(reader)
        outcomes.append(all(torch.equal(found[each], new[each]) for each in new))
        check_equal(found, new if outcomes[-1] else old)
        for path in complete_checkpoints(copy):
            reader.load(path)
    assert len(outcomes) > 20 and outcomes == sorted(outcomes) and outcomes[-1]
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]


# ---- beside the steps --------------------------------------------------------------------------------------


def test_steps_beside_a_save_change_nothing_of_it(tmp_path: Path) -> None:
    run = trained(0, CASE, tmp_path)
    expected = state_of(run)
    run.begin(2)
    train(run, 0, CASE, 2)
    path = run.finish()
    assert path == tmp_path / "step-00000002" == run.newest() and run.finish() is run.poll() is None
    other = bare(0, replace(CASE, seed=5), tmp_path)
    other.load(path)
    check_equal(state_of(other), expected)


def polled(run: Checkpoints) -> Path:
    """The checkpoint that is being written, finished between two steps of all ranks."""
    while (path := run.poll()) is None:
        run.stack.machinery.control.barrier("a step")
    return path


def failing_beside_steps(rank: int, case: Case, folder: Path, full: int) -> tuple[str, str]:
    """What all ranks hear between steps where one could not write, and the save after that."""
    run = trained(rank, case, folder)
    before, expected = run.save(2), state_of(run)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(CheckpointError) as caught:
            run.begin(3)
            polled(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if rank == 0:
        assert list(folder.iterdir()) == [before], "the disk is full enough"
    run.load(before)
    check_equal(state_of(run), expected)
    run.begin(4)
    return str(caught.value), polled(run).name


@pytest.mark.parametrize(("world_size", "full"), [(1, 0), (2, 0), (2, 1)])
def test_a_write_that_fails_is_heard_at_a_later_step_by_all(
    ranks: Pools, tmp_path: Path, world_size: int, full: int
) -> None:
    case = replace(CASE, world_size=world_size, ep_size=world_size)
    for error, saved in ranks(world_size).run(failing_beside_steps, case, tmp_path, full):
        where = f" on rank {full}" if world_size > 1 else ""
        assert error.startswith(f"saving the checkpoint of step 3 failed{where}: ")
        assert "File too large" in error and f"-{full + 1:05d}.safetensors" in error
        assert saved == "step-00000004"


def test_a_save_can_be_given_up(tmp_path: Path) -> None:
    """Also where somebody has removed its folder."""
    run = trained(0, CASE, tmp_path / "checkpoints")
    run.begin(2)
    run.drop()
    assert list(run.folder.iterdir()) == [] and run.finish() is None
    run.begin(3)
    shutil.rmtree(run.folder, ignore_errors=True)
    shutil.rmtree(run.folder, ignore_errors=True)  # the thread may have made a file meanwhile
    run.drop()
    assert run.save(4) == run.newest()


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


@pytest.mark.slow
def test_steps_of_nine_digits_are_found(tmp_path: Path) -> None:
    run = trained(0, CASE, tmp_path, keep=3)
    for step in (99_999_999, 100_000_000, 1_000_000_000):
        run.save(step)
    assert run.newest() == tmp_path / "step-1000000000"
    assert run.load(tmp_path / "step-1000000000") == 1_000_000_000


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "moe", "words"),
    [
        ({"hidden_size": 12}, {}, "there and"),
        ({}, {"num_experts": 8}, r"has shape \[4, .* there and \[8, .* here"),
        ({}, {"num_experts": 2}, r"has shape \[4, .* there and \[2, .* here"),
        ({"num_layers": 3}, {}, r"model\.layers\.2\.\S+ is missing in it"),
        ({"num_layers": 1}, {}, r"layers\.1\.\S+ exists there and not here"),
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


def test_an_identity_that_says_less_is_refused(tmp_path: Path) -> None:
    """What separates documents is said only where they are."""
    key = "data.separate_documents"
    path = trained(0, CASE, tmp_path, identity=IDENTITY | {key: True}).save(2)
    with pytest.raises(ConfigError, match=rf"{key} = none: .* was made with True"):
        bare(0, CASE, tmp_path, identity=IDENTITY).load(path)


@pytest.mark.every_value
@pytest.mark.parametrize(
    "pattern", ["shard-*.safetensors", "model-*.safetensors", "SHA256SUMS", "checkpoint.json"]
)
@pytest.mark.parametrize("share", [None, 0.0, 0.5])
def test_a_damaged_file_is_named_by_its_folder(tmp_path: Path, pattern: str, share: float | None) -> None:
    run = trained(0, CASE, tmp_path)
    path = run.save(2)
    (damaged,) = path.glob(pattern)
    content = damaged.read_bytes()
    damaged.unlink()
    if share is not None:
        damaged.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(DamagedCheckpointError, match=rf"reading {path} failed"):
        run.load(path)


# ---- writing fails -----------------------------------------------------------------------------------------


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("mine")
    run = trained(0, CASE, tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="saving the checkpoint of step 2 failed"):
        run.save(2)
    assert (tmp_path / "checkpoints").read_text() == "mine"


def test_what_other_programs_leave_in_a_folder_does_not_belong_to_a_checkpoint(tmp_path: Path) -> None:
    run = trained(0, CASE, tmp_path)
    path = run.save(2, papers=lambda folder: (folder / ".DS_Store").write_text("view"))
    assert bare(0, CASE, tmp_path).load(path) == 2


def test_a_save_whose_folder_is_taken_away_saves_nothing(tmp_path: Path) -> None:
    run = trained(0, CASE, tmp_path)
    run.begin(2)
    saving, _ = run._begun[0]
    saving.wait()
    shutil.rmtree(saving.folder)
    gone = run.finish()
    assert gone is not None and not gone.exists() and complete_checkpoints(tmp_path) == []


def test_an_older_checkpoint_that_cannot_be_removed_is_told_and_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one in a lower layer of a container's file system, which cannot be renamed there."""
    run, hide = trained(0, CASE, tmp_path, keep=1), folder._hide

    def busy(path: Path) -> None:
        if path.name == "step-00000002":
            raise OSError(16, "Device or resource busy", str(path))
        hide(path)

    monkeypatch.setattr(folder, "_hide", busy)
    for step in (2, 3, 4):
        run.save(step)
    assert re.search(r"step-00000004 is saved, and then .*busy", caplog.text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]


def test_what_a_killed_save_has_left_goes(tmp_path: Path) -> None:
    run = trained(0, CASE, tmp_path)
    path = run.save(2)
    shutil.copytree(path, tmp_path / ".unfinished-00000003")
    shutil.copytree(path, tmp_path / ".unfinished-step-00000001")  # whole, and another took its name
    run.clear_unfinished()
    left = sorted(each.name for each in tmp_path.iterdir())
    assert left == [".unfinished-step-00000001", "step-00000002"]


def test_numbers_of_another_type_are_refused(tmp_path: Path) -> None:
    path = trained(0, replace(CASE, double=True), tmp_path).save(2)
    with pytest.raises(ConfigError, match=r"type torch\.float64 there and torch\.float32 here"):
        bare(0, CASE, tmp_path).load(path)


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    path = trained(0, CASE, tmp_path).save(2)
    record = json.loads((path / RECORD).read_text())
    for version in (None, record["format"] + 1, "2"):
        (path / RECORD).write_text(json.dumps({**record, "format": version}))
        write_sums(path, {**read_sums(path), RECORD: digest_of(path / RECORD)})
        with pytest.raises(ConfigError, match=rf"is of format {version}, and this version of Penstock"):
            bare(0, CASE, tmp_path).load(path)


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


# ---- tied and frozen parameters ----------------------------------------------------------------------------


TIED = replace(CASE, model=replace(CASE.model, tie_word_embeddings=True))


@pytest.mark.slow
def test_a_tied_head_comes_back(tmp_path: Path) -> None:
    first = trained(0, TIED, tmp_path)
    path = first.save(2)
    second = trained(0, replace(TIED, seed=5), tmp_path)
    assert second.load(path) == 2
    check_equal(state_of(second), state_of(first))
    model = second.stack.model
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    assert train(second, 0, TIED, 2) == train(first, 0, TIED, 2)


@pytest.mark.parametrize(
    ("saved", "wanted", "problem"),
    [
        (TIED, CASE, "lm_head.weight is missing in it"),
        (CASE, TIED, r"lm_head.weight\S* exists there and not here"),
    ],
)
def test_tied_and_untied_refuse_each_other(tmp_path: Path, saved: Case, wanted: Case, problem: str) -> None:
    path = trained(0, saved, tmp_path).save(2)
    with pytest.raises(ConfigError, match=problem):
        trained(0, wanted, tmp_path).load(path)


def with_frozen_norms(case: Case, folder: Path) -> Checkpoints:
    stack = stack_of(0, case)
    for name, parameter in stack.model.named_parameters():
        parameter.requires_grad_("norm" not in name)
    optimizer = build_adamw(stack.model.named_parameters(), case.config.optimizer)
    initialise_state(optimizer)
    return Checkpoints(folder, stack, optimizer, keep=2, identity=IDENTITY)


def test_frozen_parameters_are_saved_without_moments(tmp_path: Path) -> None:
    first = with_frozen_norms(CASE, tmp_path)
    train(first, 0, CASE, 2)
    path = first.save(2)
    second = with_frozen_norms(replace(CASE, seed=5), tmp_path)
    assert second.load(path) == 2
    assert train(second, 0, CASE, 2) == train(first, 0, CASE, 2)
    saved = dict(first.stack.model.named_parameters())
    for name, parameter in second.stack.model.named_parameters():
        assert torch.equal(parameter, saved[name]), name
    with pytest.raises(ConfigError, match=r"norm.* is missing in it"):
        trained(0, CASE, tmp_path).load(path)
