"""What `penstock schedule` prints: the whole text once, then the facts behind it for every schedule."""

import json
from dataclasses import replace
from typing import Any

import pytest

from penstock.cost import ClusterConfig
from penstock.features.build import build_graph
from penstock.report import ScheduleDescription, describe_schedule
from penstock.schedule import SCHEDULES, Schedule
from penstock.schedule.schedule import parse_orders
from penstock.step.shape import TokenLayout
from tests.steps import SHARED

SETTING = """\
model        1 MoE layer, hidden 512, 8 GELU experts of 1024, top-2, dropless, vocabulary 256
step         batch 4 x 256 tokens per rank, float32, on 4 ranks with 2 experts each (ep 4)
cluster      link 400 Mbit/s, latency 0.2 ms; per rank 30 GFLOP/s, memory 4 GB/s
pieces       1 microbatch, 1 chunk per MoE layer, 1 all-reduce chunk per layer
note         sequential ignores microbatches = 2 and runs with 1
note         sequential ignores all_reduce_chunks = 3 and runs with 1

ORDER
sequential: one column = one slot, · = idle
forward
"""

RESULT = """\
iteration    1.11 s
network      383 ms of communication: 0 ms hidden under computation, 383 ms exposed
efficiency   65 % of the limit: computation has 727 ms of work, which no overlap can shorten
lower bound  1.11 s for any order of these pieces (critical path 1.11 s); this order takes 1.00x as long
"""


def describe(
    name: str,
    *,
    microbatches: int = 2,
    chunks: int = 2,
    cluster: ClusterConfig | None = None,
    width: int = 110,
) -> ScheduleDescription:
    return describe_schedule(
        name,
        layers=2,
        microbatches=microbatches,
        chunks=chunks,
        all_reduce_chunks=4,
        cluster=cluster,
        width=width,
    )


def test_degrees_apart_are_said_and_shown() -> None:
    description = describe_schedule(
        "fsmoe", layers=1, microbatches=1, chunks=3, backward_chunks=2, all_reduce_chunks=1
    )
    assert "1 microbatch, 3 forward and 2 backward chunks per MoE layer" in description.to_text()
    lines = description.grid.splitlines()
    forward, backward = lines.index("forward"), lines.index("backward")
    assert "D0.2" in "\n".join(lines[forward:backward])
    assert "D0.1" in "\n".join(lines[backward:]) and "D0.2" not in "\n".join(lines[backward:])


def test_text_of_a_schedule() -> None:
    description = describe_schedule("sequential", layers=1, microbatches=2, chunks=1, all_reduce_chunks=3)
    text = description.to_text()
    assert text.startswith("sequential: ")
    assert SETTING in text
    assert description.grid.rstrip() in text
    assert description.timeline.rstrip() in text
    assert text.endswith("\n\n" + RESULT)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_described_within_its_bounds(name: str) -> None:
    description = describe(name)
    assert description.iteration_s >= description.bound.seconds * (1 - 1e-9)
    assert 0 < description.efficiency <= description.order_efficiency <= 1 + 1e-9
    assert -1e-12 < description.exposed_communication_s < description.communication_s + 1e-12
    title, orders = parse_orders(description.schedule_text)
    assert title == name
    assert sum(map(len, orders.values())) == len(build_graph(description.shape).tasks)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("width", [60, 110, 150])
def test_text_is_never_wider_than_asked(name: str, width: int) -> None:
    assert max(map(len, describe(name, width=width).to_text().splitlines())) <= width


def test_notes_say_what_a_schedule_does_not_read() -> None:
    assert describe("flowmoe").notes == ("flowmoe ignores chunks = 2 and runs with 1",)
    assert describe("flowmoe", chunks=1).notes == ()
    assert "moe_pipeline ignores microbatches = 2 and runs with 1" in describe("moe_pipeline").notes
    assert describe_schedule("moe_pipeline", layers=2).notes == (), "nobody has asked for two microbatches"


def test_notes_say_where_a_form_changes_nothing() -> None:
    def notes(name: str, **given: Any) -> tuple[str, ...]:
        fixed: dict[str, Any] = {"layers": 1, "microbatches": 1, "chunks": None, "all_reduce_chunks": 1}
        return describe_schedule(name, **fixed, **given).notes

    assert notes("lina", expert_form="s1") == ("lina ignores expert_form = s1 and runs with gather",)
    assert notes("lina", expert_form="s1", sharing=SHARED) == ()
    assert notes("parm_s2", expert_form="s1") == ("parm_s2 ignores expert_form = s1 and runs with s2",)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("tokens", ["split", "replicated"])
def test_ranks_that_share_have_an_order_within_its_bounds_too(name: str, tokens: TokenLayout) -> None:
    sharing = replace(SHARED, tokens=tokens)
    description = describe_schedule(
        name, layers=2, microbatches=2, chunks=2, all_reduce_chunks=2, sharing=sharing
    )
    assert description.shape.sharing == sharing
    assert "intra " in description.grid
    assert 0 < description.efficiency <= description.order_efficiency <= 1 + 1e-9
    assert "ignores chunks = 2" not in " ".join(describe("parm_s2").notes)


def test_speedup_is_over_sequential_on_the_same_cluster() -> None:
    assert describe("sequential").speedup == 1
    slow, fast = (describe("flowmoe", cluster=ClusterConfig(link_bytes_per_s=rate)) for rate in (5e7, 1e12))
    assert slow.speedup > 1.2
    assert slow.speedup > fast.speedup
    assert slow.sequential_iteration_s == pytest.approx(describe("sequential").iteration_s)
    assert "link 8,000 Gbit/s" in fast.to_text()


def test_every_microbatch_has_a_sample() -> None:
    assert describe("flowmoe", microbatches=6).workload.batch == 6


def test_dict_is_plain_data() -> None:
    description = describe("flowmoe")
    data = json.loads(json.dumps(description.to_dict()))
    assert data["schedule"] == "flowmoe"
    assert data["speedup_over_sequential"] == description.speedup
    assert data["lower_bound"]["busiest_lane"] == "compute"
    assert data["lower_bound"]["seconds"] == description.bound.seconds
    assert data["shape"]["microbatches"] == 2
    graph = build_graph(description.shape)
    assert Schedule.parse(data["schedule_text"], graph).text() == description.schedule_text
