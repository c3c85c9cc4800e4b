"""Saved models: shards of all ranks, in place of what was there and never instead of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.adapt.checkpoint import GROUPS, optimizer_files
from penstock.adapt.saving import UNFINISHED_MODEL, InPlace, check_names, close_model
from penstock.checkpoint.folder import ONE as WEIGHTS
from penstock.checkpoint.storage import CheckpointError
from penstock.families.described import FORMER
from penstock.families.weights import stored_tensors
from penstock.topology import Control
from tests.support.adapted import DIVISIBLE, MODELS, small
from tests.support.families import tiny
from tests.support.killed import left_by_kills
from tests.support.ranks import Pools

LIMIT = 40_000
ALONE = {"config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"}
"""The files of a model whose weights are one file."""


def is_read(folder: Path, model: Any) -> bool:
    """Whether transformers reads this very model."""
    read, told = type(small("mixtral")).from_pretrained(folder, output_loading_info=True)
    state = read.state_dict()
    assert not any(told.values())
    return all(torch.equal(each, state[name]) for name, each in model.state_dict().items())


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_shards_take_the_place_of_another_model(tmp_path: Path) -> None:
    small("mixtral", seed=1).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    model = penstock.parallelize(small("mixtral"))
    model.save_pretrained(tmp_path, max_shard_size=f"{LIMIT // 1000}KB")
    assert is_read(tmp_path, model)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    papers = {*ALONE, "tokenizer.json"} - {"model.safetensors"}
    assert names_in(tmp_path) == {*shards, *papers}
    assert shards == [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]
    assert all((tmp_path / name).stat().st_size < LIMIT + 10_000 for name in shards)  # with its header
    assert index["metadata"]["total_size"] == 4 * model.num_parameters()
    model.save_pretrained(tmp_path)
    assert names_in(tmp_path) == {*ALONE, "tokenizer.json"}


@pytest.mark.slow
def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it begins, and when the old model is out of its place."""
    model, rename = penstock.parallelize(small("mixtral")), Path.rename
    model.save_pretrained(tmp_path)

    def refuse(path: Path, target: Path) -> Path:
        if path.name.endswith("index.json"):
            raise OSError("no more names")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    for limit, words in (("nonsense", "nonsense"), (LIMIT, "no more names")):
        with pytest.raises(CheckpointError, match=words):
            model.save_pretrained(tmp_path, max_shard_size=limit)
        assert is_read(tmp_path, model) and not {UNFINISHED_MODEL, FORMER} & names_in(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [(None, None), (None, LIMIT), (LIMIT, None), (LIMIT, LIMIT)])
def test_a_kill_at_any_moment_leaves_a_model_or_says_where_it_is(
    tmp_path: Path, parts: tuple[int | None, int | None]
) -> None:
    """In one file and in shards, one in place of the other. The next save begins with the old or the new."""
    folder, model = tmp_path / "saved", penstock.parallelize(small("mixtral"))

    def save(limit: int | None) -> None:
        model.save_pretrained(folder, **({} if limit is None else {"max_shard_size": limit}))

    def contents(path: Path) -> set[tuple[str, bytes]]:
        return {(each.name, each.read_bytes()) for each in path.iterdir() if each.is_file()}

    save(parts[0])
    old = contents(folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    copies = left_by_kills(folder, lambda: save(parts[1]), tmp_path / "copies")
    new, told = contents(folder), 0
    for copy in copies:
        if not (contents(copy) >= old or contents(copy) >= new):
            told += 1
            with pytest.raises(ValueError, match=re.escape(FORMER)):
                penstock.load_pretrained(copy)
        InPlace(copy, close_model).begin()
        assert contents(copy) >= old or contents(copy) >= new, copy
    assert told > 2


@pytest.mark.parametrize("model_first", [True, False])
def test_a_save_takes_back_what_one_of_its_own_kind_has_left(tmp_path: Path, model_first: bool) -> None:
    """Not what one of the other kind has: that may be all that there is of it."""
    kinds = {WEIGHTS: InPlace(tmp_path, close_model), GROUPS: optimizer_files(tmp_path, "")}
    for name, files in kinds.items():
        files.former.mkdir()
        (files.former / name).touch()
    for name in kinds if model_first else reversed(kinds):
        kinds[name].begin()
        assert (tmp_path / name).exists()
    assert {WEIGHTS, GROUPS} <= names_in(tmp_path)


@pytest.mark.slow
def test_no_files_are_taken_back_from_elsewhere(tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    (other / "mine").touch()
    (folder := tmp_path / "saved").mkdir()
    for name in (FORMER, UNFINISHED_MODEL):
        (folder / name).symlink_to(other)
    penstock.parallelize(small("mixtral")).save_pretrained(folder)
    assert names_in(other) == {"mine"}
    assert names_in(folder) == ALONE


@pytest.mark.slow
def test_rank_0_writes_all_where_transformers_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = penstock.parallelize(small("mixtral"))
    with monkeypatch.context() as patch:
        patch.delattr("transformers.core_model_loading.revert_weight_conversion")
        model.save_pretrained(tmp_path)
    assert is_read(tmp_path, model)


def save_apart(rank: int, world: int, folder: str) -> None:
    """Ranks without a file system that they share."""
    model = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe")
    if rank:  # left by a save that was interrupted
        (Path(folder) / str(rank) / UNFINISHED_MODEL).mkdir(parents=True)
    model.save_pretrained(f"{folder}/{rank}")


def test_where_ranks_see_different_folders_rank_0_saves_all(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(save_apart, 2, str(tmp_path))
    assert is_read(tmp_path / "0", small("mixtral"))
    assert names_in(tmp_path / "0") == ALONE
    assert names_in(tmp_path) == {"0", "1"} and not names_in(tmp_path / "1" / UNFINISHED_MODEL)


def save_and_lose(rank: int, world: int, folder: str) -> str:
    """Rank 1's shard is gone when all is written."""
    model = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe")
    model.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr("penstock.checkpoint.storage.write_shard", lambda path, tensors: "")
        with pytest.raises(CheckpointError) as caught:
            model.save_pretrained(folder)
    return str(caught.value)


def test_a_shard_that_rank_0_does_not_see_leaves_the_former_model(ranks: Pools, tmp_path: Path) -> None:
    said = ranks(2).run(save_and_lose, 2, str(tmp_path))
    assert all(
        f"saving {tmp_path} failed on rank 0: OSError: rank 0 does not see model-00002-of" in each
        for each in said
    )
    assert is_read(tmp_path, small("mixtral"))
    assert not {UNFINISHED_MODEL, FORMER} & names_in(tmp_path)


def made(family: str) -> Any:
    return small(family, **DIVISIBLE) if family in MODELS else tiny(family)


def saved_in_parts(rank: int, family: str, layout: dict[str, Any], folder: Path) -> set[str]:
    """The names of the files of a model of which ranks share parameters, where rank 0 may not join it all."""
    del rank
    model = penstock.parallelize(made(family), plan="flowmoe", **layout)
    with pytest.MonkeyPatch.context() as patched:
        alone = "penstock.adapt.saving._write_at_rank_0"
        patched.setattr(alone, lambda *_, **__: pytest.fail("rank 0 joins it all"))
        model.save_pretrained(folder, max_shard_size=f"{LIMIT // 1000}KB")
    return names_in(folder)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "world", "layout"),
    [
        ("deepseek_v3", 2, {"tp_size": 2}),
        ("olmoe", 4, {"tp_size": 2}),
        ("gpt_oss", 4, {"tp_size": 2}),
        ("mixtral", 4, {"etp_size": 2}),
        ("gpt_oss", 4, {"etp_size": 2}),
        ("qwen3_vl_moe", 2, {}),
    ],
)
def test_ranks_that_share_parameters_write_them_in_turn(
    ranks: Pools, tmp_path: Path, family: str, world: int, layout: dict[str, Any]
) -> None:
    """Latent vectors, norms over all heads, sinks, parts of experts, weights that files may turn."""
    files = ranks(world).run(saved_in_parts, family, layout, tmp_path)[0]
    assert len([name for name in files if name.endswith(".safetensors")]) > world
    wanted = made(family)
    read, told = type(wanted).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values())
    for name, each in wanted.state_dict().items():
        assert torch.equal(each, read.state_dict()[name]), name


# ---- names of what is saved --------------------------------------------------------------------------------


ONE, OTHER = (f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(2))


def sharing() -> Any:
    """A model with a second layer that has a parameter of its experts from the first."""
    model = small("gpt_oss")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.down_proj = first.down_proj
    return model


def tied(model: Any) -> Any:
    """A model that says so: what is shared is then saved once."""
    model._tied_weights_keys = {**type(model)._tied_weights_keys, OTHER: ONE}
    return model


def save_what_layers_share(rank: int, world: int, folder: str) -> None:
    del rank
    model = penstock.parallelize(sharing(), ep_size=world, plan="flowmoe")
    with pytest.raises(RuntimeError, match=r"shared tensors|rank 0 could not save"):
        model.save_pretrained(folder)
    tied(model).save_pretrained(folder)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: stored[...] for name, stored in stored_tensors(folder).items()}


def test_experts_that_layers_share_are_saved_as_transformers_does(ranks: Pools, tmp_path: Path) -> None:
    """Which refuses them, unless the model says that they are shared."""
    ranks(2).run(save_what_layers_share, 2, str(tmp_path / "spread"))
    tied(sharing()).save_pretrained(tmp_path / "plain")
    found, wanted = (tensors_of(tmp_path / name) for name in ("spread", "plain"))
    assert found.keys() == wanted.keys() and ONE in found and OTHER not in found
    assert all(tensor.equal(wanted[name]) for name, tensor in found.items())


def counted(rank: int) -> list[list[int]]:
    """Parameters of spread models by their own count: all, trained ones, and all but embeddings."""
    del rank
    layouts: list[dict[str, Any]] = [{"ep_size": 2}, {"etp_size": 2}]
    return [counts_of(penstock.parallelize(frozen_in_part(), plan="flowmoe", **each)) for each in layouts]


def counts_of(model: Any) -> list[int]:
    return [model.num_parameters(), model.num_parameters(True), model.num_parameters(exclude_embeddings=True)]


def frozen_in_part() -> Any:
    """A model with a frozen weight of experts, and one that is frozen and of no experts."""
    model = small("gpt_oss")
    model.model.layers[0].mlp.experts.down_proj.requires_grad_(False)
    model.lm_head.weight.requires_grad_(False)
    return model


def test_parameters_are_counted_as_those_of_the_whole_model(ranks: Pools) -> None:
    assert ranks(2).run(counted) == [[counts_of(frozen_in_part())] * 2] * 2


def test_what_transformers_would_not_read_is_refused(tmp_path: Path) -> None:
    model = penstock.parallelize(small("mixtral"))
    with pytest.raises(ValueError, match=r"missing lm_head\.weight, .* and \d+ more; unexpected other\."):
        model.save_pretrained(tmp_path, state_dict={"other": torch.ones(1)})
    model.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"missing nothing; unexpected adapter\.bias, .*merge_and_unload"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_class_that_needs_more_than_its_configuration_is_saved_without_comparing() -> None:
    """It fails where its configuration alone would build it: after training, nothing may be lost by that."""
    model = penstock.parallelize(small("mixtral"))

    def built(config: object) -> None:
        del config
        raise TypeError("missing 1 required argument")

    with pytest.warns(UserWarning, match="names of what is saved were not compared.*missing 1 required"):
        check_names(model, built, Control(0, 1))
