"""Ranks must be asked for the same loss, and those that share attention for the same samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from penstock.moe.routers import MICROBATCH, SEQUENCE, GlobalBalance
from penstock.runtime import PipelinedStack
from tests.support.layouts import tiny_case
from tests.support.parity import Case, batch_of, own_batch, stack_of
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow
CASE = tiny_case(4, num_layers=1, vocab_size=12, moe_ffn_hidden_size=6, tp_size=2, ep_size=2, batch=3)


def stepped(rank: int, case: Case, what: str | None, only: int) -> None:
    """A step in which rank `only` has something of its own."""
    stack, mine = stack_of(rank, case), case.mine(rank)
    tokens, labels = (each[mine].clone() for each in batch_of(case))
    given = {
        "tokens": tokens,
        "labels": labels,
        "ids": torch.arange(len(tokens)) + mine.start,
        "valid": torch.ones_like(tokens, dtype=torch.bool),
    }
    if rank == only and what == "order":
        given |= {"tokens": tokens.flip(0), "labels": labels.flip(0)}
    elif rank == only and what is not None:
        changed = given[what].clone()
        changed.view(-1)[-1] = 0 if what == "valid" else int(changed.view(-1)[-1]) + 1
        given[what] = changed % case.model.vocab_size if what in ("tokens", "labels") else changed
    stack(given["tokens"], given["labels"], given["ids"], given["valid"]).backward()


@pytest.mark.parametrize("what", ["tokens", "labels", "ids", "valid", "order"])
def test_what_one_rank_has_for_itself_is_told_on_all(ranks: Pools, what: str) -> None:
    for text in ranks(4).told(ValueError, stepped, CASE, what, 3):
        assert "(tp_size = 2) were given different samples" in text


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_groups_may_have_different_samples(ranks: Pools, tp_size: int) -> None:
    model = replace(CASE.model, num_heads=4)
    ranks(4).run(stepped, replace(CASE, tp_size=tp_size, model=model), None, 0)


TERMS: dict[str, Callable[[PipelinedStack], None]] = {
    "balance": lambda stack: stack.minimise(replace(stack.moe, aux_loss_coeff=0.7), stack.balance),
    "z": lambda stack: stack.minimise(replace(stack.moe, z_loss_coeff=0.7), stack.balance),
    "divisor": lambda stack: stack.minimise(stack.moe, stack.balance, 7.0),
    "group": lambda stack: stack.minimise(stack.moe, SEQUENCE),
    "whole": lambda stack: stack.minimise(stack.moe, GlobalBalance()),
}
"""What of its loss a rank may be told otherwise than others."""


def asked_otherwise(rank: int, case: Case) -> list[str]:
    """The errors of steps in which rank 1 minimises something else than others do, and of one of them all."""
    stack, said = stack_of(rank, case), []
    moe, balance = stack.moe, MICROBATCH
    tokens, labels = own_batch(rank, case)
    for change in (*TERMS.values(), lambda _: None):
        stack.minimise(moe, balance)
        if rank == 1:
            change(stack)
        try:
            stack(tokens, labels).backward()
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("")
    return said


def test_ranks_are_asked_for_one_loss(ranks: Pools) -> None:
    first, second = ranks(2).run(asked_otherwise, replace(CASE, world_size=2, tp_size=1))
    assert first == second
    assert ["different losses" in text for text in first] == [True] * len(TERMS) + [False]
