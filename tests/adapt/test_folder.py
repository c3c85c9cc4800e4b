"""Saved models: shards of all ranks, in place of what was there and never instead of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.adapt.folder import SEEN, UNFINISHED, _begin, _finish
from penstock.families.described import FORMER
from tests.support.adapted import DIVISIBLE, small
from tests.support.killed import left_by_kills
from tests.support.ranks import Pools

LIMIT = 40_000


def is_read(folder: Path, model: Any) -> bool:
    """Whether transformers reads this very model."""
    read, told = type(small("mixtral")).from_pretrained(folder, output_loading_info=True)
    state = read.state_dict()
    assert not any(told.values())
    return all(torch.equal(each, state[name]) for name, each in model.state_dict().items())


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_shards_take_the_place_of_another_model(tmp_path: Path) -> None:
    small("mixtral", seed=1).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    model = penstock.parallelize(small("mixtral"))
    model.save_pretrained(tmp_path, max_shard_size=f"{LIMIT // 1000}KB")
    assert is_read(tmp_path, model)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    papers = {"config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"}
    assert names_in(tmp_path) == {*shards, *papers}
    assert shards == [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]
    assert all((tmp_path / name).stat().st_size < LIMIT + 10_000 for name in shards)  # with its header
    assert index["metadata"]["total_size"] == 4 * model.num_parameters()
    model.save_pretrained(tmp_path)
    assert names_in(tmp_path) == {*(papers - {"model.safetensors.index.json"}), "model.safetensors"}


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    model = penstock.parallelize(small("mixtral"))
    model.save_pretrained(tmp_path)
    before = names_in(tmp_path)
    with pytest.raises(RuntimeError, match="nonsense"):
        model.save_pretrained(tmp_path, max_shard_size="nonsense")
    assert names_in(tmp_path) == before and is_read(tmp_path, model)


def test_what_changed_places_when_a_process_ended_is_taken_back(tmp_path: Path) -> None:
    """Here after the first shards of the new model, and before what says that there are any."""
    model = penstock.parallelize(small("mixtral"))
    model.save_pretrained(tmp_path)
    before = names_in(tmp_path)
    former = tmp_path / FORMER
    former.mkdir()
    for name in before:
        (tmp_path / name).rename(former / name)
    (tmp_path / UNFINISHED).mkdir()
    (tmp_path / "model-00001-of-00002.safetensors").touch()

    def fail() -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        _begin(tmp_path, fail)
    assert before <= names_in(tmp_path) and is_read(tmp_path, model) and not former.exists()


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
        _begin(copy, lambda: None)
        assert contents(copy) >= old or contents(copy) >= new, copy
    assert told > 2


def test_no_files_are_taken_back_from_elsewhere(tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    (other / "mine").touch()
    (folder := tmp_path / "saved").mkdir()
    (folder / FORMER).symlink_to(other)
    with pytest.raises(OSError, match=FORMER):
        _begin(folder, lambda: None)
    assert names_in(other) == {"mine"} and "mine" not in names_in(folder)


def test_a_file_that_cannot_be_put_in_its_place_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the last one of three, when the old model is out of its place."""
    for name, text in (("model.safetensors", "old"), ("config.json", "old")):
        (tmp_path / name).write_text(text)
    _begin(tmp_path, lambda: None)
    names = ("model-00001-of-00001.safetensors", "config.json", "model.safetensors.index.json")
    for name in names:
        (tmp_path / UNFINISHED / name).write_text("new")
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.endswith("index.json"):
            raise OSError("no more names")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="no more names"):
        _finish(tmp_path)
    assert names_in(tmp_path) == {"model.safetensors", "config.json", UNFINISHED, FORMER}
    assert {(tmp_path / name).read_text() for name in ("model.safetensors", "config.json")} == {"old"}
    assert names_in(tmp_path / UNFINISHED) == set(names) and not names_in(tmp_path / FORMER)


def test_a_former_model_that_stays_in_the_way_is_told_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / FORMER).touch()
    with pytest.raises(OSError, match=FORMER):
        _begin(tmp_path, lambda: None)


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
        (left := Path(folder) / str(rank) / UNFINISHED).mkdir(parents=True)
        (left / SEEN).touch()
    model.save_pretrained(f"{folder}/{rank}")


@pytest.mark.slow
def test_where_ranks_see_different_folders_rank_0_saves_all(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(save_apart, 2, str(tmp_path))
    assert is_read(tmp_path / "0", small("mixtral"))
    assert names_in(tmp_path / "0") == {"config.json", "generation_config.json", "model.safetensors"}
    assert names_in(tmp_path) == {"0", "1"} and names_in(tmp_path / "1" / UNFINISHED) == {SEEN}


def save_and_lose(rank: int, world: int, folder: str) -> str:
    """Rank 1's shard is gone when all is written."""
    model = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe")
    model.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr("penstock.adapt.saving.write_shard", lambda path, tensors: list(tensors))
        with pytest.raises(RuntimeError) as caught:
            model.save_pretrained(folder)
    return str(caught.value)


@pytest.mark.slow
def test_a_shard_that_rank_0_does_not_see_leaves_the_former_model(ranks: Pools, tmp_path: Path) -> None:
    said = ranks(2).run(save_and_lose, 2, str(tmp_path))
    assert all("FileNotFoundError" in each for each in said)
    assert is_read(tmp_path, small("mixtral"))


def saved_in_parts(rank: int, world: int, family: str, tp_size: int, folder: Path) -> set[str]:
    """The names of the files of a model whose attention ranks share, where rank 0 may not join it all."""
    del rank
    model = penstock.parallelize(small(family, **DIVISIBLE), ep_size=world, tp_size=tp_size, plan="flowmoe")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("penstock.adapt.folder.whole_state", lambda *_: pytest.fail("rank 0 joins it all"))
        model.save_pretrained(folder, max_shard_size=f"{LIMIT // 1000}KB")
    return names_in(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "world"), [("deepseek_v3", 2), ("olmoe", 4), ("gpt_oss", 4)])
def test_ranks_that_share_attention_write_it_in_turn(
    ranks: Pools, tmp_path: Path, family: str, world: int
) -> None:
    """Latent vectors, norms over all heads and sinks among what is saved."""
    files = ranks(world).run(saved_in_parts, world, family, 2, tmp_path)[0]
    assert len([name for name in files if name.endswith(".safetensors")]) > world
    wanted = small(family, **DIVISIBLE)
    read, told = type(wanted).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values())
    for name, each in wanted.state_dict().items():
        assert torch.equal(each, read.state_dict()[name]), name
