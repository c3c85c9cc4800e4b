"""A small run that can be saved, for tests of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.runtime import PipelinedStack
from penstock.runtime.features.sharded_optimizer.share import MOMENTS
from penstock.sharding import Sharding
from penstock.train.assemble import build_optimizer
from penstock.train.checkpoint import Checkpoints
from tests.support.layouts import tiny_case
from tests.support.parity import Case, batch_of, logical, parts_of, stack_of
from tests.support.reference_moe import Weights

IDENTITY = {"train.seed": 0, "data.path (sha256 of the text)": "abc"}
CASE = tiny_case()


def bare(
    rank: int, case: Case, folder: Path, *, keep: int = 2, identity: Mapping[str, object] = IDENTITY
) -> Checkpoints:
    """The checkpoints of a fresh run."""
    stack = stack_of(rank, case)
    optimizer = build_optimizer(stack, case.config.optimizer)
    return Checkpoints(folder, stack, optimizer, keep=keep, identity=identity)


def train(run: Checkpoints, rank: int, case: Case, steps: int) -> list[float]:
    """Losses of so many steps, always of the same batch."""
    tokens, labels = batch_of(case)
    mine = case.mine(rank)
    losses = []
    for _ in range(steps):
        run.optimizer.zero_grad()
        loss = run.stack(tokens[mine], labels[mine])
        loss.backward()
        run.optimizer.step()
        losses.append(loss.item())
    return losses


def trained(rank: int, case: Case, folder: Path, **settings: Any) -> Checkpoints:
    run = bare(rank, case, folder, **settings)
    train(run, rank, case, 2)
    return run


def state_of(run: Checkpoints) -> Weights:
    """Parameters and optimiser state by logical name. All ranks call it: states may be in shares."""
    stack: PipelinedStack = run.stack
    saved = run.optimizer.state_dict()
    trained = [p for group in run.optimizer.param_groups for p in group["params"]]
    states = {p: saved["state"][number] for number, p in enumerate(trained)}
    named = dict(stack.model.named_parameters())
    found = {f"model.{n}": t for n, t in logical(stack, {n: p.detach() for n, p in named.items()}).items()}
    for moment in MOMENTS:
        moments = {name: states[p][moment] for name, p in named.items()}
        found |= {f"{moment}.{name}": tensor for name, tensor in logical(stack, moments).items()}
    found |= {f"step.{name}": states[p]["step"] for name, p in named.items()}
    return {name: tensor.clone() for name, tensor in found.items()}


def parts_in(run: Checkpoints) -> dict[str, Sharding]:
    """Which of the tensors in `state_of` are parts of larger ones."""
    found = parts_of(run.stack).items()
    return {f"{kind}.{name}": cut for kind in ("model", *MOMENTS) for name, cut in found}


def check_equal(ours: Weights, theirs: Weights) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def saved_by(rank: int, case: Case, folder: Path) -> Weights:
    run = trained(rank, case, folder)
    run.save(2)
    return state_of(run)


def loaded_by(rank: int, case: Case, path: Path) -> Weights:
    run = bare(rank, replace(case, seed=5), path.parent)
    assert run.load(path) == 2
    return state_of(run)
