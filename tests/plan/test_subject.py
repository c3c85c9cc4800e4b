"""Published models on clusters: the sizes that the studies give, and what does not fit together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.config import ConfigError
from penstock.cost import ClusterConfig, ClusterFile
from penstock.cost.clusters import find_cluster, names
from penstock.cost.devices import Computing
from penstock.decision import Decision
from penstock.ops import Op
from penstock.plan import MODELS, estimate_memory, evaluate, published_problem
from penstock.plan.subject import Overrides

TESTBED_A, TESTBED_B = find_cluster("fsmoe-testbed-a"), find_cluster("fsmoe-testbed-b")
CLUSTER_1 = find_cluster("flowmoe-cluster-1")


@pytest.mark.every_value
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cluster", names())
def test_every_model_has_a_step_on_every_cluster(name: str, cluster: str) -> None:
    """Shortened to two layers; a node alone has one expert per layer of FSMoE's models."""
    file = find_cluster(cluster)
    few = Overrides(layers=2, num_experts=16 * file.ranks, batch=2)
    each = published_problem(name, file, few).problem
    found = evaluate(each, Decision(schedule="flowmoe", microbatches=2))
    assert 0 < found.bound.seconds <= found.predicted_s
    work, shared = each.workload, file.ranks_per_node if MODELS[name].sharded else 1
    assert (work.tp_size, work.etp_size, work.world_size) == (shared, shared, file.ranks)


def test_mixtral_on_testbed_b() -> None:
    subject = published_problem("fsmoe/mixtral-7b-layers", TESTBED_B)
    work = subject.problem.workload
    assert (work.world_size, work.ep_size, work.num_experts) == (32, 8, 8)
    assert (work.tp_size, work.etp_size, work.nodes) == (4, 4, 8)
    assert (subject.problem.shape.num_layers, work.batch, work.seq_len, work.top_k) == (7, 1, 256, 2)
    assert work.all_reduce_bytes == (4 * 4096**2 * 4 // 4,) * 7
    assert work.partial_all_reduce_bytes == (4096 * 8 * 4,) * 7, "every rank routes its part of the tokens"
    assert work.rows(0, 1, 0, 1, 4) == 8 * 20, (
        "ceil(1.2 x 2 x 64 tokens of a shard / 8 experts) slots of each"
    )
    assert any("7 layers and 256 tokens" in note for note in subject.notes)
    assert "4 ranks of a node share attention, samples and every expert" in subject.ranks
    assert subject.memory_bytes == TESTBED_B.memory_bytes


@pytest.mark.parametrize(
    ("device", "own", "wanted", "precision", "flops_per_s"),
    [
        ("A100", None, None, "bfloat16", 1e13),
        ("V100", None, None, "float32", 1e13),
        ("cpu", None, None, "float32", 1e13),
        ("A100", "float32", None, "float32", 1e13),
        ("A100", "float32", "bfloat16", "bfloat16", 1.6e14),
        ("V100", "float32", "bfloat16", "bfloat16", 1e13),
        ("A100", None, "float32", "float32", 1e13),
    ],
)
def test_bytes_and_operations_are_of_the_precision_that_is_told(
    device: str, own: Computing | None, wanted: Computing | None, precision: str, flops_per_s: float
) -> None:
    rates = ClusterConfig(flops_per_s=1e13)
    file = ClusterFile(name="x", nodes=2, ranks_per_node=2, rates=rates, device=device, precision=own)
    subject = published_problem("flowmoe/gpt2-tiny", file, Overrides(layers=1, precision=wanted))
    work, cluster = subject.problem.workload, subject.problem.cluster
    assert subject.precision == precision and subject.why_precision
    assert work.element_bytes == {"float32": 4, "bfloat16": 2}[precision]
    assert work.all_reduce_bytes[0] == (4 * work.hidden_size**2 + work.hidden_size * work.num_experts) * 4
    assert cluster.flops_per_s == pytest.approx(flops_per_s)
    converted = wanted == "bfloat16" and own == "float32"
    assert any("float32" in note for note in subject.notes) is converted


def test_elsewhere_mixtral_has_its_published_sizes() -> None:
    work = published_problem("fsmoe/mixtral-7b-layers", TESTBED_A).problem.workload
    assert (len(work.all_reduce_bytes), work.seq_len, work.num_experts, work.etp_size) == (32, 1024, 6, 8)


def test_a_flowmoe_model_spreads_its_experts_over_all_ranks() -> None:
    each = published_problem("flowmoe/bert-large", CLUSTER_1).problem
    work = each.workload
    assert (work.world_size, work.ep_size, work.num_experts, work.ranks_per_node) == (16, 16, 32, 8)
    assert each.dispatches == ("flat", "hierarchical_1d", "hierarchical_2d", "node_once")
    assert not each.shape.exchange_counts, "with a capacity all pieces have the same size"
    assert sum(work.all_reduce_bytes) / 4 / 1e6 == pytest.approx(25.2, rel=0.02)


def test_overrides_win() -> None:
    given = Overrides(layers=3, batch=8, seq_len=64, top_k=1, nodes=4, ranks_per_node=2, ep_size=4)
    subject = published_problem("flowmoe/gpt2-tiny", CLUSTER_1, given)
    work = subject.problem.workload
    assert (subject.problem.shape.num_layers, work.batch, work.seq_len, work.top_k) == (3, 8, 64, 1)
    assert (work.world_size, work.ep_size, work.ranks_per_node, work.num_experts) == (8, 4, 2, 8)
    expert = 2 * 256 * 512 * 4
    assert work.expert_all_reduce_bytes == (2 * expert,) * 3, "two experts per rank have replicas"
    assert any("link times are extrapolated from the 2 x 8 devices" in note for note in subject.notes)


def one_rank() -> ClusterFile:
    return replace(CLUSTER_1, nodes=1, ranks_per_node=1, links=())


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("Mixtral-7B", {}, ("--model", "Mixtral-7B", "Nearest: fsmoe/mixtral-7b-layers")),
        ("MoE-GPT-S", {}, ("--model", "Nearest: pro-prophet/moe-gpt-s")),
        ("fsmoe/mixtral-7b-layers", {"ep_size": 3}, ("--ep-size = 3", "8 groups", "Nearest valid: 2")),
        ("flowmoe/gpt2-tiny", {"top_k": 99}, ("--top-k = 99", "8 or fewer")),
        ("flowmoe/gpt2-tiny", {"num_experts": 7}, ("--ep-size", "7 experts")),
    ],
)
def test_what_does_not_fit_is_named(name: str, given: dict[str, Any], words: tuple[str, ...]) -> None:
    file = replace(CLUSTER_1, nodes=4, ranks_per_node=2) if name == "flowmoe/gpt2-tiny" else TESTBED_B
    with pytest.raises(ConfigError) as caught:
        published_problem(name, file, Overrides(**given))
    for word in words:
        assert word in str(caught.value)


def test_sizes_are_positive() -> None:
    with pytest.raises(ConfigError, match="--seq-len = 0"):
        Overrides(seq_len=0)


def test_one_group_reduces_in_no_time_and_still_holds_its_weights() -> None:
    alone = published_problem("flowmoe/gpt2-tiny", one_rank(), Overrides(top_k=1)).problem
    assert alone.workload.world_size == 1
    choice = Decision()
    plan = alone.plan(choice)
    cost = alone.cost(choice, plan.shape)
    assert {cost(task) for task in plan.graph.tasks if task.op == Op.ALL_REDUCE} == {0.0}
    replicated = sum(alone.workload.all_reduce_bytes)
    with_weights, without = (
        estimate_memory(replace(alone, workload=work), choice).weights_bytes
        for work in (alone.workload, replace(alone.workload, all_reduce_bytes=(0,) * alone.shape.num_layers))
    )
    assert with_weights - without == replicated > 0


def test_ranks_that_share_experts_wait_for_the_slowest() -> None:
    """Eight nodes of four: the ranks of a node share attention and experts."""
    slow = tuple(3.0 if rank == 9 else 1.0 for rank in range(32))
    each = published_problem("fsmoe/mixtral-7b-layers", replace(TESTBED_B, slowness=slow))
    assert each.problem.slowness == slow
    usual = evaluate(published_problem("fsmoe/mixtral-7b-layers", TESTBED_B).problem, Decision())
    assert evaluate(each.problem, Decision()).predicted_s > 1.3 * usual.predicted_s
    elsewhere = published_problem(
        "fsmoe/mixtral-7b-layers", replace(TESTBED_B, slowness=slow), Overrides(nodes=4)
    )
    assert elsewhere.problem.slowness == ()
    assert any("slower ranks" in note for note in elsewhere.notes)
