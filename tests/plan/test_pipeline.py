"""Orders of microbatches on pipeline stages, and stages of a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from penstock.apportion import evenly
from penstock.config import ConfigError
from penstock.cost.workload import HeldBytes, StateTypes
from penstock.decision import Decision
from penstock.plan import Problem
from penstock.plan.candidate import NothingFitsError
from penstock.plan.memory import estimate_memory
from penstock.plan.optimizers import sharing_updates
from penstock.plan.pipeline import Pipeline, PipelineRun, PipelineTimes, Slot, run_pipeline
from penstock.plan.pipeline_search import find_pipeline, pipelines
from penstock.plan.predict import closing_s, predict_s
from penstock.plan.stages import PipelinePlan, Stages, placed, stage_cluster
from tests.plan.problems import FILE, problem, with_sharing
from tests.plan.test_predict import profiled

FORWARD_S, BACKWARD_S = 1.0, 2.0
SIZES = [(1, 1, 4), (4, 1, 8), (4, 1, 2), (2, 2, 4), (4, 2, 8), (2, 4, 2), (4, 3, 12)]


def pipeline(stages: int, virtual: int, microbatches: int, *, overlaps: bool = False) -> Pipeline:
    return Pipeline(
        pipeline_parallel_size=stages,
        virtual_pipeline_parallel_size=virtual,
        microbatches=microbatches,
        overlaps=overlaps,
    )


def run(
    each: Pipeline, link_s: float = 0.0, *, together: float = FORWARD_S + BACKWARD_S, early: float = 0.0
) -> PipelineRun:
    """Equal stages. early: how long before the end of a pair its forward ends."""

    def slot_s(slot: Slot) -> list[float]:
        alone = FORWARD_S if slot[0].forward else BACKWARD_S
        ends = [alone] if len(slot) == 1 else [together - early, together]
        return [end / each.virtual_pipeline_parallel_size for end in ends]

    return run_pipeline(each, PipelineTimes(slot=slot_s, link=lambda *_: link_s))


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("stages", "virtual", "microbatches"), SIZES)
def test_equal_stages_with_free_links_take_as_long_as_the_formula_says(
    stages: int, virtual: int, microbatches: int, overlaps: bool
) -> None:
    found = run(pipeline(stages, virtual, microbatches, overlaps=overlaps))
    bubble = (stages - 1) / virtual
    assert found.seconds == pytest.approx((microbatches + bubble) * (FORWARD_S + BACKWARD_S))
    assert found.bubble == pytest.approx(bubble / (microbatches + bubble))


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("stages", "virtual", "microbatches"), SIZES)
def test_every_microbatch_passes_every_part_once_forward_and_once_back(
    stages: int, virtual: int, microbatches: int, overlaps: bool
) -> None:
    each = pipeline(stages, virtual, microbatches, overlaps=overlaps)
    cells = Counter(cell for order in each.slots for slot in order for cell in slot)
    assert len(cells) == 2 * each.parts * microbatches
    assert set(cells.values()) == {1}


@pytest.mark.parametrize(("stages", "virtual", "microbatches"), SIZES)
def test_a_stage_holds_as_many_microbatches_as_the_literature_counts(
    stages: int, virtual: int, microbatches: int
) -> None:
    both = (pipeline(stages, virtual, microbatches, overlaps=way).held for way in (False, True))
    for stage, counts in enumerate(zip(*both, strict=True)):
        held, together = (max(map(sum, each)) for each in counts)
        before = stages - stage if virtual == 1 else 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
        assert held == min(before, virtual * microbatches)
        assert held <= together <= min(2 * (stages - stage) + (virtual - 1) * stages, virtual * microbatches)


def test_a_shorter_pair_and_a_faster_link_never_make_an_update_longer() -> None:
    each = pipeline(4, 1, 16, overlaps=True)
    assert run(each, together=2.0).seconds < run(each, together=3.0).seconds
    assert run(each, 0.5, early=2.0).seconds < run(each, 0.5).seconds
    plain = pipeline(4, 2, 16)
    assert run(plain).seconds < run(plain, 0.1).seconds < run(plain, 0.5).seconds


@pytest.mark.parametrize(
    ("stages", "virtual", "microbatches", "key"),
    [
        (0, 1, 4, "--pipeline-parallel-size"),
        (1, 2, 4, "--virtual-pipeline-parallel-size"),
        (4, 2, 2, "--virtual-pipeline-parallel-size"),
        (4, 2, 6, "--virtual-pipeline-parallel-size"),
    ],
)
def test_sizes_that_give_no_order_are_refused(stages: int, virtual: int, microbatches: int, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        pipeline(stages, virtual, microbatches)
    assert refused.value.key == key


def test_a_stage_fills_nodes_or_shares_one() -> None:
    assert stage_cluster(FILE, 1) == FILE
    two, four = stage_cluster(FILE, 2), stage_cluster(FILE, 4)
    assert (two.nodes, two.ranks_per_node) == (1, 2)
    assert (four.nodes, four.ranks_per_node) == (1, 1)
    for stages in (3, 8):
        with pytest.raises(ConfigError) as refused:
            stage_cluster(FILE, stages)
        assert refused.value.key == "--pipeline-parallel-size"


def test_parts_are_even_and_none_is_empty() -> None:
    assert sorted(evenly([1.0] * 10, 4)) == [2, 2, 3, 3]
    assert evenly([1.0] * 8, 4) == (2, 2, 2, 2)
    assert sum(evenly([1.0] * 8 + [4.0], 3)) == 9
    assert evenly([1.0] * 8 + [4.0], 3) == (4, 4, 1)
    assert evenly([0.0, 1.0, 1.0], 3) == (1, 1, 1)


def predict_pipeline(
    problem: Problem, order: Pipeline, choice: Decision, layers: tuple[int, ...] = ()
) -> PipelinePlan:
    return placed(Stages(replace(problem, passes=1), choice), order, layers)


LARGE = problem((False, True, True, True, True, True), all_reduce_bytes=1 << 20)
"""Six layers, the first dense."""


@pytest.mark.parametrize("choice", [Decision(), Decision(schedule="flowmoe", microbatches=2)])
def test_one_stage_and_one_microbatch_are_a_step(choice: Decision) -> None:
    found = predict_pipeline(LARGE, pipeline(1, 1, 1), choice)
    step_s = predict_s(LARGE, choice, LARGE.plan(choice)) + closing_s(LARGE)
    assert found.layers == (6,)
    assert found.update_s == pytest.approx(step_s)
    assert found.memory[0] == estimate_memory(LARGE, choice)


def test_one_stage_with_a_sharded_optimizer_is_a_step_with_one() -> None:
    sharded = sharing_updates(problem((True, True), ranks=8))
    found = predict_pipeline(sharded, pipeline(1, 1, 1), Decision())
    assert found.update_s == pytest.approx(predict_s(sharded, Decision(), sharded.plan(Decision())))


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_measured_cluster_is_heeded_in_stages(overlaps: bool) -> None:
    quiet, loud = profiled(), profiled(contended=1.5, transfers=1.2, jitter=0.1)
    step_s = predict_s(loud, Decision(), loud.plan(Decision())) + closing_s(loud)
    assert predict_pipeline(loud, pipeline(1, 1, 1), Decision()).update_s == pytest.approx(step_s)
    choice = Decision(schedule="moe_pipeline", chunks=2, backward_chunks=2)
    one_s, more_s = (
        predict_pipeline(each, pipeline(2, 1, 6, overlaps=overlaps), choice).update_s
        for each in (quiet, loud)
    )
    assert one_s < more_s


def test_gradients_are_summed_once_for_all_microbatches() -> None:
    many, one = (predict_pipeline(LARGE, pipeline(1, 1, n), Decision()).update_s for n in (5, 1))
    free = replace(LARGE, workload=replace(LARGE.workload, all_reduce_bytes=(0,) * 6, vocab_size=64))
    added_s = predict_s(free, Decision(), free.plan(Decision()))
    assert many - one == pytest.approx(4 * added_s, rel=1e-6)


def test_parameters_that_do_not_stay_are_gathered_for_every_microbatch() -> None:
    once = sharing_updates(problem((True, True), ranks=8), releases=True)
    every = replace(once, workload=replace(once.workload, state=StateTypes(fully_sharded=True)))
    for each, more in ((once, False), (every, True)):
        stages = Stages(each, Decision())
        part = stages.cut((2,))[0]
        first_s, next_s = (stages.half_s(part, forward=True, edge=edge) for edge in (True, False))
        assert (first_s == next_s) is more


HELD = HeldBytes(weights=6 * (1 << 20) + 5 * (1 << 18), trained_experts=5 * (1 << 18), cast=True)
"""The bytes of LARGE, as a rank of a model counts them."""


@pytest.mark.parametrize("stages", [2, 3, 8])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("held", [None, HELD])
def test_stages_hold_the_whole_model_together(stages: int, sharded: bool, held: HeldBytes | None) -> None:
    whole = replace(LARGE, workload=replace(LARGE.workload, element_bytes=2, held=held))
    whole = sharing_updates(whole) if sharded else whole
    found = predict_pipeline(whole, pipeline(stages, 1, 4), Decision())
    all_of_it = estimate_memory(whole, Decision())
    assert sum(found.layers) == 6
    assert sum(each.weights_bytes for each in found.memory) == all_of_it.weights_bytes
    assert sum(each.copies_bytes for each in found.memory) == all_of_it.copies_bytes
    assert sum(each.optimizer_bytes for each in found.memory) == pytest.approx(all_of_it.optimizer_bytes)
    assert found.memory_bytes < all_of_it.total_bytes


def test_a_stage_keeps_activations_of_the_microbatches_under_way() -> None:
    one, many = (predict_pipeline(LARGE, pipeline(3, 1, n), Decision(), (2, 2, 2)).memory for n in (1, 9))
    assert [each.activations_bytes for each in many[1:]] == [
        kept * each.activations_bytes for kept, each in zip((2, 1), one[1:], strict=True)
    ]
    assert many[0].weights_bytes == one[0].weights_bytes
    again = predict_pipeline(LARGE, pipeline(3, 1, 9), Decision(recompute="blocks"), (2, 2, 2)).memory
    assert again[0].activations_bytes < many[0].activations_bytes


def test_a_forward_and_a_backward_together_take_no_longer_than_one_after_the_other() -> None:
    stages = Stages(LARGE, Decision())
    first, last = stages.cut((4, 2))
    for ahead, back in ((last, last), (first, last), (last, first)):
        both_s = stages.half_s(ahead, forward=True), stages.half_s(back, forward=False)
        assert max(both_s) < max(stages.together_s(ahead, back)) < sum(both_s)


def test_ranks_that_share_attention_send_a_part_each() -> None:
    shared = with_sharing(LARGE, 2, 1)
    plain, split = (predict_pipeline(each, pipeline(2, 1, 4), Decision()) for each in (LARGE, shared))
    assert split.update_s < plain.update_s


def tied(each: Problem) -> Problem:
    """The same model with one weight for embedding and head: the last layer has none of its own."""
    work = each.workload
    return replace(each, workload=replace(work, tied_embeddings=True))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_weight_of_embedding_and_head_is_held_twice_and_its_gradients_meet(sharded: bool) -> None:
    half = replace(LARGE, workload=replace(LARGE.workload, element_bytes=2))
    whole = sharing_updates(half) if sharded else half
    own_bytes = 4 * 64 * 128
    plain, both = (
        predict_pipeline(each, pipeline(3, 1, 4), Decision(), (2, 2, 2)) for each in (whole, tied(whole))
    )
    all_of_it = estimate_memory(tied(whole), Decision()).weights_bytes
    assert (plain.tied_bytes, both.tied_bytes) == (0, own_bytes)
    assert sum(each.weights_bytes for each in both.memory) == all_of_it + own_bytes
    assert both.memory[-1].weights_bytes - plain.memory[-1].weights_bytes == own_bytes
    copies_bytes = estimate_memory(tied(whole), Decision()).copies_bytes
    assert sum(each.copies_bytes for each in both.memory) == copies_bytes, "the first stage's is not the head"
    rates = LARGE.cluster
    assert both.tied_s == pytest.approx(rates.link_latency_s + own_bytes / rates.link_bytes_per_s)
    one = predict_pipeline(tied(whole), pipeline(1, 1, 4), Decision())
    assert one.tied_bytes == 0
    assert one.memory[0].weights_bytes == all_of_it


def test_gradients_of_a_tied_weight_end_an_update_no_earlier_than_they_meet() -> None:
    each = pipeline(4, 1, 8)
    times = PipelineTimes(slot=lambda slot: (1.0,), link=lambda *_: 0.0)
    free_s, tied_s = (run_pipeline(each, replace(times, tied_s=n)).seconds for n in (0.0, 3.0))
    assert tied_s == pytest.approx(free_s + 3.0)


def test_transfers_between_stages_share_the_card_with_those_of_a_stage() -> None:
    """A stage on two nodes that does little but send: its own rows and hidden states pass one card."""
    fast = replace(LARGE.cluster, flops_per_s=1e15, memory_bytes_per_s=1e15, task_overhead_s=1e-9)
    each = replace(LARGE, cluster=fast)
    stages, order = Stages(each, Decision()), replace(pipeline(2, 1, 6), node_size=2)
    parts = stages.cut((3, 3))
    found = predict_pipeline(each, order, Decision(), (3, 3))
    assert found.link_alone_s < found.link_s <= 2 * found.link_alone_s
    own_s = sum(stages.network_s(parts[0], forward=way, across=True) for way in (True, False))
    both_s = stages.both_s(parts[0])
    assert found.shared_s == pytest.approx(own_s + 2 * found.link_alone_s - both_s, rel=1e-2)
    alone = [stages.both_s(part) for part in parts]
    assert found.update_s > 6 * max(alone) + 5 * found.shared_s


def test_a_stage_inside_a_node_does_not_slow_what_leaves_it() -> None:
    """Its rows take links inside the node, and hidden states the card."""
    work = replace(LARGE.workload, world_size=4, node_size=4, devices_per_node=4)
    inside = replace(LARGE, workload=work)
    found = predict_pipeline(inside, replace(pipeline(2, 1, 6), node_size=4), Decision())
    assert found.link_s == found.link_alone_s > 0
    assert found.shared_s == 0


def test_more_parts_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        predict_pipeline(LARGE, pipeline(9, 1, 9), Decision())
    assert refused.value.key == "--pipeline-parallel-size"


def found_in(each: Problem, stages: int, memory_bytes: int | None = None) -> tuple[str, int]:
    tried = pipelines(stages, None, each.shape.num_layers, each, 2)
    best = find_pipeline(each, tried, lambda _: [], memory_bytes).best
    return best.choice.recompute, best.memory_bytes


@pytest.mark.slow
def test_a_search_recomputes_only_what_has_to_be_and_refuses_what_does_not_fit() -> None:
    each = replace(LARGE, passes=8, recompute=("none", "experts", "blocks"))
    none, most_bytes = found_in(each, 2)
    assert none == "none"
    _, less_bytes = found_in(each, 2, most_bytes - 1)
    assert less_bytes < most_bytes
    again, least_bytes = found_in(each, 2, most_bytes // 2)
    assert again != "none"
    assert least_bytes <= most_bytes // 2
    with pytest.raises(NothingFitsError):
        found_in(each, 2, 1)
