"""Steps on a recorded device, and on a stand-in for a GPU: they compute what a CPU does, without a hazard,
ranks agree on the order of collectives, and the host hardly waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.runtime.features.expert_replicas.test_moving import small
from tests.support import cases
from tests.support.cases import Step, drawn, step_of
from tests.support.close import check_all_close
from tests.support.layouts import layout_case
from tests.support.pairwise import covering, each_value
from tests.support.parity import Case, own_samples, stack_of
from tests.support.ranks import Pools
from tests.support.recorded import carded_steps, plain_steps, recorded_steps
from tests.support.recording import gpu
from tests.support.recording.hazards import find_disorder, most_pending_bytes
from tests.support.replicas import RandomReplicas
from tests.support.waits import PLANS, check_waits

pytestmark = pytest.mark.slow

AXES: dict[str, Any] = {
    **cases.AXES,
    "layout": [name for name in cases.LAYOUTS if name != "one rank"],  # which sends nothing
    "degrees": ((2, None), (1, 2)),  # more chunks make more of the same
    "tie_word_embeddings": (False,),  # the stand-in makes two of one
    "planned": (False, True),
    "transport": ("direct", "staged"),
    "summation": ("native", "in_order"),
    "kernel": (False, True),
}
"""What steps on a GPU differ in besides. planned: replicas are, on a thread of the host. kernel: for groups
of rows, in float32."""
FEW_LAYOUTS = ("two ranks", "two ranks, shared", "four ranks", "edp", "tp 2, etp 2", "tp 4, etp 2")
"""Layouts with every kind of group; in the others no device is asked for anything else."""


def fits(known: Mapping[str, Any]) -> bool:
    """Whether a step can be of all this."""
    if known.get("planned") and not known.get("replicas", 2):
        return False
    if known.get("replicas") and known.get("experts") == "module":
        return False  # tensors of the stand-in cannot take the place of one another
    if known.get("replicas"):  # the reference alone has no optimiser in shares for them
        known = {axis: value for axis, value in known.items() if axis != "sharded"}
    return cases.fits(known)


def device_step(values: Mapping[str, Any], **sizes: Any) -> Step:
    """The step of a value for every axis, or the first."""
    known = {axis: known[0] for axis, known in AXES.items()} | dict(values)
    made = step_of({axis: known[axis] for axis in cases.AXES}, **sizes)
    same = {axis: known[axis] for axis in ("transport", "summation")}
    case = replace(made.case, double=not known["kernel"], **same)
    hosts = made.hosts or RandomReplicas(slots=0)
    if known["planned"]:  # they move from the second step on
        hosts = replace(hosts, steps=3, moving=small(case.holders, "least_loaded"))
    return Step(case, hosts)


def check(cards: Pools, values: Mapping[str, Any]) -> None:
    """Run steps on threads, on a recorded device, and on a stand-in for a GPU whose host may hardly wait."""
    step = device_step(values)
    case, hosts, pool = step.case, step.hosts, cards(step.case.world_size)
    assert hosts is not None
    # On a card first: autograd counts devices only once.
    carded = pool.run(carded_steps, case, hosts, values["kernel"])
    recorded = pool.run(recorded_steps, case, hosts)
    plain = pool.run(plain_steps, case, hosts)
    tolerance = 1e-9 if case.double else 1e-4
    for ours, theirs in (*zip(carded, plain, strict=True), *zip(recorded, plain, strict=True)):
        assert ours.losses == pytest.approx(theirs.losses, rel=tolerance)
        assert ours.norms == pytest.approx(theirs.norms, rel=tolerance)
        check_all_close(ours.parameters, theirs.parameters, tolerance)
        assert ours.repeats[0] == (case.bounds == "exceeded")
    for ours in recorded:
        assert {"main", "inter"} <= ours.streams
        assert [*map(str, ours.hazards)] == []
        assert len(ours.calls) > 0
    assert [*map(str, find_disorder([each.calls for each in recorded]))] == []
    for ours in carded:
        for waits, repeats in [*zip(ours.waits, ours.repeats, strict=True)][1:]:  # the first makes what lasts
            if not repeats:
                check_waits(waits, case, PLANS if hosts.moving else 0)


def named(values: Mapping[str, Any]) -> str:
    """The values that are not the first of their axis."""
    return "-".join(f"{value}" for axis, value in values.items() if value != AXES[axis][0])


@pytest.mark.few(8)
@pytest.mark.parametrize("values", [*each_value({**AXES, "layout": FEW_LAYOUTS}, fits)], ids=named)
def test_every_value(cards: Pools, values: Mapping[str, Any]) -> None:
    check(cards, values)


@pytest.mark.soak
@pytest.mark.parametrize("values", [*covering(AXES, fits)], ids=named)
def test_pairs(cards: Pools, values: Mapping[str, Any]) -> None:
    check(cards, values)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(1000))
def test_product(cards: Pools, number: int) -> None:
    check(cards, drawn(Random(number), AXES, fits))


# ---- how far the host is ahead -----------------------------------------------------------------------------


def pending_of_a_backward(rank: int, case: Case) -> int:
    with gpu.recorded() as recorder:
        stack = stack_of(rank, case)
        batch, _ = own_samples(rank, case, stack.machinery.device)
        loss = stack(*batch)
        begun = len(recorder.log)
        loss.backward()
    return most_pending_bytes(recorder.log, begun)


def test_memory_that_waits_for_the_device_does_not_grow_with_layers(ranks: Pools) -> None:
    """In backward the host needs nothing of the device, and would be done before it."""
    step = layout_case((2, 1, 2, 1), "flowmoe", "gather", capacity_factor=1.0)
    cases = [replace(step, model=replace(step.model, num_layers=layers)) for layers in (3, 6)]
    few, many = (max(ranks(2).run(pending_of_a_backward, each)) for each in cases)
    assert 0 < many <= 1.1 * few
