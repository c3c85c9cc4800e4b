"""Scheduled models of all families against the same models in transformers, on one process and on several."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout

import penstock
from penstock.adapt import FAMILIES
from penstock.adapt.scheduled import engine_of, stack_of
from penstock.decision import Decision
from penstock.step.shape import Updating
from tests.support.adapted import (
    DIVISIBLE,
    MODELS,
    Batch,
    DrawnFromScores,
    choices,
    distance,
    exactly,
    grads_of,
    part_of,
    small,
    without_labels,
)
from tests.support.pages import EXTENDING, blocks, run_block
from tests.support.ranks import Pools
from tests.support.replicas import RandomReplicas, replicate_randomly

LIMITS = {torch.float32: 1e-5, torch.float64: 1e-10}
RANDOM = "phimoe"
"""Draws experts by chance in training, with numbers from one generator for all tokens of a layer; here with
numbers that a token's scores say."""

SHARED = [name for name, family in FAMILIES.items() if family.attention is not None]
"""Families whose attention ranks can share."""

FEW = ["qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe"]
ALONE = sorted({*FEW, *FAMILIES.keys() - {*SHARED}})
"""Families whose attention ranks cannot share, and a few others."""

OWN = "granitemoeshared"
"""The family that the documentation describes."""


def clear_seed(family: str, given: Any, **changes: Any) -> int:
    """A seed of weights with which rounding to float32 cannot decide which experts a token chooses."""
    for seed in range(9):
        rough, model = (
            choices(small(family, seed=seed, **changes), given),
            small(family, seed=seed, dtype=torch.float64, **changes),
        )
        with exactly(torch.float64):
            fine = choices(model, given)
        if all(map(torch.equal, rough, fine)):
            return seed
    raise AssertionError(f"{family}: choices are close with all seeds")


def agreement(
    rank: int,
    world: int,
    family: str,
    plan: str | Decision,
    dtype: torch.dtype,
    *,
    again: bool = False,
    bound_factor: float | None = None,
    tp_size: int = 1,
    ranks_per_node: int | None = None,
    sharded: bool = False,
    ep_size: int | None = None,
    etp_size: int = 1,
    mesh: Any = None,
    **changes: Any,
) -> dict[str, float]:
    """Relative distances of losses, all gradients, their norm, parameters and logits after a step of AdamW,
    on this rank.

    again: layers are computed again in backward. bound_factor: of rows, from passes before. tp_size: ranks
    that share attention and have the same samples. sharded: each rank updates a share of parameters. ep_size:
    None = all ranks. etp_size: ranks that share every expert. mesh: says these sizes in their place. changes:
    of the configuration.
    """
    ep_size = ep_size or world // etp_size
    batch = Batch(padded=True)
    everything = batch.inputs()
    groups, place = world // tp_size, rank // tp_size
    sizes = [batch.samples - groups + 1, *[1] * (groups - 1)]  # ranks have different numbers of samples
    first = sum(sizes[:place])
    mine = batch.inputs(first, first + sizes[place])
    changes |= DIVISIBLE if tp_size > 1 else {}
    exact = dtype == torch.float64
    seed = 0 if exact else clear_seed(family, without_labels(everything), **changes)
    found: dict[str, float] = {}
    with exactly(dtype), DrawnFromScores() if family == RANDOM else nullcontext():
        wanted, model = (small(family, seed=seed, dtype=dtype, **changes) for _ in range(2))
        options = {"output_router_logits": True} if hasattr(wanted, "router_aux_loss_coef") else {}
        shared = {"ep_size": ep_size, "tp_size": tp_size, "etp_size": etp_size}
        penstock.parallelize(
            model,
            **(shared if mesh is None else {"mesh": mesh}),
            plan=plan,
            ranks_per_node=ranks_per_node,
            bound_factor=bound_factor,
            updating=Updating(clips=True) if sharded else None,
        )
        optimizer = sharded_adamw(model) if sharded else None
        if isinstance(plan, Decision) and plan.num_replica_slots:
            replicate_randomly(engine_of(model).stack, RandomReplicas(slots=plan.num_replica_slots), step=0)
        if bound_factor is not None:  # training and evaluation have bounds of their own
            for trains in (True, False):
                with torch.set_grad_enabled(trains):
                    model(**mine)
        if again:
            model.activation_checkpointing_enable()
        theirs, ours = wanted(**everything, **options), model(**mine, **options)
        theirs.loss.backward()
        ours.loss.backward()
        grads, all_grads = {} if sharded else grads_of(model), grads_of(wanted)
        assert sharded or grads.keys() == all_grads.keys()
        trained = {name: p for name, p in model.named_parameters() if name in all_grads}
        for name in ("loss", "aux_loss") if options else ("loss",):
            found[name] = distance(ours[name].detach().double(), theirs[name].detach().double())
        for name, p in trained.items() if not sharded else ():
            found[name] = distance(grads[name], part_of(p, all_grads[name], rank // etp_size % ep_size))
        norm = penstock.clip_grad_norm_(model, 0.5) if optimizer is None else stepped(optimizer)
        found["norm"] = distance(norm, torch.nn.utils.clip_grad_norm_(wanted.parameters(), 0.5).double())
        for each in (wanted, model) if optimizer is None else (wanted,):
            torch.optim.AdamW(each.parameters(), lr=1e-4).step()
        whole = dict(wanted.named_parameters())
        found |= {
            f"{name} after AdamW": distance(
                p.detach(), part_of(p, whole[name].detach(), rank // etp_size % ep_size)
            )
            for name, p in trained.items()
        }
        with torch.no_grad():
            logits_BLV = wanted.eval()(**without_labels(everything)).logits[first : first + sizes[place]]
            seen_BL = mine["attention_mask"].bool()
            ours_BLV = model.eval()(**without_labels(mine)).logits
        found["logits"] = distance(ours_BLV[seen_BL], logits_BLV[seen_BL])
    return found


def sharded_adamw(model: Any) -> penstock.ShardedAdamW:
    """As torch's AdamW with its usual settings, after clipping."""
    groups = [{"params": list(model.parameters()), "weight_decay": 0.01}]
    return penstock.ShardedAdamW(stack_of(model), groups, lr=1e-4, max_norm=0.5)


def stepped(optimizer: penstock.ShardedAdamW) -> Tensor:
    """The norm of the gradients by which parameters were updated; steps are counted in float32."""
    with torch._C.DisableTorchFunction():
        optimizer.step()
    return optimizer.norm


def check_agreement(family: str) -> None:
    found = agreement(0, 1, family, "flowmoe", torch.float64)
    assert max(found.values()) < LIMITS[torch.float64], found


def test_every_family_has_a_model_here() -> None:
    assert MODELS.keys() == FAMILIES.keys()


@pytest.mark.slow
def test_the_family_that_the_documentation_describes(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: family for name, family in FAMILIES.items() if name != OWN}
    monkeypatch.setattr("penstock.families.known.FAMILIES", known)
    monkeypatch.setattr("penstock.adapt.FAMILIES", known)
    (code,) = blocks(EXTENDING, "A family of models")
    assert run_block(code)["granite"] is known[OWN]
    check_agreement(OWN)


@pytest.mark.slow
def test_an_unknown_family_is_taken_if_its_pieces_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: each for name, each in FAMILIES.items() if name not in ("olmoe", "granitemoe")}
    monkeypatch.setattr("penstock.families.known.FAMILIES", few)
    check_agreement("olmoe")
    penstock.parallelize(small("olmoe", attention_dropout=0.1))
    model = small("olmoe")
    model.model.layers[1].mlp.register_forward_hook(lambda block, _, out: dropout(out, 0.1, block.training))
    with pytest.raises(ValueError, match="computes something else"):
        penstock.parallelize(model)
    model = small("granitemoe")
    names = set(dict(model.named_modules()))
    with pytest.raises(
        ValueError, match=r"no family .* computes something else than whole: the output of layer 0"
    ):
        penstock.parallelize(model)
    assert set(dict(model.named_modules())) == names and not model.model.layers[0]._forward_hooks


@pytest.mark.slow
def test_a_plan_of_expert_parallelism_says_where_experts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own, or one that is given, also for a family that is not known."""
    few = {name: each for name, each in FAMILIES.items() if name != "olmoe"}
    monkeypatch.setattr("penstock.families.known.FAMILIES", few)
    own = {"layers.*.mlp.experts": "ep_dispatch_experts", "layers.*.mlp.experts.down_proj": "grouped_gemm"}
    for family in ("olmoe", "qwen3_moe"):
        assert penstock.parallelize(small(family), plan="flowmoe", ep_plan=own) is not None
    with pytest.raises(ValueError, match="no module of it holds experts"):
        penstock.parallelize(small("olmoe"), ep_plan={"layers.*.moe.experts": "ep_dispatch_experts"})
    for plan, words in (
        (
            {"layers.*.mlp": "ep_dispatch_experts"},
            r"names model\.layers\.0\.mlp, .* the experts are .*",
        ),
        ({"layers.*.mlp.gate": "ep_router"}, r"ep_plan = .layers.*ep_router.: only modules of experts"),
        ({"layers.*.mlp.experts.down_proj": "grouped_gemm"}, "names no module of experts"),
    ):
        with pytest.raises(penstock.ConfigError, match=words):
            penstock.parallelize(small("qwen3_moe"), ep_plan=plan)


def test_a_family_without_a_balance_loss_gets_none() -> None:
    """Llama 4 has a coefficient in its configuration, and nothing that it weighs."""
    wanted, model = (small("llama4_text", router_aux_loss_coef=10.0) for _ in range(2))
    penstock.parallelize(model)
    given = {**Batch().inputs(), "output_router_logits": True}
    found = model(**given)
    assert found.loss.item() == pytest.approx(wanted(**given).loss.item(), rel=1e-5)
    assert found.aux_loss is None


Given = tuple[str, dict[str, Any]]
"""A family, and what of a step is not usual: arguments of `agreement`."""


def agreements(rank: int, world: int, cases: list[Given]) -> dict[str, float]:
    """The largest distance of every case, as a share of what is allowed."""
    found = {}
    for family, settings in cases:
        given = {"plan": "penstock", "dtype": torch.float64, **settings}
        distances = agreement(rank, world, family, **given)
        found[f"{family} {settings}: {max(distances, key=distances.__getitem__)}"] = (
            max(distances.values()) / LIMITS[given["dtype"]]
        )
    return found


def each_of(families: Iterable[str], **settings: Any) -> list[Given]:
    return [(family, settings) for family in families]


def of_plans(plans: Iterable[tuple[str, Decision]], tp_size: int = 1) -> list[Given]:
    """On four ranks, two in a node."""
    return [(family, {"plan": plan, "tp_size": tp_size, "ranks_per_node": 2}) for family, plan in plans]


def steps_of(world: int, tp_size: int, families: Iterable[str], rounded: Collection[str]) -> list[Given]:
    """In float64, and in float32 those of `rounded`: what differs by family is the same in both."""
    usual: dict[str, Any] = {"plan": "penstock" if world == 2 else "flowmoe", "tp_size": tp_size}
    families = sorted(families)
    narrow = [family for family in families if family in rounded]
    return each_of(families, **usual) + each_of(narrow, **usual, dtype=torch.float32)


WAYS = [
    ("qwen3_moe", Decision(schedule="flowmoe", microbatches=2, dispatch="node_once")),
    ("gpt_oss", Decision(schedule="flowmoe", microbatches=2, dispatch="hierarchical_2d")),
    ("qwen2_moe", Decision(schedule="penstock", microbatches=2, experts="planned", replica_slots=2)),
    ("deepseek_v3", Decision(schedule="penstock", chunks=2, dispatch="node_once", recompute="blocks")),
    ("olmoe", Decision(schedule="penstock", dispatch="hierarchical_1d", experts="planned")),
    ("gpt_oss", Decision(schedule="penstock", chunks=2, experts="shadowing")),
]
OF_SHARED = [
    ("deepseek_v3", Decision(schedule="penstock", chunks=2, expert_form="s2")),
    ("gpt_oss", Decision(schedule="penstock", expert_form="baseline")),
]
FOR_ALL = [
    Decision(schedule="flowmoe", microbatches=2, dispatch="node_once"),
    Decision(schedule="penstock", chunks=2, dispatch="hierarchical_2d", recompute="blocks"),
    Decision(schedule="penstock", microbatches=2, experts="planned", replica_slots=2),
]

CASES: dict[str, tuple[int, list[Given]]] = {
    # Dense layers, shared experts, groups of experts, sinks and states of Mamba among them.
    "layers computed again": (
        2,
        [
            ("deepseek_v3", {"plan": "flowmoe", "again": True}),
            ("gpt_oss", {"plan": "fsmoe", "again": True}),
            ("jamba", {"plan": "moe_pipeline", "again": True}),
        ],
    ),
    "bounded rows": (2, each_of(["deepseek_v3", "gpt_oss"], plan="flowmoe", bound_factor=2.0)),
    "sharded optimizer": (2, each_of(FEW[:2], sharded=True)),
    "sharded optimizer, attention shared": (2, each_of(FEW[2:], sharded=True, tp_size=2)),
    "replicas of experts": (
        4,
        [
            ("gpt_oss", {"tp_size": 2, "ep_size": 2, "sharded": True}),
            ("deepseek_v3", {"tp_size": 4, "ep_size": 2}),
        ],
    ),
    "shards of experts": (
        4,
        [
            ("deepseek_v3", {"etp_size": 2, "tp_size": 2, "again": True}),
            ("llama4_text", {"etp_size": 2, "ep_size": 1}),
            ("olmoe", {"etp_size": 2, "tp_size": 4, "ep_size": 1, "sharded": True}),
        ],
    ),
    "biases of dense layers": (
        2,
        [
            ("deepseek_v2", {"tp_size": 2, "mlp_bias": True}),
            ("ernie4_5_moe", {"tp_size": 2, "use_bias": True, "plan": OF_SHARED[1][1]}),
        ],
    ),
    "ways of rows and experts": (4, of_plans(WAYS[:3])),
    "ways where attention is shared": (4, of_plans([*WAYS[3:], *OF_SHARED], 2)),
    # Every family once: on ranks that share attention where they can, which share experts as others do.
    "families": (2, steps_of(2, 1, ALONE, FEW[:2])),
    "families, attention shared": (2, steps_of(2, 2, SHARED, FEW[2:])),
}
MORE: dict[str, tuple[int, list[Given]]] = {
    "all sharded": (2, each_of(sorted(FAMILIES), sharded=True)),
    "all sharded, attention shared": (2, each_of(SHARED, sharded=True, tp_size=2)),
    "more replicas of experts": (
        4,
        [
            ("olmoe", {"ep_size": 2, "sharded": True}),
            ("qwen3_moe", {"tp_size": 2, "ep_size": 2}),
            ("qwen3_moe", {"etp_size": 4}),
            ("gpt_oss", {"etp_size": 2, "sharded": True}),
        ],
    ),
    "all shards of experts": (
        4,
        each_of((name for name, family in sorted(FAMILIES.items()) if family.form.narrows), etp_size=2),
    ),
    "all ways": (4, of_plans(WAYS)),
    "all ways where attention is shared": (4, of_plans([*WAYS, *OF_SHARED], 2)),
    **{
        f"every family, {plan.words}": (
            4,
            of_plans(
                (name, plan)
                for name, family in sorted(FAMILIES.items())
                if family.form.moves or not plan.num_replica_slots
            ),
        )
        for plan in FOR_ALL
    },
    **{
        f"all on {world} ranks, attention shared by {tp_size}": (
            world,
            steps_of(world, tp_size, FAMILIES if tp_size == 1 else SHARED, FAMILIES),
        )
        for world, tp_size in ((2, 1), (2, 2), (1, 1), (4, 1), (4, 2), (4, 4))
    },
}
"""Of all families, for `make soak`."""


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.soak) for name, case in MORE.items()),
    ],
)
def test_a_step_is_that_of_transformers(ranks: Pools, world: int, cases: list[Given]) -> None:
    for found in ranks(world).run(agreements, world, cases, timeout_s=600):
        assert max(found.values()) < 1, {name: value for name, value in found.items() if value >= 1}


def test_rows_that_travel_compressed_are_rounded_and_no_more(ranks: Pools) -> None:
    for form in ("bfloat16", "int8"):
        plan = Decision(schedule="flowmoe", comm_dtype=form)
        for found in ranks(2).run(agreement, 2, "qwen3_moe", plan, torch.float32):
            assert 1e-4 < max(found.values()) < 0.1, found
