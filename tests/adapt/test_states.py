"""State dicts of scheduled models and of their optimisers, by whatever tool they are saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.tensor import DTensor

import penstock
from penstock.adapt.scheduled import stack_of
from penstock.partial_state import ShareError
from penstock.step.shape import Updating
from tests.support.adapted import DIVISIBLE, Batch, distance, exactly, small
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow

Layout = dict[str, Any]
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
SAVED: Layout = {"ep_size": 2}
LOADED: list[Layout] = [{"ep_size": 4}, {"ep_size": 1}, {"ep_size": 2, "tp_size": 2}]


class Training:
    """A small model and its optimiser; what is trained is the same on every layout."""

    def __init__(
        self,
        rank: int,
        layout: Layout,
        *,
        seed: int = 0,
        family: str = "qwen3_moe",
        updating: Updating | None = None,
    ) -> None:
        with exactly(torch.float64):
            whole = small(family, dtype=torch.float64, seed=seed, **DIVISIBLE)
            self.model = penstock.parallelize(whole, plan="flowmoe", updating=updating, **layout)
        groups = [{"params": list(self.model.parameters()), "weight_decay": 0.01}]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.01)
        if updating is not None:
            self.optimizer = penstock.ShardedAdamW(stack_of(self.model), groups, lr=0.01)
        tp_size = layout.get("tp_size", 1)
        groups, place = dist.get_world_size() // tp_size, rank // tp_size
        self._mine = Batch(samples=4).inputs(place * 4 // groups, (place + 1) * 4 // groups)

    def step(self) -> float:
        with exactly(torch.float64):
            loss = self.model(**self._mine).loss
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def whole(self) -> dict[str, Tensor]:
        """The weights of the whole model, on rank 0."""
        found: dict[str, Any] = get_model_state_dict(
            self.model, options=FULL
        )  # views where this rank has the whole
        return {name: each.clone() for name, each in found.items()}


def states_of(training: Training) -> tuple[dict[str, Any], dict[str, Any]]:
    return get_state_dict(training.model, training.optimizer)


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], most: float = 0.0) -> bool:
    return found.keys() == wanted.keys() and all(distance(found[n], wanted[n]) <= most for n in wanted)


def elsewhere(rank: int, folder: Path) -> list[tuple[bool, float]]:
    """What `torch.distributed.checkpoint` writes on one layout, and other layouts go on from."""
    saved = Training(rank, SAVED)
    saved.step()
    model, optimizer = states_of(saved)
    experts = [name for name, each in model.items() if isinstance(each, DTensor)]
    assert experts and all("experts" in name and len(model[name]) == 8 for name in experts)
    save_distributed({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    whole = saved.whole()
    losses = [saved.step(), saved.step()]
    after, found = saved.whole(), []
    for layout in LOADED:
        loaded = Training(rank, layout, seed=1)
        model, optimizer = states_of(loaded)
        state = {"model": model, "optimizer": optimizer}
        load_distributed(state, checkpoint_id=folder)
        set_state_dict(
            loaded.model,
            loaded.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        begins_alike = same(loaded.whole(), whole)
        differences = [abs(loaded.step() - loss) for loss in losses]
        ends_alike = same(loaded.whole(), after, 1e-9)
        found.append((begins_alike and ends_alike, max(differences)))
    return found


def test_any_layout_goes_on_from_a_distributed_checkpoint(ranks: Pools, tmp_path: Path) -> None:
    for found in ranks(4).run(elsewhere, tmp_path):
        assert [is_same for is_same, _ in found] == [True] * len(LOADED)
        assert max(difference for _, difference in found) < 1e-10


def refusal(function: Callable[[], Any]) -> str:
    try:
        function()
    except (ShareError, CheckpointException) as error:
        failures = getattr(error, "failures", {0: (error, None)})
        return ", ".join(sorted({type(each[0]).__name__ for each in failures.values()}))
    return ""


def fused(rank: int, folder: Path) -> list[str]:
    """What is said of parts of fused matrices: as `torch.distributed.checkpoint` is to write them, and as
    this rank's own state and another's are loaded."""
    training, states = Training(rank, {"ep_size": 1, "etp_size": 2}, family="mixtral"), [dict[str, Any]()] * 2
    dist.all_gather_object(states, training.model.state_dict())
    alone = {name: each for name, each in states[1 - rank].items() if "down_proj" not in name}
    return [
        refusal(partial(save_distributed, training.model.state_dict(), checkpoint_id=folder)),
        *(refusal(partial(training.model.load_state_dict, states[each])) for each in (rank, 1 - rank)),
        refusal(partial(training.model.load_state_dict, alone, strict=False)),
    ]


def test_parts_of_fused_matrices_are_written_by_no_other_tool(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(2).run(fused, tmp_path) == [["ShareError", "", "ShareError", "ShareError"]] * 2


def put_in_place(rank: int) -> list[float]:
    """How losses differ when states go on that were saved with a copy of a model, and when other parameters
    had taken the place of its own."""
    found, layout = list[float](), {"ep_size": 2}
    for exchange in (True, False):
        saved = Training(rank, layout)
        if exchange:
            saved.model.load_state_dict(saved.model.state_dict(), assign=True)
        else:
            saved.model = copy.deepcopy(saved.model)
        saved.optimizer = torch.optim.AdamW(saved.model.parameters(), lr=0.01)
        saved.step()
        states = copy.deepcopy((saved.model.state_dict(), saved.optimizer.state_dict()))
        loaded = Training(rank, layout, seed=1)
        loaded.step()  # from now on its optimiser is known
        loaded.model.load_state_dict(states[0])
        loaded.optimizer.load_state_dict(states[1])
        found += [abs(loaded.step() - saved.step()) for _ in range(2)]
    return found


def test_what_takes_the_place_of_a_part_says_which_it_is(ranks: Pools) -> None:
    for found in ranks(2).run(put_in_place):
        assert max(found) < 1e-10


def of_either_kind(rank: int) -> list[float]:
    """How losses differ when a sharded optimiser goes on with the state dict of a sharded or plain one."""
    found, after = list[float](), Updating(clips=False)
    for before in (after, None):
        saved = Training(rank, {"ep_size": 2}, updating=before)
        saved.step()
        states = copy.deepcopy((saved.model.state_dict(), saved.optimizer.state_dict()))
        loaded = Training(rank, {"ep_size": 2}, seed=1, updating=after)
        loaded.model.load_state_dict(states[0])
        loaded.optimizer.load_state_dict(states[1])
        found += [abs(loaded.step() - saved.step()) for _ in range(2)]
    return found


def test_a_sharded_optimizer_takes_a_state_dict_of_its_own_and_a_plain_one_s(ranks: Pools) -> None:
    for found in ranks(2).run(of_either_kind):
        assert max(found) < 1e-10
