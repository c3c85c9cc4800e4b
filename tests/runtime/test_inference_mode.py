"""Evaluation under `torch.inference_mode`: what it allocates must serve the training steps after it."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.support.cases import ROUTINGS, hosting_case
from tests.support.close import check_close
from tests.support.parity import batch_of, stack_of
from tests.support.ranks import Pools
from tests.support.replicas import RandomReplicas, replicate_randomly, stack_with_replicas

REPLICAS_OF_ALL = RandomReplicas(slots=2, pieces=2)
STEP = replace(hosting_case(2, ROUTINGS[0], "penstock"), padding=False)


def judged_and_trained(rank: int) -> None:
    """Each of two steps follows an evaluation, of which the first makes the room for replicas."""
    replicated, plain = stack_with_replicas(rank, STEP, REPLICAS_OF_ALL), stack_of(rank, STEP)
    tokens, labels = batch_of(STEP)
    batch = tokens[STEP.mine(rank)], labels[STEP.mine(rank)]
    for turn in range(2):
        replicate_randomly(replicated, REPLICAS_OF_ALL, turn)
        with torch.inference_mode():
            judged = replicated(*batch)
        for stack in (replicated, plain):
            stack.zero_grad()
            loss = stack(*batch)
            assert abs(float(loss.detach()) - float(judged)) <= 1e-10 * float(judged)
            loss.backward()
        for name, parameter in replicated.model.named_parameters():
            wanted = plain.model.get_parameter(name).grad
            assert parameter.grad is not None and wanted is not None, name
            check_close(parameter.grad, wanted, 1e-10, name)


def test_replicas_of_an_evaluation_leave_room_for_those_of_steps(ranks: Pools) -> None:
    ranks(2).run(judged_and_trained)
