"""`penstock generate` and `evaluate`: what a run of two ranks has learnt, on one process."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace, Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from penstock.adapt.asking import Judgement, judge, open_model
from penstock.adapt.trained import from_checkpoint
from penstock.checkpoint.folder import RECORD, SUMS, digest_of, write_sums
from penstock.cli import main
from penstock.config import ConfigError, to_dict
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.train.assemble import build_optimizer, build_stack
from penstock.train.checkpoint import Checkpoints
from penstock.train.config import RunConfig
from penstock.train.logs import telling
from penstock.train.trainer import Trainer
from tests.support.adapted import small
from tests.support.cli import Cli
from tests.support.parity import machinery
from tests.support.patience import HANG_S
from tests.support.ranks import Pools
from tests.support.runs import without_reader, write_config
from tests.support.training import train_on

STEPS = 8
LAYERS = ["model.moe_layers=[1]", "model.tie_word_embeddings=true"]
AS_QWEN3_MOE = [*LAYERS, "model.num_key_value_heads=2", "model.head_dim=6", "moe.norm_topk_prob=false"]
SETTINGS = {
    "as Qwen3-MoE": AS_QWEN3_MOE,
    "with a gate of its own": [*LAYERS, "moe.gate=sigmoid", "moe.expert_bias_rate=0.01"],
}
SAMPLE = "line 7: 49 is the"


def judge_sample(trainer: Trainer, step: int) -> None:
    """On every rank: after the last step, leave in the run's folder what the stack makes of a sample."""
    if step == STEPS:
        tokens_L = torch.tensor(list(SAMPLE.encode()))
        trainer.stack.eval()
        with torch.no_grad():
            loss = trainer.stack(tokens_L[None, :-1], tokens_L[None, 1:])
        trainer.stack.train()
        assert trainer.stack.statistics is not None and loss.isfinite()
        (trainer.config.output.dir / "loss").write_text(str(trainer.stack.statistics.cross_entropy.item()))


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_what_can_be_done_with_a_run(ranks: Pools, tmp_path: Path, cli: Cli, settings: list[str]) -> None:
    write_config(tmp_path)
    ranks(2).run(train_on, 2, tmp_path, [*settings, f"train.steps={STEPS}"], judge_sample)
    folder = tmp_path / "run"
    (checkpoint,) = (folder / "checkpoints").iterdir()

    sample = tmp_path / "sample.txt"
    sample.write_text(SAMPLE)
    found = cli.finds(["evaluate", folder, sample])
    assert found["tokens"] == len(SAMPLE) - 1
    assert found["loss"] == pytest.approx(float((folder / "loss").read_text()), rel=1e-5)
    assert "perplexity" in cli.prints(["evaluate", checkpoint, sample, "--length", "5"])
    told = list[str]()
    with telling(told.append):
        loss = judge(open_model(folder, None), SAMPLE, 1).loss
    assert len(told) > 1 and told[-1] == f"16 of 16 tokens, loss so far {loss:.4f}"

    asked = ("--prompt", "line 1", "--max-new-tokens", "24")  # more than the model has positions for
    text = cli.prints(["generate", folder, *asked])
    assert text.startswith("line 1") and len(text) > len("line 1\n")
    drawn = [cli.prints(["generate", folder, *asked, "--temperature", "2", "--seed", seed]) for seed in "112"]
    assert drawn[0] == drawn[1] != drawn[2]


READ_ALONE = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch.save(model(torch.arange(16)[None]).logits.detach(), sys.argv[2])
tokens = model.generate(torch.arange(4)[None], max_new_tokens=4, do_sample=False)
assert tokens.shape == (1, 8) and not any("penstock" in name for name in sys.modules)
"""


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        [],
        ["parallel.tp_size=2", "parallel.etp_size=2", "optimizer.zero_stage=1"],
        pytest.param(["optimizer.zero_stage=1"], marks=pytest.mark.soak),
    ],
    ids=" ".join,
)
def test_a_checkpoint_is_a_folder_of_transformers(ranks: Pools, tmp_path: Path, layout: list[str]) -> None:
    """It computes the same there, and, as one layout shows for all, without Penstock.

    And a run may begin with it, on another layout, which keeps what the folder says of generation.
    """
    write_config(tmp_path)
    settings = [*AS_QWEN3_MOE, f"train.steps={STEPS}"]
    began = ranks(2).run(train_on, 2, tmp_path, [*settings, *layout], None)[0].summary
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    theirs, told = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert type(theirs).__name__ == "Qwen3MoeForCausalLM" and not any(told.values()), told
    with torch.no_grad():
        logits, ours = (
            model(torch.arange(16)[None]).logits for model in (theirs, from_checkpoint(checkpoint))
        )
    torch.testing.assert_close(logits, ours)
    assert ours.std() > 0.01
    if not layout:
        alone = [sys.executable, "-c", READ_ALONE, str(checkpoint), str(tmp_path / "logits.pt")]
        subprocess.run(alone, check=True, timeout=HANG_S)
        torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), ours)
    said = {"eos_token_id": 5, "max_position_embeddings": 64}
    described = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(described | said))
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [5, 3], "do_sample": true}')
    fresh = [f"model.config={checkpoint}", f"output.dir={tmp_path / 'second'}", f"train.steps={STEPS}"]
    second = ranks(2).run(train_on, 2, tmp_path, fresh, None)[0].summary
    assert second.steps == STEPS and second.first_loss < began.first_loss
    assert second.first_loss == pytest.approx(began.last_loss, rel=0.05)
    (checkpoint,) = (tmp_path / "second" / "checkpoints").iterdir()
    for model in (from_checkpoint(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint)):
        assert said.items() <= model.config.to_dict().items()
        assert model.generation_config.eos_token_id == [5, 3] and model.generation_config.do_sample


def words_file(folder: Path, last: str = "cube") -> Path:
    """A tokenizer of few words; everything else is one token."""
    kept = ("?", "<eos>", "line", "is", "the", "square", last)
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(kept)}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<eos>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.slow
@pytest.mark.parametrize("prepared", [False, True])
def test_a_run_on_tokens_is_asked_in_its_tokens(
    ranks: Pools, tmp_path: Path, cli: Cli, prepared: bool
) -> None:
    """By the file that it was given, while that is the same; otherwise a user has to name it, in a folder of
    transformers, too. There is no guessing at bytes."""
    write_config(tmp_path)
    text, file = tmp_path / "text.txt", words_file(tmp_path / "words")
    data = [f"data.tokenizer={file}", f"data.cache={tmp_path}"]
    if prepared:
        cli.prints(["prepare", text, "--tokenizer", file, "--out", tmp_path / "tokens"])
        data = [f"data.path={tmp_path / 'tokens'}"]
    settings = ["model.vocab_size=300", "train.steps=1", *data]
    assert ranks(2).run(train_on, 2, tmp_path, settings, None)[0].summary is not None
    run, sample = tmp_path / "run", tmp_path / "sample"
    sample.write_text("the square of the line")
    found = cli.prints(["evaluate", run, sample, "--tokenizer", file])
    assert found.endswith(", 4 tokens\n")
    if prepared:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:8]
        said_of = cli.refuses(["evaluate", run, sample])
        assert f"was trained on tokens of a tokenizer {digest}: name its tokenizer.json" in said_of
    else:
        assert cli.prints(["evaluate", run, sample]) == found
        words_file(tmp_path / "words", last="Cube")
        assert "is not there any more or has changed" in cli.refuses(["evaluate", run, sample])
    assert "not on bytes" in cli.refuses(["evaluate", run, sample, "--tokenizer", "bytes"])
    other = words_file(tmp_path / "other", last="Sphere")
    assert main(["evaluate", str(run), str(sample), "--tokenizer", str(other)]) == 0
    assert "is not the file that the model was trained with" in cli.capsys.readouterr().err


def checkpoint_of(folder: Path, tokenizer: str | None = None, **moe: object) -> Path:
    """The checkpoint of a run that has done no step."""
    sizes = {"vocab_size": 300, "num_layers": 1, "hidden_size": 16, "num_heads": 2, "seq_len": 16}
    config = RunConfig(model=ModelConfig(**sizes), moe=MoEConfig(**moe))  # type: ignore[arg-type]
    stack = build_stack(config, machinery(1, 1, 0))
    optimizer, settings = build_optimizer(stack, config.optimizer), to_dict(config)
    run = Checkpoints(
        folder / "checkpoints",
        stack,
        optimizer,
        keep=1,
        identity={},
        settings=settings,
        tokenizer=tokenizer,
    )
    return run.save(0)


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["softmax", "cosine"])
def test_a_model_with_room_for_more_than_bytes(tmp_path: Path, cli: Cli, gate: str) -> None:
    """It draws what is asked for, once it is known what its tokens are."""
    asked = ("generate", checkpoint_of(tmp_path, gate=gate), "--prompt", "line", "--max-new-tokens", "8")
    assert "--tokenizer bytes" in cli.refuses(asked)
    known = cli.prints([*asked, "--tokenizer", "bytes"])
    asked = ("generate", checkpoint_of(tmp_path, "bytes", gate=gate), *asked[2:])
    assert cli.prints(asked) == known
    likeliest, *drawn = (
        cli.prints([*asked, *more]) for more in ((), *(("--top-k", "250", "--seed", seed) for seed in "112"))
    )
    assert likeliest.startswith("line") and drawn[0] == drawn[1] != drawn[2]
    assert Judgement(loss=1e4, tokens=1).perplexity == float("inf")


def test_a_tokenizer_keeps_the_space_between_a_prompt_and_what_follows(tmp_path: Path, cli: Cli) -> None:
    words = {f"\u2581w{number}": number for number in range(61)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="\u2581w0"))
    tokenizer.pre_tokenizer, tokenizer.decoder = Metaspace(), MetaspaceDecoder()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    small("mixtral").save_pretrained(tmp_path)
    text = cli.prints(["generate", tmp_path, "--prompt", "w7 w8", "--max-new-tokens", "3"])
    assert text.startswith("w7 w8 w")


@pytest.mark.slow
def test_a_text_that_is_generated_may_lose_its_reader(tmp_path: Path) -> None:
    words = ("generate", checkpoint_of(tmp_path, "bytes"), "--prompt", "a", "--max-new-tokens", "2")
    assert without_reader(words) == (0, b"")


@pytest.mark.slow
def test_what_cannot_be_opened_is_refused(tmp_path: Path, cli: Cli) -> None:
    said_of = cli.refuses(["generate", tmp_path, "--prompt", "a"])
    assert "neither a Hugging Face model folder" in said_of
    small("mixtral").save_pretrained(tmp_path / "mixtral")
    assert "has no tokenizer" in cli.refuses(["generate", tmp_path / "mixtral", "--prompt", "a"])
    for name, number in (("tokenizer.json", 1), ("large", 10**6)):
        model = tokenizers.models.WordLevel({"a": 0, "b": number}, unk_token="a")
        tokenizers.Tokenizer(model).save(str(tmp_path / name))
    asked = ("generate", tmp_path / "mixtral", "--prompt", "b", "--tokenizer")
    assert cli.prints([*asked, tmp_path / "tokenizer.json", "--max-new-tokens", "3"]).startswith("b")
    assert "has tokens up to 1000000, and the model knows" in cli.refuses([*asked, tmp_path / "large"])
    assert "is no tokenizer.json" in cli.refuses([*asked, tmp_path / "nothing"])
    (tmp_path / "large").rename(words_file(tmp_path / "folder"))
    judging = ("evaluate", tmp_path / "mixtral", __file__, "--tokenizer", tmp_path / "folder")
    assert "has tokens up to 1000000, and the model knows 61: it is the" in cli.refuses(judging)
    small("mixtral", vocab_size=256).save_pretrained(tmp_path / "bytes")
    text = tmp_path / "text"
    text.write_text("several words")
    empty, latin = tmp_path / "empty", tmp_path / "latin"
    empty.write_text("")
    latin.write_bytes(b"several\nw\xf6rter")
    for command, *rest in (("generate", "--prompt", "b"), ("evaluate", str(text))):
        said_of = cli.refuses([command, tmp_path / "mixtral", *rest, "--tokenizer", "bytes"])
        assert "bytes are 256 tokens, and the model knows 61" in said_of
    for more, words in (
        (["generate", "--prompt", ""], "prompt is empty"),
        (["evaluate", tmp_path / "nothing"], "there is no such file"),
        (["evaluate", text, "--length", "65"], "use 1 to 64"),
        (["evaluate", tmp_path], "is a folder, not a file"),
        (["evaluate", empty], f"{empty} has less than two tokens"),
        (["evaluate", latin], f"{latin}: is not UTF-8 text (line 2). Save it as UTF-8."),
    ):
        name, *options = map(str, more)
        assert words in cli.refuses([name, tmp_path / "bytes", *options])
    assert "several words" in cli.prints(["generate", tmp_path / "bytes", "--prompt", "several words"])


def with_settings(folder: Path, section: str, name: str, value: object) -> Path:
    """A checkpoint of Penstock whose record has another value of a setting, or, with `...`, lacks it."""
    path = checkpoint_of(folder, "bytes")
    record = json.loads((path / RECORD).read_text())
    table = record["settings"].setdefault(section, {})
    if value is ...:
        del table[name]
    else:
        table[name] = value
    (path / RECORD).write_text(json.dumps(record))
    write_sums(path, {file.name: digest_of(file) for file in path.iterdir() if file.name != SUMS})
    return path


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        *(("model", name, ...) for name in ("num_layers", "hidden_size", "num_heads", "seq_len")),
        *(("moe", name, ...) for name in ("num_experts", "top_k")),
        ("data", "tokenizer", 3),
    ],
)
def test_a_checkpoint_without_a_setting_is_refused(
    tmp_path: Path, cli: Cli, section: str, name: str, value: object
) -> None:
    path = with_settings(tmp_path / "run", section, name, value)
    with pytest.raises(ConfigError) as caught:
        open_model(tmp_path / "run")
    assert caught.value.key == f"{path / RECORD}: settings.{section}.{name}"
    said_of = cli.refuses(["generate", tmp_path / "run", "--prompt", "a"])
    assert said_of.strip() == f"penstock: {caught.value}"


@pytest.mark.parametrize(("name", "value"), [("hidden_size", 1 << 20), ("num_layers", 2)])
def test_a_checkpoint_is_compared_with_its_settings_before_memory_is_allocated(
    tmp_path: Path, cli: Cli, name: str, value: int
) -> None:
    with_settings(tmp_path / "run", "model", name, value)
    said_of = cli.refuses(["generate", tmp_path / "run", "--prompt", "a"])
    assert "holds another model than its settings say" in said_of and said_of.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--temperature", "1e-40", "'1e-40': must be 0, for the likeliest token, or at least 0.0001"),
        ("--temperature", "nan", "'nan': must be 0"),
        ("--temperature", "warm", "'warm': must be 0"),
        ("--top-p", "half", "'half': must be above 0 and at most 1"),
        ("--top-p", "2", "argument --top-p: '2': must be above 0 and at most 1"),
        ("--prompt", "hel\udcff", "is not UTF-8; write it in UTF-8"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(
    capsys: pytest.CaptureFixture[str], option: str, value: str, why: str
) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "run", "--prompt", "a", option, value])
    said = capsys.readouterr().err
    assert f"argument {option}: " in said and why in said


def test_a_model_whose_numbers_are_not_finite_is_refused(tmp_path: Path, cli: Cli) -> None:
    """Its likeliest token would be token 0, and its loss no number in JSON."""
    model = small("mixtral", vocab_size=256)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    model.save_pretrained(tmp_path)
    (tmp_path / "text").write_text("several words")
    for command in (("generate", tmp_path, "--prompt", "ab"), ("evaluate", tmp_path, tmp_path / "text")):
        assert cli.refuses([*command, "--json"]).count("\n") == 1


def test_the_least_temperature_takes_the_likeliest(tmp_path: Path, cli: Cli) -> None:
    small("mixtral", vocab_size=256).save_pretrained(tmp_path)
    asked = ("generate", tmp_path, "--prompt", "several words", "--max-new-tokens", "5")
    assert cli.prints([*asked, "--temperature", "0.0001"]) == cli.prints(asked)
