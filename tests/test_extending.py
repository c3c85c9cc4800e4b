"""The parts that the documentation shows: run as shown, against formulas and under every schedule."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor

import penstock.dispatch
import penstock.moe
from penstock import MoELayer
from penstock.cli import main
from penstock.dispatch import HierarchicalDispatch2D, Place
from penstock.graph import Lane, Op, StepShape
from penstock.graph.task import SPECS
from penstock.models import ModelConfig
from penstock.moe import (
    Bfloat16Rows,
    Hook,
    Int8Rows,
    MergedOrder,
    ModuleExperts,
    MoEConfig,
    SampleKeys,
    SigmoidGate,
    SoftmaxGate,
    SortOrder,
    SwiGLUExperts,
    Tokens,
)
from penstock.runtime import PipelinedStack
from penstock.schedule import SCHEDULES, Pieces, ScheduleConfig, plan_step, unit_cost
from penstock.train.assemble import build_stack
from penstock.train.config import RunConfig
from tests.dispatch.test_legs import exchanged, permuted, tables
from tests.support.parity import (
    Case,
    StepResult,
    batch_of,
    check_close,
    executed_as_planned,
    logical,
    machinery,
    merge,
    prepare,
    settings_of,
)
from tests.support.ranks import Pools

ROOT = Path(__file__).parent.parent
EXTENDING, README = ROOT / "docs" / "extending.md", ROOT / "README.md"
MOE_LAYER = ROOT / "docs" / "moe-layer.md"
HIDDEN, WIDTH, EXPERTS, CHOICES, SLOTS = 64, 12, 8, 2, 3
"""64 and 8 are the sizes that the documentation writes out."""


@cache
def blocks(path: Path, heading: str) -> list[str]:
    """The Python of one section."""
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", path.read_text(), re.M | re.S)
    return re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)


def run_block(code: str, **known: Any) -> dict[str, Any]:
    """What a block defines."""
    namespace = dict(known)
    exec(code, namespace)
    return namespace


@cache
def shown(heading: str) -> dict[str, Any]:
    """What the only block of a section of extending.md defines."""
    (code,) = blocks(EXTENDING, heading)
    return run_block(code)


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "gate": lambda _: {"gate": shown("A gate")["DistanceGate"](HIDDEN, EXPERTS, CHOICES)},
    "experts": lambda local: {"expert": shown("Experts")["SquaredReluExperts"](HIDDEN, WIDTH, local)},
    "module": lambda local: {"expert": ModuleExperts(shown("Any module as an expert")["bottleneck"], local)},
    "hook": lambda _: {"hooks": (shown("A hook")["ClipRowGradients"](longest=0.01),)},
    "order": lambda _: {
        "order": shown("An order")["SurestFirstOrder"](EXPERTS, capacity_factor=0.7, min_capacity=1)
    },
    "dispatch": lambda _: {"dispatch": shown("A dispatch")["AdaptiveDispatch"](few=100)},
}
"""What each section adds to a layer, from the number of local experts."""


def layer_with(part: str, number: int = 0, ep_size: int = 1, ep_rank: int = 0) -> MoELayer:
    """An ordinary layer in which one part is the documentation's."""
    del number
    usual = {
        "gate": SoftmaxGate(HIDDEN, EXPERTS, CHOICES),
        "order": SortOrder(EXPERTS),
        "expert": SwiGLUExperts(HIDDEN, WIDTH, EXPERTS // ep_size),
    }
    return MoELayer(**{**usual, **PARTS[part](EXPERTS // ep_size)}, ep_size=ep_size, ep_rank=ep_rank)


# ---- against formulas --------------------------------------------------------------------------------------


def mixed(
    x_TM: Tensor,
    scores_TE: Tensor,
    expert: Callable[[int, Tensor], Tensor],
    slots: float = float("inf"),
    surest_first: bool = False,
) -> Tensor:
    """Token by token, choice by choice: the two best experts, weights that sum to one."""
    values, indices = scores_TE.topk(CHOICES)
    values = values / values.sum(-1, keepdim=True)
    queue: Sequence[int] = range(len(x_TM))
    if surest_first:
        queue = sorted(queue, key=lambda t: -float(values[t].detach().max()))
    taken, out = [0] * EXPERTS, [torch.zeros_like(x) for x in x_TM]
    for choice in range(CHOICES):
        for t in queue:
            e = int(indices[t, choice])
            taken[e] += 1
            if taken[e] <= slots:
                out[t] = out[t] + values[t, choice] * expert(e, x_TM[t])
    return torch.stack(out)


def softmax(layer: MoELayer, x_TM: Tensor) -> Tensor:
    return (x_TM @ layer.gate.get_parameter("weight").T).softmax(-1)


def swiglu(layer: MoELayer, e: int, x_M: Tensor) -> Tensor:
    gate, up, down = (layer.experts.get_parameter(name)[e] for name in ("w_gate", "w_up", "w_down"))
    return (F.silu(x_M @ gate) * (x_M @ up)) @ down


def distances(layer: MoELayer, x_TM: Tensor) -> Tensor:
    points = layer.gate.get_parameter("points")
    logits = [[-(x - point).square().sum().sqrt() for point in points] for x in x_TM]
    return mixed(x_TM, torch.stack([torch.stack(row) for row in logits]).softmax(-1), partial(swiglu, layer))


def squared_relu(layer: MoELayer, x_TM: Tensor) -> Tensor:
    up, down = layer.experts.get_parameter("w_up"), layer.experts.get_parameter("w_down")
    return mixed(x_TM, softmax(layer, x_TM), lambda e, x_M: (x_M @ up[e]).clamp(min=0) ** 2 @ down[e])


def modules(layer: MoELayer, x_TM: Tensor) -> Tensor:
    def expert(e: int, x_M: Tensor) -> Tensor:
        name = f"expert_modules.{e}"
        norm = F.layer_norm(
            x_M,
            (HIDDEN,),
            layer.experts.get_parameter(f"{name}.0.weight"),
            layer.experts.get_parameter(f"{name}.0.bias"),
        )
        narrow = F.silu(norm @ layer.experts.get_parameter(f"{name}.1.weight").T)
        return narrow @ layer.experts.get_parameter(f"{name}.3.weight").T

    return mixed(x_TM, softmax(layer, x_TM), expert)


def clipped(layer: MoELayer, x_TM: Tensor) -> Tensor:
    def expert(e: int, x_M: Tensor) -> Tensor:
        out_M = swiglu(layer, e, x_M)
        out_M.register_hook(lambda grad_M: grad_M * min(1.0, 0.01 / float(grad_M.norm())))
        return out_M

    return mixed(x_TM, softmax(layer, x_TM), expert)


def surest_first(layer: MoELayer, x_TM: Tensor) -> Tensor:
    return mixed(x_TM, softmax(layer, x_TM), partial(swiglu, layer), slots=SLOTS, surest_first=True)


def usual(layer: MoELayer, x_TM: Tensor) -> Tensor:
    return mixed(x_TM, softmax(layer, x_TM), partial(swiglu, layer))


FORMULAS: dict[str, Callable[[MoELayer, Tensor], Tensor]] = {
    "gate": distances,
    "experts": squared_relu,
    "module": modules,
    "hook": clipped,
    "order": surest_first,
    "dispatch": usual,
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("part", PARTS)
def test_a_layer_with_it_is_a_formula(part: str) -> None:
    layer, tokens = layer_with(part).double(), 16  # 0.7 * 2 * 16 / 8 = 2.8: three slots
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=i) / parameter.shape[-1] ** 0.5)
    x_TM, direction_TM = drawn(tokens, HIDDEN, seed=100).requires_grad_(), drawn(tokens, HIDDEN, seed=101)
    outputs = [layer(x_TM), FORMULAS[part](layer, x_TM)]
    torch.testing.assert_close(*outputs)
    found, wanted = (
        torch.autograd.grad(
            (out_TM * direction_TM).sum(),
            [x_TM, *layer.parameters()],
            allow_unused=True,
            materialize_grads=True,
        )
        for out_TM in outputs
    )
    torch.testing.assert_close(found, wanted)


def test_the_order_drops_some_and_others_than_the_index_order() -> None:
    layer, x_TM = layer_with("order").double(), drawn(16, HIDDEN, seed=100)
    scores_TE = softmax(layer, x_TM)
    kept = [
        mixed(x_TM, scores_TE, partial(swiglu, layer), slots, first)
        for slots, first in ((float("inf"), False), (SLOTS, False), (SLOTS, True))
    ]
    assert len({tuple(out_TM.flatten().tolist()) for out_TM in kept}) == 3


@pytest.mark.parametrize("few", [0, 20, 10_000])
@given(case=tables())
def test_rows_arrive_sorted_by_source(few: int, case: tuple[Any, int]) -> None:
    table, size = case
    dispatch = shown("A dispatch")["AdaptiveDispatch"](few)
    places = [Place(rank, len(table), size) for rank in range(len(table))]
    legs = [dispatch.legs(table, place) for place in places]
    rows = [[(s, t, n) for t in range(len(table)) for n in range(table[s, t])] for s in range(len(table))]
    for number in range(len(dispatch.ops)):
        now = [mine[number] for mine in legs]
        rows = exchanged(
            [permuted(r, leg) for r, leg in zip(rows, now, strict=True)], now, places, back=False
        )
    for target, held in enumerate(rows):
        assert held == [(s, target, n) for s in range(len(table)) for n in range(table[s, target])]


def test_the_dispatch_goes_both_ways_in_the_test_below() -> None:
    """Of the two microbatches of four ranks one has many rows and the other few."""
    dispatch = shown("A dispatch")["AdaptiveDispatch"](few=100)
    groups = [dispatch.legs(np.full((4, 4), rows), Place(0, 4, 2))[1].group for rows in (5, 10)]
    assert groups == ["rail", "ep"]


# ---- under every schedule ----------------------------------------------------------------------------------


def case_of(part: str, world_size: int, schedule: str) -> Case:
    capacity = {"capacity_factor": 0.7, "min_capacity": 1} if part == "order" else {}
    return Case(
        world_size=world_size,
        ep_size=None,
        schedule=ScheduleConfig(name=schedule, microbatches=2, chunks=3, all_reduce_chunk_bytes=65536),
        model=ModelConfig(num_layers=2, hidden_size=HIDDEN, num_heads=4, seq_len=5, vocab_size=11),
        moe=MoEConfig(
            num_experts=EXPERTS,
            top_k=CHOICES,
            moe_ffn_hidden_size=WIDTH,
            aux_loss_coeff=0.1,
            aux_loss_group="microbatch",
            z_loss_coeff=0.01,
            **capacity,  # type: ignore[arg-type]  # two numbers
        ),
        batch=3,
        double=True,
        node_size=world_size // 2 if world_size > 1 else None,
    )


def stack_of(rank: int, case: Case, part: str) -> PipelinedStack:
    found = machinery(case.world_size, case.world_size, rank, case.node_size or 0)
    make_moe = partial(layer_with, part, ep_size=case.world_size, ep_rank=rank)
    stack = build_stack(case.config, found, torch.float64, make_moe)
    prepare(stack, case)
    return stack


def result_of(stack: PipelinedStack, loss: Tensor, as_planned: bool) -> StepResult:
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in stack.model.named_parameters()
    }
    return StepResult(loss.item(), 0.0, logical(stack, gradients), {}, as_planned)


def run_scheduled(rank: int, case: Case, part: str) -> StepResult:
    """One step on this rank."""
    stack = stack_of(rank, case, part)
    tokens, labels = batch_of(case)
    mine = slice(rank * case.batch, (rank + 1) * case.batch)
    loss = stack(tokens[mine], labels[mine], torch.arange(len(tokens))[mine])
    loss.backward()
    return result_of(stack, loss, executed_as_planned(stack))


def run_alone(case: Case, part: str) -> StepResult:
    """The same model without any schedule, its layers called as modules: microbatch by microbatch."""
    stack = stack_of(0, case_of(part, 1, "sequential"), part)
    model: Any = stack.model
    tokens, labels = batch_of(case)
    loss = torch.zeros((), dtype=torch.float64)
    for samples in settings_of(case).pieces:
        keys, share = SampleKeys(case.seed, torch.tensor(samples)), len(samples) / len(tokens)
        h_BLM = model.embed(tokens[samples], keys)
        for block in model.parts:
            residual_BLM, x_TM = block.attend(h_BLM, keys)
            out_BLM = block.moe(x_TM.view_as(h_BLM))
            h_BLM = block.add(residual_BLM, out_BLM.flatten(0, 1), keys)
            losses = block.moe.losses
            loss = loss + share * (
                case.moe.aux_loss_coeff * losses.balance + case.moe.z_loss_coeff * losses.z
            )
        loss = loss + model.head(h_BLM, labels[samples]) / labels.numel()
    loss.backward()
    return result_of(stack, loss, True)


def check_part(ranks: Pools, part: str, world_size: int, schedule: str) -> None:
    case = case_of(part, world_size, schedule)
    result = merge(ranks(world_size).run(run_scheduled, case, part))
    expected = run_alone(case, part)
    assert result.loss == pytest.approx(expected.loss, rel=1e-10)
    assert result.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert gradient.any() or ".experts." in name, f"{name} was not trained"  # an expert may be idle
        check_close(result.gradients[name], gradient, 1e-10, f"gradient of {name}")


TURNS = [(part, schedule) for i, part in enumerate(PARTS) for schedule in islice(cycle(SCHEDULES), i, i + 4)]
"""Four schedules for every part; all of them take turns."""


@pytest.mark.parametrize(("part", "schedule"), TURNS)
def test_scheduled_it_is_the_layer_alone(ranks: Pools, part: str, schedule: str) -> None:
    check_part(ranks, part, 1, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [4])
@pytest.mark.parametrize("schedule", ["moe_pipeline", "penstock"])
@pytest.mark.parametrize("part", PARTS)
def test_on_two_nodes_as_well(ranks: Pools, part: str, schedule: str, world_size: int) -> None:
    check_part(ranks, part, world_size, schedule)


# ---- what the pages show -----------------------------------------------------------------------------------


def stack_built(code: str, known: dict[str, Any]) -> PipelinedStack:
    """What a block makes that goes on from the example in training.md, on one process."""
    config = RunConfig(
        model=ModelConfig(num_layers=2, hidden_size=HIDDEN, num_heads=4, seq_len=8),
        moe=MoEConfig(num_experts=EXPERTS, top_k=CHOICES),
    )
    found = machinery(1, 1, 0)
    there = {"config": config, "machinery": found, "layout": found.layout, "build_stack": build_stack}
    stack = run_block(code, **known, **there)["stack"]
    assert isinstance(stack, PipelinedStack)
    return stack


def check_trains(stack: PipelinedStack) -> None:
    tokens = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(0))
    stack(tokens, tokens).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in stack.model.parameters())


def test_the_scheduled_model_of_the_page() -> None:
    (code,) = blocks(EXTENDING, "Into a scheduled model")
    stack = stack_built(code, shown("A gate"))
    assert type(stack.parts.parts[1].moe.gate).__name__ == "DistanceGate"  # type: ignore[union-attr]  # an MoE block
    check_trains(stack)


def test_the_layer_of_the_readme() -> None:
    alone, scheduled = blocks(README, "A layer of your own")
    known = run_block(alone)
    assert known["out"].shape == known["x"].shape == known["x"].grad.shape
    assert all(p.grad is not None for name, p in known["layer"].named_parameters() if "experts" not in name)
    stack = stack_built(scheduled, known)
    assert stack.plan.graph.shape.shared_experts
    check_trains(stack)


def test_every_block_of_the_pages_is_run_here() -> None:
    headings = re.findall(r"^## (.*)$", EXTENDING.read_text(), re.M)
    assert sum(len(blocks(EXTENDING, heading)) for heading in headings) == len(PARTS) + 1
    headings = re.findall(r"^## (.*)$", MOE_LAYER.read_text(), re.M)
    found = [heading for heading in headings if blocks(MOE_LAYER, heading)]
    assert found == ["Padding", "By itself, on several ranks", "From Hugging Face"]


def test_examples_import_from_few_packages() -> None:
    for page in (EXTENDING, MOE_LAYER):
        imported = set(re.findall(r"^from (penstock\S*) import", page.read_text(), re.M))
        assert imported <= {
            "penstock",
            "penstock.moe",
            "penstock.dispatch",
            "penstock.models.huggingface",
            "penstock.runtime.exchange",
        }


def test_padding_of_the_page() -> None:
    (code,) = blocks(MOE_LAYER, "Padding")
    out = run_block(code)["out"]
    assert not out[1, 6:].any() and out[1, :6].any(1).all() and out[0].any(1).all()


def test_hugging_face_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (code,) = blocks(MOE_LAYER, "From Hugging Face")
    assert run_block(code)["difference"] < 1e-5


def run_several(rank: int) -> dict[str, Tensor]:
    """What the block about several ranks leaves on this one: parameters (p), gradients (g) and tokens (x)."""
    (code,) = blocks(MOE_LAYER, "By itself, on several ranks")
    made = run_block(code)
    found = {"x": made["x"]}
    for name, parameter in made["layer"].named_parameters():
        key = f"{name} of {rank}" if name.startswith("experts.") else name
        found |= {f"p {key}": parameter.detach(), f"g {key}": parameter.grad}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_several_ranks_of_the_page(ranks: Pools, world_size: int) -> None:
    """Gradients are those of one process that has all experts and all tokens."""
    results = ranks(world_size).run(run_several)
    layer = MoELayer(
        gate=SigmoidGate(HIDDEN, EXPERTS, CHOICES),
        order=SortOrder(EXPERTS),
        expert=SwiGLUExperts(HIDDEN, 128, EXPERTS),
    )

    def whole(kind: str, name: str) -> Tensor:
        if name.startswith("experts."):
            return torch.cat([result[f"{kind} {name} of {rank}"] for rank, result in enumerate(results)])
        assert all(torch.equal(result[f"{kind} {name}"], results[0][f"{kind} {name}"]) for result in results)
        return results[0][f"{kind} {name}"]  # type: ignore[no-any-return]  # a tensor of another process

    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(whole("p", name))
    out = layer(torch.cat([result["x"] for result in results]))
    assert layer.losses is not None
    (out.square().mean() + 0.01 * layer.losses.balance + 0.001 * layer.losses.z).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        check_close(whole("g", name), parameter.grad, 1e-5, name)


def test_the_refusal_is_a_real_one(capsys: pytest.CaptureFixture[str]) -> None:
    command, said = re.findall(r"^\$ penstock (.*)\n(penstock: .*)\n```", MOE_LAYER.read_text(), re.M)[0]
    words = [word.replace("configs/", f"{ROOT / 'configs'}/") for word in command.split()]
    assert main(words) == 2
    assert capsys.readouterr().err.strip() == said


def test_the_picture_is_a_real_one() -> None:
    shape = StepShape(
        moe_layers=(True,), dispatch=HierarchicalDispatch2D().ops, shared_experts=True, exchange_counts=True
    )
    pieces = Pieces(
        microbatches=2,
        chunks=1,
        all_reduce_chunk_bytes=1024,
        all_reduce_bytes=(1024,),
        expert_all_reduce_bytes=(0,),
    )
    plan = plan_step(SCHEDULES["flowmoe"], shape, pieces, lambda _: unit_cost)
    assert plan.schedule.grid(plan.graph, width=106).partition("\n")[2].strip() in MOE_LAYER.read_text()


def rows_of(heading: str) -> list[list[str]]:
    """Cells of the tables of a section, without the first table's two header lines."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", MOE_LAYER.read_text(), re.M | re.S)
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in row] for row in rows]


def test_the_parts_exist_and_tasks_are_on_their_lanes() -> None:
    for _, name, _, _, where in rows_of("Parts")[2:]:
        assert hasattr(penstock.moe, name) or hasattr(penstock.dispatch, name), name
        for part in where.split(";"):
            *ops, lane = re.split(r", | and ", re.sub(r" \(and W\)", "", part.strip()))
            if lane in set(Lane):
                assert {SPECS[Op(op)].lane for op in ops} == {lane}, (name, part)


def test_defaults_of_the_configuration() -> None:
    found: dict[str, str] = {}
    for keys, defaults, _ in rows_of("From the configuration")[2:]:
        found.update(zip(re.findall(r"\w+", keys), defaults.split(", "), strict=True))
    assert found == {field.name: as_toml(field.default) for field in fields(MoEConfig)}


def as_toml(value: object) -> str:
    return {str: f'"{value}"', bool: str(value).lower(), type(None): "none"}.get(type(value), str(value))


def test_what_one_copy_per_rank_saves() -> None:
    for case, without, independent, distinct, counted, saved in rows_of("One copy per rank")[2:]:
        experts, choices, ranks = (int(number) for number in case.split(", "))
        torch.manual_seed(0)
        with torch.no_grad():
            choice = SoftmaxGate(HIDDEN, experts, choices)(20 * torch.randn(4096, HIDDEN), Tokens())
        rows = MergedOrder(experts, choices, ranks).plan(choice, 1).chunk_rows[0] / 4096
        assert SortOrder(experts).plan(choice, 1).chunk_rows[0] == int(without) * 4096
        assert float(counted) == pytest.approx(rows, abs=0.01)
        assert float(saved.removesuffix("%")) == pytest.approx(100 * (1 - rows / choices), abs=1)
        others = math.comb(experts - experts // ranks, choices) / math.comb(experts, choices)
        assert float(distinct) == pytest.approx(ranks * (1 - others), abs=0.006)
        assert float(independent) == pytest.approx(ranks * (1 - (1 - 1 / ranks) ** choices), abs=0.006)


def test_bytes_and_errors_of_compression() -> None:
    rows_RM = torch.randn(1000, 1024, generator=torch.Generator().manual_seed(0))
    hooks = {"none (float32)": Hook(), "bfloat16": Bfloat16Rows(), "int8": Int8Rows(1024)}
    for name, _, small, large, measured in rows_of("Compression")[2:]:
        config = MoEConfig(compression=None if name.startswith("none") else name)  # type: ignore[arg-type]  # a name
        assert [config.row_bytes(hidden, 4) for hidden in (1024, 4096)] == [int(small), int(large)]
        leaving = hooks[name].before_dispatch(rows_RM)
        assert leaving.nbytes == 1000 * int(small)
        error = (hooks[name].after_dispatch(leaving) - rows_RM).norm() / rows_RM.norm()
        assert float(measured.removesuffix("%")) == pytest.approx(100 * float(error), abs=0.01)


def test_what_splitting_does_to_balance() -> None:
    anything, own = balance_tokens()
    group = ""
    for first, name, *values in rows_of("Balance")[7:]:
        tokens = own if first.startswith("each") or (not first and group == "own") else anything
        group = "own" if tokens is own else ""
        found = [balance_of(tokens, name, pieces) for pieces in (1, 2, 4, 8)]
        assert [float(value) for value in values] == pytest.approx(found, abs=2e-3)


def balance_tokens() -> tuple[Tensor, Tensor]:
    """8 samples of 128 tokens: of 256 symbols, and each of 16 symbols of its own."""
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(256, (8, 128), generator=generator)
    own = [
        torch.randint(256, (16,), generator=generator)[torch.randint(16, (128,), generator=generator)]
        for _ in range(8)
    ]
    return anything, torch.stack(own)


def balance_of(tokens: Tensor, group: str, pieces: int) -> float:
    config = RunConfig(
        model=ModelConfig(num_layers=1, hidden_size=64, seq_len=128),
        moe=MoEConfig(num_experts=16, moe_ffn_hidden_size=16, aux_loss_group=group),  # type: ignore[arg-type]  # a name
        schedule=ScheduleConfig(name="flowmoe", microbatches=pieces),
    )
    stack = build_stack(config, machinery(1, 1, 0))
    with torch.no_grad():
        stack.model.get_parameter("blocks.0.feed_forward.gate.weight").mul_(25)
    stack(tokens, tokens)
    assert stack.statistics is not None
    return float(stack.statistics.aux)
