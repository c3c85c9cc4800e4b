"""What docs/moe-layer.md shows: its code runs, its tables and its picture are true."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import penstock.features.dispatch
import penstock.moe
from penstock import MoELayer, clip_grad_norm_
from penstock.cli import main
from penstock.features.build import build_graph
from penstock.features.dispatch import DISPATCHES
from penstock.graph import Lane
from penstock.moe import (
    Bfloat16Rows,
    Hook,
    Int8Rows,
    MergedPermutation,
    MoEConfig,
    SigmoidRouter,
    SoftmaxRouter,
    SortPermutation,
    SwiGLUExperts,
    Tokens,
)
from penstock.step import StepShape
from tests.support.close import check_close
from tests.support.pages import CHOICES, EXPERTS, HIDDEN, MOE_LAYER, ROOT, blocks, run_block
from tests.support.ranks import Pools


def test_padding_of_the_page() -> None:
    (code,) = blocks(MOE_LAYER, "Padding")
    out = run_block(code)["out"]
    assert not out[1, 6:].any() and out[1, :6].any(1).all() and out[0].any(1).all()


def test_hugging_face_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (code,) = blocks(MOE_LAYER, "From Hugging Face")
    assert run_block(code)["difference"] < 1e-5


@dataclass(frozen=True)
class Ran:
    """What the block about several ranks did on this one: parameters before and after its loop, by name."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    x: Tensor
    target: Tensor
    norms: list[float]


def parameters_of(layer: nn.Module, rank: int) -> dict[str, Tensor]:
    """Whole tensors; an expert's under its rank."""
    found: dict[str, Tensor] = {}
    for name, parameter in layer.named_parameters():
        key = f"{name} of {rank}" if name.startswith("experts.") else name
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found[key] = whole.detach().clone()
    return found


def run_several(rank: int, sharded: bool) -> Ran:
    """Runs the block up to its optimiser, and from there on."""
    first, second = blocks(MOE_LAYER, "By itself, on several ranks")
    if sharded:
        (line,) = [line for line in first.splitlines(keepends=True) if line.startswith("model = Distributed")]
        first = first.replace(line, second)
    setup, mark, loop = first.partition("optimizer = ")
    made = run_block(setup)
    before, norms = parameters_of(made["layer"], rank), list[float]()

    def noting(model: nn.Module, max_norm: float) -> Tensor:
        norm = clip_grad_norm_(model, max_norm)
        assert norm > 2 * max_norm, "nothing was clipped"
        norms.append(float(norm))
        return norm

    left = run_block(mark + loop, **{**made, "clip_grad_norm_": noting})
    return Ran(before, parameters_of(made["layer"], rank), left["x"], left["target"], norms)


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "sharded"), [(1, False), (2, False), (4, False), (2, True)])
def test_several_ranks_of_the_page(ranks: Pools, world_size: int, sharded: bool) -> None:
    """Five steps are those of one process that has all experts and all tokens, and clips as torch does."""
    results = ranks(world_size).run(run_several, sharded)
    layer = MoELayer(
        gate=SigmoidRouter(HIDDEN, EXPERTS, CHOICES),
        permutation=SortPermutation(EXPERTS),
        expert=SwiGLUExperts(HIDDEN, 128, EXPERTS),
    )

    def whole(when: str, name: str) -> Tensor:
        found = [getattr(result, when) for result in results]
        if name.startswith("experts."):
            return torch.cat([tensors[f"{name} of {rank}"] for rank, tensors in enumerate(found)])
        assert all(torch.equal(tensors[name], found[0][name]) for tensors in found), name
        return found[0][name]  # type: ignore[no-any-return]  # a tensor of another process

    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(whole("before", name))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    x, target = (torch.cat([getattr(result, what) for result in results]) for what in ("x", "target"))
    norms = []
    for _ in range(5):
        loss = (layer(x) - target).square().mean()
        assert layer.losses is not None
        (loss + 0.01 * layer.losses.balance + 0.001 * layer.losses.z).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    for result in results:
        assert result.norms == results[0].norms == pytest.approx(norms, rel=1e-5)
    for name, parameter in layer.named_parameters():
        moved = parameter.detach() - whole("before", name)
        check_close(whole("after", name) - whole("before", name), moved, 1e-4, name)


def test_the_refusal_is_a_real_one(capsys: pytest.CaptureFixture[str]) -> None:
    command, said = re.findall(r"^\$ penstock (.*)\n(penstock: .*)\n```", MOE_LAYER.read_text(), re.M)[0]
    words = [word.replace("configs/", f"{ROOT / 'configs'}/") for word in command.split()]
    assert main(words) == 2
    assert capsys.readouterr().err.strip() == said


def rows_of(heading: str, page: Path = MOE_LAYER) -> list[list[str]]:
    """Cells of the tables of a section, without the first table's two header lines."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", page.read_text(), re.M | re.S)
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in row] for row in rows]


def lanes_of_ops() -> dict[str, Lane]:
    """The lane of every op of an MoE layer, in any of the dispatches."""
    shapes = (
        StepShape(moe_layers=(True,), dispatch=d.hops, shared_experts=True) for d in DISPATCHES.values()
    )
    return {task.op: task.lane for shape in shapes for task in build_graph(shape).tasks}


def test_the_parts_exist() -> None:
    for _, names, *_ in rows_of("Parts")[2:]:
        for name in re.findall(r"\w+", names):
            assert hasattr(penstock.moe, name) or hasattr(penstock.features.dispatch, name), name


def test_the_tasks_of_the_picture_are_on_their_lanes() -> None:
    (picture,) = re.findall(r"```\n( +hidden states.*?)```", MOE_LAYER.read_text(), re.S)
    lanes, shown = lanes_of_ops(), dict(re.findall(rf"\b([A-Z]+), ({'|'.join(Lane)})", picture))
    assert shown.keys() == {*"NXUDCS", "AT", "ST", "DG", "DS", "CG", "CS"}
    assert shown == {op: lanes[op] for op in shown}


def test_what_one_copy_per_rank_saves() -> None:
    for case, counted, saved in rows_of("One copy per rank")[2:]:
        experts, choices, ranks = (int(number) for number in case.split(", "))
        torch.manual_seed(0)
        with torch.no_grad():
            choice = SoftmaxRouter(HIDDEN, experts, choices)(20 * torch.randn(4096, HIDDEN), Tokens())
        rows = MergedPermutation(experts, choices, ranks).plan(choice, 1).chunk_rows[0] / 4096
        assert SortPermutation(experts).plan(choice, 1).chunk_rows[0] == choices * 4096
        assert float(counted) == pytest.approx(rows, abs=0.01)
        assert float(saved.removesuffix("%")) == pytest.approx(100 * (1 - rows / choices), abs=1)


def test_bytes_and_errors_of_compression() -> None:
    rows_RM = torch.randn(1000, 1024, generator=torch.Generator().manual_seed(0))
    hooks = {"none (float32)": Hook(), "bfloat16": Bfloat16Rows(), "int8": Int8Rows(1024)}
    for name, _, small, large, measured in rows_of("Compression")[2:]:
        config = MoEConfig(comm_dtype=None if name.startswith("none") else name)  # type: ignore[arg-type]  # a name
        assert [config.row_bytes(hidden, 4) for hidden in (1024, 4096)] == [int(small), int(large)]
        leaving = hooks[name].before_dispatch(rows_RM)
        assert leaving.nbytes == 1000 * int(small)
        error = (hooks[name].after_dispatch(leaving) - rows_RM).norm() / rows_RM.norm()
        assert float(measured.removesuffix("%")) == pytest.approx(100 * float(error), abs=0.01)
