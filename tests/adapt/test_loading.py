"""Models read from a folder: every rank has its share of every tensor, and never needs much more memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._C._distributed_c10d import TCPStore
from transformers import Llama4Config, Llama4ForConditionalGeneration

import penstock
from penstock.adapt import FAMILIES
from penstock.adapt.asking import read_whole
from penstock.adapt.build import reload
from penstock.families import weights
from penstock.partial_state import local_state
from tests.support.adapted import DIVISIBLE, Batch, distance, grads_of, part_of, small
from tests.support.forked import run_text
from tests.support.hub import hub_of
from tests.support.memory import give_back_what_is_freed
from tests.support.ranks import Pools, RankPool

Tensors = dict[str, torch.Tensor]
MIB = 1 << 20
SHARD_MIB = 12
FORMS = ["gpt_oss", "granitemoe", "dbrx", "llama4_text", "mixtral"]
"""Families that store experts in ways of their own; of the last one a step is run, too."""


def shares_read(rank: int, world: int, folder: str, families: list[str], layout: dict[str, Any]) -> list[str]:
    """The tensors that are not this rank's share of those in the folder, bit by bit; of one a step, too."""
    wrong: list[str] = []
    place = 0 if "etp_size" in layout else rank
    for family in families:
        whole = small(family, **sizes_of(layout))
        model = penstock.load_pretrained(f"{folder}/{family}", plan="flowmoe", **layout)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        given = dict(whole.state_dict())
        held = local_state(model.state_dict())
        for name, mine in held.items():
            if not torch.equal(part_of(parameters.get(name, mine), given[name], place), mine):
                wrong.append(f"{family}: {name}")
        assert given.keys() == held.keys()
        assert type(model).__name__ == type(whole).__name__ and model.generation_config is not None
    batch = Batch(samples=world).inputs()
    whole(**batch).loss.backward()
    mine = slice(None) if "tp_size" in layout else slice(rank, rank + 1)
    model(**{name: each[mine] for name, each in batch.items()}).loss.backward()
    expected = grads_of(whole)
    return wrong + [
        name
        for name, grad in grads_of(model).items()
        if distance(grad, part_of(parameters[name], expected[name], place)) > 1e-5
    ]


def sizes_of(layout: dict[str, Any]) -> dict[str, Any]:
    return DIVISIBLE if "tp_size" in layout else {}


@pytest.mark.parametrize(
    ("families", "layout"),
    [
        (FORMS, {}),
        (["gpt_oss", "deepseek_v3", "mixtral"], {"tp_size": 2}),
        (["gpt_oss", "granitemoe", "llama4_text", "mixtral"], {"etp_size": 2}),
        pytest.param(sorted(FAMILIES), {}, marks=pytest.mark.soak),
    ],
)
def test_every_rank_reads_its_share(
    ranks: Pools, tmp_path: Path, families: list[str], layout: dict[str, Any]
) -> None:
    for family in families:
        small(family, **sizes_of(layout)).save_pretrained(tmp_path / family, max_shard_size="40KB")
    for wrong in ranks(2).run(shares_read, 2, str(tmp_path), families, layout):
        assert not wrong


def reloaded_otherwise(rank: int, world: int, folder: str, layout: dict[str, Any]) -> list[str]:
    """Names of what is not as it was, of a model in bfloat16 with some parameters in float32."""
    del rank, world
    model = penstock.parallelize(small("mixtral", dtype=torch.bfloat16), **layout)
    for name, parameter in model.named_parameters():
        if "gate" in name or "k_proj" in name:
            parameter.data = parameter.data.float() * 1.2345
    before = {name: each.clone() for name, each in local_state(model.state_dict()).items()}
    model.save_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    reload(model, folder)
    after = local_state(model.state_dict())
    return [name for name, each in before.items() if not torch.equal(each, after[name])]


@pytest.mark.parametrize("layout", [{}, {"etp_size": 2}])
def test_every_weight_is_read_in_the_type_that_it_has(
    ranks: Pools, tmp_path: Path, layout: dict[str, Any]
) -> None:
    for found in ranks(2).run(reloaded_otherwise, 2, str(tmp_path), layout):
        assert not found


def memory_mib(field: str) -> float:
    """Of this process: VmRSS as it is, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def memory_used(rank: int, world: int, folder: str) -> tuple[float, float]:
    """MiB that a rank has needed at most while it read the model, and that it holds."""
    del rank
    give_back_what_is_freed()
    penstock.load_pretrained(f"{folder}/little", ep_size=world, plan="flowmoe")  # imports and buffers
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
    before = memory_mib("VmRSS")
    model = penstock.load_pretrained(f"{folder}/large", ep_size=world, plan="flowmoe")
    held = sum(parameter.nbytes for parameter in model.parameters()) / MIB
    return memory_mib("VmHWM") - before, held


@pytest.mark.slow
def test_reading_needs_memory_for_the_share_and_a_shard(tmp_path: Path) -> None:
    """On ranks of its own: what earlier tests have left in a process would count."""
    small("mixtral").save_pretrained(tmp_path / "little")
    large = small(
        "mixtral", hidden_size=128, intermediate_size=512, num_hidden_layers=12, num_local_experts=8
    )
    large.save_pretrained(tmp_path / "large", max_shard_size=f"{SHARD_MIB}MB")
    whole = sum(parameter.nbytes for parameter in large.parameters()) / MIB
    pool = RankPool(2)
    try:
        found = pool.run(memory_used, 2, str(tmp_path))
    finally:
        pool.close()
    for most, held in found:
        assert held < 0.55 * whole
        limit = held + SHARD_MIB
        assert most < limit < 0.8 * whole, f"{most:.0f} MiB to hold {held:.0f} of {whole:.0f}"


STACKED = "model.layers.0.mlp.experts.down_proj"


def of_expert_7(tensors: Tensors) -> list[str]:
    """The names of what the last rank reads."""
    return [name for name in tensors if ".experts.7." in name]


def with_more_experts(tensors: Tensors) -> None:
    for name in of_expert_7(tensors):
        tensors[name.replace(".experts.7.", ".experts.8.")] = tensors[name].clone()


CHANGES: dict[str, tuple[str, Callable[[Tensors], object]]] = {
    "without a tensor": ("mixtral", lambda tensors: tensors.pop("model.norm.weight")),
    "with another tensor": ("mixtral", lambda tensors: tensors.update(other=torch.ones(1))),
    "with fewer experts": ("mixtral", lambda tensors: [tensors.pop(name) for name in of_expert_7(tensors)]),
    "with more experts": ("mixtral", with_more_experts),
    "with taller experts": (
        "gpt_oss",
        lambda tensors: tensors.update({STACKED: tensors[STACKED].repeat(2, 1, 1)}),
    ),
    "with one taller expert": (
        "mixtral",
        lambda tensors: tensors.update(
            {name: tensors[name].repeat(2, 1) for name in of_expert_7(tensors)[:1]}
        ),
    ),
    "with a nan": ("mixtral", lambda tensors: tensors[of_expert_7(tensors)[0]][0, 0].fill_(torch.nan)),
}
"""A family, of which one stacks experts, and what becomes of its tensors."""

DESCRIBED = {
    "dense": {"model_type": "llama"},
    "of no known family": {"model_type": "aria_text", "head_dim": 8},
}


def save_changed(folder: Path, change: str) -> None:
    family, apply = CHANGES.get(change, ("mixtral", None))
    small(family).save_pretrained(folder)
    path, config = folder / "model.safetensors", folder / "config.json"
    if apply is not None:
        tensors = load_file(path)
        apply(tensors)
        save_file(tensors, path, {"format": "pt"})
    elif change in DESCRIBED:
        config.write_text(json.dumps(json.loads(config.read_text()) | DESCRIBED[change]))
    else:
        path.unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("without a tensor", "missing: model.norm.weight"),
        ("with another tensor", "unexpected: other"),
        ("with fewer experts", r"w[123]\.weight of all experts but 7"),
        ("with more experts", r"w[123]\.weight of expert 8"),
        ("with taller experts", r"layers\.0\.mlp\.experts\.down_proj \[16, 24, 32\]"),
        ("with a nan", r"experts\.7\.w\d\.weight holds numbers that are not finite"),
        ("without weights", "holds neither model.safetensors nor"),
        ("dense", "LlamaForCausalLM has no experts"),
        ("of no known family", "AriaTextForCausalLM is of no family .* load it with from_pretrained"),
    ],
)
@pytest.mark.slow
def test_what_is_not_the_model_is_refused(tmp_path: Path, change: str, words: str) -> None:
    save_changed(tmp_path, change)
    with pytest.raises(ValueError, match=words):
        penstock.load_pretrained(tmp_path)


OF_EXPERTS = [
    "with fewer experts",
    "with more experts",
    "with taller experts",
    "with one taller expert",
    "with a nan",
]


def refused_on(rank: int, world: int, folder: str) -> list[str]:
    """What a rank says to folders that lack experts of another rank, have some of none, or spoilt ones."""
    del rank
    found = []
    for name in OF_EXPERTS:
        with pytest.raises(ValueError) as caught:
            penstock.load_pretrained(f"{folder}/{name}", ep_size=world)
        found.append(str(caught.value))
    return found


def test_every_rank_refuses_experts_that_are_missing_too_many_or_not_finite(
    ranks: Pools, tmp_path: Path
) -> None:
    for change in OF_EXPERTS:
        save_changed(tmp_path / change, change)
    first, second = ranks(2).run(refused_on, 2, str(tmp_path))
    assert first[:3] == second[:3]
    assert all("experts.7." in each[-1] for each in (first, second))
    assert all("on rank 1, " in each for each in first[3:])


@pytest.mark.slow
def test_of_a_model_that_sees_the_text_part_is_read(tmp_path: Path) -> None:
    """As published: Llama 4 with its vision model beside it."""
    text = small("llama4_text")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {
        "vision_output_dim": 16,
        "image_size": 28,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
    }
    config = Llama4Config(text_config=text.config.to_dict(), vision_config={**sizes, "image_size": 28})
    whole = Llama4ForConditionalGeneration(config)
    whole.language_model.load_state_dict(text.state_dict())
    whole.save_pretrained(tmp_path)
    model = penstock.load_pretrained(tmp_path)
    assert type(model).__name__ == type(text).__name__
    held = model.state_dict()
    assert all(torch.equal(held.pop(name), tensor) for name, tensor in text.state_dict().items()) and not held
    assert type(read_whole(tmp_path)) is type(text)


@pytest.mark.slow
def test_one_file_goes_before_shards_of_an_earlier_save(tmp_path: Path) -> None:
    whole = small("mixtral")
    whole.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "gone"}}')
    assert penstock.load_pretrained(tmp_path).lm_head.weight.equal(whole.lm_head.weight)


# ---- models that are named as on the hub -------------------------------------------------------------------


NAME = "someone/a-model"
PROGRAM = """
import os
import torch
from huggingface_hub import constants
from transformers.models.mixtral import modeling_mixtral

import penstock

torch.set_num_threads(1)
template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, {address!r})
constants.ENDPOINT, constants.HUGGINGFACE_CO_URL_TEMPLATE = {address!r}, template
constants.HF_HUB_CACHE = {cache!r}

def fork(rank, ranks):
    own = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    own |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT={port}, TORCHELASTIC_USE_AGENT_STORE=True)
    child = os.fork()
    if child:
        return child
    os.environ.update({{name: str(value) for name, value in own.items()}} if ranks > 1 else {{}})
    model = penstock.load_pretrained({name!r}, plan="flowmoe")
    held = model.model.layers[0].mlp.experts.down_proj.shape[0]
    line = f"has {{held}} {{float(model.lm_head.weight.sum().detach())}}\\n"
    os.write(1, line.encode())  # at once: two ranks write to one pipe
    os._exit(0)

for offline, ranks in ((False, 2), (True, 1)):
    constants.HF_HUB_OFFLINE = offline
    children = [fork(rank, ranks) for rank in range(ranks)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * ranks
"""
"""Two ranks that load a model, and then a process that has the cache alone."""


@pytest.mark.slow
def test_a_model_is_read_by_its_name_on_the_hub(tmp_path: Path) -> None:
    """By every rank its experts; files of folders inside are left there. Afterwards no hub is needed."""
    whole, folder, cache = small("mixtral"), tmp_path / "model", tmp_path / "cache"
    whole.save_pretrained(folder)
    (folder / "original").mkdir()
    (folder / "original/model.safetensors").write_text("not to be read")
    head = str(float(whole.lm_head.weight.sum().detach()))
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with hub_of(folder, NAME) as address:
        done = run_text(PROGRAM.format(address=address, cache=str(cache), port=store.port, name=NAME))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*["has", "4", head] * 2, "has", "8", head]
    assert not list(cache.rglob("original"))


def test_a_name_that_the_hub_does_not_have() -> None:
    with pytest.raises(
        ValueError, match="some/one is no folder here, and the Hugging Face hub does not give"
    ):
        penstock.load_pretrained("some/one")


def test_a_folder_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    with pytest.raises(ValueError, match=rf"{NAME} holds no config\.json"):
        penstock.load_pretrained(NAME)
    for named in (tmp_path / "nothing", "./nothing", "a/b/c", Path("some/one")):
        assert weights.folder_of(named) == Path(named)
