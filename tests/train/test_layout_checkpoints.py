"""A checkpoint of any layout loads under any other, bit for bit, and the run goes on as if never stopped."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from penstock.checkpoint.folder import complete_checkpoints
from penstock.checkpoint.storage import CheckpointError
from penstock.config import ConfigError
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.sharding import Sharding
from penstock.step.shape import TokenLayout
from penstock.train.checkpoint import Checkpoints, NotFiniteError
from tests.support.checkpoints import (
    CASE,
    bare,
    check_equal,
    parts_in,
    state_of,
    train,
    trained,
)
from tests.support.close import check_close
from tests.support.joining import joined
from tests.support.parity import Case
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow
GLOBAL_BATCH = 8
MODEL = ModelConfig(num_layers=2, hidden_size=8, num_heads=4, seq_len=5, vocab_size=12, moe_layers=(1,))
MOE = MoEConfig(num_experts=4, moe_ffn_hidden_size=8, shared_ffn_hidden_size=8, expert_bias_rate=0.1)


@dataclass(frozen=True)
class World:
    """A layout of so many ranks."""

    ranks: int
    tp: int
    ep: int
    etp: int
    tokens: TokenLayout = "split"
    sharded: bool = False

    def __str__(self) -> str:
        optimizer = " sharded" if self.sharded else ""
        return f"{self.ranks}: tp{self.tp} ep{self.ep} etp{self.etp} {self.tokens}{optimizer}"

    @property
    def case(self) -> Case:
        """The same model and batch under this layout, with a dense layer and shared experts."""
        return replace(
            CASE,
            model=MODEL,
            moe=MOE,
            world_size=self.ranks,
            tp_size=self.tp,
            ep_size=self.ep,
            etp_size=self.etp,
            tokens=self.tokens,
            sharded=self.sharded,
            clips=False,
            batch=GLOBAL_BATCH * self.tp // self.ranks,
            double=True,
        )


ALONE = World(1, 1, 1, 1)
WORLDS = [
    ALONE,
    World(2, 2, 1, 2),
    World(2, 1, 2, 1),
    World(2, 2, 2, 1, "replicated"),
    World(2, 1, 1, 2),
    World(4, 2, 2, 2),
    World(4, 4, 1, 4, "replicated"),
    World(4, 2, 4, 1),
    World(4, 1, 2, 2, sharded=True),
    World(4, 2, 2, 1, sharded=True),
    World(2, 1, 1, 1, sharded=True),
    World(4, 4, 2, 1),
]
STEP_APART = 5
"""Each is loaded under the one that stands so many places after it, from fewer ranks to more and back."""


@dataclass(frozen=True)
class State:
    """What one rank has of a run's state, and the losses on the way to it."""

    tensors: dict[str, Tensor]
    parts: dict[str, Sharding]
    losses: list[float]


@dataclass(frozen=True)
class Run:
    """What is known of a run that saved after two steps and did one more."""

    folder: Path
    saved: dict[str, Tensor]
    after: dict[str, Tensor]
    loss: float


def state(run: Checkpoints, losses: list[float]) -> State:
    return State(state_of(run), parts_in(run), losses)


def whole(ranks: list[State]) -> dict[str, Tensor]:
    """The state of the whole model; what several ranks hold must be the same bits on all of them."""
    return joined((rank.tensors, rank.parts) for rank in ranks)


def saving(rank: int, case: Case, folder: Path) -> tuple[State, State]:
    """The state that is saved, and that of one step later."""
    run = trained(rank, case, folder)
    run.save(2)
    then = state(run, [])
    return then, state(run, train(run, rank, case, 1))


def loading(rank: int, case: Case, path: Path) -> tuple[State, State]:
    """The state that was loaded into another model, and that of one step later."""
    run = bare(rank, replace(case, seed=5), path.parent)
    assert run.load(path) == 2
    then = state(run, [])
    return then, state(run, train(run, rank, case, 1))


Saved = Callable[[World], Run]


@pytest.fixture(scope="module")
def saved(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The run of a layout, made when first asked for."""
    runs: dict[World, Run] = {}

    def run_of(world: World) -> Run:
        if world not in runs:
            folder = tmp_path_factory.mktemp("saved")
            results = ranks(world.ranks).run(saving, world.case, folder)
            then, after = (whole([result[i] for result in results]) for i in (0, 1))
            runs[world] = Run(folder / "step-00000002", then, after, results[0][1].losses[0])
        return runs[world]

    return run_of


PAIRS = [
    (WORLDS[number], WORLDS[(number + STEP_APART) % len(WORLDS)])
    for number in (0, 4, 6, 7, 8, 9, 10, 11)  # with which every layout saves or loads
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("first", "then"), PAIRS, ids=str)
def test_what_one_layout_saves_another_loads(ranks: Pools, saved: Saved, first: World, then: World) -> None:
    check_loads(ranks, saved(first), then)


@pytest.mark.soak
@pytest.mark.parametrize("first", WORLDS, ids=str)
def test_what_one_layout_saves_all_load(ranks: Pools, saved: Saved, first: World) -> None:
    for then in WORLDS:
        check_loads(ranks, saved(first), then)


def check_loads(ranks: Pools, run: Run, then: World) -> None:
    results = ranks(then.ranks).run(loading, then.case, run.folder)
    check_equal(whole([result[0] for result in results]), run.saved)
    after = whole([result[1] for result in results])
    assert after.keys() == run.after.keys()
    for _, result in results:
        assert result.losses[0] == pytest.approx(run.loss, rel=1e-12)
    for name, tensor in run.after.items():
        check_close(after[name], tensor, 1e-10, name)


LOADED_BY_TORCH = """
import sys, torch
from pathlib import Path
from typing import Any
from torch.distributed.checkpoint import HuggingFaceStorageReader, load

for folder in sys.argv[1:]:
    described = HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata
    state = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in described.items()}
    load(state, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
    torch.save(state, Path(folder).with_name("loaded.pt"))
assert not any("penstock" in name for name in sys.modules)
"""


@pytest.fixture(scope="module")
def stored(saved: Saved) -> dict[World, dict[str, Tensor]]:
    """All tensors of every layout's checkpoint but the ranks' own generators, as others load it, without
    Penstock."""
    folders = {world: saved(world).folder for world in WORLDS}
    subprocess.run([sys.executable, "-c", LOADED_BY_TORCH, *map(str, folders.values())], check=True)
    found: dict[World, dict[str, Tensor]] = {}
    for world, folder in folders.items():
        tensors: dict[str, Tensor] = torch.load(folder.with_name("loaded.pt"))
        found[world] = {name: each for name, each in tensors.items() if not name.startswith("generator")}
    return found


@pytest.mark.few(6)
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_every_layout_saves_the_same_tensors(stored: dict[World, dict[str, Tensor]], world: World) -> None:
    """Names, shapes and types are those of one process, each tensor is there once, and so are the values."""
    assert stored[world].keys() == stored[ALONE].keys()
    for name, tensor in stored[ALONE].items():
        assert stored[world][name].shape == tensor.shape and stored[world][name].dtype == tensor.dtype
        check_close(stored[world][name], tensor, 1e-10, name)


def test_what_is_shared_is_written_once(saved: Saved) -> None:
    """Every rank writes its own part, and of what several hold one writes it."""
    for world in WORLDS:
        described: dict[str, Any] = (
            HuggingFaceStorageReader(str(saved(world).folder)).read_metadata().state_dict_metadata
        )
        for name, each in described.items():
            assert sum(prod(chunk.sizes) for chunk in each.chunks) == prod(each.size), (str(world), name)
        writers = {path.name.split("-")[1][:5] for path in saved(world).folder.glob("shard-*")}
        assert len(writers) == world.ranks, str(world)


# ---- what is refused ---------------------------------------------------------------------------------------


def refused(rank: int, case: Case, path: Path) -> str:
    run = bare(rank, case, path.parent)
    try:
        run.load(path)
    except (ConfigError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_another_model_is_refused_on_all_ranks(ranks: Pools, saved: Saved) -> None:
    case = WORLDS[1].case
    wider = replace(case, moe=replace(case.moe, moe_ffn_hidden_size=16))
    texts = ranks(2).run(refused, wider, saved(ALONE).folder)
    assert len(set(texts)) == 1, texts
    assert "was made by another model" in texts[0] and "there and" in texts[0]


def test_a_damaged_file_is_refused_on_all_ranks(ranks: Pools, saved: Saved, tmp_path: Path) -> None:
    """Also by those that would not read it."""
    path, world = tmp_path / "step-00000002", WORLDS[5]
    shutil.copytree(saved(world).folder, path)
    damaged = sorted(path.glob("*.safetensors"))[-1]
    damaged.write_bytes(damaged.read_bytes()[:-8])
    texts = ranks(world.ranks).run(refused, world.case, path)
    assert len(set(texts)) == 1 and texts[0].startswith("DamagedCheckpointError"), texts


# ---- what fails on one rank --------------------------------------------------------------------------------

SHARED = World(4, 2, 2, 2)


def not_finite(rank: int, case: Case, folder: Path, name: str, only: int) -> str:
    run = trained(rank, case, folder)
    if rank == only:
        run.stack.model.get_parameter(name).data.view(-1)[-1] = float("nan")
    try:
        run.save(2)
    except NotFiniteError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "named"),
    [("lm_head.weight",) * 2, ("model.layers.1.mlp.experts.w_up", "layers.1.mlp.experts.3.up_proj.weight")],
)
def test_a_part_that_is_not_finite_is_not_saved(ranks: Pools, tmp_path: Path, name: str, named: str) -> None:
    texts = ranks(4).run(not_finite, SHARED.case, tmp_path, name, 3)
    assert len(set(texts)) == 1 and named in texts[0] and "on rank 3 is not finite" in texts[0]
    assert complete_checkpoints(tmp_path) == []
