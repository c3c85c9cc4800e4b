"""Every gate, order, dispatch and kind of expert, on real ranks, against loops over tokens.

Four ranks are two nodes of two for hierarchical dispatches; two ranks are two nodes of one.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice, product
from typing import Any

import pytest

from penstock.config import ConfigError
from penstock.decision import ScheduleConfig
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.moe.config import Compression
from tests.steps import PLAIN
from tests.support.close import check_close
from tests.support.pairwise import pairwise
from tests.support.parity import Case, check_parity, merge, run_step
from tests.support.ranks import Pools

GATES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax raw": {"norm_topk_prob": False},
    "noisy": {"gate": "noisy"},
    "sigmoid": {"gate": "sigmoid"},
    "deepseek": {
        "gate": "sigmoid",
        "num_groups": 4,
        "group_top_k": 2,
        "routed_scaling_factor": 2.5,
        "expert_bias_rate": 0.01,
        "aux_loss_group": "sequence",
    },
    "cosine": {"gate": "cosine", "gate_proj_size": 5},
    "expert_choice": {"gate": "expert_choice"},
    "soft": {"gate": "soft", "slots_per_expert": 3},
}
ORDERS: dict[str, dict[str, Any]] = {
    "sort": {"order": "sort"},
    "merged": {"order": "sort", "one_copy_per_rank": True},
    "index": {"order": "index", "capacity_factor": 0.75, "min_capacity": 1},
    "einsum": {"order": "einsum", "capacity_factor": 0.75, "min_capacity": 1},
    "soft slots": {"order": "einsum"},
}
NOT_BY_TOKEN = ("expert_choice", "soft")
TO_JOIN = ("sort", "index")
"""Orders whose rows, one for each choice, one copy per node makes one of."""
ACCEPTED = [
    *product([gate for gate in GATES if gate not in NOT_BY_TOKEN], list(ORDERS)[:4]),
    ("expert_choice", "index"),
    ("expert_choice", "einsum"),
    ("soft", "soft slots"),
]
DISPATCHES = ("flat", "hierarchical_1d", "hierarchical_2d")
JOINED = "node_once"
EXPERTS = ("gelu", "swiglu", "module")
LAYOUTS: dict[str, tuple[Any, ...]] = {"world_size": (2, 4), "padding": (False, True)}


def accepted(known: dict[str, Any]) -> bool:
    """Whether the order takes the gate's choices, and the dispatch its rows; as far as they are known."""
    if known.get("dispatch") == JOINED and (known["order"] not in TO_JOIN or known["gate"] in NOT_BY_TOKEN):
        return False
    return "order" not in known or (known["gate"], known["order"]) in ACCEPTED


def case(world_size: int, gate: str, order: str, dispatch: str, experts: str, schedule: str) -> Case:
    moe = {
        "num_experts": 8,
        "top_k": 3,
        "moe_ffn_hidden_size": 5,
        "aux_loss_coeff": 0.1,
        "z_loss_coeff": 0.01,
        "dispatch": dispatch,
        "expert": "gelu" if experts == "module" else experts,
        "shared_ffn_hidden_size": 3 if experts == "swiglu" else 0,
        **GATES[gate],
        **ORDERS[order],
    }
    return Case(
        world_size=world_size,
        ep_size=None,
        schedule=ScheduleConfig(name=schedule, microbatches=2, chunks=3, all_reduce_chunk_bytes=2048),
        model=ModelConfig(
            num_layers=2 if world_size == 1 else 1,
            hidden_size=6,
            num_heads=2,
            num_key_value_heads=1,
            head_dim=4,
            seq_len=5,
            vocab_size=11,
        ),
        moe=MoEConfig(**moe),
        batch=3,
        double=True,
        module_experts=experts == "module",
        node_size=world_size // 2 if world_size > 1 else None,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("gate", "order"), ACCEPTED)
def test_alone(ranks: Pools, gate: str, order: str) -> None:
    """Every kind of expert, each with another schedule; those take turns."""
    turns = cycle(PLAIN)
    first = ACCEPTED.index((gate, order))
    for experts, schedule in zip(EXPERTS, islice(turns, first, None), strict=False):
        check_parity(ranks, case(1, gate, order, "flat", experts, schedule))


@pytest.mark.slow
@pairwise(
    accepted,
    gate=GATES,
    order=ORDERS,
    schedule=PLAIN,
    dispatch=(*DISPATCHES, JOINED),
    experts=EXPERTS,
    **LAYOUTS,
)
def test_on_several_ranks(
    ranks: Pools,
    gate: str,
    order: str,
    schedule: str,
    dispatch: str,
    experts: str,
    world_size: int,
    padding: bool,
) -> None:
    step = case(world_size, gate, order, dispatch, experts, schedule)
    check_parity(ranks, replace(step, padding=padding))


@pytest.mark.soak
@pytest.mark.parametrize(("gate", "order"), ACCEPTED)
@pytest.mark.parametrize("schedule", PLAIN)
def test_every_combination(ranks: Pools, gate: str, order: str, schedule: str) -> None:
    for dispatch, experts, world_size, padding in product((*DISPATCHES, JOINED), EXPERTS, *LAYOUTS.values()):
        if not accepted({"gate": gate, "order": order, "dispatch": dispatch}):
            continue
        step = case(world_size, gate, order, dispatch, experts, schedule)
        check_parity(ranks, replace(step, padding=padding))


@pytest.mark.parametrize(("gate", "order"), ACCEPTED)
def test_padding_alone(ranks: Pools, gate: str, order: str) -> None:
    check_parity(ranks, replace(case(1, gate, order, "flat", "gelu", "flowmoe"), padding=True))


@pytest.mark.every_value
@pytest.mark.slow
@pytest.mark.parametrize(("order", "dispatch"), [*product(["sort", "merged"], DISPATCHES), ("sort", JOINED)])
def test_a_rank_that_gets_nothing_and_one_that_gets_all(ranks: Pools, order: str, dispatch: str) -> None:
    for schedule in ("flowmoe", "penstock"):
        busy = replace(case(4, "softmax", order, dispatch, "gelu", schedule), busy_experts=(6, 7))
        check_parity(ranks, replace(busy, moe=replace(busy.moe, top_k=2)))


@pytest.mark.every_value
@pytest.mark.slow
@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("comm_dtype", ["bfloat16", "int8"])
def test_compression_is_the_same_on_any_layout(ranks: Pools, comm_dtype: Compression, dispatch: str) -> None:
    """A row is rounded by itself, there and back: four ranks and one round alike, and not at all is else."""
    results = []
    choices: list[tuple[Compression | None, int]] = [(comm_dtype, 4), (comm_dtype, 1), (None, 1)]
    for chosen, world_size in choices:
        base = case(world_size, "softmax", "sort", dispatch if world_size > 1 else "flat", "gelu", "penstock")
        moe = replace(base.moe, comm_dtype=chosen)
        model = replace(base.model, num_layers=1)
        step = replace(base, model=model, moe=moe, double=False, batch=12 // world_size)
        results.append(merge(ranks(world_size).run(run_step, step)))
    four, one, exact = results
    assert abs(four.loss - one.loss) <= 1e-5 * one.loss
    for name, gradient in one.gradients.items():
        check_close(four.gradients[name], gradient, 2e-3, name)  # rounding may fall to either side of a tie
    name = "model.layers.0.mlp.experts.w_up.0"
    distance = (one.gradients[name] - exact.gradients[name]).norm() / exact.gradients[name].norm()
    assert 1e-4 < distance < 5e-2


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"gate": "expert_choice", "order": "sort", "capacity_factor": 1.0}, "every slot is filled"),
        ({"gate": "soft", "order": "sort"}, "no token has a row of its own"),
        ({"gate": "soft", "order": "index"}, "it has no index"),
        ({"gate": "soft", "capacity_factor": 1.0}, "slots_per_expert says"),
        ({"gate": "expert_choice"}, "capacity_factor says how many"),
        ({"order": "sort", "capacity_factor": 1.0}, "would have no effect"),
        ({"order": "index"}, "set a capacity_factor"),
        ({"order": "einsum"}, "set a capacity_factor"),
        ({"one_copy_per_rank": True, "capacity_factor": 1.0}, "slots belong to experts"),
        ({"one_copy_per_rank": True, "comm_dtype": "int8"}, "would be rounded"),
        ({"dispatch": JOINED, "gate": "soft"}, "whose tokens do not choose"),
        ({"dispatch": JOINED, "order": "einsum", "capacity_factor": 1.0}, "a slot for every choice"),
        ({"dispatch": JOINED, "one_copy_per_rank": True}, "the same by rank"),
        ({"dispatch": JOINED, "comm_dtype": "int8"}, "rounds what is beside it"),
        ({"gate": "soft", "expert_bias_rate": 0.1}, "how tokens choose"),
        ({"gate": "expert_choice", "capacity_factor": 1.0, "num_groups": 2, "group_top_k": 1}, "how tokens"),
        ({"num_groups": 3, "group_top_k": 1}, "must divide num_experts"),
        ({"num_groups": 4}, "belong together"),
        ({"num_groups": 8, "group_top_k": 1}, "need 2 groups"),
    ],
)
def test_what_does_not_fit_together_says_why(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        MoEConfig(**settings)
    assert caught.value.hint
