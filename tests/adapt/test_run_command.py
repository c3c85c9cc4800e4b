"""Models of transformers in the command and in sessions: what runs, what is kept, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import penstock
from penstock.adapt.build import ALONE
from penstock.adapt.run import model_of_run
from penstock.autotune.choose.layouts import run_subject
from penstock.config import ConfigError
from penstock.cost import ClusterFile
from penstock.train.assemble import COPIES, build_machinery, memory_of
from tests.adapt.test_run import LENGTH, Case, Trained, folder_of, text
from tests.support.adapted import DIVISIBLE
from tests.support.forked import run_forked
from tests.support.ranks import Pools
from tests.support.runs import refused, write_config


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Mixtral for text as bytes."""
    folder = tmp_path_factory.mktemp("mixtral")
    return folder_of("mixtral", folder, vocab_size=256, initializer_range=0.02)


def losses_in(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def bare_config(folder: Path, start: Path) -> tuple[Path, list[str]]:
    """A configuration file, and settings that leave the model to its own file."""
    path = write_config(folder)
    text = path.read_text().partition("[parallel]")[2]
    path.write_text(f"[model]\nseq_len = 16\n\n[parallel]{text}")
    return path, [f"model.config={start}", "train.steps=6", "train.checkpoint_every=3"]


@pytest.mark.slow
def test_the_command_trains_another_family_and_resumes_it(tmp_path: Path, start: Path) -> None:
    """Equal in every bit; what is saved is a folder of transformers, with the loss that was measured."""
    path, settings = bare_config(tmp_path, start)
    whole, halves = (f"output.dir={tmp_path}/{name}" for name in ("whole", "halves"))
    once = run_forked(2, "train", path, *settings, whole)
    assert once.returncode == 0, once.stderr
    for more in ("train.steps=3", "train.resume=true"):
        half = run_forked(2, "train", path, *settings, halves, more)
        assert half.returncode == 0, half.stderr
    assert losses_in(tmp_path / "halves") == losses_in(tmp_path / "whole")
    saved = [tmp_path / name / "checkpoints/step-00000006" for name in ("whole", "halves")]
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in saved]
    assert [type(model).__name__ for model in models] == ["MixtralForCausalLM"] * 2
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(part, second[name]) for name, part in first.items())
    before = AutoModelForCausalLM.from_pretrained(start).state_dict()
    assert not any(torch.equal(part, first[name]) for name, part in before.items())
    said = run_forked(1, "generate", tmp_path / "whole", "--prompt", "line 7", "--max-new-tokens", "4")
    assert said.returncode == 0, said.stderr


@pytest.mark.slow
def test_a_configuration_alone_begins_with_the_same_weights_on_any_layout(
    tmp_path: Path, start: Path
) -> None:
    path, settings = bare_config(tmp_path, start / "config.json")
    found = []
    for ranks, samples in ((1, 8), (2, 4)):
        said = [f"parallel.processes={ranks}", f"data.batch_per_device={samples}"]
        done = run_forked(
            ranks, "train", path, *settings, "train.steps=2", f"output.dir={tmp_path}/{ranks}", *said
        )
        assert done.returncode == 0, done.stderr
        found.append(losses_in(tmp_path / str(ranks)))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("moe.gate=sigmoid", "moe.gate"),
        ("moe.num_experts=16", "moe.num_experts"),
        ("model.num_layers=4", "model.num_layers"),
        ("model.hidden_size=64", "model.hidden_size"),
        ("model.dropout=0.1", "model.dropout"),
        ("model.seq_len=999", "model.seq_len"),
        ("model.model_type=olmoe", "model.model_type"),
        ("moe.z_loss_coeff=0.5", "moe.z_loss_coeff"),
    ],
)
def test_what_the_family_does_not_have_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, start: Path, setting: str, key: str
) -> None:
    path, settings = bare_config(tmp_path, start)
    assert f"penstock: {key} = " in refused(capsys, "train", path, *settings, setting)


@pytest.mark.parametrize(
    ("family", "setting", "key"),
    [
        ("dbrx", "parallel.tp_size=2", "parallel.tp_size"),
        ("dbrx", "parallel.etp_size=2", "parallel.etp_size"),
        ("gpt_oss", "data.separate_documents=true", "data.separate_documents"),
        ("dbrx", "placement.experts=shadowing", "placement.experts"),
        ("deepseek_v3", "moe.aux_loss_coeff=0.5", "moe.aux_loss_coeff"),
        ("deepseek_v3", "moe.aux_loss_coeff=0.01", "moe.aux_loss_coeff"),
    ],
)
def test_what_one_family_lacks_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, family: str, setting: str, key: str
) -> None:
    start = folder_of(family, tmp_path / "start", vocab_size=256)
    path, settings = bare_config(tmp_path, start)
    assert f"penstock: {key} = " in refused(capsys, "train", path, *settings, setting)


def test_models_of_unknown_families_and_damaged_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, start: Path
) -> None:
    path, settings = bare_config(tmp_path, tmp_path / "config.json")
    table = json.loads((start / "config.json").read_text())
    for content, key in (
        ({**table, "model_type": "llama"}, f"{tmp_path}/config.json: model_type"),
        ({**table, "model_type": "unheard_of"}, "model.config"),
        ({**table, "num_local_experts": 1 << 60}, f"{tmp_path}/config.json: num_local_experts"),
        ({**table, "router_jitter_noise": 0.1}, "model.config"),
        (
            {**table, "auto_map": {"AutoConfig": "x.Y"}, "model_type": 3},
            f"{tmp_path}/config.json: model_type",
        ),
        ([], f"{tmp_path}/config.json: model_type"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert f"penstock: {key}" in refused(capsys, "train", path, *settings), content


def test_other_layers_are_made_for_the_own_decoder_alone(start: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"model\.config"),
        penstock.session(
            None, f"model.config={start}", "model.seq_len=8", make_moe=lambda *_: pytest.fail("made")
        ),
    ):
        pass


@pytest.mark.slow
def test_a_session_trains_any_family(start: Path) -> None:
    settings = (f"model.config={start}", f"model.seq_len={LENGTH}", "plan.mode=fixed")
    wanted = AutoModelForCausalLM.from_pretrained(start)
    tokens_BL, labels_BL = text(0)
    with penstock.session(None, *settings) as session:
        loss = session.model(tokens_BL, labels_BL)
        loss.backward()
        theirs = wanted(tokens_BL, labels=labels_BL, shift_labels=labels_BL, output_router_logits=True).loss
        theirs.backward()
        assert float(loss.detach()) == pytest.approx(theirs.item(), rel=1e-5)
        grads = {name: p.grad for name, p in session.model.model.named_parameters()}
        for name, p in wanted.named_parameters():
            assert p.grad is not None and grads[name] is not None
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-3, atol=1e-6)


def test_memory_is_that_of_the_model_and_not_of_one_with_as_many_heads(tmp_path: Path) -> None:
    """DeepSeek's latent vectors make its attention smaller than heads of that width would be."""
    folder = folder_of("deepseek_v3", tmp_path / "start", kv_lora_rank=2, q_lora_rank=2)
    config = Case("deepseek_v3").config(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    need = memory_of(config, ALONE)
    assert need.state_bytes == COPIES * trained
    assert need.vocabulary_bytes == COPIES * 2 * model.lm_head.weight.nbytes


def test_a_model_beyond_the_memory_is_refused_before_a_rank_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, start: Path
) -> None:
    """By its own sizes: the file alone is read."""
    table = json.loads((start / "config.json").read_text())
    large = table | {"num_local_experts": 1 << 15, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(large))
    path, settings = bare_config(tmp_path, tmp_path / "config.json")
    assert "penstock: moe.num_experts = 32768: " in refused(capsys, "train", path, *settings)


def test_a_folder_is_planned_for_as_it_is(start: Path) -> None:
    """For ranks of a cluster, with the shape of steps that the model's ranks would have."""
    file = ClusterFile(name="by hand", nodes=2, ranks_per_node=2, device="H100")
    for path in (start, start / "config.json"):
        subject = run_subject(path, ["model.seq_len=16", "data.batch_per_device=2"], file)
        work, shape = subject.problem.workload, subject.problem.shape
        assert (work.num_experts, work.top_k, work.hidden_size, work.ep_size) == (8, 2, 32, 4)
        assert shape.moe_layers == (True, True) and not shape.carries_residual
        assert work.held is not None and subject.title == str(path)


@pytest.mark.slow
def test_another_file_at_the_same_place_is_no_continuation(tmp_path: Path, start: Path) -> None:
    """Whatever it is that the model computes otherwise; settings of generation do not count."""
    table = json.loads((start / "config.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(table))
    path, settings = bare_config(tmp_path, file)
    short = [*settings, "parallel.processes=1", "train.steps=1"]
    assert run_forked(1, "train", path, *short).returncode == 0
    rope = {**table.get("rope_parameters", {"rope_type": "default"}), "rope_theta": 100.0}
    for changes, code in (
        ({"rope_parameters": rope}, 2),
        ({"eos_token_id": 7, "router_aux_loss_coef": 0.5, "dtype": "bfloat16"}, 0),
    ):
        file.write_text(json.dumps(table | changes))
        done = run_forked(1, "train", path, *short, "train.resume=true", "train.steps=2")
        assert done.returncode == code, (changes, done.stderr)
        assert (f"penstock: model.config = {json.dumps(str(file))}: " in done.stderr) == (code == 2), changes


def other_files(rank: int, folder: Path) -> str:
    """What a session says whose file, or weights, differ between ranks."""
    mine = folder / ("first" if rank == 0 else "second")
    try:
        with penstock.session(None, f"model.config={mine}", "model.seq_len=8", "plan.mode=fixed"):
            return "trained"
    except ConfigError as error:
        return error.key


def test_ranks_with_other_files_are_told_apart(ranks: Pools, tmp_path: Path, start: Path) -> None:
    for name, changes in (("first", {}), ("second", {"sliding_window": None})):
        (tmp_path / "config" / name).mkdir(parents=True)
        table = json.loads((start / "config.json").read_text()) | changes
        (tmp_path / "config" / name / "config.json").write_text(json.dumps(table))
    assert set(ranks(2).run(other_files, tmp_path / "config")) == {"model.config_sha256"}
    (tmp_path / "weights/second").mkdir(parents=True)
    shutil.copytree(start, tmp_path / "weights/first")
    shutil.copy(start / "config.json", tmp_path / "weights/second")
    assert set(ranks(2).run(other_files, tmp_path / "weights")) == {"model.config"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_what_a_folder_says_of_generation_and_losses_is_kept(tmp_path: Path, family: str) -> None:
    """By a run that begins with it, one that goes on, and one with fresh weights; a weight of 0, too."""
    start = folder_of(family, tmp_path / "start", router_aux_loss_coef=0.5)
    generation = {"temperature": 0.6, "do_sample": True, "eos_token_id": [2, 7]}
    (start / "generation_config.json").write_text(json.dumps(generation))
    for number, begins in enumerate((True, False, True)):
        if number == 2:
            (start / "model.safetensors").unlink()
        config = Case(family).config(start)
        config = replace(config, moe=replace(config.moe, aux_loss_coeff=0.0))
        machinery = build_machinery(ALONE, torch.device("cpu"), config.parallel, "float32")
        model = model_of_run(config, machinery, plan=None, moving=None, begins=begins)
        files = model.files("bytes")
        assert generation.items() <= files["generation_config.json"].items()
        assert files["config.json"]["router_aux_loss_coef"] == 0.0
        assert files["config.json"]["tokenizer_digest"] == "bytes"


def test_weights_that_are_no_numbers_to_compute_with_are_refused(tmp_path: Path, start: Path) -> None:
    folder = shutil.copytree(start, tmp_path / "start")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if ".experts." in name)
    save_file(tensors | {name: tensors[name].to(torch.int8)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=name) as caught:
        Trained(0, Case("mixtral"), folder, tmp_path / "out")
    assert caught.value.key == "model.config"


def test_a_model_in_the_folder_of_the_run_itself_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, start: Path
) -> None:
    """An earlier run there is moved aside, and checkpoints are removed."""
    path, settings = bare_config(tmp_path, start)
    inside = shutil.copytree(start, tmp_path / "run/checkpoints/step-00000003")
    for each in (f"model.config={inside}", f"output.dir={start}"):
        assert "penstock: model.config = " in refused(capsys, "train", path, *settings, each)


@pytest.mark.slow
def test_dropout_follows_the_seed(tmp_path: Path) -> None:
    start = folder_of("mixtral", tmp_path / "start", attention_dropout=0.3)
    losses = [Trained(0, Case("mixtral"), start, tmp_path / "out").step(0) for _ in range(2)]
    assert losses[0] == losses[1]
    torch.manual_seed(99)
    assert Trained(0, Case("mixtral"), start, tmp_path / "out").step(0) == losses[0]
    plain = folder_of("mixtral", tmp_path / "plain")
    assert Trained(0, Case("mixtral"), plain, tmp_path / "out").step(0) != losses[0]


def drawn_next(rank: int, world: int, start: Path, out: Path, tp_size: int) -> tuple[int, Tensor]:
    """A rank's place among those with other samples, and the state of its generator at a save or a load."""
    trained = Trained(rank, Case("mixtral", world, tp_size=tp_size), start, out)
    if tp_size == 1:
        trained.step(0)
        trained.checkpoints.save(1)
    else:
        trained.checkpoints.load(out / "step-00000001")
    place = trained.stack.machinery.layout.dp_rank
    trained.stack.close()
    return place, torch.get_rng_state()


def test_ranks_that_share_attention_draw_alike_wherever_a_run_goes_on(ranks: Pools, tmp_path: Path) -> None:
    start = folder_of("mixtral", tmp_path / "start", attention_dropout=0.3, **DIVISIBLE)
    before = dict(ranks(2).run(drawn_next, 2, start, tmp_path / "out", 1))
    after = ranks(4).run(drawn_next, 4, start, tmp_path / "out", 2)
    assert sorted(place for place, _ in after) == [0, 0, 1, 1]
    assert not torch.equal(before[0], before[1])
    assert all(torch.equal(state, before[place]) for place, state in after)


def outside(rank: int, world: int, start: Path) -> str:
    """What a run's model says that is called outside of a step."""
    trained = Trained(rank, Case("mixtral", world), start, start)
    assert any(isinstance(each, DTensor) for each in trained.stack.model.state_dict().values())
    try:
        with torch.no_grad():
            trained.stack.model(text(0)[0])
    except ValueError as error:
        return str(error)
    finally:
        trained.stack.close()
    return "called"


def test_a_share_of_experts_is_not_taken_for_all_of_them(ranks: Pools, start: Path) -> None:
    assert all("a share of the experts" in each for each in ranks(2).run(outside, 2, start))


@pytest.mark.slow
def test_runs_of_one_file_do_not_change_each_other(start: Path) -> None:
    settings = (f"model.config={start / 'config.json'}", "model.seq_len=8", "plan.mode=fixed")
    with (
        penstock.session(None, *settings, "moe.aux_loss_coeff=0.5") as first,
        penstock.session(None, *settings, "moe.aux_loss_coeff=0.25") as second,
    ):
        configs: list[Any] = [run.model.model.config for run in (first, second)]
        assert [config.router_aux_loss_coef for config in configs] == [0.5, 0.25]
