"""Checkpoints of scheduled models: a run goes on as if nothing had happened, on other ranks, too."""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM

import penstock
from penstock.adapt.checkpoint import save_optimizer
from penstock.adapt.saving import AsWhole, close_model
from penstock.adapt.scheduled import stack_of
from penstock.checkpoint.storage import CheckpointError
from penstock.config import ConfigError
from penstock.step.shape import Updating
from tests.support.adapted import DIVISIBLE, Batch, small
from tests.support.killed import left_by_kills
from tests.support.patience import HANG_S
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow

SAVED_AT, STEPS = 2, 5


def optimizer_of(model: Any, *, sharded: bool = False) -> torch.optim.Optimizer:
    """Two groups, as fine-tuning has them."""
    named = list(model.named_parameters())
    thin, thick = ([p for _, p in named if (p.dim() < 2) == short] for short in (True, False))
    groups: list[dict[str, Any]] = [{"params": thin, "weight_decay": 0.0}, {"params": thick}]
    if sharded:
        groups[1]["weight_decay"] = 0.01
        return penstock.ShardedAdamW(stack_of(model), groups, lr=1e-2)
    return torch.optim.AdamW(groups, lr=1e-2)


def losses_of(
    model: Any, optimizer: Any, rank: int, world: int, steps: range, folder: str = ""
) -> list[float]:
    """Those of some steps on this rank's samples; saved beside step `SAVED_AT`, if there is a folder."""
    each, losses = 4 // world, []
    for step in steps:
        if folder and step == SAVED_AT:
            saved = penstock.save_checkpoint(model, optimizer, folder, wait=False)
        loss = model(**Batch(seed=step).inputs(rank * each, (rank + 1) * each)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if folder:
        assert not (Path(folder) / "optimizer.json").exists()
        saved.finish()
    return losses


def updating(*, sharded: bool) -> Updating | None:
    return Updating(clips=False) if sharded else None


def begin(
    rank: int, world: int, family: str, folder: str, layout: dict[str, Any], sharded: bool
) -> list[float]:
    tp_size = layout.get("tp_size", 1)
    sizes: dict[str, Any] = {} if tp_size == 1 else DIVISIBLE
    whole = small(family, initializer_range=0.1, **sizes)
    model = penstock.parallelize(whole, plan="flowmoe", updating=updating(sharded=sharded), **layout)
    place, groups = rank // tp_size, world // tp_size
    optimizer = optimizer_of(model, sharded=sharded)
    LambdaLR(optimizer, lambda step: 1.0)
    return losses_of(model, optimizer, place, groups, range(STEPS), folder)


def go_on(rank: int, world: int, folder: str, layout: dict[str, Any], sharded: bool) -> list[float]:
    tp_size = layout.get("tp_size", 1)
    model = penstock.load_pretrained(folder, plan="flowmoe", updating=updating(sharded=sharded), **layout)
    optimizer = optimizer_of(model, sharded=sharded)
    for group in optimizer.param_groups:
        group["lr"] = 1.0  # what was saved counts
    penstock.load_optimizer(model, optimizer, folder)
    LambdaLR(optimizer, lambda step: 1.0, last_epoch=SAVED_AT)
    return losses_of(model, optimizer, rank // tp_size, world // tp_size, range(SAVED_AT, STEPS))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "layout", "sharded"),
    [
        ("mixtral", {}, True),
        ("mixtral", {"etp_size": 2}, True),
        ("gpt_oss", {"tp_size": 2}, False),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in (
                ("mixtral", {}, False),
                ("gpt_oss", {"tp_size": 2}, True),
                ("gpt_oss", {"etp_size": 2}, False),
                ("dbrx", {}, False),
            )
        ),
    ],
)
def test_a_run_goes_on_from_its_checkpoint(
    ranks: Pools, tmp_path: Path, family: str, layout: dict[str, Any], sharded: bool
) -> None:
    """On other ranks, with the optimiser that has saved, and from a sharded one with a plain one and back."""
    folder = tmp_path / "saved"
    killed = tmp_path / ".unfinished-former-saved"  # while it was removed, or before another had its name
    folder.mkdir()
    killed.mkdir()
    (killed / "tokenizer.json").touch()
    (folder / "notes").touch()
    (folder / "model-00001-of-00009.safetensors").touch()
    began = ranks(2).run(begin, 2, family, str(folder), layout, sharded)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert (folder / "tokenizer.json").exists() and (folder / "notes").exists()
    assert not (folder / "model-00001-of-00009.safetensors").exists()
    for other, shares in (({}, sharded), (layout, not sharded)):
        for found in ranks(2).run(go_on, 2, str(folder), other, shares):
            assert found == pytest.approx(began[0][SAVED_AT:], rel=1e-5)
    assert go_on(0, 1, str(folder), {}, False) == pytest.approx(began[0][SAVED_AT:], rel=1e-5)
    AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("sharded", [True, False])
def test_in_bfloat16_a_run_goes_on_with_either_optimizer(tmp_path: Path, sharded: bool) -> None:
    """Only a sharded one keeps weights and moments in float32."""

    def made(of: Any, *, sharded: bool) -> tuple[Any, torch.optim.Optimizer]:
        model = penstock.parallelize(of, updating=updating(sharded=sharded))
        return model, optimizer_of(model, sharded=sharded)

    model, optimizer = made(small("mixtral", dtype=torch.bfloat16), sharded=sharded)
    losses_of(model, optimizer, 0, 1, range(SAVED_AT))
    penstock.save_checkpoint(model, optimizer, tmp_path / "saved")
    index = json.loads((tmp_path / "saved/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model.safetensors"}
    expected = losses_of(model, optimizer, 0, 1, range(SAVED_AT, STEPS))
    for other in (sharded, not sharded):
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", experts_implementation="eager")
        model, optimizer = made(whole, sharded=other)
        penstock.load_optimizer(model, optimizer, tmp_path / "saved")
        assert losses_of(model, optimizer, 0, 1, range(SAVED_AT, STEPS)) == pytest.approx(expected, rel=1e-2)
        keys = {key for state in optimizer.state.values() for key in state}
        assert keys == (set() if other else {"step", "exp_avg", "exp_avg_sq"})


@pytest.mark.parametrize(
    ("kind", "options", "loads"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.1, "fused": True}, True),
        (torch.optim.Adam, {"weight_decay": 0.0}, True),
        (torch.optim.Adam, {"weight_decay": 0.1}, False),
        (torch.optim.AdamW, {"weight_decay": 0.1, "maximize": True}, False),
        (torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True}, False),
    ],
)
def test_options_that_a_sharded_optimizer_lacks_stay_as_they_are_or_are_refused(
    tmp_path: Path, kind: Any, options: dict[str, Any], loads: bool
) -> None:
    models = [
        penstock.parallelize(small("mixtral"), updating=updating(sharded=each)) for each in (True, False)
    ]
    group = {"params": list(models[0].parameters()), "weight_decay": options["weight_decay"]}
    groups = [{**group, "amsgrad": False} if "maximize" in options else group]  # one as an AdamW has them
    optimizers = [
        penstock.ShardedAdamW(stack_of(models[0]), groups, lr=1e-2),
        kind(models[1].parameters(), lr=1e-2, **options),
    ]
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        losses_of(model, optimizer, 0, 1, range(1))
        save_optimizer(model, optimizer, tmp_path / str(number))
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        group, folder = optimizer.param_groups[0], tmp_path / str(1 - number)
        before = {key: group[key] for key in group.keys() - {"params", "betas"}}
        with nullcontext() if loads else pytest.raises(ValueError):
            penstock.load_optimizer(model, optimizer, folder)
        group = optimizer.param_groups[0]
        assert {key: group[key] for key in group.keys() - {"params", "betas"}} == before
        losses_of(model, optimizer, 0, 1, range(1))


FROZEN = ("lm_head.weight", "model.layers.1.mlp.experts.down_proj")


def some_frozen(world: int, *, sharded: bool, dtype: torch.dtype = torch.float32, frozen: bool = True) -> Any:
    """A model, of which some parameters may be frozen, and its optimiser."""
    whole = small("mixtral", dtype=dtype)
    model = penstock.parallelize(whole, ep_size=world, plan="flowmoe", updating=updating(sharded=sharded))
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(not frozen)
    return model, optimizer_of(model, sharded=sharded)


def kept_by(model: Any, optimizer: Any) -> dict[tuple[str, str], torch.Tensor]:
    """What this rank has of the state, by parameter and key."""
    names = {p: name for name, p in model.named_parameters()}
    parameters = [names[p] for group in optimizer.param_groups for p in group["params"]]
    return {
        (parameters[number], key): each.to_local() if isinstance(each, DTensor) else each
        for number, state in optimizer.state_dict()["state"].items()
        for key, each in state.items()
    }


def are_same(found: Mapping[Any, torch.Tensor], wanted: Mapping[Any, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


def freeze_and_thaw(rank: int, world: int, folder: Path, dtype: torch.dtype) -> list[bool]:
    """Whether a state is what was saved, after it was read and saved by who had frozen parameters."""
    model, optimizer = some_frozen(world, sharded=True, dtype=dtype, frozen=False)
    losses_of(model, optimizer, rank, world, range(SAVED_AT))
    save_optimizer(model, optimizer, folder / "first")
    wanted, found = kept_by(model, optimizer), []
    for frozen in (True, False):
        model, optimizer = some_frozen(world, sharded=True, dtype=dtype)
        penstock.load_optimizer(model, optimizer, folder / "first")
        save_optimizer(model, optimizer, folder / "second")
        model, optimizer = some_frozen(world, sharded=True, dtype=dtype, frozen=frozen)
        penstock.load_optimizer(model, optimizer, folder / "second")
        found.append(are_same(kept_by(model, optimizer), wanted))
        for name in FROZEN:
            model.get_parameter(name).requires_grad_(True)
        found.append(are_same(kept_by(model, optimizer), wanted))
        losses_of(model, optimizer, rank, world, range(1))
        after = kept_by(model, optimizer)
        found.append({float(each) for (_, key), each in after.items() if key == "step"} == {SAVED_AT + 1})
    return found


def test_a_frozen_parameter_of_a_sharded_optimizer_keeps_its_state(ranks: Pools, tmp_path: Path) -> None:
    assert all(freeze_and_thaw(0, 1, tmp_path / "narrow", torch.bfloat16))
    for found in ranks(2).run(freeze_and_thaw, 2, tmp_path / "spread", torch.float32):
        assert all(found), found


@pytest.mark.parametrize("steps", [0, 1])
def test_a_parameter_without_a_saved_state_starts_afresh_in_shares(tmp_path: Path, steps: int) -> None:
    """Where it was frozen, or saved before the first step; whatever state it had."""
    plain, adamw = some_frozen(1, sharded=False)
    losses_of(plain, adamw, 0, 1, range(steps))
    save_optimizer(plain, adamw, tmp_path)
    model, optimizer = some_frozen(1, sharded=True, frozen=False)
    losses_of(model, optimizer, 0, 1, range(SAVED_AT))
    penstock.load_optimizer(model, optimizer, tmp_path)
    saved, found = kept_by(plain, adamw), kept_by(model, optimizer)
    fresh = found.keys() - saved.keys()
    assert len({name for name, _ in fresh}) == (len(FROZEN) if steps else len([*model.parameters()]))
    assert not any(found[key].any() for key in fresh)
    assert are_same({key: found[key] for key in saved}, saved)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("at_once", [True, False], ids=["exchanged", "without exchange"])
def test_a_kill_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """Where names cannot be exchanged, a moment without either is told, and ended by the next save."""
    if not at_once:
        monkeypatch.setattr("penstock.adapt.saving.exchange", lambda first, second: False)
    model = penstock.parallelize(small("mixtral"))
    optimizer = optimizer_of(model)
    parent, folder = tmp_path / "parent", tmp_path / "parent" / "saved"
    losses_of(model, optimizer, 0, 1, range(1))
    penstock.save_checkpoint(model, optimizer, folder)
    (folder / "tokenizer.json").write_text("mine")
    old = contents(folder)
    losses_of(model, optimizer, 0, 1, range(1, 2))
    copies = left_by_kills(
        parent, lambda: penstock.save_checkpoint(model, optimizer, folder), tmp_path / "copies"
    )
    new = contents(folder)
    assert [path.name for path in parent.iterdir()] == ["saved"]
    assert new.keys() == old.keys() and new["model.safetensors"] != old["model.safetensors"]
    whole = [copy for copy in copies if (copy / "saved").is_dir()]
    assert (len(whole) == len(copies)) is at_once and len(whole) > 20
    assert all(contents(copy / "saved") in (old, new) for copy in whole)
    for copy in set(copies) - set(whole):
        for read in (penstock.load_pretrained, lambda path: penstock.load_optimizer(model, optimizer, path)):
            with pytest.raises(ValueError, match=r"\.unfinished-former-saved"):
                read(copy / "saved")
        AsWhole(copy / "saved", close_model, lambda name, new: True).begin()
        assert contents(copy / "saved") == old and names_in(copy) == {"saved", ".unfinished-saved"}


def test_a_checkpoint_takes_the_place_of_no_file_and_goes_through_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = penstock.parallelize(small("mixtral"))
    optimizer, other = optimizer_of(model), tmp_path / "other"
    losses_of(model, optimizer, 0, 1, range(1))
    other.mkdir()
    (other / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="Not a directory"):
        penstock.save_checkpoint(model, optimizer, other / "mine")
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="current working directory"):
        patch.chdir(other)
        penstock.save_checkpoint(model, optimizer, ".")
    for name in (".unfinished-saved", ".unfinished-former-saved"):
        (tmp_path / name).symlink_to(other)
    first = penstock.save_checkpoint(model, optimizer, tmp_path / "saved", wait=False)
    penstock.save_checkpoint(model, optimizer, tmp_path / "next")  # ends the one before
    first.finish()
    assert contents(other) == {"mine": b"mine"} and names_in(tmp_path) == {"other", "saved", "next"}
    assert contents(tmp_path / "saved") == contents(tmp_path / "next")


def test_what_an_optimizer_cannot_take_is_refused(tmp_path: Path) -> None:
    model = penstock.parallelize(small("mixtral"))
    optimizer = optimizer_of(model)
    with pytest.raises(ValueError, match="holds no optimizer"):
        penstock.load_optimizer(model, optimizer, tmp_path)
    losses_of(model, optimizer, 0, 1, range(1))
    penstock.save_checkpoint(model, optimizer, tmp_path / "saved")
    fewer = torch.optim.AdamW([model.lm_head.weight])
    with pytest.raises(ValueError, match=r"other parameters: model\.embed_tokens\.weight"):
        penstock.load_optimizer(model, fewer, tmp_path / "saved")
    with pytest.raises(ValueError, match="another kind of optimizer than SGD"):
        groups = [{"params": group["params"]} for group in optimizer.param_groups]
        penstock.load_optimizer(model, torch.optim.SGD(groups), tmp_path / "saved")
    with pytest.raises(ValueError, match="1 parameters that are not the model's"):
        penstock.save_checkpoint(model, torch.optim.SGD([torch.zeros(1)]), tmp_path / "other")
    factored = torch.optim.Adafactor(model.parameters())
    losses_of(model, factored, 0, 1, range(1))
    with pytest.raises(ValueError, match="only state of a parameter's own shape"):
        penstock.save_checkpoint(model, factored, tmp_path / "other")
    with pytest.raises(ValueError, match="Linear is no scheduled model"):
        penstock.save_checkpoint(model.lm_head, optimizer, tmp_path / "other")
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    penstock.save_checkpoint(model, optimizer, tmp_path / "saved")
    optimizer.param_groups[0]["lr"] = 1.0
    penstock.load_optimizer(model, optimizer, tmp_path / "saved")
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_state_that_lacks_parameters_is_refused(tmp_path: Path) -> None:
    """Those that never had a gradient have none, and are no others than those that the groups say."""
    model = penstock.parallelize(small("mixtral"))
    model.lm_head.weight.requires_grad_(False)
    optimizer = optimizer_of(model)
    losses_of(model, optimizer, 0, 1, range(1))
    penstock.save_checkpoint(model, optimizer, tmp_path)
    penstock.load_optimizer(model, optimizer, tmp_path)
    assert model.lm_head.weight not in optimizer.state
    shard = tmp_path / "optimizer-00001.safetensors"
    tensors, norm = load_file(shard), "optimizer.model.norm.weight."
    for stored, words in (
        ({**tensors, "optimizer.other.exp_avg": torch.ones(1)}, "unexpected other"),
        ({n: each for n, each in tensors.items() if not n.startswith(norm)}, r"missing model\.norm\.weight"),
        ({**tensors, f"{norm}exp_avg": torch.ones(3)}, rf"{norm}exp_avg has shape \[3\] there and"),
    ):
        save_file(stored, shard)
        with pytest.raises(ValueError, match=words):
            penstock.load_optimizer(model, optimizer, tmp_path)
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(ValueError, match=rf"{shard.name} is no safetensors file"):
        penstock.load_optimizer(model, optimizer, tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "{}", "[3]", "[{}]", '[{"parameters": 3}]', '[{"parameters": [3]}]', "[" * 100_000]
)
def test_a_list_of_groups_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    model = penstock.parallelize(small("mixtral"))
    (tmp_path / "optimizer.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        penstock.load_optimizer(model, optimizer_of(model), tmp_path)
    assert caught.value.key == str(tmp_path / "optimizer.json")


def save_with_little_room(rank: int, world: int, folder: str, wait: bool) -> str:
    """The error of saving in place of a checkpoint where rank 0 may write small files only, and no state.

    Of a save beside the steps it comes with the next one, which does not begin.
    """
    model = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe", timeout_s=HANG_S)
    optimizer = optimizer_of(model)
    losses_of(model, optimizer, rank, world, range(SAVED_AT + 1), folder)
    held_bytes = max(each.stat().st_size for each in Path(folder).glob("model*.safetensors"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (held_bytes, hard))
    try:
        with pytest.raises(CheckpointError) as caught:
            penstock.save_checkpoint(model, optimizer, folder, wait=wait)
            losses_of(model, optimizer, rank, world, range(1))
            penstock.save_checkpoint(model, optimizer, f"{folder}-next")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    losses_of(model, optimizer, rank, world, range(1))  # ranks are still together
    return str(caught.value)


@pytest.mark.parametrize("wait", [True, False], ids=["at once", "beside steps"])
def test_a_disk_without_room_for_the_state_ends_the_save_on_all_ranks(
    ranks: Pools, tmp_path: Path, wait: bool
) -> None:
    folder = tmp_path / "saved"
    for said in ranks(2).run(save_with_little_room, 2, str(folder), wait):
        assert f"saving {folder} failed" in said
        assert "File too large" in said
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    AutoModelForCausalLM.from_pretrained(folder)


def test_a_state_that_cannot_be_written_leaves_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = penstock.parallelize(small("mixtral"))
    optimizer = optimizer_of(model)
    losses_of(model, optimizer, 0, 1, range(1))
    save_optimizer(model, optimizer, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="saving the optimizer"):
        patch.delattr("penstock.checkpoint.storage.write_shard")
        save_optimizer(model, optimizer, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    losses_of(model, optimizer, 0, 1, range(1))
    save_optimizer(model, optimizer, tmp_path)
    assert before != {path.name: path.read_bytes() for path in tmp_path.iterdir()}
