"""Folders of transformers that are damaged or disagree with themselves: one message says which file."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import penstock
from penstock.cli import main
from penstock.cli.run import BAD_USAGE
from penstock.config import ConfigError
from penstock.families.described import DEEPEST, read_table
from penstock.families.weights import ModelFolder
from tests.support.adapted import small
from tests.support.runs import refused

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models of two families, the second as `penstock train` saves it."""
    folder = tmp_path_factory.mktemp("saved")
    small("mixtral", vocab_size=256).save_pretrained(folder / "mixtral")
    small("qwen3_moe", vocab_size=256).save_pretrained(folder / "own")
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
    (indexed("{}"), rf"{INDEX}: has no weight_map"),
    (indexed("[]"), rf"{INDEX}: has no weight_map"),
    (indexed("{"), rf"{INDEX}: is not valid JSON: .* Copy it again"),
    (indexed('{"weight_map": {"lm_head.weight": 3}}'), rf"{INDEX}: has no weight_map"),
    (indexed('{"weight_map": {"lm_head.weight": "gone"}}'), "gone cannot be read as safetensors"),
    (
        indexed('{"weight_map": {"lm_head.weight": "../gone"}}'),
        r"\.json: names \.\./gone: .* lead nowhere else",
    ),
    (holding("config.json", "{"), r"config\.json: is not valid JSON"),
    (holding("config.json", "{}"), r"config\.json: model_type: is not there"),
    (saying(model_type="nonsense"), r"config\.json describes no model that transformers knows: .*nonsense"),
    (saying(model_type="vit"), r"config\.json: model_type = 'vit' is no causal .* penstock\.parallelize"),
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


def nested(depth: int) -> str:
    return f'{{"model_type": "mixtral", "x": {"[" * depth}{"]" * depth}}}'


def pipe_for_weights(folder: Path) -> None:
    (folder / ONE).unlink()
    os.mkfifo(folder / ONE)


HUGE = 1 << 31
KEYS: list[tuple[Change, str]] = [
    *(
        (saying(**{name: HUGE}), f"config.json: {name}")
        for name in ("num_hidden_layers", "num_local_experts")
    ),
    *((saying(**{name: HUGE}), f"config.json: {name}") for name in ("num_labels", "hidden_size")),
    (saying(head_dim=1 << 15), "config.json: head_dim"),
    (saying(num_hidden_layers=10**400), "config.json: num_hidden_layers"),
    (saying(sections={"moe": {"num_experts": HUGE}}), "config.json: sections.moe.num_experts"),
    (saying(attn_implementation="org/kernel"), "config.json: attn_implementation"),
    (saying(attn_implementation={"": "org/kernel"}), "config.json: attn_implementation."),
    (saying(_attn_implementation_internal="flash_attention_2"), "config.json: _attn_implementation_internal"),
    (saying(experts_implementation="sonicmoe"), "config.json: experts_implementation"),
    (saying(text_config={"attn_implementation": "a/b"}), "config.json: text_config.attn_implementation"),
    (saying(configuration_files=["config.5.0.0.json"]), "config.json: configuration_files"),
    *(
        (
            saying(quantization_config={"quant_method": method}),
            "config.json: quantization_config.quant_method",
        )
        for method in ("gptq", "awq", "bitsandbytes", "torchao")
    ),
    (saying(quantization_config={}), "config.json: quantization_config"),
    (
        saying(text_config={"quantization_config": {"quant_method": "fp8"}}),
        "config.json: text_config.quantization_config.quant_method",
    ),
    (
        saying(text_config={"text_config": {"quantization_config": {"quant_method": "x"}}}),
        "config.json: text_config.text_config.quantization_config.quant_method",
    ),
    (saying(text_config={"text_config": {}}), "config.json: text_config"),
    (holding("config.json", nested(100_000)), "config.json"),
    (holding("config.json", nested(DEEPEST + 1)), "config.json"),
    (holding("config.json", f'{{"model_type": "{"x" * (1 << 22)}"}}'), "config.json"),
    (holding("generation_config.json", "{"), "generation_config.json"),
    (holding("generation_config.json", "[]"), "generation_config.json"),
    (holding("generation_config.json", nested(100_000)), "generation_config.json"),
    (pipe_for_weights, ONE),
]
"""What would hang, fetch code or raise an error of transformers, and the end of the key that is named."""

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


@pytest.mark.parametrize(("change", "key"), KEYS)
def test_a_setting_is_refused_by_its_key(
    saved: Path, tmp_path: Path, change: Change, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(saved / "mixtral", tmp_path / "mixtral")
    change(folder)
    with pytest.raises(ConfigError) as caught:
        penstock.load_pretrained(folder)
    assert caught.value.key == str(folder / key)
    (tmp_path / "text").write_text("several words")
    for command in (("generate", folder, "--prompt", "ab"), ("evaluate", folder, tmp_path / "text")):
        assert refused(capsys, *command).strip() == f"penstock: {caught.value}"


def test_a_folder_that_asks_for_tuples_is_read(saved: Path, tmp_path: Path) -> None:
    """`return_dict: false` changes how results are handed over, and not what is computed."""
    folder = shutil.copytree(saved / "mixtral", tmp_path / "mixtral")
    saying(return_dict=False)(folder)
    assert main(["generate", str(folder), "--prompt", "ab", "--max-new-tokens", "1"]) == 0


def test_a_model_is_no_larger_than_memory_and_its_weights(saved: Path, tmp_path: Path) -> None:
    """Where every size by itself would do."""
    folder = shutil.copytree(saved / "mixtral", tmp_path / "mixtral")
    saying(hidden_size=1 << 20, intermediate_size=1 << 20)(folder)
    with pytest.raises(ValueError, match=r"config\.json: the model that it describes has"):
        penstock.load_pretrained(folder)


VALUES: tuple[Any, ...] = (
    HUGE,
    1 << 20,
    10**30,
    -1,
    0,
    1e300,
    None,
    True,
    "x",
    "org/x",
    [],
    [HUGE],
    {},
    {"": "org/x"},
)


@pytest.mark.slow
@given(data=st.data())
def test_no_value_of_a_setting_hangs_or_ends_in_a_traceback(
    saved: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    data: st.DataObject,
) -> None:
    """Any setting of either file, with any of these values: the model answers, or one line says why not."""
    kind = data.draw(st.sampled_from(("mixtral", "own")))
    folder = shutil.copytree(saved / kind, tmp_path_factory.mktemp("drawn") / "model")
    file = folder / data.draw(st.sampled_from(("config.json", "generation_config.json")))
    table = json.loads(file.read_text())
    name = data.draw(st.sampled_from([*sorted(table), "attn_implementation", "num_labels", "num_beams"]))
    file.write_text(json.dumps({**table, name: data.draw(st.sampled_from(VALUES))}))
    capsys.readouterr()
    code = main(["generate", str(folder), "--prompt", "ab", "--max-new-tokens", "2"])
    said = capsys.readouterr().err.strip()
    assert code in (0, BAD_USAGE)
    assert code == 0 or (said.startswith("penstock: ") and "\n" not in said), said


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


def test_of_equal_keys_the_last_counts_as_in_transformers(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"hidden_size": 1, "hidden_size": 2}')
    assert read_table(file) == {"hidden_size": 2}


class OwnConfig(MixtralConfig):
    model_type = "mixtral_of_our_own"


class OwnModel(MixtralForCausalLM):
    config_class = OwnConfig


def test_a_model_that_its_user_has_registered_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for register in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        monkeypatch.setattr(register, "_extra_content", {})  # as before when the test ends
    AutoConfig.register(OwnConfig.model_type, OwnConfig)
    AutoModelForCausalLM.register(OwnConfig, OwnModel)
    small("mixtral").save_pretrained(tmp_path)
    saying(model_type=OwnConfig.model_type)(tmp_path)
    assert type(ModelFolder.open(tmp_path).model) is OwnModel
