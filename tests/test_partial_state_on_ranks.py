"""A rank's share of a model is loaded into the same share alone, and written by no tool as the whole."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

import penstock
from penstock.moe import ModuleExperts, SoftmaxRouter, SortPermutation
from penstock.partial_state import without_marks
from penstock.runtime import PipelinedStack, ShardedAdamW
from tests.runtime.features.sharded_optimizer.steps import Habits, build, go_on
from tests.runtime.test_shared_surgery import SHARED
from tests.runtime.test_surgery import CASE
from tests.support.adapted import Batch, as_torchrun_starts_it, small
from tests.support.layouts import layout_case
from tests.support.pages import ROOT, blocks, run_block
from tests.support.parity import stack_of
from tests.support.ranks import Pools
from tests.support.surgery import run
from tests.test_integrations_page import drawn, exchange

pytestmark = pytest.mark.slow
RANKS = 2


def session(rank: int) -> nn.Module:
    return stack_of(rank, replace(CASE, double=False))


def shards(rank: int) -> nn.Module:
    """Attention, vocabulary and every expert in two parts."""
    return stack_of(rank, replace(SHARED, double=False))


def moe_layer(rank: int) -> nn.Module:
    """The model of docs/integrations.md."""
    del rank
    (common,) = blocks(ROOT / "docs" / "integrations.md", "The model")
    return drawn(run_block(common)["Model"](exchange()), torch.float32)  # type: ignore[no-any-return]


def of_transformers(rank: int, family: str = "mixtral") -> nn.Module:
    del rank
    return penstock.parallelize(small(family), plan="flowmoe")  # type: ignore[no-any-return]


def with_adapters(rank: int) -> nn.Module:
    """LoRA on attention and on experts, whose adapters are whole in a state dict."""
    from peft import LoraConfig, get_peft_model

    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets)
    adapted: nn.Module = get_peft_model(of_transformers(rank), config)
    return adapted


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def stepped(model: Any, rank: int, optimizer: Any) -> None:
    """One step of training."""
    if isinstance(model, PipelinedStack):
        run(model, rank, CASE if model.machinery.layout.ep_size > 1 else SHARED)
    elif hasattr(model, "config"):
        model(**Batch(samples=RANKS).inputs(rank, rank + 1)).loss.backward()
    else:
        model(torch.randn(2, 3, 16), torch.randn(2, 3, 4))["loss"].backward()
    optimizer.step()


Make = Callable[[int], nn.Module]
SCHEDULED: list[Make] = [of_transformers, with_adapters]
KINDS: list[Make] = [session, shards, moe_layer, *SCHEDULED]


def numbers_of(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def outcome(function: Callable[[], Any]) -> str:
    """The name of the error that a call raises, that of the first rank where ranks save together."""
    try:
        function()
    except CheckpointException as error:
        return type(next(iter(error.failures.values()))[0]).__name__
    except Exception as error:
        return type(error).__name__
    return ""


def loaded(rank: int, make: Make, folder: Path) -> dict[str, list[str]]:
    """What happens to states of this rank, and to those of rank 0, by the way in which they are loaded."""
    model = make(rank)
    torch.save(model.state_dict(), folder / f"{make.__name__}-{rank}.pt")
    dist.barrier()
    found: dict[str, list[str]] = {}
    for number in (rank, 0):
        state = torch.load(folder / f"{make.__name__}-{number}.pt", weights_only=True)
        for name, load in ways_into(model, state).items():
            found.setdefault(name, []).append(outcome(load))
    dist.barrier()
    return found


def ways_into(model: nn.Module, state: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    around, copied = nn.ModuleDict({"module": model}), copy.deepcopy(model)
    below = {f"module.{name}": each for name, each in state.items()}
    return {
        "plain": lambda: model.load_state_dict(state),
        "not strict": lambda: model.load_state_dict(state, strict=False),
        "around": lambda: around.load_state_dict(below),
        "copy": lambda: copied.load_state_dict(state),
        "assigned": lambda: model.load_state_dict(state, assign=True),
        "unmarked": lambda: model.load_state_dict(without_marks(state), strict=False),
    }


@pytest.mark.parametrize("make", [*KINDS[:-1], pytest.param(with_adapters, marks=pytest.mark.soak)])
def test_a_rank_loads_its_own_share_alone(ranks: Pools, tmp_path: Path, make: Make) -> None:
    ways = ("plain", "not strict", "around", "copy", "assigned")
    own, other = ranks(RANKS).run(loaded, make, tmp_path)
    unmarked = "" if make in SCHEDULED else "ShareError"  # there each tensor says it
    assert own == {way: ["", ""] for way in ways} | {"unmarked": [unmarked] * 2}
    assert other == {way: ["", "ShareError"] for way in ways} | {"unmarked": [unmarked, "ShareError"]}


def of_replicas(rank: int, ep_size: int) -> list[str]:
    """What happens to the states of four ranks, of which several hold the same experts."""
    model = stack_of(rank, replace(CASE, double=False, world_size=4, ep_size=ep_size))
    states: list[Any] = [None] * 4
    dist.all_gather_object(states, model.state_dict())
    return [outcome(partial(model.load_state_dict, state)) for state in states]


@pytest.mark.parametrize("ep_size", [1, 2])
def test_replicas_load_the_state_of_each_other(ranks: Pools, ep_size: int) -> None:
    for rank, found in enumerate(ranks(4).run(of_replicas, ep_size)):
        assert found == ["" if (rank - other) % ep_size == 0 else "ShareError" for other in range(4)]


def moments_loaded(rank: int, make: Make, folder: Path) -> list[str]:
    """A new optimiser gets the moments of rank 0, before and after its first step; then its own."""
    model = make(rank)
    optimizer, fresh, again = (adamw(model) for _ in range(3))
    for name, parameter in model.named_parameters():
        if make is shards and ".experts." in name:
            parameter.requires_grad_(False)  # one of two kinds of shares has no moments
    stepped(model, rank, optimizer)
    file = folder / f"{make.__name__}-{rank}.pt"
    torch.save(optimizer.state_dict(), file)
    dist.barrier()
    first = torch.load(folder / f"{make.__name__}-0.pt", weights_only=True)
    found = list[str]()
    fresh.load_state_dict(first)
    before = numbers_of(model)
    found.append(outcome(partial(fresh.step)))
    assert not found[-1] or all(map(torch.equal, before, numbers_of(model)))
    found.append(outcome(partial(optimizer.load_state_dict, first)))
    again.load_state_dict(torch.load(file, weights_only=True))
    again.step()
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    assert all(group.keys() == {*optimizer.defaults, "params"} for group in again.param_groups)
    dist.barrier()
    return found


@pytest.mark.parametrize("make", KINDS)
def test_moments_are_those_of_the_same_share(ranks: Pools, tmp_path: Path, make: Make) -> None:
    assert ranks(RANKS).run(moments_loaded, make, tmp_path) == [["", ""], ["ShareError"] * 2]


def finished(later: Any) -> Any:
    return later.result()


def written(rank: int, make: Make, folder: Path) -> dict[str, str]:
    """What tools say that write a state dict as that of the whole model, most of them on rank 0 alone."""
    folder = folder / make.__name__
    model = make(rank)
    optimizer = adamw(model)
    stepped(model, rank, optimizer)
    found: dict[str, str] = {}

    def attempt(name: str, save: Callable[[], Any]) -> None:
        found[name] = outcome(save)
        dist.barrier()

    if rank == 0:
        folder.mkdir()
    attempt("safetensors", lambda: save_file(model.state_dict(), folder / f"{rank}.safetensors"))
    attempt("save_model of safetensors", lambda: save_model(model, str(folder / f"m-{rank}.safetensors")))
    states: dict[str, Callable[..., Any]] = {
        "distributed": lambda: save_distributed(model.state_dict(), checkpoint_id=folder / "1"),
        "distributed model": lambda: save_distributed({"model": model}, checkpoint_id=folder / "2"),
        "distributed state": lambda: save_distributed(
            get_model_state_dict(model), checkpoint_id=folder / "3"
        ),
        "distributed later": lambda: finished(async_save(model.state_dict(), checkpoint_id=folder / "async")),
        "distributed optimiser": lambda: save_distributed(
            get_optimizer_state_dict(model, optimizer), checkpoint_id=folder / "4"
        ),
    }
    for name, save in states.items():
        attempt(name, save)
    with as_torchrun_starts_it(rank, RANKS):
        accelerator = Accelerator(cpu=True)
        prepared = accelerator.prepare_model(model, evaluation_mode=True)
        prepared_optimizer = accelerator.prepare_optimizer(optimizer)
        stepped(prepared, rank, prepared_optimizer)
        for name, save in {
            "model": partial(accelerator.save_model, prepared),
            "state": accelerator.save_state,
        }.items():
            for safe in (True, False):
                path = str(folder / f"{name}-{safe}")
                attempt(f"accelerate, {name}, {safe}", partial(save, path, safe_serialization=safe))
        accelerator.free_memory()
    return found


@pytest.mark.parametrize("make", KINDS[:-2])
def test_no_tool_writes_a_share_as_the_whole(ranks: Pools, tmp_path: Path, make: Make) -> None:
    """Those of accelerate write on rank 0 alone, which is the one to refuse."""
    first, second = ranks(RANKS).run(written, make, tmp_path)
    assert len(first) == 11 and set(first.values()) == {"ShareError"}
    assert {name for name, error in second.items() if error != "ShareError"} == {
        name for name in first if name.startswith("accelerate")
    }
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".safetensors", ".distcp")]


@pytest.mark.parametrize("make", SCHEDULED)
def test_what_writes_scheduled_models_writes_the_whole(ranks: Pools, tmp_path: Path, make: Make) -> None:
    """safetensors, which write what one rank has, find no memory in a DTensor; moments of a rank's adapters
    belong to no whole."""
    for found in ranks(RANKS).run(written, make, tmp_path):
        errors = {name: error for name, error in found.items() if error}
        unsaid = {"distributed optimiser": "ShareError"} if make is with_adapters else {}
        safe = {"safetensors": "RuntimeError", "save_model of safetensors": "RuntimeError"}
        assert errors == safe | unsaid
    folders = {path.parent for path in tmp_path.rglob("*") if path.suffix in (".safetensors", ".distcp")}
    assert {path.name for path in folders} >= {"1", "2", "3", "async", "model-True", "state-True"}


def mixed(rank: int, make: Make) -> list[str]:
    """What optimisers of torch say that take parameters of all ranks for the same; nothing is changed."""
    model, found = make(rank), []
    averager = PeriodicModelAverager(period=1, warmup_steps=0)
    for optimizer in (
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01),
        PostLocalSGDOptimizer(adamw(model), averager),
    ):
        before = numbers_of(model)
        found.append(outcome(partial(stepped, model, rank, optimizer)))
        assert all(map(torch.equal, before, numbers_of(model)))
        model.zero_grad()
    return found


@pytest.mark.parametrize("make", KINDS[:-1])
def test_no_optimiser_mixes_shares(ranks: Pools, make: Make) -> None:
    assert ranks(RANKS).run(mixed, make) == [["ShareError"] * 2] * RANKS


def of_whole(rank: int, make: Make) -> list[str]:
    """What happens to the state of a whole model, loaded strictly and not."""
    model = make(rank)
    whole = small("mixtral") if make is of_transformers else nn.ModuleDict({"layer": of_modules(None)})
    ways = (True, False)
    return [outcome(partial(model.load_state_dict, whole.state_dict(), strict=strict)) for strict in ways]


def of_modules(exchange: Any) -> nn.Module:
    """A layer of which every expert is a module: a whole one has the names of a share, and more."""
    local = 8 // (exchange.ep_size if exchange else 1)
    experts = ModuleExperts(lambda: nn.Linear(16, 16), local)
    return penstock.MoELayer(
        gate=SoftmaxRouter(16, 8, 2), permutation=SortPermutation(8), expert=experts, exchange=exchange
    )


def modules(rank: int) -> nn.Module:
    del rank
    return nn.ModuleDict({"layer": of_modules(exchange())})


@pytest.mark.parametrize("make", [modules, of_transformers])
def test_a_whole_model_is_loaded_where_tensors_say_so(ranks: Pools, make: Make) -> None:
    for found in ranks(RANKS).run(of_whole, make):
        assert found == ["" if make is of_transformers else "ShareError"] * 2


def exported(rank: int, folder: Path) -> tuple[str, str]:
    """A model saved whole with the state that accelerate gives, and with that of rank 0 on all ranks."""
    model: Any = of_transformers(rank)
    state = [model.state_dict()]
    with as_torchrun_starts_it(rank, RANKS):
        accelerator = Accelerator(cpu=True)
        given = accelerator.get_state_dict(accelerator.prepare_model(model, evaluation_mode=True))
        first = outcome(partial(model.save_pretrained, folder, state_dict=given))
    dist.broadcast_object_list(state, 0)
    return first, outcome(partial(model.save_pretrained, folder, state_dict=state[0]))


def test_a_model_is_saved_whole_from_states_of_its_own_ranks_alone(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(RANKS).run(exported, tmp_path) == [("", "ShareError")] * RANKS
    whole = small("mixtral")
    read = type(whole).from_pretrained(tmp_path)
    assert all(map(torch.equal, whole.state_dict().values(), read.state_dict().values()))


def sharded_moments(rank: int) -> list[str]:
    """Moments of a sharded optimiser, which are whole on every rank but for those of experts."""
    case = layout_case((2, 1, 2, 1), "flowmoe", "gather")
    stack, optimizer = build(rank, case, Habits(), sharded=True)
    assert isinstance(optimizer, ShardedAdamW)
    go_on(stack, optimizer, rank, case, Habits(), range(1))
    saved = optimizer.state_dict()
    both: list[Any] = [None, None]
    dist.all_gather_object(both, saved)
    _, fresh = build(rank, case, Habits(), sharded=True)
    every = ((each, state) for each in (optimizer, fresh) for state in (both[rank], both[0]))
    return [outcome(partial(each.load_state_dict, state)) for each, state in every]


def test_a_sharded_optimiser_takes_moments_of_its_own_share(ranks: Pools) -> None:
    assert ranks(RANKS).run(sharded_moments) == [["", ""] * 2, ["", "ShareError"] * 2]


def pickled(rank: int) -> list[str]:
    """Models and parts of them that are pickled, or fail in another way than by a refusal."""
    makes: list[Make] = [session, modules, of_transformers, with_adapters]
    given: dict[str, Any] = {make.__name__: make(rank) for make in makes}
    given |= {"inside": given["of_transformers"].model, "layer": given["modules"].layer}
    return [name for name, model in given.items() if not is_refused(partial(pickle.dumps, model))]


def is_refused(function: Callable[[], Any]) -> bool:
    try:
        function()
    except TypeError as error:
        return "cannot be pickled" in str(error)
    return False


def test_a_model_that_runs_on_this_process_is_not_pickled(ranks: Pools) -> None:
    assert ranks(RANKS).run(pickled) == [[], []]


@pytest.mark.usefixtures("alone")
def test_nor_is_one_that_runs_on_one_process() -> None:
    model: Any = of_transformers(0)
    assert is_refused(partial(torch.save, model, io.BytesIO()))
    assert (
        copy.deepcopy(model).state_dict().keys()
        == model.state_dict().keys()
        == small("mixtral").state_dict().keys()
    )
