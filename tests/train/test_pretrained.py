"""Weights of a Qwen3-MoE of transformers, read by every rank of any layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.checkpoint.folder import digest_of, write_sums
from penstock.config import ConfigError
from penstock.models import ModelConfig, MoEDecoder
from penstock.models.qwen3_moe import sections_of
from penstock.moe import MoEConfig
from penstock.train.checkpoint import begin_with, files_of, read_weights
from tests.support.adapted import small
from tests.support.close import check_close
from tests.support.joining import joined
from tests.support.layouts import layout_case
from tests.support.parity import Case, logical, parts_of, stack_of
from tests.support.ranks import Pools
from tests.support.reference_moe import Weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers saves it, in several files."""
    path = tmp_path_factory.mktemp("pretrained")
    small("qwen3_moe", vocab_size=64).save_pretrained(path, max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 1 and files_of(path)
    return path


def configs(folder: Path) -> tuple[ModelConfig, MoEConfig]:
    found = sections_of(folder)
    return ModelConfig(**found["model"], seq_len=5), MoEConfig(**found["moe"])


def read_by(rank: int, case: Case, folder: Path) -> tuple[Weights, Any]:
    """What a rank holds after it has read its part, by logical name."""
    stack = stack_of(rank, case)
    assert isinstance(stack.model, MoEDecoder)
    read_weights(stack.model, folder)
    return logical(stack, {n: p.detach() for n, p in stack.model.named_parameters()}), parts_of(stack)


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (2, 1, 2, 1), (2, 2, 1, 2), (4, 2, 2, 1)], ids=str)
def test_ranks_together_hold_the_model(ranks: Pools, folder: Path, layout: tuple[int, int, int, int]) -> None:
    model, moe = configs(folder)
    case = replace(layout_case(layout, "flowmoe", "gather"), model=model, moe=moe, double=False)
    found = joined(ranks(layout[0]).run(read_by, case, folder))
    theirs = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    assert len(found) == len(theirs)
    for name, tensor in found.items():
        there, number = name, name.rpartition(".")[2]
        if ".experts." in name:
            kind = name.split(".")[-2].removeprefix("w_")
            there = f"{name.partition('.experts.')[0]}.experts.{number}.{kind}_proj.weight"
        check_close(tensor.t() if ".experts." in name else tensor, theirs[there], 0.0, name)


def begun_by(rank: int, case: Case, folders: list[Path]) -> str:
    """The error of ranks that begin with folders of their own."""
    stack = stack_of(rank, case)
    assert isinstance(stack.model, MoEDecoder)
    try:
        begin_with(stack.model, folders[rank], stack.machinery.control)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_begin_with_the_same_files_or_not_at_all(ranks: Pools, folder: Path, tmp_path: Path) -> None:
    model, moe = configs(folder)
    case = replace(layout_case((2, 1, 2, 1), "flowmoe", "gather"), model=model, moe=moe, double=False)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert ranks(2).run(begun_by, case, [folder, folder]) == ["", ""]
    first, second = ranks(2).run(begun_by, case, [folder, tmp_path])
    assert first.startswith("model.config = ") and "on rank 1 no weights" in first
    assert "on rank 1 no weights" in second
    changed = shutil.copytree(folder, tmp_path / "changed")
    digests = {path.name: digest_of(path) for path in changed.glob("*.safetensors")}
    write_sums(changed, digests)
    assert ranks(2).run(begun_by, case, [changed, changed]) == ["", ""]
    for name in sorted(digests)[:2]:  # one for each rank to find
        data = bytearray((changed / name).read_bytes())
        data[-1] ^= 1
        (changed / name).write_bytes(data)
        errors = ranks(2).run(begun_by, case, [changed, changed])
        assert all(f"{name} has changed since it was written" in each for each in errors), errors
        data[-1] ^= 1
        (changed / name).write_bytes(data)
    (tmp_path / "model.safetensors").write_text("nothing")
    broken = ranks(2).run(begun_by, case, [tmp_path, tmp_path])
    assert all("cannot be read" in each for each in broken)


UP = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("model.norm.weight", lambda tensors, name: tensors.pop(name), "is missing in it"),
        (UP, lambda tensors, name: tensors.pop(name), "is missing in it"),
        (
            "model.layers.0.self_attn.q_proj.bias",
            lambda tensors, name: tensors.update({name: torch.zeros(2)}),
            "exists there and not here",
        ),
        (
            UP,
            lambda tensors, name: tensors[name].view(-1)[-1].fill_(torch.nan),
            "holds numbers that are not finite",
        ),
        (
            "model.norm.weight",
            lambda tensors, name: tensors.update({name: tensors[name].to(torch.int64)}),
            "has numbers of type torch.int64",
        ),
        (
            "lm_head.weight",
            lambda tensors, name: tensors.update({name: torch.zeros(3, 3)}),
            "has shape [3, 3] there",
        ),
        (
            "model.layers.0.mlp.experts.0.down_proj.weight",
            lambda tensors, name: tensors.update({name: torch.zeros(3, 3)}),
            "",
        ),
    ],
)
def test_weights_of_another_model_are_refused(
    folder: Path, tmp_path: Path, name: str, change: Callable[[Weights, str], object], words: str
) -> None:
    tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    change(tensors, name)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        read_weights(MoEDecoder(*configs(folder)), tmp_path)
    assert caught.value.key == "model.config" and f"{name} {words}".strip() in caught.value.why


def test_a_folder_without_weights_is_a_configuration_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text())))
    assert not files_of(tmp_path) and not files_of(folder / "config.json")
    drawn = MoEDecoder(*configs(folder))
    before = {name: parameter.detach().clone() for name, parameter in drawn.named_parameters()}
    read_weights(drawn, tmp_path)
    assert all(torch.equal(parameter, before[name]) for name, parameter in drawn.named_parameters())
    (tmp_path / "adapter_model.safetensors").write_text("nothing")
    with pytest.raises(ConfigError, match=r"model\.config.*adapter_model.safetensors, and neither"):
        read_weights(drawn, tmp_path)
    (tmp_path / "model.safetensors").write_text("nothing")
    with pytest.raises(ConfigError, match=r"model\.config.*cannot be read"):
        read_weights(MoEDecoder(*configs(folder)), tmp_path)
