"""Ranks that share attention and experts equal one plain process, in every layout and by every schedule."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import pytest

from penstock.schedule import SCHEDULES
from penstock.step.shape import ExpertForm
from tests.support.close import check_close, digest
from tests.support.layouts import FORMS, SIZES, TOKENS, Layout, engines, fits, layout_case, layouts
from tests.support.pairwise import pairwise
from tests.support.parity import check_parity, merge, run_step
from tests.support.ranks import Pools

SETTINGS: dict[str, tuple[Any, ...]] = {
    "tokens": TOKENS,
    "capacity_factor": (None, 0.75),
    "top_k": (2, 1),
    "moe_layers": (None, (1,), (0,)),
    "shared_ffn_hidden_size": (0, 6),
    "expert": ("swiglu", "gelu"),
    "aux_loss_group": ("global", "microbatch", "sequence"),
    "tie_word_embeddings": (False, True),
    "padding": (False, True),
    "ignore_labels": (False, True),
    "scattered": (False, True),
}
EIGHT: dict[str, tuple[Layout, str, ExpertForm]] = {
    "every axis of two": ((8, 2, 2, 2), "penstock", "gather"),
    "experts over all, shards of four": ((8, 4, 2, 4), "flowmoe", "s2"),
    "attention over four, experts over eight": ((8, 4, 8, 1), "sequential", "s1"),
}


@pytest.mark.slow
@pairwise(
    fits,
    schedule=SCHEDULES,
    form=FORMS,
    tp_size=SIZES,
    ep_size=SIZES,
    etp_size=SIZES,
    world_size=(2, 4),
    **SETTINGS,
)
def test_two_and_four_ranks(
    ranks: Pools,
    schedule: str,
    form: ExpertForm,
    tp_size: int,
    ep_size: int,
    etp_size: int,
    world_size: int,
    tokens: str,
    capacity_factor: float | None,
    top_k: int,
    moe_layers: tuple[int, ...] | None,
    shared_ffn_hidden_size: int,
    expert: str,
    aux_loss_group: str,
    tie_word_embeddings: bool,
    padding: bool,
    ignore_labels: bool,
    scattered: bool,
) -> None:
    step = layout_case(
        (world_size, tp_size, ep_size, etp_size),
        schedule,
        form,
        tokens=tokens,
        capacity_factor=capacity_factor,
        top_k=top_k,
        moe_layers=moe_layers,
        shared_ffn_hidden_size=shared_ffn_hidden_size,
        expert=expert,
        aux_loss_group=aux_loss_group,
        tie_word_embeddings=tie_word_embeddings,
        padding=padding,
        packed=padding,
        ignore_labels=ignore_labels,
        scattered=scattered,
    )
    check_parity(ranks, step)


@pytest.mark.slow
@pytest.mark.parametrize("name", EIGHT)
def test_eight_ranks(ranks: Pools, name: str) -> None:
    settings: dict[str, Any] = {
        "shared_ffn_hidden_size": 6,
        "capacity_factor": 0.75,
        "ignore_labels": True,
        "batch": 2,
    }
    check_parity(ranks, layout_case(*EIGHT[name], moe_layers=(1,), tokens="split", **settings))


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("engine", engines(), ids="-".join)
def test_every_layout(ranks: Pools, world_size: int, engine: tuple[str, ExpertForm]) -> None:
    """With either layout of tokens, dropless and not; the other settings take turns."""
    rest = {name: values for name, values in SETTINGS.items() if name not in ("tokens", "capacity_factor")}
    turns = cycle(product(*rest.values()))
    for layout, tokens, capacity in product(layouts(world_size), TOKENS, SETTINGS["capacity_factor"]):
        settings = dict(zip(rest, next(turns), strict=True))
        check_parity(ranks, layout_case(layout, *engine, tokens=tokens, capacity_factor=capacity, **settings))


# ---- numbers that do not divide ----------------------------------------------------------------------------


@pytest.mark.slow
@pairwise(form=FORMS, tokens=TOKENS, batches=[(3, 1), (0, 2)])
def test_mp_groups_with_other_numbers_of_samples(
    ranks: Pools, form: ExpertForm, tokens: str, batches: tuple[int, int]
) -> None:
    """Of one group they are as many, of another they may be fewer, or none."""
    step = layout_case((4, 2, 2, 2), "penstock", form, tokens=tokens, batches=batches, padding=True)
    check_parity(ranks, step)


@pytest.mark.slow
@pairwise(tokens=TOKENS, length=[4, 7], capacity_factor=[None, 0.75])
def test_few_tokens(ranks: Pools, tokens: str, length: int, capacity_factor: float | None) -> None:
    """One or two of a sample for each of four ranks."""
    settings = {"seq_len": length, "capacity_factor": capacity_factor, "batch": 2, "padding": True}
    check_parity(ranks, layout_case((4, 4, 4, 1), "flowmoe", "gather", tokens=tokens, **settings))


# ---- what does not depend on the layout --------------------------------------------------------------------


@pytest.mark.every_value
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_dropout_does_not_depend_on_the_layout(ranks: Pools, form: ExpertForm, tokens: str) -> None:
    """Masks are keyed by sample and position, of which a rank may have a part."""
    settings = {"dropout": 0.3, "moe_layers": (1,), "shared_ffn_hidden_size": 6, "tokens": tokens}
    base = merge(ranks(1).run(run_step, layout_case((1, 1, 1, 1), "sequential", form, batch=4, **settings)))
    for layout, batch in (((2, 2, 1, 2), 4), ((4, 2, 2, 2), 2), ((4, 4, 4, 1), 4)):
        step = layout_case(layout, "penstock", form, batch=batch, **settings)
        result = merge(ranks(layout[0]).run(run_step, step))
        assert abs(result.loss - base.loss) <= 1e-10 * base.loss
        for name, gradient in base.gradients.items():
            check_close(result.gradients[name], gradient, 1e-10, f"{name} in {layout}")


@pytest.mark.slow
def test_same_seed_same_bits(ranks: Pools) -> None:
    step = layout_case((4, 2, 2, 2), "penstock", "gather", moe_layers=(1,))
    first, second = (merge(ranks(4).run(run_step, step)) for _ in range(2))
    assert first.loss == second.loss
    assert digest(first.gradients) == digest(second.gradients)
    assert digest(first.parameters) == digest(second.parameters)


# ---- who holds what ----------------------------------------------------------------------------------------

DENSE = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
)
EXPERTS = tuple(f"model.layers.1.mlp.experts.{name}.7" for name in ("w_gate", "w_up", "w_down"))
WHOLE = (
    "model.layers.0.self_attn.k_norm.weight",
    "model.norm.weight",
    "model.layers.1.input_layernorm.weight",
    "model.layers.1.mlp.gate.weight",
    "model.layers.1.mlp.shared.expert.w_up",
)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "attention", "experts"), [((4, 2, 1, 4), 2, 4), ((4, 4, 2, 2), 4, 2)])
def test_ranks_hold_their_part_and_no_more(
    ranks: Pools, layout: Layout, attention: int, experts: int
) -> None:
    step = layout_case(layout, "sequential", "gather", moe_layers=(1,), shared_ffn_hidden_size=6)
    results = ranks(4).run(run_step, step)
    whole = merge(results).parameters
    for result in results:
        held = {name: whole[name].numel() / part.numel() for name, part in result.parameters.items()}
        assert {held[name] for name in DENSE} == {attention}
        assert {held[name] for name in EXPERTS if name in held} <= {experts}
        assert {held[name] for name in WHOLE} == {1}
