"""LoRA of peft on experts: every rank has the adapters of its own, which follow peft on one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

import penstock
from penstock.families.adapters import ExpertAxis, axes_of
from tests.adapt.test_checkpoint import losses_of
from tests.adapt.test_trainer import SAVED_AT, trained
from tests.support.adapted import (
    Batch,
    as_torchrun_starts_it,
    distance,
    exactly,
    grads_of,
    small,
    without_labels,
)
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
EXACT = torch.float64


def adapted(model: Any, targets: list[str] = EXPERTS, **settings: Any) -> Any:
    """The same numbers every time, none of them zero, of another rank for one of the weights."""
    torch.manual_seed(7)
    patterns = {"rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {"experts.down_proj": 7}}
    config = LoraConfig(
        r=4,
        lora_alpha=12,
        use_rslora=True,
        target_parameters=targets,
        init_lora_weights=False,
        **{"target_modules": ["q_proj", "v_proj"], **patterns, **settings},
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def part_of(whole: Any, model: Any, rank: int, world: int) -> dict[str, torch.Tensor]:
    """The gradients of a whole model, of experts those that this rank has."""
    axes: dict[Any, ExpertAxis] = {}
    for layer in model.get_base_model().model.layers:
        axes |= axes_of(layer.mlp.experts)
    named, grads = dict(model.named_parameters()), grads_of(whole)
    return {
        name: axes[named[name]].part(grad, rank, world) if named[name] in axes else grad
        for name, grad in grads.items()
    }


def beside_peft(
    rank: int, world: int, family: str, plan: str, changes: dict[str, int], folder: str
) -> dict[str, float]:
    """The largest distances from peft on one process during a few steps of AdamW; saves the adapters."""
    batch, found = Batch(padded=True), dict.fromkeys(("loss", "gradients", "norm", "logits", "off"), 0.0)
    mine = batch.inputs(2 * rank, 2 * rank + 2)
    with exactly(EXACT):
        wanted, model = (adapted(small(family, dtype=EXACT, **changes)) for _ in range(2))
        assert penstock.parallelize(model, ep_size=world, plan=plan) is model
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (wanted, model)]
        for _ in range(3):
            losses = wanted(**batch.inputs()).loss, model(**mine).loss
            for loss in losses:
                loss.backward()
            grads, expected = grads_of(model), part_of(wanted, model, rank, world)
            assert grads.keys() == expected.keys() and all("lora_" in name for name in grads)
            norms = (
                penstock.clip_grad_norm_(model, 0.5),
                torch.nn.utils.clip_grad_norm_(wanted.parameters(), 0.5),
            )
            for what, distances in (
                ("loss", [distance(losses[1].detach(), losses[0].detach())]),
                ("gradients", [distance(grad, expected[name]) for name, grad in grads.items()]),
                ("norm", [distance(norms[0], norms[1].double())]),
            ):
                found[what] = max(found[what], *distances)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        model.save_pretrained(folder)
        found["logits"] = evaluated(model, wanted, batch, rank)
        with model.disable_adapter(), wanted.disable_adapter():
            found["off"] = evaluated(model, wanted, batch, rank)
        model.merge_adapter()
        found["merged"] = evaluated(model, wanted, batch, rank)
        model.unmerge_adapter()
        model.merge_and_unload()
        found["unloaded"] = evaluated(model.get_base_model(), wanted, batch, rank)
    return found


def evaluated(model: Any, wanted: Any, batch: Batch, rank: int) -> float:
    """The distance of logits of this rank's samples."""
    with torch.no_grad():
        expected = wanted.eval()(**without_labels(batch.inputs())).logits[2 * rank : 2 * rank + 2]
        found = model.eval()(**without_labels(batch.inputs(2 * rank, 2 * rank + 2))).logits
    wanted.train()
    model.train()
    seen = batch.inputs(2 * rank, 2 * rank + 2)["attention_mask"].bool()
    return distance(found[seen], expected[seen])


@pytest.mark.parametrize(
    ("family", "plan", "changes"),
    [
        ("mixtral", "penstock", {}),
        ("gpt_oss", "flowmoe", {"num_local_experts": 2}),  # one on every rank
        *(pytest.param(each, "flowmoe", {}, marks=pytest.mark.soak) for each in ("qwen2_moe", "olmoe")),
    ],
)
def test_adapters_on_experts_follow_peft(
    ranks: Pools, tmp_path: Path, family: str, plan: str, changes: dict[str, int]
) -> None:
    """What they save peft reads into the whole model."""
    for found in ranks(2).run(beside_peft, 2, family, plan, changes, str(tmp_path / "saved")):
        assert max(found.values()) < 1e-10, found
    whole = adapted(small(family, dtype=EXACT, **changes))
    whole.save_pretrained(tmp_path / "plain")
    stored, plain = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("saved", "plain"))
    assert {name: each.shape for name, each in stored.items()} == {n: e.shape for n, e in plain.items()}
    read = PeftModel.from_pretrained(small(family, dtype=EXACT, **changes), str(tmp_path / "saved"))
    state = {name.replace(".default", ""): each for name, each in read.state_dict().items()}
    assert all(state[name].equal(each) for name, each in stored.items())


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)


def go_on(rank: int, world: int, folder: str) -> list[list[float]]:
    """Losses after a checkpoint: as the run went on, and as others do that read it before and after experts
    are spread.
    """
    model = adapted(penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe"))
    optimizer = optimizer_of(model)
    losses_of(model, optimizer, rank, world, range(2))
    penstock.save_checkpoint(model, optimizer, folder)
    return [losses_of(model, optimizer, rank, world, range(2)), *read_again(rank, world, folder)]


def read_again(rank: int, world: int, folder: str) -> list[list[float]]:
    whole = PeftModel.from_pretrained(small("mixtral"), folder, is_trainable=True)
    spread = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe")
    found = []
    for model in (
        penstock.parallelize(whole, ep_size=world, plan="flowmoe"),
        PeftModel.from_pretrained(spread, folder, is_trainable=True),
    ):
        optimizer = optimizer_of(model)
        penstock.load_optimizer(model, optimizer, folder)
        found.append(losses_of(model, optimizer, rank, world, range(2)))
    return found


def test_adapters_go_on_from_their_checkpoint_on_any_ranks(ranks: Pools, tmp_path: Path) -> None:
    """Where a whole model lies, it stays: adapters are saved without it."""
    saved, whole = str(tmp_path / "saved"), tmp_path / "saved" / "model.safetensors"
    small("mixtral").save_pretrained(saved)
    before = whole.read_bytes()
    went_on, *others = ranks(2).run(go_on, 2, saved)[0]
    assert whole.read_bytes() == before
    for found in (*others, *read_again(0, 1, saved)):
        assert found == pytest.approx(went_on, rel=1e-5)


def spoil(rank: int, world: int, folder: str) -> None:
    """Folders of other adapters, and what is no adapter of single experts."""
    spread = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe")
    with pytest.raises(ValueError, match=r"is no adapter of all experts here, which is \[32, 32\]"):
        PeftModel.from_pretrained(spread, folder)
    model = penstock.parallelize(small("gpt_oss"), ep_size=world, plan="flowmoe")
    model = adapted(model, ["experts.down_proj_bias"])
    for training in (True, False):
        with pytest.raises(ValueError, match=r"adapter of down_proj_bias .* one of all experts together"):
            model.train(training)(**Batch().inputs(rank, rank + 1))


def test_adapters_that_ranks_cannot_share_are_refused(ranks: Pools, tmp_path: Path) -> None:
    """Those of half as many experts have the shape of a rank's own."""
    adapted(small("mixtral", num_local_experts=4)).save_pretrained(tmp_path)
    ranks(2).run(spoil, 2, str(tmp_path))
    with pytest.raises(ValueError, match=r"mlp of DbrxExperts has an adapter .* target_parameters"):
        penstock.parallelize(adapted(small("dbrx"), ["experts.mlp.w1"], target_modules=["Wqkv"]))


def surgery(rank: int, world: int) -> dict[str, float]:
    """The largest distances of gradients: adapters of one layer and of routers are put on after a step, then
    others beside them, with experts thawed in the other layer.
    """
    targets = ["layers.1.mlp.experts.gate_up_proj", "gate.weight"]
    batch, found = Batch(), {}
    mine = batch.inputs(2 * rank, 2 * rank + 2)
    with exactly(EXACT):
        wanted = adapted(small("mixtral", dtype=EXACT), targets)
        spread = penstock.parallelize(small("mixtral", dtype=EXACT), ep_size=world, plan="flowmoe")
        spread(**mine).loss.backward()
        spread.zero_grad()
        model = adapted(spread, targets)
        for each in (wanted, model):
            each.add_adapter("other", each.peft_config["default"])
            each.get_base_model().model.layers[0].mlp.experts.requires_grad_(True)
        numbers = {name: each for name, each in wanted.state_dict().items() if "lora_" in name}
        assert not model.load_state_dict(numbers, strict=False).unexpected_keys
        assert all(each.equal(numbers[name]) for name, each in model.state_dict().items() if name in numbers)
        for names in (["default"], ["other"], ["default", "other"]):
            for each, given in ((wanted, batch.inputs()), (model, mine)):
                each.base_model.set_adapter(names)
                each.zero_grad()
                each(**given).loss.backward()
            grads, expected = grads_of(model), part_of(wanted, model, rank, world)
            assert grads.keys() == expected.keys() and any(
                "0.mlp.experts.down_proj" in name for name in grads
            )
            twin = copy.deepcopy(model)
            assert type(twin) is type(model) and twin(**mine).loss.item() == model(**mine).loss.item()
            found["+".join(names)] = max(distance(each, expected[name]) for name, each in grads.items())
    return found


def test_adapters_that_come_and_go(ranks: Pools) -> None:
    for found in ranks(2).run(surgery, 2):
        assert max(found.values()) < 1e-10, found


def test_merged_adapters_that_are_disabled_are_not_there() -> None:
    """From the first pass on, which takes them out of the weights."""
    model = penstock.parallelize(adapted(small("mixtral"))).eval()
    given = without_labels(Batch().inputs())
    with torch.no_grad(), model.disable_adapter():
        wanted = model(**given).logits
    model.merge_adapter()
    with torch.no_grad(), model.disable_adapter():
        assert distance(model(**given).logits, wanted) < 1e-5


# ---- the Trainer -------------------------------------------------------------------------------------------


def train_with_trainer(rank: int, world: int, folder: str, resume: str | None) -> list[float]:
    whole = adapted(small("mixtral", initializer_range=0.1))
    model = penstock.parallelize(whole, ep_size=world, plan="flowmoe")
    with as_torchrun_starts_it(rank, world):
        return trained(model, folder, world, resume)


def test_the_trainer_trains_and_resumes_adapters(ranks: Pools, tmp_path: Any) -> None:
    """Those of experts, too."""
    whole = adapted(small("mixtral", initializer_range=0.1))
    wanted = trained(whole, str(tmp_path / "plain"), 1)
    for found in ranks(2).run(train_with_trainer, 2, str(tmp_path / "ranks"), None):
        assert found == pytest.approx(wanted, rel=1e-4)
    saved = str(tmp_path / "ranks" / f"checkpoint-{SAVED_AT}")
    for found in ranks(2).run(train_with_trainer, 2, str(tmp_path / "again"), saved):
        assert found == pytest.approx(wanted, rel=1e-4)
