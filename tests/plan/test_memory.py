"""The memory formula, worked out by hand and against what a model really has."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from penstock.autotune.problem import assumed_problem
from penstock.config import ConfigError, load
from penstock.cost import RoutedCost, StateTypes
from penstock.cost.placed import Evidence
from penstock.decision import Decision, PlacementConfig
from penstock.device import using
from penstock.features.field import NOTHING_MOVES
from penstock.plan import MemoryEstimate, Problem, estimate_memory, evaluate, find_plan
from penstock.plan.candidate import NothingFitsError
from penstock.plan.memory import ACTIVATIONS, STATE
from penstock.plan.moving import with_routing
from penstock.plan.optimizers import sharing_updates
from penstock.step.shape import FORM_TOKENS, ExpertForm, Sharing, TokenLayout
from penstock.topology import Layout
from penstock.train.assemble import build_machinery, build_optimizer, build_stack
from penstock.train.config import RunConfig
from penstock.train.optimizer import build_update
from penstock.workloads import RoutingConfig
from tests.plan.problems import problem, with_sharing
from tests.support.card import MEMORY, CardDevice, install
from tests.support.ranks import Pools

TOKENS: tuple[TokenLayout, ...] = ("split", "replicated")


def test_by_hand() -> None:
    """Two MoE layers, one expert of 2 x 128 x 256 per rank, 256 tokens of which each goes to two experts."""
    found = estimate_memory(problem(), Decision())
    weights = 2 * (1 << 20) + 2 * 2 * 128 * 256 * 4
    assert found.weights_bytes == found.gradients_bytes == weights
    assert found.optimizer_bytes == 2 * weights
    layer = 4 * (256 * 14 * 128 + 512 * (4 * 128 + 2 * 256))
    assert found.activations_bytes == 2 * layer + 256 * 64 * 4 * 2
    assert found.buffers_bytes == layer + 2 * 512 * 128 * 4
    assert found.total_bytes == sum(found.parts.values())


def test_types_and_shares_of_others() -> None:
    """In bfloat16 everything is half as large, but for the float32 weights that are then kept beside them."""
    plain, sharing = problem(), sharing_updates(problem((True,) * 6), releases=True)
    state = StateTypes(parameter_bytes=2, gradient_bytes=2, moment_bytes=2)
    half, whole = (
        estimate_memory(replace(each, workload=replace(each.workload, state=state)), Decision())
        for each in (plain, sharing)
    )
    before = estimate_memory(plain, Decision())
    assert (half.weights_bytes, half.gradients_bytes) == (
        before.weights_bytes // 2,
        before.weights_bytes // 2,
    )
    assert half.optimizer_bytes == 2 * before.weights_bytes
    sharded = replace(state, fully_sharded=True)
    least = estimate_memory(replace(sharing, workload=replace(sharing.workload, state=sharded)), Decision())
    assert least.weights_bytes < whole.weights_bytes and least.optimizer_bytes == whole.optimizer_bytes


def test_copies_are_of_what_is_gathered_where_parameters_are_sharded() -> None:
    """Of two layers at a time, each with replicated weights and experts; nobody has any alone."""
    each = sharing_updates(problem((True,) * 6, ranks=8), releases=True)
    work = replace(each.workload, element_bytes=2, state=StateTypes(fully_sharded=True))
    sharded = replace(each, workload=work)
    assert estimate_memory(sharded, Decision()).copies_bytes == 2 * ((1 << 20) + (1 << 18)) // 2
    with pytest.raises(NothingFitsError):
        find_plan(sharded, memory_bytes=1)


def test_an_embedding_is_copied_for_products_where_it_is_the_head() -> None:
    work = replace(problem().workload, element_bytes=2)
    apart, tied = (
        estimate_memory(replace(problem(), workload=replace(work, tied_embeddings=each)), Decision())
        for each in (False, True)
    )
    assert tied.weights_bytes == apart.weights_bytes
    assert tied.copies_bytes - apart.copies_bytes == 2 * work.vocab_size * work.hidden_size


SIZES = (
    *("model.num_layers=3", "model.hidden_size=256", "model.num_heads=4", "model.seq_len=64"),
    *("model.moe_layers=[1,2]", "moe.num_experts=4", "moe.moe_ffn_hidden_size=256"),
    *("parallel.processes=1", "schedule.name=penstock", "schedule.microbatches=2"),
)


def taken(rank: int, *overrides: str) -> tuple[int, int, MemoryEstimate]:
    """Bytes that tensors of a stand-in for a GPU take at most in a step, and after it; and what the planner
    thinks."""
    device, config = install(), load(RunConfig, None, [*SIZES, *overrides])
    layout = Layout.build(config.parallel, 1, rank, 4)
    decision = config.schedule.decision("flat", recompute=config.plan.given_recompute)
    before = MEMORY.now_bytes
    with using(CardDevice(kernel=config.train.precision == "bfloat16")):
        machinery = build_machinery(layout, device, config.parallel, config.train.precision)
        stack = build_stack(config, machinery)
        update = build_update(stack, build_optimizer(stack, config.optimizer), config.optimizer)
        sizes = 2, config.data.batch_per_device, config.model.seq_len
        tokens = torch.randint(256, sizes, generator=torch.Generator().manual_seed(0)).to(device)
        for step in (1, 2):  # the second has moments
            MEMORY.peak_bytes = MEMORY.now_bytes
            loss = stack(*tokens)  # held until the next, as by most loops
            update.backward(loss, step)
            update.apply(accepted=True)
        estimate = estimate_memory(assumed_problem(config, layout), decision)
        return MEMORY.peak_bytes - before, MEMORY.now_bytes - before, estimate


@pytest.mark.every_value
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [2, 8])
@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_what_a_step_takes_on_a_gpu(cards: Pools, precision: str, batch: int, recompute: str) -> None:
    """Weights that are copied into the type of products included; contexts and communicators are not."""
    more = f"train.precision={precision}", f"data.batch_per_device={batch}", f"plan.recompute={recompute}"
    ((taken_bytes, _, found),) = cards(1).run(taken, *more)
    assert (found.copies_bytes > 0) == (precision == "bfloat16")
    # Where blocks are recomputed the most is taken in the backward of one: by norms, too, which are several
    # operations here and one kernel on a GPU.
    least = 0.94 if recompute == "none" else 0.89
    assert least * taken_bytes <= found.total_bytes <= 1.2 * taken_bytes


@pytest.mark.slow
def test_no_copies_of_weights_outlive_a_step_on_a_gpu(cards: Pools) -> None:
    """Though its loss is held, and its records may be asked for: the next step makes others."""
    whole, half = (
        cards(1).run(taken, f"train.precision={each}", "data.batch_per_device=2")[0][1]
        for each in ("float32", "bfloat16")
    )
    assert half == pytest.approx(whole, rel=1e-3)


def test_replicas_take_weights_and_gradients_and_no_moments() -> None:
    without, found = (
        estimate_memory(problem((True, False, True)), Decision(experts=experts, replica_slots=3))
        for experts in ("none", "planned")
    )
    room = 2 * 3 * 2 * 128 * 256 * 4
    assert found.weights_bytes == found.gradients_bytes == without.weights_bytes + room
    assert found.optimizer_bytes == without.optimizer_bytes


def test_the_busiest_rank_has_more_rows_where_none_are_dropped() -> None:
    """512 rows of the batch, 3 times as many at the experts of the busiest of 4 ranks."""
    even, uneven = problem(), problem().with_imbalance(3)
    before, found = (estimate_memory(each, Decision()) for each in (even, uneven))
    layer = 4 * 2 * 512 * (2 * 128 + 2 * 256)
    assert found.activations_bytes == before.activations_bytes + 2 * layer
    assert found.buffers_bytes == before.buffers_bytes + layer + 2 * 512 * 128 * 4
    again = (estimate_memory(each, Decision(recompute="experts")) for each in (even, uneven))
    less, more = (each.activations_bytes for each in again)
    assert more == less + 2 * 4 * 2 * 512 * 128
    for size in ({"capacity_factor": 1.0}, {"slots_per_sample": 16}):
        limited = replace(even, workload=replace(even.workload, **size))
        assert estimate_memory(limited.with_imbalance(3), Decision()) == estimate_memory(limited, Decision())


def known(each: Problem, *wanted: tuple[int, ...]) -> Problem:
    """The problem with a routing in which every token wants the same experts; they are given by layer."""
    work = each.workload
    counts = np.zeros((4, work.batch, len(wanted), work.num_experts), np.int64)
    for layer, experts in enumerate(wanted):
        counts[:, :, layer, list(experts)] = work.seq_len
    return replace(each, evidence=Evidence(counts, counts))


def test_a_known_routing_counts_layer_by_layer_on_the_rank_that_needs_most() -> None:
    """512 rows of the batch; the experts of two of four ranks get 1,024 each, in both layers or in turns."""
    even, hot, taking_turns = problem(), known(problem(), (0, 1), (1, 2)), known(problem(), (0, 1), (2, 3))
    before, found, turns = (estimate_memory(each, Decision()) for each in (even, hot, taking_turns))
    layer, wire = 4 * 512 * (2 * 128 + 2 * 256), 512 * 128 * 4
    assert found.activations_bytes == before.activations_bytes + 2 * layer, "rank 1 is busy in both"
    assert found.buffers_bytes == turns.buffers_bytes == before.buffers_bytes + layer + wire
    assert turns.activations_bytes == before.activations_bytes, "twice in one layer and nothing in the other"
    fixed = replace(hot, workload=replace(hot.workload, capacity_factor=1.0))
    even_fixed = replace(fixed, evidence=None)
    assert estimate_memory(fixed, Decision()) == estimate_memory(even_fixed, Decision())


def test_replicas_take_rows_from_the_busiest_rank() -> None:
    """Rank 0 has the only expert that is wanted twice; once it has replicas, no rank has more than the
    mean."""
    each = known(problem(), (0, 1), (0, 1))
    still, moving = (
        estimate_memory(each, Decision(experts=experts, replica_slots=1))
        for experts in ("none", "least_loaded")
    )
    assert moving.activations_bytes == estimate_memory(problem(), Decision()).activations_bytes
    assert moving.activations_bytes < still.activations_bytes


MOVES: tuple[dict[str, object], ...] = (
    {},
    {"experts": "planned", "replica_slots": 2},
    {"experts": "pro_prophet"},
    {"samples": "netmoe", "experts": "least_loaded"},
)


@pytest.mark.parametrize("moves", MOVES)
@pytest.mark.parametrize("cuts", [{}, {"schedule": "moe_pipeline", "chunks": 2, "microbatches": 2}])
def test_the_rows_are_those_that_the_step_is_priced_with(moves: dict[str, Any], cuts: dict[str, Any]) -> None:
    each = replace(problem(), placement=PlacementConfig())
    each = with_routing(each, RoutingConfig.parse("zipf,zipf_exponent=1.5"), NOTHING_MOVES)
    agree(each, Decision(**moves, **cuts))


@pytest.mark.parametrize("form", FORM_TOKENS)
def test_the_rows_of_shards_are_those_that_the_step_is_priced_with(form: ExpertForm) -> None:
    each = with_routing(with_sharing(problem(), 2, 2), RoutingConfig.parse("zipf"), NOTHING_MOVES)
    agree(each, Decision(expert_form=form))


def agree(each: Problem, choice: Decision) -> None:
    """Compare loads with what the cost of the step says of its tasks."""
    shape, tasks = each.cut(choice), each.plan(choice).graph.tasks
    assert each.evidence is not None
    counts, placed = each.evidence.now_DBYE, each.placed(choice, shape)
    cost = RoutedCost(shape, each.workload, each.cluster, counts, placed=placed)
    loads = each.expert_loads(choice, shape)
    assert loads.max() == pytest.approx(cost.imbalance(tasks))
    assert loads.std(axis=1).mean() == pytest.approx(cost.load_spread(tasks))


@pytest.mark.slow
def test_a_search_prices_even_routing_and_finds_room_for_what_was_observed() -> None:
    even, hot = problem(batch=64), known(problem(batch=64), (0, 1), (0, 1))
    seen = replace(even, observed=hot.evidence, recompute=("none", "experts"))
    cut = Decision(schedule="flowmoe", microbatches=16)
    room_bytes = estimate_memory(even, cut).total_bytes
    assert estimate_memory(seen, Decision()) == estimate_memory(hot, Decision())
    assert evaluate(seen, Decision()).predicted_s == evaluate(even, Decision()).predicted_s
    assert seen.only((1,)).observed is not None
    with pytest.raises(ConfigError, match="memory per rank"):
        find_plan(replace(seen, recompute=("none",)), memory_bytes=room_bytes, effort="low", budget=0.01)
    best = find_plan(seen, memory_bytes=room_bytes, effort="low", budget=0.01).best
    assert best.choice.recompute == "experts" and best.memory_bytes <= room_bytes


def test_microbatches_save_buffers_and_nothing_else() -> None:
    whole, cut = (estimate_memory(problem(), Decision(schedule="flowmoe", microbatches=n)) for n in (1, 4))
    assert whole.activations_bytes == cut.activations_bytes
    assert whole.buffers_bytes == 4 * cut.buffers_bytes


def test_a_larger_batch_makes_activations_dominate() -> None:
    assert next(iter(estimate_memory(problem(batch=1), Decision()).parts)) == STATE
    assert next(iter(estimate_memory(problem(batch=64), Decision()).parts)) == ACTIVATIONS


def test_dense_blocks_and_shared_experts_count() -> None:
    dense = estimate_memory(problem((False,)), Decision())
    assert dense.weights_bytes == 1 << 20
    assert dense.activations_bytes == 4 * 256 * (14 * 128 + 4 * 256) + 256 * 64 * 4 * 2
    each = problem((True,))
    shared = replace(each, workload=replace(each.workload, shared_ffn_hidden_size=64))
    more = (
        estimate_memory(shared, Decision()).activations_bytes
        - estimate_memory(each, Decision()).activations_bytes
    )
    assert more == 4 * 256 * 2 * 64


def test_shards_share_weights_and_tokens() -> None:
    """256 tokens of a pair of ranks, 2 x 128 x 256 of an expert of which each of two ranks has half."""
    each = problem()
    work = replace(each.workload, world_size=8, tp_size=2, etp_size=2)
    whole, found = estimate_memory(each, Decision()), {}
    for tokens, form in product(TOKENS, FORM_TOKENS):
        sharing = Sharing(tp_size=2, etp_size=2, tokens=tokens)
        shared = replace(each, workload=work, shape=replace(each.shape, sharing=sharing))
        found[tokens, form] = estimate_memory(shared, Decision(expert_form=form))
        experts = 2 * 2 * 128 * 256 * 4
        assert whole.weights_bytes - found[tokens, form].weights_bytes == experts // 2
    split, hidden = found["split", "gather"], 128
    block = 256 * hidden * (3 + 8 / 2 + 3 / 2)
    rows = 256 * hidden * 2 + 256 * (2 * 2 * hidden + 2 * 256)
    assert split.activations_bytes == int(2 * 4 * (block + rows) + 256 * 64 * 4 * 2 / 2)
    assert split.activations_bytes == found["split", "s1"].activations_bytes
    kept = found["replicated", "gather"].activations_bytes - split.activations_bytes
    assert kept == 2 * 4 * 128 * hidden * 3, "what lies between blocks, of the tokens of the other rank"
    ordered = found["split", "s2"].activations_bytes - split.activations_bytes
    assert ordered == 2 * 4 * 256 * hidden * 2, "rows at home, of the tokens of the other rank"
    repeated = found["split", "baseline"].activations_bytes - found["split", "s2"].activations_bytes
    assert repeated == 2 * 4 * 256 * (2 * 2 * hidden + 2 * 256), "rows that each of a pair sends to experts"
