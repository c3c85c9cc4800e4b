"""Models of transformers as the models of runs: steps, and checkpoints on any layout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from penstock.adapt import FAMILIES
from penstock.adapt.run import model_of_run, sample_moving_of
from penstock.data import DataConfig
from penstock.decision import PlacementConfig, ScheduleConfig
from penstock.families.weights import saved_tensors
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.plan.plan_config import PlanConfig
from penstock.runtime.features.sample_placement import SamplePlacement
from penstock.step.shape import TokenLayout
from penstock.topology import Layout, ParallelConfig
from penstock.train.assemble import build_machinery, build_optimizer, gradient_bytes
from penstock.train.checkpoint import Checkpoints
from penstock.train.config import RunConfig, TrainConfig
from penstock.train.optimizer import OptimizerConfig, build_adamw, build_update
from tests.support.adapted import DIVISIBLE, DrawnFromScores, exactly, small
from tests.support.placers import RandomHomes
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow

SAMPLES, LENGTH = 8, 12
LIMIT = 1e-10
"""In float64."""

MAX_NORM = 0.3
USUAL = MoEConfig().aux_loss_coeff
RANDOM = "phimoe"
OTHERS = sorted(FAMILIES.keys() - {"qwen3_moe"})
"""Families that transformers computes: the other one is Penstock's own decoder in a run."""

ADAMW = OptimizerConfig(lr=1e-3, clip_grad_norm=MAX_NORM, warmup_steps=0)


@dataclass(frozen=True)
class Case:
    """A run of a family on a layout."""

    family: str
    ranks: int = 1
    tp_size: int = 1
    ep_size: int | None = None
    etp_size: int = 1
    schedule: str = "penstock"
    sharded: bool = False
    experts: str = "none"
    dispatch: str = "flat"
    documents: bool = False
    moves: bool = False
    tokens: TokenLayout = "split"
    changes: dict[str, Any] = field(default_factory=dict)  # of the configuration

    def __str__(self) -> str:
        extra = f"{' sharded' * self.sharded} {self.dispatch} {self.schedule} {self.experts}"
        extra += f"{' documents' * self.documents}{' moves' * self.moves}"
        return f"{self.family} {self.ranks}: tp{self.tp_size} ep{self.ep_size} etp{self.etp_size}{extra}"

    def config(self, folder: Path) -> RunConfig:
        """The run that begins with the model in a folder."""
        groups = self.ranks // self.tp_size
        return RunConfig(
            model=ModelConfig(config=folder, seq_len=LENGTH),
            moe=MoEConfig(dispatch=self.dispatch, aux_loss_coeff=0.0 if self.documents else USUAL),
            schedule=ScheduleConfig(name=self.schedule),
            placement=PlacementConfig(
                experts=self.experts,  # type: ignore[arg-type]
                samples="netmoe" if self.moves else "none",
            ),
            plan=PlanConfig(mode="fixed"),
            parallel=ParallelConfig(
                ep_size=self.ep_size,
                tp_size=self.tp_size,
                etp_size=self.etp_size,
                tokens=self.tokens,
                ranks_per_node=max(self.tp_size, self.etp_size, self.ranks // 2),
            ),
            data=DataConfig(batch_per_device=SAMPLES // groups, separate_documents=self.documents),
            optimizer=replace(ADAMW, zero_stage=1 if self.sharded else 0),
            train=TrainConfig(precision="float32"),
        ).resolved(self.ranks)


def text(step: int) -> tuple[Tensor, Tensor]:
    """The tokens of all samples of a step, and those that follow them."""
    tokens_BN = torch.randint(3, 61, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return tokens_BN[:, :-1].contiguous(), tokens_BN[:, 1:].contiguous()


def begins() -> Tensor:
    """Where the document of every token begins: two documents in every sample, of other lengths in each."""
    places_BL = torch.arange(LENGTH).expand(SAMPLES, -1)
    cuts_B1 = 3 + torch.arange(SAMPLES).unsqueeze(1)
    return torch.where(places_BL < cuts_B1, 0, cuts_B1)


class Trained:
    """A run of a family in a process that has joined, with its optimiser and checkpoints."""

    def __init__(
        self, rank: int, case: Case, start: Path, out: Path, dtype: torch.dtype = torch.float32
    ) -> None:
        config = case.config(start)
        layout = Layout.build(config.parallel, case.ranks, rank, config.moe.num_experts)
        machinery = build_machinery(layout, torch.device("cpu"), config.parallel, "float32")
        self.model = model_of_run(config, machinery, plan=None, moving=None, begins=True)
        self.stack = self.model.stack
        planned = gradient_bytes(config.model, config.moe, layout, sharded=case.sharded)
        assert planned == self.stack.gradients.sizes_bytes
        if case.moves:  # wherever samples go, and not only where that pays
            self.stack.of(SamplePlacement).moving = replace(
                sample_moving_of(config.placement), placer=RandomHomes()
            )
            self.stack.adopt(self.stack.plan)
            assert self.stack.of(SamplePlacement).relocation is not None
        self.stack.model.to(dtype)
        with torch._C.DisableTorchFunction():  # steps are counted in float32
            self.optimizer = build_optimizer(self.stack, config.optimizer)
        self.update = build_update(self.stack, self.optimizer, config.optimizer)
        self.checkpoints = Checkpoints(
            out,
            self.stack,
            self.optimizer,
            keep=3,
            identity={},
            files=self.model.files(None),
            naming=self.model.naming,
        )
        mine = SAMPLES * case.tp_size // case.ranks
        self._documents = case.documents
        self._rows = slice(layout.dp_rank * mine, (layout.dp_rank + 1) * mine)

    def step(self, number: int) -> float:
        """Train on the samples of a step; returns their loss."""
        tokens_BL, labels_BL = text(number)
        ids_B = torch.arange(SAMPLES) + number * SAMPLES
        mine = [each[self._rows].contiguous() for each in (tokens_BL, labels_BL)]
        documents_BL = begins()[self._rows].contiguous() if self._documents else None
        loss: Tensor = self.stack(*mine, ids_B[self._rows], documents_BL=documents_BL)
        self.update.backward(loss, number)
        with torch._C.DisableTorchFunction():
            self.update.apply(accepted=True)
        return float(loss.detach())


def plain_losses(folder: Path, steps: int, loss_of: Callable[[Any, Tensor, Tensor], Tensor]) -> list[float]:
    """The losses of a run of the same model in transformers, on one process without Penstock."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    model.train()
    optimizer = build_adamw(list(model.named_parameters()), ADAMW)
    found = []
    for number in range(steps):
        loss = loss_of(model, *text(number))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def of_samples(model: Any, tokens_BL: Tensor, labels_BL: Tensor, *, balances: bool) -> Tensor:
    """The model's own loss, with that of its routers where a run asks for it."""
    asked = {"output_router_logits": True} if balances else {}
    loss: Tensor = model(tokens_BL, labels=labels_BL, shift_labels=labels_BL, **asked).loss
    return loss


def of_documents(model: Any, tokens_BL: Tensor, labels_BL: Tensor) -> Tensor:
    """The loss of documents one by one."""
    total = torch.zeros((), dtype=torch.float64)
    for tokens_L, labels_L, cut in zip(tokens_BL, labels_BL, begins()[:, -1].tolist(), strict=True):
        for part in (slice(cut), slice(cut, None)):
            out = model(tokens_L[part].unsqueeze(0), use_cache=False)
            total = total + cross_entropy(out.logits[0], labels_L[part], reduction="sum")
    return total / labels_BL.numel()


def folder_of(family: str, folder: Path, **changes: Any) -> Path:
    """A small model of a family, saved by transformers."""
    small(family, **changes).save_pretrained(folder)
    return folder


def written(model: Any) -> dict[str, Tensor]:
    """What transformers writes of a model, in memory of its own."""
    found = revert_weight_conversion(model, dict(saved_tensors(model)))
    return {name: each.detach().clone() for name, each in found.items()}


@pytest.mark.parametrize("family", OTHERS)
def test_tensors_of_files_are_views_of_every_family(family: str, tmp_path: Path) -> None:
    """What a rank saves is what transformers would write, and is read in place."""
    trained = Trained(0, Case(family), folder_of(family, tmp_path / "start"), tmp_path / "out")
    model = trained.stack.model
    wanted = written(model)
    found = {name: part for name, part, _ in trained.model.naming(model).in_files()}
    assert found.keys() == wanted.keys()
    for name, part in found.items():
        assert torch.equal(part, wanted[name]), name
        part.add_(1.0)
    for name, part in written(model).items():
        assert torch.equal(part, wanted[name] + 1.0), name


def doubled(written: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each * 2 if ".w1." in name else each for name, each in written.items()}


def one_half_twice(written: dict[str, Tensor]) -> dict[str, Tensor]:
    """As many numbers as there are, and not all of them."""
    return {name: written[name.replace(".w3.", ".w1.")] for name in written}


@pytest.mark.parametrize("changed", [doubled, one_half_twice])
def test_what_is_no_view_keeps_its_own_name(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    changed: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> None:
    """transformers may come to write something else than parts of parameters."""
    trained = Trained(0, Case("mixtral"), folder_of("mixtral", tmp_path / "start"), tmp_path / "out")
    model = trained.stack.model

    def other(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return changed(revert_weight_conversion(model, state))

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", other)
    found = {name: part for name, part, _ in trained.model.naming(model).in_files()}
    stacked = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(found[stacked], model.get_parameter(stacked))
    assert not any(".w1." in name or ".w3." in name for name in found)
    assert any(".w2." in name for name in found)


def _drawing(case: Case) -> AbstractContextManager[Any]:
    return DrawnFromScores() if case.family == RANDOM else nullcontext()


def losses_and_folder(rank: int, case: Case, start: Path, out: Path, resumed: Case | None) -> list[float]:
    """The losses of two steps, a save, and one more step; resumed: on the way of a checkpoint."""
    with exactly(torch.float64):
        trained = Trained(rank, case, start, out, torch.float64)
        first = 0
        if resumed is not None:
            with torch._C.DisableTorchFunction():  # counts of steps stay in float32
                first = trained.checkpoints.load(out / "step-00000002")
        found = []
        for number in range(first, 3):
            with _drawing(case):
                found.append(trained.step(number))
            if number == 1:
                trained.update.flush()
                with torch._C.DisableTorchFunction():
                    trained.checkpoints.save(2)
        trained.stack.close()
    return found


CASES = [
    (
        Case("deepseek_v2", 4, tp_size=2, sharded=True, tokens="replicated", changes={"mlp_bias": True}),
        Case("deepseek_v2", 2),
    ),
    (Case("gpt_oss", 4, ep_size=2, experts="shadowing", schedule="fsmoe"), Case("gpt_oss", 4, tp_size=4)),
    (Case("llama4_text", 4, dispatch="node_once"), Case("llama4_text", 2, sharded=True)),
    (Case("jamba", 4, moves=True, schedule="flowmoe"), Case("jamba", 2, moves=True, sharded=True)),
    (Case("qwen2_moe", 2, moves=True, experts="planned"), Case("qwen2_moe", 4, tp_size=2, moves=True)),
    (Case("gpt_oss", 4, etp_size=2, tp_size=2, sharded=True), Case("gpt_oss", 1)),
    (Case("olmoe", 4, etp_size=2, experts="planned"), Case("olmoe", 2, etp_size=2, sharded=True)),
]
"""A run, and the layout on which it is continued after two steps."""


ALL = [
    *((Case(family, 2), Case(family, 4, sharded=True)) for family in OTHERS),
    (Case("mixtral", 2, schedule="flowmoe"), Case("mixtral", 1)),
    (Case("granitemoe", 2, sharded=True), Case("granitemoe", 4, dispatch="hierarchical_2d")),
    (Case("dbrx", 2), Case("dbrx", 4)),
    (Case("mixtral", 4, etp_size=2, schedule="fsmoe"), Case("mixtral", 4, etp_size=4, sharded=True)),
    (Case("olmoe", 1), Case("olmoe", 4, ep_size=2, tp_size=2)),
    (Case("llama4_text", 2), Case("llama4_text", 4, etp_size=2, schedule="flowmoe")),
    (Case("granitemoe", 2, etp_size=2), Case("granitemoe", 4, ep_size=1, etp_size=2)),
    (Case("qwen2_moe", 4, etp_size=2, moves=True, schedule="fsmoe"), Case("qwen2_moe", 2)),
]
"""More pairs of the same families and layouts, for `make soak`."""


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("first", "then"), [*CASES, *(pytest.param(*pair, marks=pytest.mark.soak) for pair in ALL)], ids=str
)
def test_a_run_trains_as_transformers_does_and_goes_on_on_another_layout(
    ranks: Pools, tmp_path: Path, first: Case, then: Case
) -> None:
    """Losses of three steps with clipping and AdamW, before and after a checkpoint; in float64."""
    with exactly(torch.float64):
        changes = {**DIVISIBLE, **first.changes}
        start = folder_of(first.family, tmp_path / "start", dtype=torch.float64, **changes)
        balances = first.config(start).moe.aux_loss_coeff
        with _drawing(first):
            wanted = plain_losses(start, 3, partial(of_samples, balances=balances > 0))
    out = tmp_path / "out"
    for found in ranks(first.ranks).run(losses_and_folder, first, start, out, None):
        assert found == pytest.approx(wanted, rel=LIMIT)
    for found in ranks(then.ranks).run(losses_and_folder, then, start, out, first):
        assert found == pytest.approx(wanted[2:], rel=LIMIT)


def losses_of_run(rank: int, case: Case, start: Path, out: Path) -> list[float]:
    with exactly(torch.float64), _drawing(case):
        trained = Trained(rank, case, start, out, torch.float64)
        found = [trained.step(number) for number in range(2)]
        trained.stack.close()
    return found


SEPARATE = [name for name in OTHERS if FAMILIES[name].separates_documents and name != RANDOM]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("mixtral", 2, documents=True, schedule="flowmoe"), marks=pytest.mark.soak),
        Case("deepseek_v3", 4, tp_size=2, documents=True),
        Case("glm4_moe", 4, documents=True, moves=True),
        *(pytest.param(Case(name, documents=True), marks=pytest.mark.soak) for name in SEPARATE),
    ],
    ids=str,
)
def test_documents_of_a_sample_do_not_see_each_other(ranks: Pools, tmp_path: Path, case: Case) -> None:
    with exactly(torch.float64):
        start = folder_of(case.family, tmp_path / "start", dtype=torch.float64, **DIVISIBLE)
        wanted = plain_losses(start, 2, of_documents)
    for found in ranks(case.ranks).run(losses_of_run, case, start, tmp_path / "out"):
        assert found == pytest.approx(wanted, rel=LIMIT)
