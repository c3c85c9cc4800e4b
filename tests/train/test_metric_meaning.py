"""Every metric is what its documentation says: against the reference, which shares no code with the stack."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.autotune import Autotuner
from penstock.config import load
from penstock.moe.routers import Router
from penstock.topology.join import ALONE
from penstock.train.batches import Batch
from penstock.train.config import RunConfig
from penstock.train.metrics import StepMetrics
from penstock.train.trainer import Trainer
from tests.support.parity import Case
from tests.support.reference import Settings, reference_loss
from tests.support.reference_moe import Weights
from tests.support.reference_step import settings_of
from tests.support.runs import write_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("joined")]

CPU = torch.device("cpu")
GROUPS = ("global", "sequence", "microbatch")
AUX, Z = 0.3, 0.02


def trainer_of(folder: Path, group: str, *more: str) -> Trainer:
    """Three layers, two of them with experts; weights large enough for experts to be chosen unevenly."""
    settings = [
        "parallel.processes=1",
        "model.num_layers=3",
        "model.moe_layers=[0, 2]",
        f"moe.aux_loss_group={group}",
        f"moe.aux_loss_coeff={AUX}",
        f"moe.z_loss_coeff={Z}",
        "schedule.microbatches=2",
        "optimizer.clip_grad_norm=0.01",
        *more,
    ]
    trainer = Trainer(load(RunConfig, write_config(folder), settings), ALONE, CPU, Autotuner, quiet=True)
    with torch.no_grad():
        for parameter in trainer.stack.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(6.0)
    return trainer


def mathematics(trainer: Trainer, samples: int) -> Settings:
    config = trainer.config
    case = Case(
        world_size=1,
        ep_size=1,
        schedule=config.schedule,
        model=config.model,
        moe=replace(config.moe, dispatch="flat"),
        batch=samples,
    )
    return settings_of(case)


def reference(trainer: Trainer, batch: Batch, **coefficients: float) -> Tensor:
    """The reference's loss with these coefficients; its variables are the trainer's parameters."""
    settings = replace(mathematics(trainer, len(batch.tokens_BL)), **coefficients)  # type: ignore[arg-type]
    weights: Weights = dict(trainer.stack.model.named_parameters())
    return reference_loss(weights, settings, batch.tokens_BL, batch.labels_BL)


@pytest.mark.parametrize("group", GROUPS)
def test_metrics_of_a_step_are_those_of_the_reference(tmp_path: Path, group: str) -> None:
    trainer = trainer_of(tmp_path, group)
    batch = trainer.source.stream.batch(0)
    plain = reference(trainer, batch, aux_coeff=0.0, z_coeff=0.0).item()
    balance = reference(trainer, batch, aux_coeff=1.0, z_coeff=0.0).item() - plain
    z = reference(trainer, batch, aux_coeff=0.0, z_coeff=1.0).item() - plain
    everything = reference(trainer, batch)
    gradients = torch.autograd.grad(
        everything, list(trainer.stack.model.parameters()), allow_unused=True, materialize_grads=True
    )
    norm = torch.cat([gradient.flatten().double() for gradient in gradients]).norm()

    found: StepMetrics = trainer._step(0)
    assert found.loss == pytest.approx(plain, rel=1e-5)
    assert found.total_loss == pytest.approx(everything.item(), rel=1e-5)
    assert found.total_loss == pytest.approx(plain + AUX * balance + Z * z, rel=1e-5)
    assert getattr(found, f"aux_loss_{group}") == pytest.approx(balance / 2, rel=1e-4)
    assert found.z_loss == pytest.approx(z / 2, rel=1e-4)
    assert found.grad_norm == pytest.approx(float(norm), rel=1e-4)
    others = [getattr(found, f"aux_loss_{other}") for other in GROUPS if other != group]
    assert others == [None, None]


def test_tokens_per_second_counts_the_tokens_that_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is smaller than usual."""
    trainer = trainer_of(tmp_path, "global")
    whole = trainer.source.stream.batch(0)
    short = Batch(whole.tokens_BL[:3], whole.labels_BL[:3], whole.sample_ids_B[:3])
    counts = []
    for batch in (whole, short):
        monkeypatch.setattr(trainer.source.stream, "batch", lambda step, batch=batch: batch)
        found = trainer._step(0)
        counts.append(found.tokens_per_s * found.iteration_s)
    assert counts == pytest.approx([whole.tokens_BL.numel(), 3 * whole.tokens_BL.shape[1]])


def test_dropped_choices_are_those_beyond_the_slots_of_their_expert(tmp_path: Path) -> None:
    """Counted by hand from what gates chose, microbatch by microbatch."""
    trainer = trainer_of(tmp_path, "global", "moe.capacity_factor=0.75", "moe.min_capacity=1")
    gates = [module for module in trainer.stack.model.modules() if isinstance(module, Router)]
    chosen: list[list[Tensor]] = [[] for _ in gates]
    for each, gate in zip(chosen, gates, strict=True):
        gate.register_forward_hook(lambda _, given, choice, each=each: each.append(choice.experts_Tk))
    found: StepMetrics = trainer._step(0)
    shares = []
    for layer in chosen:
        assert len(layer) == 2, "microbatches"
        dropped = 0
        for experts_Tk in layer:
            slots = math.ceil(0.75 * experts_Tk.numel() / 4)
            dropped += sum(max(0, int((experts_Tk == expert).sum()) - slots) for expert in range(4))
        shares.append(dropped / sum(experts_Tk.numel() for experts_Tk in layer))
    assert found.rows_dropped == pytest.approx(shares)
    assert min(shares) > 0
    assert found.aux_loss_by_layer is not None and found.aux_loss_global is not None
    assert sum(found.aux_loss_by_layer) / 2 == pytest.approx(found.aux_loss_global)
