"""Training in which samples and experts move follows the losses of training in which nothing moves."""

from __future__ import annotations

from itertools import combinations
from typing import Any, NamedTuple

import pytest
import torch

from penstock.config import load
from penstock.runtime.features.expert_replicas.manager import ExpertReplicas
from penstock.topology import Layout
from penstock.train.assemble import build_machinery, build_optimizer, build_stack
from penstock.train.batches import Batch
from penstock.train.config import RunConfig
from penstock.train.measuring import evaluate
from penstock.train.optimizer import build_update
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow

SETTINGS = [
    "model.num_layers=3",
    "model.hidden_size=16",
    "model.num_heads=2",
    "model.seq_len=12",
    "model.vocab_size=256",
    "moe.num_experts=8",
    "moe.top_k=4",
    "moe.moe_ffn_hidden_size=24",
    "data.batch_per_device=6",
    "schedule.name=flowmoe",
    "schedule.microbatches=2",
    "schedule.all_reduce_chunk_bytes=2048",
    "cluster.flops_per_s=1e7",  # so slow that replicas pay
    "optimizer.lr=1e-2",
]
BOTH = ["placement.samples=netmoe", "placement.experts=planned", "placement.replica_slots=2"]
EVERYTHING = [*BOTH, "optimizer.zero_stage=2", "plan.recompute=blocks"]
CONTROLS = [
    *([f"schedule.microbatches={n}"] for n in (1, 3, 6)),
    ["schedule.name=penstock", "schedule.chunks=2"],
    ["schedule.name=lina"],
]
"""Other orders of the same sums."""
LONG_S = 900.0
EVALUATED, HELD_OUT = 6, 10_000
"""After every so many steps the loss of this batch is asked for."""
FLAVOURS = 4
"""Samples come in so many languages, so that they have favourite experts."""


class Curve(NamedTuple):
    """losses: of every step, and of evaluations between. hosted, moved: in how many steps replicas were
    hosted, and samples away."""

    losses: list[float]
    hosted: int
    moved: int


def batch(config: RunConfig, layout: Layout, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Text in which the next byte follows from the one before, by a rule of the sample's language."""
    samples, length = config.data.batch_per_device, config.model.seq_len
    ids_B = step * samples * layout.dp_size + layout.dp_rank * samples + torch.arange(samples)
    generator = torch.Generator().manual_seed(step * layout.dp_size + layout.dp_rank)
    flavour_B = torch.randint(FLAVOURS, (samples, 1), generator=generator)
    start_B = torch.randint(64, (samples, 1), generator=generator)
    text_BL = flavour_B * 64 + (start_B + (flavour_B + 1) * torch.arange(length + 1)) % 64
    return text_BL[:, :-1].contiguous(), text_BL[:, 1:].contiguous(), ids_B


def curve(rank: int, world_size: int, overrides: list[str], steps: int, dtype: torch.dtype) -> Curve:
    """Train on this rank."""
    config = load(RunConfig, None, [*SETTINGS, *overrides]).resolved(world_size)
    layout = Layout.build(
        config.parallel, world_size, rank, config.moe.num_experts, node_size=world_size // 2
    )
    stack = build_stack(
        config, build_machinery(layout, torch.device("cpu"), config.parallel, "float32"), dtype
    )
    update = build_update(stack, build_optimizer(stack, config.optimizer), config.optimizer)
    away, losses, hosted, moved = _Away(stack), [], 0, 0
    for step in range(steps):
        tokens_BL, labels_BL, ids_B = batch(config, layout, step)
        hosted += any(h is not None and not h.is_empty for h in stack.of(ExpertReplicas).replications)
        loss = stack(tokens_BL, labels_BL, ids_B)
        update.backward(loss, step + 1)
        moved += away.saw(ids_B)
        update.apply(accepted=True)
        losses.append(loss.item())
        if (step + 1) % EVALUATED == 0:
            tokens_BL, labels_BL, ids_B = batch(config, layout, HELD_OUT)
            held_out = Batch(tokens_BL, labels_BL, ids_B, largest_batch=len(ids_B))
            losses.append(evaluate(stack, [held_out]).loss)
            away.saw(ids_B)
    stack.close()
    return Curve(losses, hosted, moved)


class _Away:
    """Notes whose samples the last layer's gate has seen."""

    def __init__(self, stack: Any) -> None:
        self._seen: set[int] = set()
        stack.moe_layers[-1].gate.register_forward_hook(self._note)

    def saw(self, ids_B: torch.Tensor) -> bool:
        """Whether they were others than these, since the last call."""
        seen, self._seen = self._seen, set()
        return bool(seen - set(ids_B.tolist()))

    def _note(self, gate: Any, given: Any, choice: Any) -> None:
        del gate, choice
        if not given[1].clean:
            self._seen.update(given[1].keys.sample_ids_B.tolist())


def curves(rank: int, world_size: int, runs: list[list[str]], steps: int, dtype: torch.dtype) -> list[Curve]:
    return [curve(rank, world_size, overrides, steps, dtype) for overrides in runs]


def largest_difference(one: Curve, other: Curve) -> float:
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [2, 4])
def test_losses_of_two_hundred_steps_are_those_without_moves(ranks: Pools, world_size: int) -> None:
    """With both, with experts alone, whose rows are split by the loads of their own step, and with both
    beside all else that changes memory and traffic."""
    runs, steps = [[], BOTH, BOTH[1:], EVERYTHING], 200
    found = ranks(world_size).run(curves, world_size, runs, steps, torch.float64, timeout_s=LONG_S)
    still, moving, replication, everything = found[0]
    assert max(largest_difference(still, each) for each in found[0][1:]) < 1e-8
    assert moving.losses[-1] < 0.9 * moving.losses[0]
    assert (still.hosted, still.moved, replication.moved) == (0, 0, 0)
    assert min(moving.hosted, replication.hosted, everything.hosted) > steps / 2
    for number in (1, 3):
        assert sum(each[number].moved for each in found) > steps / 4  # experts learn languages soon


@pytest.mark.soak
def test_in_single_precision_losses_differ_as_they_do_when_sums_are_reordered(ranks: Pools) -> None:
    """Runs that cut the step otherwise only add in another order. A run in which something moves is no
    farther from the one in which nothing does than any two of those are from each other.

    If moving, too, only adds in another order, all runs are alike: none has a reason to be farther off.
    """
    runs = [[], BOTH, BOTH[:1], BOTH[1:], *CONTROLS]
    found = ranks(2).run(curves, 2, runs, 200, torch.float32, timeout_s=LONG_S)[0]
    still, moving, controls = found[0], found[1:4], found[4:]
    spread = max(largest_difference(*pair) for pair in combinations([still, *controls], 2))
    assert all(0 < largest_difference(still, each) <= spread for each in moving)
    assert [each.hosted > 100 or each.moved > 100 for each in found] == [False, *[True] * 3, *[False] * 5]
