"""Scheduled models of all families against the same models in transformers, on one process and on several."""

from __future__ import annotations

from collections.abc import Collection
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

MORE = ((1, 1), (4, 1), (4, 2), (4, 4))
"""Ranks, and how many of them share attention."""

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
) -> dict[str, float]:
    """Relative distances of losses, all gradients, their norm, parameters and logits after a step of AdamW,
    on this rank.

    again: layers are computed again in backward. bound_factor: of rows, from passes before. tp_size: ranks
    that share attention and have the same samples. sharded: each rank updates a share of parameters. ep_size:
    None = all ranks. etp_size: ranks that share every expert. mesh: says these sizes in their place.
    """
    ep_size = ep_size or world // etp_size
    batch = Batch(padded=True)
    everything = batch.inputs()
    groups, place = world // tp_size, rank // tp_size
    sizes = [batch.samples - groups + 1, *[1] * (groups - 1)]  # ranks have different numbers of samples
    first = sum(sizes[:place])
    mine = batch.inputs(first, first + sizes[place])
    changes = DIVISIBLE if tp_size > 1 else {}
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
            model.gradient_checkpointing_enable()
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


def all_agreements(
    rank: int, world: int, pairs: list[tuple[str, torch.dtype]], plan: str, tp_size: int = 1
) -> dict[str, float]:
    """The largest distance for every family and type, as a share of what is allowed."""
    return {
        f"{family} {dtype}: {max(found, key=found.__getitem__)}": max(found.values()) / LIMITS[dtype]
        for family, dtype in pairs
        for found in [agreement(rank, world, family, plan, dtype, tp_size=tp_size)]
    }


def agreements_again(rank: int, world: int, pairs: list[tuple[str, str]]) -> dict[str, float]:
    """The largest distance for every family and schedule where layers are computed again."""
    return {
        f"{family} {plan}": max(agreement(rank, world, family, plan, torch.float64, again=True).values())
        for family, plan in pairs
    }


@pytest.mark.slow
def test_layers_that_are_computed_again(ranks: Pools) -> None:
    """Dense layers, shared experts, groups of experts, sinks and states of Mamba among them."""
    pairs = [
        ("deepseek_v3", "flowmoe"),
        ("gpt_oss", "fsmoe"),
        ("jamba", "moe_pipeline"),
    ]
    for found in ranks(2).run(agreements_again, 2, pairs):
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
    found = agreement(0, 1, OWN, "flowmoe", torch.float64)
    assert max(found.values()) < LIMITS[torch.float64], found


@pytest.mark.slow
def test_an_unknown_family_is_taken_if_its_pieces_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: each for name, each in FAMILIES.items() if name not in ("olmoe", "granitemoe")}
    monkeypatch.setattr("penstock.families.known.FAMILIES", few)
    found = agreement(0, 1, "olmoe", "flowmoe", torch.float64)
    assert max(found.values()) < LIMITS[torch.float64], found
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


def sharded_agreements(rank: int, world: int, families: list[str], tp_size: int) -> dict[str, float]:
    """The largest distance for every family where ranks update shares of parameters."""
    return {
        family: max(
            agreement(rank, world, family, "penstock", torch.float64, tp_size=tp_size, sharded=True).values()
        )
        for family in families
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("families", "tp_size"),
    [
        (FEW[:2], 1),
        (FEW[2:], 2),
        pytest.param(sorted(FAMILIES), 1, marks=pytest.mark.soak),
        pytest.param(SHARED, 2, marks=pytest.mark.soak),
    ],
)
def test_a_sharded_optimizer_updates_families(ranks: Pools, families: list[str], tp_size: int) -> None:
    for found in ranks(2).run(sharded_agreements, 2, families, tp_size, timeout_s=300):
        assert max(found.values()) < LIMITS[torch.float64], found


def layout_agreements(rank: int, world: int, layouts: list[tuple[str, dict[str, Any]]]) -> dict[str, float]:
    """The largest distance for every family and layout."""
    return {
        f"{family} {layout}": max(
            agreement(rank, world, family, "penstock", torch.float64, **layout).values()
        )
        for family, layout in layouts
    }


REPLICAS: list[tuple[str, dict[str, Any]]] = [
    ("gpt_oss", {"tp_size": 2, "ep_size": 2, "sharded": True}),
    ("deepseek_v3", {"tp_size": 4, "ep_size": 2}),
    ("olmoe", {"ep_size": 2, "sharded": True}),
    ("qwen3_moe", {"tp_size": 2, "ep_size": 2}),
]
"""Layouts in which experts have replicas."""

NARROW: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v3", {"etp_size": 2, "tp_size": 2, "again": True}),
    ("llama4_text", {"etp_size": 2, "ep_size": 1}),
    ("olmoe", {"etp_size": 2, "tp_size": 4, "ep_size": 1, "sharded": True}),
    ("qwen3_moe", {"etp_size": 4}),
    ("gpt_oss", {"etp_size": 2, "sharded": True}),
]
"""Layouts in which ranks share every expert."""

ALL_NARROW = [(name, {"etp_size": 2}) for name, family in sorted(FAMILIES.items()) if family.form.narrows]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        REPLICAS[:2],
        NARROW[:3],
        *(pytest.param(each, marks=pytest.mark.soak) for each in (REPLICAS[2:], NARROW[3:], ALL_NARROW)),
    ],
)
def test_replicas_and_shards_of_experts_beside_shared_attention(
    ranks: Pools, layouts: list[tuple[str, dict[str, Any]]]
) -> None:
    for found in ranks(4).run(layout_agreements, 4, layouts, timeout_s=300):
        assert max(found.values()) < LIMITS[torch.float64], found


def bounded_agreements(rank: int, world: int, families: list[str]) -> dict[str, float]:
    """The largest distance for every family where rows are bounded."""
    return {
        family: max(agreement(rank, world, family, "flowmoe", torch.float64, bound_factor=2.0).values())
        for family in families
    }


@pytest.mark.slow
def test_rows_that_are_bounded(ranks: Pools) -> None:
    families = ["deepseek_v3", "gpt_oss"]
    for found in ranks(2).run(bounded_agreements, 2, families):
        assert max(found.values()) < LIMITS[torch.float64], found


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


def agreements_of(rank: int, world: int, pairs: list[tuple[str, Decision]], tp_size: int) -> dict[str, float]:
    """The largest distance for every family and decision; half of the ranks are in each of two nodes."""
    return {
        f"{family}, {plan.words}": max(
            agreement(
                rank, world, family, plan, torch.float64, tp_size=tp_size, ranks_per_node=world // 2
            ).values()
        )
        for family, plan in pairs
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp_size", "pairs"),
    [
        (1, WAYS[:3]),
        (2, [*WAYS[3:], *OF_SHARED]),
        pytest.param(1, WAYS, marks=pytest.mark.soak),
        pytest.param(2, [*WAYS, *OF_SHARED], marks=pytest.mark.soak),
    ],
)
def test_every_way_of_rows_and_experts_serves_families(
    ranks: Pools, tp_size: int, pairs: list[tuple[str, Decision]]
) -> None:
    for found in ranks(4).run(agreements_of, 4, pairs, tp_size, timeout_s=300):
        assert max(found.values()) < LIMITS[torch.float64], found


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(
    "plan",
    [
        Decision(schedule="flowmoe", microbatches=2, dispatch="node_once"),
        Decision(schedule="penstock", chunks=2, dispatch="hierarchical_2d", recompute="blocks"),
        Decision(schedule="penstock", microbatches=2, experts="planned", replica_slots=2),
    ],
)
def test_every_family_has_these_ways(ranks: Pools, plan: Decision) -> None:
    pairs = [
        (name, plan)
        for name, family in sorted(FAMILIES.items())
        if family.form.moves or not plan.num_replica_slots
    ]
    for found in ranks(4).run(agreements_of, 4, pairs, 1, timeout_s=600):
        assert max(found.values()) < LIMITS[torch.float64], found


@pytest.mark.slow
def test_rows_that_travel_compressed_are_rounded_and_no_more(ranks: Pools) -> None:
    for form in ("bfloat16", "int8"):
        plan = Decision(schedule="flowmoe", comm_dtype=form)
        for found in ranks(2).run(agreement, 2, "qwen3_moe", plan, torch.float32):
            assert 1e-4 < max(found.values()) < 0.1, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "tp_size", "families", "rounded"),
    [
        (2, 1, ALONE, FEW[:2]),
        (2, 2, SHARED, FEW[2:]),
        *(
            pytest.param(
                *sizes,
                sorted(FAMILIES if sizes[1] == 1 else SHARED),
                sorted(FAMILIES),
                marks=pytest.mark.soak,
            )
            for sizes in ((2, 1), (2, 2), *MORE)
        ),
    ],
    ids=str,
)
def test_a_step_is_that_of_transformers(
    ranks: Pools, world: int, tp_size: int, families: Collection[str], rounded: Collection[str]
) -> None:
    """In float64, and in float32 those of `rounded`: what differs by family is the same in both.

    Every family once: on ranks that share attention where they can, which share experts as others do.
    """
    families = sorted(families)
    pairs = [(family, torch.float64) for family in families]
    pairs += [(family, torch.float32) for family in families if family in rounded]
    plan = "penstock" if world == 2 else "flowmoe"
    for found in ranks(world).run(all_agreements, world, pairs, plan, tp_size, timeout_s=600):
        assert max(found.values()) < 1, {name: value for name, value in found.items() if value >= 1}
