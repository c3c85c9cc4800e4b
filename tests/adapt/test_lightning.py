"""Scheduled models in a `LightningModule`: Lightning's Trainer trains, evaluates, saves and goes on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import penstock
from penstock.checkpoint.storage import CheckpointError
from tests.support.adapted import Batch, as_torchrun_starts_it, small, with_adapters
from tests.support.pages import ROOT, blocks, run_block
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow

RANKS, STEPS, SAVED_AT, SAMPLES = 2, 4, 2, 32


class Module(lightning.LightningModule):
    """A module as users write them. losses: of every training step, then of every evaluation."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        del number
        loss: Tensor = self.loss_of(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], number: int) -> None:
        del number
        self.losses.append(loss := self.model(**batch).loss.item())
        self.log("val_loss", loss, sync_dist=True)

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class WithCritic(Module):
    """With a head of its own beside the model."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        torch.manual_seed(3)
        self.critic = nn.Linear(32, 1)

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        hidden_BLM = self.model.model(batch["input_ids"]).last_hidden_state
        loss: Tensor = (self.critic(hidden_BLM) - 1).square().mean()
        return loss


class Late(Module):
    """Spreads the model when the ranks have joined, as Lightning wants it of large ones."""

    def __init__(self, model: Any) -> None:
        super().__init__(None)
        self.whole = [model]

    def configure_model(self) -> None:
        if self.model is None:
            self.model = penstock.parallelize(self.whole.pop(), plan="flowmoe")


class Apart(Module):
    """With an optimiser for experts, and one for everything else."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        loss = super().training_step(batch, number)
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        kinds: tuple[list[Any], list[Any]] = ([], [])
        for name, parameter in self.model.named_parameters():
            kinds["experts" in name].append(parameter)
        return [torch.optim.AdamW(each, lr=1e-2) for each in kinds]


class Adapted(Module):
    """Trains adapters alone."""


def loader(world: int) -> Any:
    given = Batch(samples=SAMPLES).inputs()
    given["labels"] = given["input_ids"].clone()
    samples = [{name: each[at] for name, each in given.items()} for at in range(SAMPLES)]
    rank = torch.distributed.get_rank() if world > 1 else 0
    own: Any = torch.utils.data.DistributedSampler(samples, world, rank, shuffle=False)  # type: ignore[arg-type]
    return torch.utils.data.DataLoader(samples, batch_size=4 // world, sampler=own)  # type: ignore[arg-type]


def fit(module: Module, folder: Path, world: int, resume: Path | None = None, **more: Any) -> list[float]:
    """Losses by step, every second of which is an update, and those of two evaluations."""
    given: dict[str, Any] = {
        "devices": world,
        "max_steps": STEPS,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "limit_val_batches": 2,
        "val_check_interval": 4,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,  # Lightning's own shuffles
        "callbacks": [ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED_AT, save_top_k=-1)],
    }
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**given, **more},
    )
    trainer.fit(module, loader(world), loader(world), ckpt_path=resume)
    return module.losses


def test_the_module_of_the_page_trains(tmp_path: Path) -> None:
    (text,) = blocks(ROOT / "docs/trainers.md", "Lightning")
    small("mixtral").save_pretrained(tmp_path)
    names = {"lightning": lightning, "penstock": penstock, "torch": torch, "path": tmp_path}
    names["AutoModelForCausalLM"] = AutoModelForCausalLM
    page = run_block(text.partition("\n\n\nlightning.Trainer")[0], **names)
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_steps=1, **quiet)
    trainer.fit(page["Module"](), loader(1))
    assert trainer.global_step == 1


def whole_of(kind: type[Module]) -> Any:
    model = small("mixtral", initializer_range=0.1)
    return with_adapters(model) if kind is Adapted else model


def model_of(kind: type[Module]) -> Any:
    model = whole_of(kind)
    return model if kind is Late else penstock.parallelize(model, plan="flowmoe")


def fit_on_ranks(
    rank: int, kind: type[Module], folder: Path, resume: Path | None, more: dict[str, Any]
) -> list[float]:
    with as_torchrun_starts_it(rank, RANKS):
        return fit(kind(model_of(kind)), folder, RANKS, resume, **more)


def on_ranks(
    ranks: Pools, kind: type[Module], folder: Path, resume: Path | None = None, **more: Any
) -> list[float]:
    """Means of all ranks' losses."""
    found = ranks(RANKS).run(fit_on_ranks, kind, folder, resume, more)
    return [sum(each) / RANKS for each in zip(*found, strict=True)]


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", [Module, Apart, Adapted, Late])
def test_lightning_trains_saves_and_goes_on(ranks: Pools, tmp_path: Path, kind: type[Module]) -> None:
    more: dict[str, Any] = {"accumulate_grad_batches": 1, "gradient_clip_val": None} if kind is Apart else {}
    plain = Module if kind is Late else kind
    wanted = fit(plain(whole_of(kind)), tmp_path / "plain", 1, **more)
    assert wanted
    saved, half = tmp_path / "ranks", f"step={SAVED_AT}.ckpt"
    assert on_ranks(ranks, kind, saved, **more) == pytest.approx(wanted, rel=1e-4)
    if kind is Late:  # what goes on does not know when the model was spread
        return
    wanted = fit(plain(whole_of(kind)), tmp_path / "plain on", 1, tmp_path / "plain" / half, **more)
    assert on_ranks(ranks, kind, tmp_path / "on", saved / half, **more) == pytest.approx(wanted, rel=1e-4)
    if kind is not Module:
        return
    alone = fit(Module(model_of(Module)), tmp_path / "alone", 1, saved / half)
    assert alone == pytest.approx(wanted, rel=1e-4)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "on" / f"step={STEPS}.ckpt")
    with torch.no_grad():  # the checkpoint of the last step, after which comes an evaluation
        losses = [read(**batch).loss.item() for _, batch in zip(range(2), loader(1), strict=False)]
    assert losses == pytest.approx(wanted[-2:], rel=1e-4)


def test_a_checkpoint_is_whole_until_another_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that fails leaves it; the model of another state leaves nothing of Lightning beside itself."""
    saved, module = tmp_path / "last.ckpt", Module(model_of(Module))
    fit(module, tmp_path / "half", 1, max_steps=SAVED_AT)
    module.trainer.save_checkpoint(saved)
    fit(module, tmp_path / "all", 1)
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=str(saved)):
        patch.delattr("penstock.checkpoint.storage.write_shard")
        module.trainer.save_checkpoint(saved)
    first = tmp_path / "half" / f"step={SAVED_AT}.ckpt"
    wanted, found = (fit(Module(model_of(Module)), tmp_path / "on", 1, each) for each in (first, saved))
    assert wanted and found == wanted
    for weights_only in (False, True):
        module.trainer.save_checkpoint(saved, weights_only)
        assert torch.load(saved / "lightning.ckpt", weights_only=False)["global_step"] == STEPS
    penstock.save_checkpoint(module.model, module.trainer.optimizers[0], saved)
    assert not (saved / "lightning.ckpt").exists()


def test_what_a_module_trains_beside_a_model_is_averaged(ranks: Pools, tmp_path: Path) -> None:
    off: dict[str, Any] = {"callbacks": [], "enable_checkpointing": False}
    wanted = fit(WithCritic(small("mixtral", initializer_range=0.1)), tmp_path, 1, **off)
    assert on_ranks(ranks, WithCritic, tmp_path, **off) == pytest.approx(wanted, rel=1e-4)


def evaluate(rank: int) -> tuple[list[float], list[Tensor]]:
    """No rank gets the experts of another one; the losses of its samples, and what it holds."""
    model = model_of(Module)
    before = [p.detach().clone() for p in model.parameters()]
    with as_torchrun_starts_it(rank, RANKS):
        trainer = lightning.Trainer(accelerator="cpu", devices=RANKS, logger=False, enable_progress_bar=False)
        trainer.validate(module := Module(model), loader(RANKS), verbose=False)
    assert all(map(torch.equal, model.parameters(), before))
    return module.losses, [model.model.layers[0].mlp.experts.down_proj.detach()]


def test_validation_alone(ranks: Pools) -> None:
    module = Module(small("mixtral", initializer_range=0.1))
    trainer = lightning.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    trainer.validate(module, loader(1), verbose=False)
    (one, (first,)), (other, (second,)) = ranks(RANKS).run(evaluate)
    means = [(a + b) / 2 for a, b in zip(one, other, strict=True)]
    assert means == pytest.approx(module.losses, rel=1e-5) and not first.equal(second)


def refuse(rank: int, folder: Path) -> list[str]:
    said = []
    (empty := folder / "empty.ckpt").mkdir(exist_ok=True)
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    wrong: list[tuple[type[Module], Path | None, dict[str, Any]]] = [
        (Module, None, {"devices": 1}),
        (Late, None, {"strategy": ModelParallelStrategy(RANKS, 1)}),
        (Module, None, {"plugins": [scaled]}),
        (WithCritic, None, {}),
        (Module, empty, {}),
        (Module, None, {"callbacks": [EMAWeightAveraging()]}),
        (Module, None, {"callbacks": [StochasticWeightAveraging(1e-2)]}),
    ]
    for kind, resume, more in wrong:
        with as_torchrun_starts_it(rank, RANKS), pytest.raises((ValueError, RuntimeError)) as caught:
            fit(kind(model_of(kind)), folder, RANKS, resume, **more)
        said.append(str(caught.value))
        torch.distributed.barrier()
    return said


def test_what_lightning_cannot_do_with_them_is_refused(ranks: Pools, tmp_path: Path) -> None:
    wanted = (
        "Lightning has 1 processes, and the model is spread over 2",
        "ModelParallelStrategy would spread the parameters of a model that is spread already",
        "16-mixed.* scales losses",
        "has parameters of the scheduled model 'model' and others",
        r"empty.ckpt has no lightning.ckpt",
        "EMAWeightAveraging: its average",
        "StochasticWeightAveraging: its average",
    )
    for said in ranks(RANKS).run(refuse, tmp_path):
        for words, text in zip(wanted, said, strict=True):
            assert re.search(words, text), text
