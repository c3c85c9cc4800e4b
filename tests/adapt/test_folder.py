"""Saved models: shards of all ranks, in place of what was there and never instead of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.adapt.folder import FORMER, UNFINISHED, _begin
from tests.support.adapted import small
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


def save_apart(rank: int, world: int, folder: str) -> None:
    """Ranks without a file system that they share."""
    model = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe")
    model.save_pretrained(f"{folder}/{rank}")


@pytest.mark.slow
def test_where_ranks_see_different_folders_rank_0_saves_all(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(save_apart, 2, str(tmp_path))
    assert is_read(tmp_path / "0", small("mixtral"))
    assert names_in(tmp_path / "0") == {"config.json", "generation_config.json", "model.safetensors"}
    assert names_in(tmp_path) == {"0"}
