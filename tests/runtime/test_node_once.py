"""One copy per node: what crosses, counted on the transports, is what the choices of tokens ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from torch import Tensor

from penstock.autotune.problem import possible_dispatches
from penstock.config import ConfigError
from penstock.decision import PlacementConfig
from penstock.mesh import Axes, Group, node_of
from penstock.moe import GeluExperts, MergedPermutation, MoELayer, SoftmaxRouter, SortPermutation
from penstock.moe.routers import TokenChoice
from penstock.plan.plan_config import PlanConfig
from penstock.runtime.transport import GroupTransport
from penstock.topology import Layout
from tests.support.cases import JOINED
from tests.support.cases import small_case as case
from tests.support.parity import Case, own_batch, stack_of
from tests.support.ranks import Pools

ELEMENT_BYTES = 8


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[Axes]]:
    """Bytes that leave this rank, by the kind of group."""
    seen: Counter[Axes] = Counter()
    count = GroupTransport._count

    def counting(self: GroupTransport, rows: Tensor, splits: Any, group: Axes) -> None:
        before = self.traffic.total()
        count(self, rows, splits, group)
        seen[group] += self.traffic.total() - before

    with monkeypatch.context() as patched:
        patched.setattr(GroupTransport, "_count", counting)
        yield seen


@dataclass(frozen=True)
class Sent:
    """By one rank: bytes between nodes and inside them, and which experts its tokens chose."""

    across: int
    inside: int
    chosen: list[list[int]]


def sent_by(rank: int, step: Case) -> Sent:
    stack, chosen = stack_of(rank, step), []
    for layer in stack.moe_layers:
        assert layer is not None

        def keep(_: Any, __: Any, choice: TokenChoice) -> None:
            chosen.extend(choice.experts_Tk.tolist())

        layer.gate.register_forward_hook(keep)
    with pytest.MonkeyPatch.context() as monkeypatch, counted(monkeypatch) as seen:
        stack(*own_batch(rank, step)).backward()
    return Sent(seen[Group.RAIL], seen[Group.NODE], chosen)


@pytest.mark.parametrize("gate", ["softmax", "deepseek"])
def test_bytes_are_those_that_the_choices_ask_for(ranks: Pools, gate: str) -> None:
    """Out with numbers and weights beside the row, home without; gradients the same way back."""
    step = case(4, gate, "sort", JOINED, "swiglu", "penstock")
    found = ranks(4).run(sent_by, step)
    crossing = copied = 0
    local = step.moe.num_experts // 4
    for rank, sent in enumerate(found):
        assert len(sent.chosen) == step.batch * step.model.seq_len
        for experts in sent.chosen:
            hosts = {expert // local for expert in experts}
            nodes = {node_of(host, 2) for host in hosts}
            crossing += len(nodes - {node_of(rank, 2)})
            copied += sum(host % 2 != rank % 2 for host in hosts)
    hidden, beside = step.model.hidden_size, 2 * step.moe.top_k
    each = 2 * (hidden + beside + hidden) * ELEMENT_BYTES
    assert sum(sent.across for sent in found) == crossing * each > 0
    assert sum(sent.inside for sent in found) == copied * each > 0


def layer_of(**parts: Any) -> Callable[[], MoELayer]:
    usual = {"gate": SoftmaxRouter(4, 8, 2), "expert": GeluExperts(4, 4, 2), "ep_size": 4, "ep_rank": 1}
    return lambda: MoELayer(**{**usual, **parts})


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            layer_of(permutation=SortPermutation(8), dispatch=JOINED),
            "SortPermutation makes one for each: use MergedPermutation",
        ),
        (
            layer_of(permutation=MergedPermutation(8, 2, 4, node_size=2, rank=1)),
            'use dispatch="node_once", or node_size=1',
        ),
        (lambda: MergedPermutation(1040, 2, 4, node_size=2), "exact up to 256.*520"),
        (lambda: MergedPermutation(36, 2, 36, node_size=9), "at most 8 ranks"),
    ],
)
def test_parts_that_do_not_fit_say_why(make: Callable[[], object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()


@pytest.mark.parametrize(
    ("layout", "settings", "why"),
    [
        ({"ep_size": 4, "node_size": 4}, {}, "needs an expert group over several nodes"),
        ({"ep_size": 2, "etp_size": 2}, {}, "parallel.etp_size = 2 forbids"),
        (
            {"ep_size": 4},
            {"placement": PlacementConfig(samples="netmoe")},
            "placement.samples = netmoe forbids",
        ),
    ],
)
def test_layouts_and_moves_that_do_not_fit_say_why(
    layout: dict[str, Any], settings: dict[str, Any], why: str
) -> None:
    step = case(4, "softmax", "sort", JOINED, "gelu", "penstock")
    config = replace(step.config, **settings)
    with pytest.raises(ConfigError, match=why):
        possible_dispatches(config, Layout(**{"world_size": 4, "rank": 0, "node_size": 2, **layout}))


@pytest.mark.parametrize(
    ("layout", "moe", "names"),
    [
        ({"ep_size": 4}, {}, ["flat", "hierarchical_1d", "hierarchical_2d", JOINED]),
        ({"ep_size": 4}, {"comm_dtype": "int8"}, ["flat", "hierarchical_1d", "hierarchical_2d"]),
        ({"ep_size": 2, "world_size": 2, "node_size": 1}, {}, ["flat", JOINED]),
        ({"ep_size": 2, "etp_size": 2, "world_size": 8}, {}, ["flat"]),
        ({"ep_size": 1, "world_size": 1}, {}, ["flat"]),
    ],
)
def test_a_search_looks_at_it_where_it_can_run(
    layout: dict[str, Any], moe: dict[str, Any], names: list[str]
) -> None:
    step = case(4, "softmax", "sort", "auto", "gelu", "penstock")
    config = replace(step.config, moe=replace(step.moe, **moe), plan=PlanConfig(mode="auto"))
    assert (
        possible_dispatches(config, Layout(**{"world_size": 4, "rank": 0, "node_size": 2, **layout})) == names
    )
