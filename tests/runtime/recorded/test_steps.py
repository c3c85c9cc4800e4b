"""Steps on a recorded device: all schedules and options compute what a CPU does, without a hazard, and ranks
agree on the order of collectives; on a stand-in for a GPU the host hardly waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import pytest

from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.runtime.recorded.hazards import find_disorder
from penstock.schedule import SCHEDULES
from penstock.step.shape import Recompute
from penstock.topology.groups import TransportName
from tests.runtime.test_moving import small
from tests.support.layouts import engines, schedule_of
from tests.support.pairwise import covering, each_value
from tests.support.parity import Case
from tests.support.placers import RandomHomes
from tests.support.ranks import Pools
from tests.support.recorded import carded_steps, plain_steps, recorded_steps
from tests.support.replicas import RandomReplicas
from tests.support.waits import PLANS, check_waits

LAYOUTS: dict[str, dict[str, Any]] = {
    "two nodes of one": {"world_size": 2, "node_size": 1},
    "two nodes of two": {"world_size": 4, "node_size": 2},
    "replicas": {"world_size": 4, "ep_size": 2, "node_size": 4},
    "tensor parallel": {"world_size": 4, "tp_size": 2, "ep_size": 4, "node_size": 2},
    "expert shards": {"world_size": 4, "tp_size": 2, "ep_size": 2, "etp_size": 2, "node_size": 2},
}
BOUNDS: dict[str, Any] = {"bounded": "", "exceeded": "exceeded"}
"""Sizes that steps know from earlier ones: the first step has none, or too few rows."""
SHARED = ("tensor parallel", "expert shards")
MOVES = ("nothing", "samples", "experts", "both")
AXES: dict[str, Any] = {
    "schedule": tuple(SCHEDULES),
    "dispatch": ("flat", "hierarchical_2d", "node_once"),
    "layout": [name for name in LAYOUTS if name != "tensor parallel"],  # shards are with it here
    "moves": MOVES,
    "sharded": (False, True),
    "recompute": ("none", "blocks", "experts"),
    "sizes": ("counted", "slots", "bounded", "exceeded"),
    "routing": ("even", "one rank"),
    "samples": ("even", "none on the last"),
    "transport": ("direct", "staged"),
}


def fits(known: Mapping[str, Any]) -> bool:
    """Whether a step can be of all this."""
    layout, dispatch = known.get("layout"), known.get("dispatch", "flat")
    moves, sizes = known.get("moves", "nothing"), known.get("sizes", "counted")
    form = SCHEDULES[known.get("schedule", "penstock")].expert_form or "gather"
    if layout is not None and form != "gather" and layout not in SHARED:
        return False
    if (moves in ("samples", "both") and form != "gather") or (
        moves == "experts" and form in ("baseline", "s2")
    ):
        return False
    if layout is not None and dispatch != "flat" and layout != "two nodes of two":
        return False
    if sizes != "counted" and moves != "nothing":
        return False
    if sizes == "slots" and known.get("samples", "even") != "even":
        return False
    return dispatch != "node_once" or (sizes == "counted" and moves in ("nothing", "experts"))


def case_of(
    schedule: str,
    dispatch: str,
    layout: str,
    moves: str,
    sharded: bool,
    recompute: Recompute,
    sizes: str,
    routing: str,
    samples: str,
    transport: TransportName,
) -> Case:
    """A small step with two MoE layers, cut in all ways.

    sizes: of the rows of experts, see `BOUNDS`. routing: which ranks get rows. samples: which have some.
    """
    form = next(form for name, form in engines() if name == schedule)
    ranks = LAYOUTS[layout]
    groups = ranks["world_size"] // ranks.get("tp_size", 1)
    return Case(
        **{"ep_size": None, **ranks},
        schedule=replace(schedule_of(schedule, form), chunks=2),
        model=ModelConfig(num_layers=2, hidden_size=16, num_heads=4, seq_len=6, vocab_size=12),
        moe=MoEConfig(
            num_experts=8,
            top_k=2,
            moe_ffn_hidden_size=16,
            expert="swiglu",
            aux_loss_coeff=0.05,
            dispatch=dispatch,
            capacity_factor=1.0 if sizes == "slots" else None,
            bound_factor=1.5 if sizes in BOUNDS else None,
            shared_ffn_hidden_size=8,
        ),
        batch=4,
        batches=() if samples == "even" else (*[4] * (groups - 1), 0),
        placer=RandomHomes() if moves in ("samples", "both") else None,
        sharded=sharded,
        recompute=recompute,
        busy_experts=(0, 1) if routing == "one rank" else (),
        transport=transport,
        bounds=BOUNDS.get(sizes, ""),
    )


def replicas_of(case: Case, moves: str) -> RandomReplicas:
    """Steps in which the experts of a case move or stay."""
    if moves in ("experts", "both"):
        return RandomReplicas(slots=2, moving=small(case.holders, "least_loaded"))
    return RandomReplicas(slots=0)


def check(cards: Pools, values: Mapping[str, Any]) -> None:
    """Run steps on threads, on a recorded device, and on a stand-in for a GPU whose host may hardly wait."""
    case = case_of(**values)
    hosts = replicas_of(case, values["moves"])
    hosts = replace(hosts, steps=3 if hosts.moving else 2)  # replicas move from the second step on
    pool = cards(case.world_size)
    carded = pool.run(carded_steps, case, hosts)  # on a card first: autograd counts devices only once
    recorded = pool.run(recorded_steps, case, hosts)
    plain = pool.run(plain_steps, case, hosts)
    for ours, theirs in (*zip(carded, plain, strict=True), *zip(recorded, plain, strict=True)):
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
        assert ours.norms == pytest.approx(theirs.norms, rel=1e-4)
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
    return "-".join(map(str, values.values()))


@pytest.mark.slow
@pytest.mark.parametrize("values", [*each_value(AXES, fits)], ids=named)
def test_every_option(cards: Pools, values: Mapping[str, Any]) -> None:
    check(cards, values)


@pytest.mark.soak
@pytest.mark.parametrize("values", [*covering(AXES, fits)], ids=named)
def test_pairs_of_options(cards: Pools, values: Mapping[str, Any]) -> None:
    check(cards, values)


def everything() -> Iterator[dict[str, Any]]:
    """All that can be combined, with one routing, samples and transport and the others in turn."""
    turning = ("routing", "samples", "transport")
    axes = {**AXES, "layout": LAYOUTS, **dict.fromkeys(turning, (None,))}
    each = [dict(zip(turning, values, strict=True)) for values in product(*(AXES[axis] for axis in turning))]
    turns = cycle((*each, *each[::-1]))
    for values in product(*axes.values()):
        case = dict(zip(axes, values, strict=True))
        if fits({**case, "samples": "even"}):
            turned = {**case, **next(turns)}
            yield turned if fits(turned) else {**turned, "samples": "even"}


@pytest.mark.soak
@pytest.mark.parametrize("values", [*everything()], ids=named)
def test_all_options(cards: Pools, values: Mapping[str, Any]) -> None:
    check(cards, values)
