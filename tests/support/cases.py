"""Cases of one step: every axis that the engine has, which values go together, and steps of these values.

`AXES` and `fits` are the only matrix of steps on real ranks: tests/runtime/test_cases.py runs pairs of its
values, drawn cases and named ones. Four ranks are two nodes of two where they share nothing, two ranks two
nodes of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Any

from hypothesis import strategies as st

from penstock.decision import ScheduleConfig
from penstock.mesh import Group
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.schedule import SCHEDULES
from penstock.step.shape import FORM_TOKENS
from tests.support.layouts import Layout, layout_case
from tests.support.parity import Case, check_parity
from tests.support.placers import Eager, RandomHomes, Rotated
from tests.support.replicas import RandomReplicas, check_hosted

# ---- values ------------------------------------------------------------------------------------------------

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
    "sort": {"permutation": "sort"},
    "merged": {"permutation": "sort", "one_copy_per_rank": True},
    "index": {"permutation": "index", "capacity_factor": 0.75, "min_capacity": 1},
    "einsum": {"permutation": "einsum", "capacity_factor": 0.75, "min_capacity": 1},
    "soft slots": {"permutation": "einsum"},
}
NOT_BY_TOKEN = ("expert_choice", "soft")
TO_JOIN = ("sort", "index")
"""Orders whose rows, one for each choice, one copy per node makes one of."""
DROPLESS = ("sort", "merged")
ACCEPTED = [
    *product([gate for gate in GATES if gate not in NOT_BY_TOKEN], list(ORDERS)[:4]),
    ("expert_choice", "index"),
    ("expert_choice", "einsum"),
    ("soft", "soft slots"),
]
DISPATCHES = ("flat", "hierarchical_1d", "hierarchical_2d")
JOINED = "node_once"
EXPERTS = ("gelu", "swiglu", "module")
PLACERS = {"random": RandomHomes(), "rotated": Rotated(), "netmoe": Eager()}
LAYOUTS: dict[str, Layout] = {
    "one rank": (1, 1, 1, 1),
    "two ranks": (2, 1, 2, 1),
    "two ranks, shared": (2, 2, 1, 2),
    "four ranks": (4, 1, 4, 1),
    "edp": (4, 1, 2, 1),
    "only edp": (4, 1, 1, 1),
    "tp 2": (4, 2, 4, 1),
    "etp 2": (4, 1, 2, 2),
    "tp 2, etp 2": (4, 2, 2, 2),
    "tp 4": (4, 4, 4, 1),
    "tp 4, etp 2": (4, 4, 2, 2),
}
NODES = {"two ranks": 1, "four ranks": 2}
"""Ranks per node, in layouts of several nodes."""
SAMPLES: dict[str, tuple[int, ...]] = {
    "even": (),
    "few": (3, 0, 1, 5),
    "most have none": (0, 2, 0, 0),
}
"""How many samples the groups of ranks have that have samples of their own."""

AXES: dict[str, tuple[Any, ...]] = {
    "layout": tuple(LAYOUTS),
    "form": tuple(FORM_TOKENS),
    "dispatch": (*DISPATCHES, JOINED),
    "bounds": ("counted", "", "kept", "exceeded", "exceeded, known early"),
    "moves": ("nothing", *PLACERS, "random, residual apart"),
    "replicas": (0, 2),
    "gate": tuple(GATES),
    "order": tuple(ORDERS),
    "schedule": tuple(SCHEDULES),
    "experts": EXPERTS,
    "samples": tuple(SAMPLES),
    "degrees": ((3, None), (1, 2), (2, 3), (4, 2)),
    "recompute": ("none", "experts", "blocks"),
    "group": ("global", "microbatch", "sequence"),
    "tokens": ("split", "replicated"),
    "moe_layers": (None, (1,), (0,)),
    "routing": ("even", "one rank", "one expert idle"),
    "top_k": (3, 1),
    "shared_ffn_hidden_size": (0, 6),
    "padding": (False, True),
    "packed": (False, True),
    "scattered": (False, True),
    "ignore_labels": (False, True),
    "tie_word_embeddings": (False, True),
    "sharded": (False, True),
}
"""What a step on real ranks can differ in; what forbids most stands first, which makes fewer pairs.

degrees: chunks forward and backward. group: that over which balance is judged. bounds: of rows, by those of
earlier steps; "" = there are none yet. replicas: slots for them. sharded: the optimiser is.
"""


def fits(known: Mapping[str, Any]) -> bool:  # noqa: PLR0911, PLR0912 - a table of what there is not
    """Whether there is a step of these values; some may be missing."""
    layout, dispatch = known.get("layout"), known.get("dispatch", "flat")
    gate, order = known.get("gate", "softmax"), known.get("order")
    moves, replicas = known.get("moves", "nothing") != "nothing", known.get("replicas", 0) > 0
    bounded = known.get("bounds", "counted") != "counted"
    world, tp, ep, etp = LAYOUTS.get(layout or "", (4, 1, 4, 1))
    form = known.get("form", SCHEDULES[known["schedule"]].expert_form if "schedule" in known else None)
    if "schedule" in known and form is not None and not _has(known["schedule"], form):
        return False
    if layout is not None and form not in (None, "gather") and tp * etp == 1:
        return False
    if layout is not None and dispatch != "flat" and layout not in NODES:
        return False
    if order is not None and (gate, order) not in ACCEPTED:
        return False
    if dispatch == JOINED and (order not in (None, *TO_JOIN) or gate in NOT_BY_TOKEN or moves):
        return False
    split = None if layout is None or form is None else tp > 1 and FORM_TOKENS[form] == "split"
    if gate == "soft" and split:  # it needs whole samples
        return False
    if order == "merged" and (etp > 1 or (split is False and tp > 1)):  # one row for experts of one rank
        return False
    if known.get("experts") == "module" and (tp * etp > 1 or layout in ("edp", "only edp")):
        return False
    if known.get("group", "global") != "global" and gate in (*NOT_BY_TOKEN, "deepseek"):
        return False
    if moves and (order not in (None, "sort") or gate in NOT_BY_TOKEN or form not in (None, "gather")):
        return False  # which of a sample's tokens is dropped, or shares a row, depends on who else is there
    if moves and (known.get("group") == "microbatch" or bounded):
        return False
    if known.get("moves") == "rotated" and (layout in ("edp", "only edp") or etp > 1):
        return False  # it knows of one group of ranks that exchange samples
    if known.get("packed") and gate == "expert_choice":
        return False  # tokens that begin documents are alike, and which of them experts choose is open
    if replicas and (order not in (None, *DROPLESS) or gate in NOT_BY_TOKEN or bounded):
        return False
    if replicas and (form not in (None, "gather", "s1") or (form == "s1" and etp == 1) or ep == 1):
        return False
    if replicas and (known.get("packed") or known.get("sharded")):
        return False  # `check_hosted` has no documents, and an optimiser of its own
    if bounded and (order not in (None, "sort") or gate in NOT_BY_TOKEN or dispatch == JOINED or world == 1):
        return False
    return not (known.get("routing", "even") != "even" and gate == "soft")


def _has(schedule: str, form: str) -> bool:
    system = SCHEDULES[schedule]
    return "expert_form" in system.reads or form == (system.expert_form or "gather")


# ---- cases -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A step to compare with the reference. hosts: where ranks host experts as replicas; None = they do
    not."""

    case: Case
    hosts: RandomReplicas | None = None

    def check(self, pools: Any) -> None:
        """Run it on real ranks, and compare."""
        if self.hosts is None:
            check_parity(pools, self.case)
        else:
            check_hosted(pools, self.case, self.hosts)


def step_of(values: Mapping[str, Any], **sizes: Any) -> Step:
    """The step of a value for every axis, or the first. sizes: of model, layer and case, beside them."""
    known = {axis: known[0] for axis, known in AXES.items()} | dict(values)
    layout = LAYOUTS.get(known["layout"], known["layout"])
    chunks, backward = known["degrees"]
    gate, moves, bounds = known["gate"], known["moves"], known["bounds"]
    settings: dict[str, Any] = GATES[gate] | ORDERS[known["order"]]
    if known["group"] != "global":
        settings["aux_loss_group"] = known["group"]
    if bounds != "counted":
        settings["bound_factor"] = 1.25
        settings["bounds"], settings["late"] = bounds.split(",")[0], "early" not in bounds
    if moves != "nothing":
        settings["placer"] = PLACERS[moves.split(",")[0]]
        settings["carried"] = "apart" not in moves
    busy, first = dict[str, Any](), 8 // layout[2]
    if known["routing"] == "one rank":
        busy = {"busy_experts": tuple(range(first))}
    elif known["routing"] == "one expert idle":
        busy = {"idle_expert": 3}
    same = [
        "dispatch",
        "tokens",
        "moe_layers",
        "top_k",
        "shared_ffn_hidden_size",
        "padding",
        "packed",
        "scattered",
    ]
    same += ["ignore_labels", "tie_word_embeddings", "recompute", "sharded"]
    settings |= {name: known[name] for name in same} | busy
    if gate == "expert_choice":
        settings["vocab_size"] = 4096  # two samples that begin with one token would be alike, as above
    settings["expert"] = "gelu" if known["experts"] == "module" else known["experts"]
    settings["module_experts"] = known["experts"] == "module"
    settings["node_size"] = NODES.get(known["layout"])
    batches = sizes.pop("batches", None)
    case = layout_case(layout, known["schedule"], known["form"], **{**settings, **sizes})
    cut = replace(case.schedule, chunks=chunks, backward_chunks=backward)
    if batches is None:
        batches = SAMPLES[known["samples"]][: case.mesh.size(Group.DATA)]
    if known["samples"] != "even" and not any(batches):
        batches = (2,)
    slots = known["replicas"]
    return Step(
        replace(case, schedule=cut, batches=batches), RandomReplicas(slots=slots, pieces=2) if slots else None
    )


def drawn(
    random: Random, axes: Mapping[str, Sequence[Any]] = AXES, fits: Callable[[Mapping[str, Any]], bool] = fits
) -> dict[str, Any]:
    """Any values that go together."""
    known: dict[str, Any] = {}
    for axis, values in axes.items():
        known[axis] = random.choice([each for each in values if fits({**known, axis: each})])
    return known


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Any values that go together, and any sizes; numbers that do not divide on purpose."""
    known: dict[str, Any] = {}
    for axis, values in AXES.items():
        fitting = [each for each in values if each != "expert_choice" and fits({**known, axis: each})]
        known[axis] = draw(st.sampled_from(fitting))
    _, tp, _, etp = LAYOUTS[known["layout"]]
    sizes: dict[str, Any] = {
        "seq_len": draw(st.integers(1, 9)),
        "batch": draw(st.integers(1, 5)),
        "seed": draw(st.integers(0, 1000)),
    }
    if tp * etp == 1:
        heads = draw(st.sampled_from([1, 2, 4]))
        sizes |= {"num_heads": heads, "num_key_value_heads": draw(st.sampled_from([1, heads]))}
        sizes |= {"hidden_size": draw(st.integers(3, 18)), "head_dim": 2 * draw(st.integers(1, 4))}
        sizes |= {"vocab_size": 13, "moe_ffn_hidden_size": draw(st.integers(3, 20))}
    step = step_of(known, **sizes)
    cut = replace(
        step.case.schedule,
        microbatches=draw(st.integers(1, step.case.batch)),
        all_reduce_chunk_bytes=draw(st.sampled_from([512, 3000, 1 << 20])),
    )
    return replace(step, case=replace(step.case, schedule=cut))


# ---- small steps, of which tests change one thing ----------------------------------------------------------


def small_case(world_size: int, gate: str, order: str, dispatch: str, experts: str, schedule: str) -> Case:
    """A step of few numbers, with one MoE layer on several ranks."""
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


MOVING_GATES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "noisy": {"gate": "noisy"},
    "raw weights": {"norm_topk_prob": False, "routed_scaling_factor": 2.5},
    "first choice": {"top_k": 1},
    "loss-free": {"gate": "sigmoid", "expert_bias_rate": 0.01, "aux_loss_group": "sequence"},
}


def moving_case(
    world_size: int, schedule: str, gate: str = "softmax", dispatch: str = "flat", **own: Any
) -> Case:
    """Three layers, of which the second is dense, with shared experts. own: fields of the case."""
    moe: dict[str, Any] = {"num_experts": 8, "top_k": 3, "moe_ffn_hidden_size": 5}
    moe |= {
        "shared_ffn_hidden_size": 3,
        "aux_loss_coeff": 0.1,
        "z_loss_coeff": 0.01,
        "dispatch": dispatch,
        **MOVING_GATES[gate],
    }
    cut: dict[str, Any] = {"microbatches": 2, "chunks": 2, "backward_chunks": 3}
    sizes: dict[str, Any] = {"num_layers": 3, "hidden_size": 6, "seq_len": 5}
    sizes |= {"num_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    return Case(
        world_size=world_size,
        ep_size=own.pop("ep_size", None),
        schedule=ScheduleConfig(name=schedule, all_reduce_chunk_bytes=2048, **cut),
        model=ModelConfig(**sizes, vocab_size=11, moe_layers=(0, 2)),
        moe=MoEConfig(**moe),
        batch=own.pop("batch", 5),
        double=True,
        node_size=own.pop("node_size", world_size // 2),
        placer=own.pop("placer", RandomHomes()),
        **own,
    )


ROUTINGS = [("softmax raw", "sort"), ("noisy", "sort"), ("sigmoid", "merged"), ("deepseek", "merged")]
"""Gates whose choices tokens make, and the orders without fixed slots."""


def hosting_case(
    world_size: int, routing: tuple[str, str], schedule: str, dispatch: str = "flat", experts: str = "swiglu"
) -> Case:
    """Two MoE layers, with everything cut that can be cut."""
    step = small_case(world_size, *routing, dispatch, experts, schedule)
    return replace(step, model=replace(step.model, num_layers=2))
