"""What a plan is sought for with a model of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import penstock
from penstock.adapt import planning
from penstock.adapt.engine import Engine
from penstock.adapt.planning import moving_of, stand_in
from penstock.adapt.scheduled import engine_of
from penstock.autotune.profile import tasks
from penstock.cost import Attention, ClusterFile
from penstock.decision import Decision, GradientBytes
from penstock.families.sizes import ModelSizes
from penstock.models import MoEDecoder
from penstock.moe import MoEConfig
from penstock.plan import MemoryEstimate, estimate_memory
from penstock.runtime import Machinery, PipelinedStack
from penstock.step import StepShape
from penstock.topology import Layout, ParallelConfig
from penstock.train.assemble import build_stack
from penstock.train.config import RunConfig
from tests.support.adapted import Batch, distance, small
from tests.support.faulty import before
from tests.support.ranks import Pools

CLUSTER = ClusterFile(name="assumed", nodes=1, ranks_per_node=1)


def estimated(model: Any) -> MemoryEstimate:
    """For a search by the model's engine; a process by itself searches for none."""
    engine: Engine = model.__dict__["_penstock"]
    return estimate_memory(engine._planner.problem(engine.stack, CLUSTER, 4, 12), Decision())


def whole(model: Any) -> Any:
    return model


def half(model: Any) -> Any:
    return model.bfloat16()


def double(model: Any) -> Any:
    return model.double()


def experts_alone(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." in name)
    return model


def with_lora(model: Any) -> Any:
    """Adapters of float32 on attention and experts; all else is bfloat16, and frozen."""
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    from peft import LoraConfig, get_peft_model  # here: it takes seconds to import

    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], target_parameters=targets)
    return get_peft_model(model.bfloat16(), lora).get_base_model()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("tuned", [whole, half, experts_alone, with_lora])
def test_memory_is_that_of_the_weights_as_they_are(tuned: Callable[[Any], Any], family: str) -> None:
    model = penstock.parallelize(tuned(small(family)), plan="flowmoe")
    found = estimated(model)
    parameters = list(model.parameters())
    trained_bytes = sum(p.nbytes for p in parameters if p.requires_grad)
    assert found.weights_bytes == sum(p.nbytes for p in parameters)
    assert found.gradients_bytes == trained_bytes > 0
    assert found.optimizer_bytes == 2 * trained_bytes


def test_what_is_trained_when_a_plan_is_made_counts() -> None:
    model = penstock.parallelize(small("mixtral"), plan="flowmoe")
    before = estimated(model)
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_()
    after = estimated(model)
    assert after.weights_bytes == before.weights_bytes
    assert after.gradients_bytes == model.lm_head.weight.nbytes < before.gradients_bytes


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("tuned", [whole, half])
def test_experts_move_in_their_own_type(tuned: Callable[[Any], Any], family: str) -> None:
    """Those of gpt_oss with their biases."""
    engine = engine_of(penstock.parallelize(tuned(small(family)), plan="flowmoe"))
    moving = moving_of(Decision(experts="planned"), engine._planner.sizes, engine.stack)
    expert_bytes = engine.stack.gradients.sizes_bytes.expert
    assert moving is not None and expert_bytes > 0
    assert moving.costs.parameter_bytes == moving.costs.gradient_bytes == expert_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tuned", "autocast", "dtype"),
    [
        (whole, None, torch.float32),
        (half, None, torch.bfloat16),
        (double, None, torch.float64),
        (whole, torch.bfloat16, torch.float32),
    ],
)
def test_what_is_measured_computes_as_the_model_does(
    tuned: Callable[[Any], Any],
    autocast: torch.dtype | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nearly all models of the hub are loaded in bfloat16, in which GPUs are ten times as fast."""
    found, models = list[Any](), tasks._models

    def noted(config: RunConfig, machinery: Machinery, *given: Any) -> PipelinedStack:
        with torch.device("cpu"):
            stack = build_stack(config, machinery, *given)
        (types,) = {parameter.dtype for parameter in stack.model.parameters()}
        found.append((types, stack.machinery.autocast_dtype))
        return stack

    def fitted(runs: Any, *given: Any) -> Any:
        found.append((runs.work.element_bytes, runs.work.wire_row_bytes))
        return models(runs, *given)

    monkeypatch.setattr(tasks, "build_stack", noted)
    monkeypatch.setattr(tasks, "_models", fitted)
    monkeypatch.setattr(planning, "PROFILE_S", 0.01)
    engine = engine_of(penstock.parallelize(tuned(small("mixtral")), plan="flowmoe"))
    engine.stack.compute_in(autocast)
    searching = replace(engine._planner, searches=True)
    with torch.device("meta"):  # as Lightning makes a GPU the default
        searching.of(engine.stack, 2, 12)
    computed_bytes = (autocast or dtype).itemsize
    assert found == [(dtype, autocast), (computed_bytes, 32 * computed_bytes)]
    (file,) = searching.measured.values()
    assert file.precision == ("bfloat16" if computed_bytes == 2 else "float32")
    priced = searching.problem(engine.stack, file, 2, 12).workload
    assert priced.element_bytes == computed_bytes and priced.wire_row_bytes == 32 * computed_bytes
    assert priced.held is not None and priced.held.cast == (autocast is not None)


def change_autocast(rank: int, world: int) -> list[tuple[torch.dtype | None, ...]]:
    """The types that were measured after each of some steps."""
    model = penstock.parallelize(small("mixtral"), ep_size=world, plan="auto")
    measured: dict[Any, ClusterFile] = engine_of(model)._planner.measured
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "PROFILE_S", 0.01)
        for cast in (False, True, False, True):
            with torch.autocast("cpu", enabled=cast):
                model(**Batch().inputs(2 * rank, 2 * rank + 2)).loss.backward()
            found.append(tuple(key[-1] for key in measured))
    return found


@pytest.mark.slow
def test_a_plan_is_measured_for_each_autocast_once(ranks: Pools) -> None:
    after = [(None,), *3 * [(None, torch.bfloat16)]]
    assert ranks(2).run(change_autocast, 2) == [after, after]


def run_out() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.32 GiB.")


@pytest.mark.parametrize("where", [(MoEDecoder, "head"), (tasks, "build_stack")])
def test_memory_that_is_short_while_a_cluster_is_measured(
    where: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring needs memory beside that of the model, in its first step."""
    owner, name = where
    monkeypatch.setattr(owner, name, getattr(owner, name))  # as it was, afterwards
    before(owner, name, run_out, calls=1)
    monkeypatch.setattr(planning, "PROFILE_S", 0.01)
    engine = engine_of(penstock.parallelize(small("mixtral"), plan="flowmoe"))
    with pytest.raises(RuntimeError) as caught:  # of its own type: loops try a smaller batch
        replace(engine._planner, searches=True).of(engine.stack, 2, 12)
    assert 'plan = "auto"' in "".join(caught.value.__notes__)


def by_all_ways(rank: int, world: int) -> tuple[tuple[str, ...], float]:
    """What a search considers on two nodes, and the largest distance of gradients from those of the first."""
    del world
    model = penstock.parallelize(small("qwen3_moe"), plan="flowmoe", ranks_per_node=2)
    engine = engine_of(model)
    stack, given = engine.stack, engine._planner
    ways = given.problem(stack, replace(CLUSTER, nodes=2, ranks_per_node=2), 2, 12).dispatches
    tokens_BL = torch.arange(24).reshape(2, 12) + rank
    found = []
    for way in (*ways, ways[0]):
        stack.send_by(way)
        stack.adopt(replace(given, choice=Decision(dispatch=way)).of(stack, 2, 12))
        model.zero_grad()
        model(input_ids=tokens_BL, labels=tokens_BL).loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    return ways, max(distance(*pair) for each in found for pair in zip(each, found[0], strict=True))


def test_a_search_may_let_rows_travel_by_other_ways(ranks: Pools) -> None:
    for ways, furthest in ranks(4).run(by_all_ways, 4):
        assert ways[0] == "flat" and "node_once" in ways
        assert furthest < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("samples", [0, 1])
def test_steps_of_at_most_one_sample_are_measured(samples: int) -> None:
    """Fine-tuning often has one sample on each process, and a first batch may be empty on all."""
    engine: Engine = penstock.parallelize(small("mixtral")).__dict__["_penstock"]
    like = stand_in(engine._planner.sizes, engine.stack.base_shape, ParallelConfig(), samples, 12 * samples)
    assert like.data.batch_per_device == 1


def test_heads_of_any_width_are_planned_for() -> None:
    """GPT-OSS has 45 numbers for a head by its hidden size, and 64 by its configuration."""
    sizes = ModelSizes(
        hidden_size=2880,
        vocab_size=300,
        heads=64,
        key_value_heads=8,
        head_dim=None,
        dense_width=0,
        shared_width=0,
        expert_matrices=3,
        element_bytes=4,
        moe=MoEConfig(num_experts=4),
    )
    layout = Layout(world_size=2, ep_size=2, rank=0)
    gradients = GradientBytes((1,), (1,), (0,))
    heads = sizes.workload(layout, gradients, 2, 8).heads
    assert heads == Attention.of_heads(2880, 64 * 46, 8 * 46)
    said = replace(sizes, head_dim=64)
    assert said.workload(layout, gradients, 2, 8).heads == Attention.of_heads(2880, 64 * 64, 8 * 64)
    model = stand_in(said, StepShape(moe_layers=(True,)), ParallelConfig(), 2, 8).model
    assert (model.attention_size, model.key_value_size) == (4096, 512)
    odd = replace(sizes, key_value_heads=5)
    assert odd.groups == 64, "where groups are uneven each head counts"
