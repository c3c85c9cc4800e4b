"""Folders of transformers that are damaged or disagree with themselves: one message says which file."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import penstock
from penstock.adapt.own import PenstockConfig, PenstockForCausalLM
from tests.support.adapted import small
from tests.support.runs import refused

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
SIZES = {"vocab_size": 256, "num_layers": 1, "hidden_size": 16, "num_heads": 2, "seq_len": 16}

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a model of transformers, and of Penstock's own."""
    folder = tmp_path_factory.mktemp("saved")
    small("mixtral", vocab_size=256).save_pretrained(folder / "mixtral")
    PenstockForCausalLM(PenstockConfig({"model": SIZES})).save_pretrained(folder / "own")
    return folder


def saying(**settings: Any) -> Change:
    """A configuration that says something else."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **settings}))

    return change


def holding(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def cut_to(size: int, folder: Path) -> None:
    (folder / ONE).write_bytes((folder / ONE).read_bytes()[:size])


def without_tensors(folder: Path) -> None:
    save_file({}, folder / ONE, {"format": "pt"})


def indexed(text: str) -> Change:
    def change(folder: Path) -> None:
        (folder / ONE).unlink()
        (folder / INDEX).write_text(text)

    return change


BOTH: list[tuple[Change, str]] = [
    (partial(cut_to, -1000), rf"{ONE} cannot be read as safetensors: .* Copy it again"),
    (partial(cut_to, 0), rf"{ONE} cannot be read as safetensors"),
    (without_tensors, rf"{ONE}: no tensors are in there"),
    (indexed("{}"), rf"{INDEX} has no weight_map"),
    (indexed("[]"), rf"{INDEX} holds list, and no JSON object"),
    (indexed("{"), rf"{INDEX} is not JSON: .* Copy it again"),
    (indexed('{"weight_map": {"lm_head.weight": 3}}'), rf"{INDEX} has no weight_map"),
    (indexed('{"weight_map": {"lm_head.weight": "gone"}}'), "gone cannot be read as safetensors"),
    (
        indexed('{"weight_map": {"lm_head.weight": "../gone"}}'),
        r"\.json names \.\./gone: .* lead nowhere else",
    ),
    (holding("config.json", "{"), r"config\.json is not JSON"),
    (holding("config.json", "{}"), r"config\.json names no model_type"),
    (saying(model_type="nonsense"), r"config\.json describes no model that transformers knows: .*nonsense"),
]
"""What is wrong, and what is said of it, in a folder of either."""

MIXTRAL: list[tuple[Change, str]] = [
    (saying(hidden_size=24), r"misshapen: lm_head.weight \(\[256, 32\] there, \[256, 24\] by config\.json\)"),
    (saying(num_hidden_layers=3), r"missing: model\.layers\.2\.input_layernorm\.weight, .* and \d+ more"),
    (saying(num_local_experts=0), r"config\.json: num_local_experts = 0, and a layer .* at least one"),
    (saying(num_local_experts="8"), r"config\.json describes no model .*num_local_experts.*expected int"),
    (saying(num_experts_per_tok=9), r"num_experts_per_tok = 9, and there are num_local_experts = 8"),
    (saying(num_attention_heads=0), r"config\.json: transformers cannot make a causal language model"),
]

OWN: list[tuple[Change, str]] = [
    (saying(hidden_size=24), r"config\.json describes no model .*hidden_size = 24, and sections say 16"),
    (saying(sections=[]), r"config\.json describes no model .*sections = \[\]: write the settings"),
    (saying(sections={"model": 3}), r"config\.json describes no model .*sections = .*: write the settings"),
    (
        saying(sections={"model": {"hidden_size": "x"}}),
        r"config\.json describes no .*model\.hidden_size = .x",
    ),
]

TOKENIZERS: list[tuple[Change, str]] = [
    (holding("tokenizer.json", "{}"), r"tokenizer\.json cannot be read as a tokenizer .* --tokenizer"),
    (holding("tokenizer.json", "{"), r"tokenizer\.json cannot be read as a tokenizer"),
    (holding("tokenizer_config.json", "{"), r"tokenizer_config\.json cannot be read as a tokenizer"),
]


@pytest.mark.parametrize(("change", "words"), [*BOTH, *MIXTRAL])
def test_a_model_to_be_spread_is_refused(
    saved: Path, tmp_path: Path, change: Change, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `load_pretrained`, and by `penstock generate`, in one line."""
    folder = shutil.copytree(saved / "mixtral", tmp_path / "mixtral")
    change(folder)
    with pytest.raises(ValueError, match=words) as caught:
        penstock.load_pretrained(folder)
    said = refused(capsys, "generate", folder, "--prompt", "ab")
    assert said.strip() == f"penstock: {caught.value}" and "\n" not in said.strip()


@pytest.mark.parametrize(("change", "words"), [*BOTH, *OWN])
def test_a_model_of_penstock_is_refused(
    saved: Path, tmp_path: Path, change: Change, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(saved / "own", tmp_path / "own")
    change(folder)
    said = refused(capsys, "convert", folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    check_line(said, words)


@pytest.mark.parametrize(("change", "words"), TOKENIZERS)
def test_a_tokenizer_is_refused(
    saved: Path, tmp_path: Path, change: Change, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(saved / "mixtral", tmp_path / "mixtral")
    change(folder)
    (tmp_path / "text").write_text("several words")
    for command in (("generate", folder, "--prompt", "ab"), ("evaluate", folder, tmp_path / "text")):
        check_line(refused(capsys, *command), words)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (
            "config",
            saying(model_type="evil", auto_map={"AutoConfig": "evil.A", "AutoModelForCausalLM": "evil.B"}),
        ),
        (
            "tokenizer_config",
            holding(
                "tokenizer_config.json",
                '{"tokenizer_class": "C", "auto_map": {"AutoTokenizer": ["evil.C", null]}}',
            ),
        ),
    ],
)
def test_nobody_is_asked_to_run_what_a_folder_brings(
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    change: Change,
) -> None:
    """Whoever is in a hurry would say yes."""
    asked = []

    def answer(question: str) -> str:
        asked.append(question)
        return "n"

    monkeypatch.setattr("builtins.input", answer)
    folder = shutil.copytree(saved / "mixtral", tmp_path / "mixtral")
    (folder / "evil.py").touch()
    change(folder)
    said = refused(capsys, "generate", folder, "--prompt", "ab")
    check_line(said, rf"{name}\.json .*(custom code|cannot be read as a tokenizer)")
    assert not asked


def check_line(said: str, words: str) -> None:
    assert "\n" not in said.strip() and said.startswith("penstock: "), said
    assert re.search(words, said), said
