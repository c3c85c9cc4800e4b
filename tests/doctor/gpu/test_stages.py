"""Every stage on two ranks: it passes, and what is planted makes it fail with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from penstock.config import load
from penstock.cost import ClusterFile
from penstock.device import using
from penstock.doctor.gpu import curves, faults, lanes, numerics, prediction, races, waits
from penstock.doctor.gpu.here import Case, Here, Running, Scale
from penstock.doctor.gpu.numerics import LIMITS, Errors
from penstock.doctor.gpu.outcome import Outcome, Verdict
from penstock.doctor.gpu.stages import STAGES
from penstock.runtime.transport import GroupTransport
from penstock.topology import ProcessInfo
from penstock.train.config import RunConfig
from tests.support.card import CardDevice, counted, install
from tests.support.ranks import Pools, RankPool
from tests.support.recording.gpu import recorded
from tests.support.recording.hazards import Hazard, find_hazards
from tests.support.recording.recorder import Launch

SCALE = Scale(rounds=4, repeats=2, steps=1, budget_s=0.5, largest_bytes=0, judged=False)
TINY = (
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.seq_len=8",
    "moe.num_experts=2",
    "moe.moe_ffn_hidden_size=16",
    "data.batch_per_device=2",
    "parallel.timeout_s=10",
)
Plant = Callable[[int], AbstractContextManager[Any]]


def here_of(rank: int, device: torch.device | None = None, **changes: Any) -> Here:
    config = load(RunConfig, None, TINY).resolved(2)
    info = ProcessInfo(rank=rank, world_size=2, local_rank=rank, launcher="penstock")
    here = Here(info=info, device=device or torch.device("cpu"), config=config, scale=SCALE)
    return replace(here, **changes)


def nothing(rank: int) -> AbstractContextManager[Any]:
    del rank
    return nullcontext()


def run_on(rank: int, name: str, plant: Plant) -> Outcome:
    """A stage on this rank of a pool."""
    with plant(rank):
        return STAGES[name].run(here_of(rank))


def run_on_card(rank: int, name: str, plant: Plant) -> Outcome:
    """The same on this rank's stand-in for a GPU, which counts what the host waits for."""
    device = install()
    with using(Counting()), plant(rank):
        return STAGES[name].run(here_of(rank, device))


class Counting(CardDevice):
    def counting_waits(self) -> AbstractContextManager[Any]:
        return counted()


def judged(name: str, found: list[Outcome]) -> Outcome:
    return STAGES[name].judge(dict(enumerate(found)))


def both(*contexts: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    found = ExitStack()
    for each in contexts:
        found.enter_context(each)
    return found


# ---- numerics ----------------------------------------------------------------------------------------------


def few_cases(*sizes: int) -> list[Case]:
    del sizes
    shared = {"tp_size": 2, "etp_size": 2}
    return [
        Case(name="plain"),
        Case(name="shared", schedule="parm_s1", parallel=shared, precision="bfloat16"),
        Case(name="sharded", schedule="penstock", optimizer={"zero_stage": 1}),
    ]


def only_few(rank: int) -> AbstractContextManager[Any]:
    del rank
    return patch.object(numerics, "cases", few_cases)


def scaled_sums(factor: Callable[[], float]) -> AbstractContextManager[Any]:
    """Sums of gradients are wrong on all ranks alike, so that none differs from the others."""
    original = GroupTransport.all_reduce

    def wrong(self: Any, tensor: Tensor, group: Any) -> None:
        original(self, tensor, group)
        if tensor.numel() > 500:
            tensor.mul_(factor())

    return patch.object(GroupTransport, "all_reduce", wrong)


def outside_chooses_tf32(rank: int) -> AbstractContextManager[Any]:
    def off_unless_highest(*given: Any) -> Errors:
        del given
        off = float(torch.get_float32_matmul_precision() != "highest")
        return Errors(loss=off, norm=0.0, parameters=0.0)

    torch.set_float32_matmul_precision("high")
    return both(only_few(rank), patch.object(numerics, "check", off_unless_highest))


def half_is_lost(rank: int) -> AbstractContextManager[Any]:
    return both(only_few(rank), scaled_sums(lambda: 0.5))


def test_numbers_of_steps_are_those_of_the_reference(ranks: Pools) -> None:
    found = judged("numerics", ranks(2).run(run_on, "numerics", only_few))
    assert (found.verdict, found.reason) == (Verdict.PASS, "")
    assert [each["case"] for each in found.figures["cases"]] == ["plain", "sharded", "shared"]
    assert max(each["parameters"] for each in found.figures["cases"][:2]) < 1e-5


def test_products_are_those_of_float32_whatever_is_chosen_outside(ranks: Pools) -> None:
    found = judged("numerics", ranks(2).run(run_on, "numerics", outside_chooses_tf32))
    assert (found.verdict, found.reason) == (Verdict.PASS, "")


def test_a_lost_sum_is_found(ranks: Pools) -> None:
    found = judged("numerics", ranks(2).run(run_on, "numerics", half_is_lost))
    assert found.verdict is Verdict.FAIL
    assert "plain in float32: " in found.reason and "parameters is off by" in found.reason


def two_cases(rank: int) -> AbstractContextManager[Any]:
    """The card has no tensors without memory, as a sharded optimiser has in place of parameters."""
    del rank
    return patch.object(numerics, "cases", lambda *sizes: few_cases()[:2])


@pytest.mark.slow
def test_numbers_of_the_card_are_those_of_the_reference(cards: Pools) -> None:
    found = judged("numerics", cards(2).run(run_on_card, "numerics", two_cases))
    assert (found.verdict, found.reason) == (Verdict.PASS, "")


def test_what_is_no_number_is_wrong() -> None:
    nan = Errors(loss=float("nan"), norm=0.0, parameters=0.0)
    found = numerics.outcome_of([(Case(name="x"), nan)])
    assert found.verdict is Verdict.FAIL
    assert found.figures["cases"][0]["loss"] is None
    assert not Errors(loss=0.0, norm=0.0, parameters=0.0).beyond(LIMITS["float32"])


@pytest.mark.parametrize(
    ("world_size", "node_size"), [(1, 1), (2, 2), (2, 1), (3, 3), (4, 4), (6, 3), (8, 4), (12, 0)]
)
def test_all_schedules_are_among_the_cases(world_size: int, node_size: int) -> None:
    """Those for which ranks must share something, where they can; and every case in both precisions."""
    from penstock.schedule import SCHEDULES

    found = [*numerics.cases(world_size, node_size)]
    plain = {name for name, each in SCHEDULES.items() if each.expert_form in (None, "gather")}
    pairs = node_size in (2, 4)
    assert {each.schedule for each in found} == (set(SCHEDULES) if pairs else plain)
    assert all(pairs or not each.parallel.keys() & {"tp_size", "etp_size"} for each in found)
    assert len({(each.name, each.precision) for each in found}) == len(found)


# ---- races -------------------------------------------------------------------------------------------------


def one_schedule(rank: int) -> AbstractContextManager[Any]:
    del rank
    return patch.object(races, "SCHEDULES", ("flowmoe",))


def late_tasks_change_sums(rank: int) -> AbstractContextManager[Any]:
    """As a race would: only where tasks are late."""
    original, late = races.delayed, [False]

    def delayed(here: Here, found: Any) -> Any:
        late[0] = True
        return original(here, found)

    slightly = scaled_sums(lambda: 1.001 if late[0] else 1.0)
    return both(one_schedule(rank), slightly, patch.object(races, "delayed", delayed))


def test_late_tasks_change_no_bit(ranks: Pools) -> None:
    found = judged("races", ranks(2).run(run_on, "races", one_schedule))
    assert (found.verdict, found.reason) == (Verdict.PASS, "")
    (only,) = found.figures["schedules"]
    assert only == {"schedule": "flowmoe", "repeatable": True, "equal": True, "off": 0.0}


def test_a_race_is_found(ranks: Pools) -> None:
    found = judged("races", ranks(2).run(run_on, "races", late_tasks_change_sums))
    assert found.verdict is Verdict.FAIL
    assert "flowmoe: disturbed steps differ" in found.reason


# ---- waits -------------------------------------------------------------------------------------------------


def many_waits(rank: int) -> AbstractContextManager[Any]:
    """Every step of one schedule reads its loss ten times."""
    del rank
    original = Running.step

    def step(self: Running, number: int = 0) -> tuple[Tensor, Tensor]:
        loss, norm = original(self, number)
        for _ in range(10):
            loss.item()
        return loss, norm

    return both(patch.object(waits, "TRIED", ("flowmoe",)), patch.object(Running, "step", step))


@pytest.mark.slow
def test_waits_of_the_card_are_few(cards: Pools) -> None:
    found = judged("waits", cards(2).run(run_on_card, "waits", nothing))
    assert (found.verdict, found.reason) == (Verdict.PASS, "")
    assert all(each["waits"] <= each["allowed"] for each in found.figures["waits"])
    assert found.figures["tasks"] > 0 and found.figures["issue_s"] > 0


@pytest.mark.slow
def test_more_waits_are_slow(cards: Pools) -> None:
    found = judged("waits", cards(2).run(run_on_card, "waits", many_waits))
    assert found.verdict is Verdict.SLOW
    assert "flowmoe waits " in found.reason
    lines = [line for each in found.figures["waits"] for line in each["lines"]]
    assert any(line["times"] >= 10 and line["what"] == "number read on the host" for line in lines)


# ---- curves and prediction ---------------------------------------------------------------------------------


def curves_then_prediction(rank: int) -> tuple[Outcome, Outcome, Outcome]:
    from penstock.config import from_dict

    here = here_of(rank)
    found = curves.run(here)
    plain = json.loads(json.dumps(found.figures["cluster"]))  # as the command hands it on
    measured = replace(here, cluster=from_dict(ClusterFile, plain, "cluster"))
    with patch.object(prediction, "TRIED", ("sequential", "flowmoe")):
        predicted = prediction.run(measured)
        far = replace(measured, scale=replace(SCALE, judged=True))
        with patch.object(prediction, "whole_s", lambda *given: 1e-9):
            return found, predicted, prediction.run(far)


def test_curves_are_a_cluster_file_from_which_steps_are_predicted(ranks: Pools) -> None:
    """And steps that take longer than predicted are said to be slow, where times count."""
    for found, predicted, far in ranks(2).run(curves_then_prediction):
        assert found.verdict in (Verdict.PASS, Verdict.SLOW), found.reason
        assert found.figures["cluster"]["measured"]["host"] == ""
        assert any(line.startswith("all_to_all: ") for line in found.lines)
        assert predicted.verdict is Verdict.PASS
        rows = predicted.figures["schedules"]
        assert [row["schedule"] for row in rows] == ["sequential", "flowmoe"]
        assert all(row["predicted_s"] > 0 and row["measured_s"] > 0 for row in rows)
        assert far.verdict is Verdict.SLOW
        assert "sequential takes " in far.reason and "flowmoe takes " in far.reason


def test_doubts_about_curves_are_shown() -> None:
    file = ClusterFile(name="x", nodes=1, ranks_per_node=2, doubts=("links were busy",))
    found = curves.outcome_of(file, [], judged=True)
    assert (found.verdict, found.reason) == (Verdict.SLOW, "links were busy")
    assert curves.outcome_of(file, [], judged=False).verdict is Verdict.PASS


def large_ones(rank: int) -> Outcome:
    here = here_of(rank, scale=replace(SCALE, largest_bytes=1 << 16))
    with patch.object(curves, "LEAST_LARGE_BYTES", 1 << 14):
        return curves.run(here)


def test_larger_collectives_than_a_profile_has_are_measured(ranks: Pools) -> None:
    for found in ranks(2).run(large_ones):
        sizes = [(each["collective"], each["bytes"]) for each in found.figures["large"]]
        assert sizes == [(name, size) for size in (1 << 14, 1 << 16) for name in ("all_reduce", "all_to_all")]


# ---- communicators and lanes -------------------------------------------------------------------------------


def wrong_sums(rank: int) -> AbstractContextManager[Any]:
    original = GroupTransport.all_reduce

    def wrong(self: Any, tensor: Tensor, group: Any) -> None:
        original(self, tensor, group)
        tensor.add_(rank)

    return patch.object(GroupTransport, "all_reduce", wrong)


@pytest.mark.parametrize(("name", "said"), [("join", "gave [4, "), ("lanes", "rounds gave wrong numbers")])
def test_exchanges_are_right_and_wrong_ones_are_found(ranks: Pools, name: str, said: str) -> None:
    plain = judged(name, ranks(2).run(run_on, name, nothing))
    assert (plain.verdict, plain.reason) == (Verdict.PASS, "")
    wrong = judged(name, ranks(2).run(run_on, name, wrong_sums))
    assert wrong.verdict is Verdict.FAIL
    assert said in wrong.reason and wrong.reason.startswith("rank 1: ")


def recorded_lanes(rank: int) -> tuple[Outcome, list[Hazard], int]:
    """The stage on streams that are logged, what could happen too early in it, and how much is in the log."""
    with recorded() as recorder:
        found = lanes.run(here_of(rank))
    launches = [each for each in recorder.log if isinstance(each, Launch) and each.actor.on_device]
    return found, find_hazards(recorder.log), len(launches)


def test_lanes_of_a_gpu_wait_for_each_other(ranks: Pools) -> None:
    """The stage itself has no race: what it reads at the end has been written."""
    for found, hazards, launches in ranks(2).run(recorded_lanes):
        assert (found.verdict, hazards) == (Verdict.PASS, [])
        assert launches > 0


def test_lanes_that_do_not_run_at_once_are_slow(ranks: Pools) -> None:
    found = judged("lanes", ranks(2).run(one_after_the_other))
    assert (found.verdict, found.reason) == (Verdict.SLOW, "the two lanes do not run at the same time")


def one_after_the_other(rank: int) -> Outcome:
    here = here_of(rank, scale=replace(SCALE, judged=True))
    with patch.object(lanes, "seconds", lambda here, machinery, transports: float(len(transports))):
        return lanes.run(here)


def sizes_of_sums(rank: int) -> set[int]:
    original, sizes = GroupTransport.all_reduce, set()

    def noted(self: Any, tensor: Tensor, group: Any) -> None:
        sizes.add(tensor.numel())
        original(self, tensor, group)

    with patch.object(GroupTransport, "all_reduce", noted):
        lanes.run(here_of(rank))
    return sizes


def test_lanes_that_share_a_link_may_run_at_once(ranks: Pools) -> None:
    """Two transfers that fill it would take as long as one after the other."""
    assert ranks(2).run(sizes_of_sums) == [{lanes.SIZE}] * 2


@pytest.mark.slow
def test_all_layouts_have_communicators(cards: Pools) -> None:
    found = judged("join", cards(2).run(run_on_card, "join", nothing))
    assert (found.verdict, found.reason) == (Verdict.PASS, "")
    made = {
        (each["layout"], one["group"]) for each in found.figures["layouts"] for one in each["communicators"]
    }
    assert {("flat", "ep"), ("hierarchical", "rail"), ("tensor parallel", "tp"), ("sharded", "etp")} <= made


def join_from_nodes_of_one(rank: int) -> Outcome:
    info = ProcessInfo(rank=rank, world_size=2, local_rank=0, launcher="penstock")
    return STAGES["join"].run(here_of(rank, info=info))


def test_ranks_of_different_nodes_share_nothing_that_stays_in_one(ranks: Pools) -> None:
    found = judged("join", ranks(2).run(join_from_nodes_of_one))
    assert (found.verdict, found.reason) == (Verdict.PASS, "")
    assert [each["layout"] for each in found.figures["layouts"]] == ["flat", "replicas", "hierarchical"]


# ---- faults ------------------------------------------------------------------------------------------------


def a_fault(rank: int, plants: bool) -> Outcome:
    """Afterwards the groups of the ranks cannot be used, if there was one."""
    here = here_of(rank)
    if not plants:
        with patch.object(faults, "_plant", lambda ran: None):
            return faults.run(here)
    return faults.run(here)


@pytest.mark.parametrize(
    ("said", "waited_s", "faulty", "why"),
    [
        ("rank 0: task x failed: rank 1 had failed", 0.5, False, ""),
        ("", 0.5, False, "the step ended"),
        ("rank 0: task x failed: it was closed", 0.5, False, "rank 1 is not named"),
        ("rank 1 had failed", 60.0, False, "it learned of the failure after 60.0 s"),
        ("rank 1: PlantedError: a fault", 0.5, True, ""),
        ("rank 1: ValueError", 0.5, True, "its own error was lost"),
    ],
)
def test_what_ranks_must_say_of_a_fault(said: str, waited_s: float, faulty: bool, why: str) -> None:
    found = faults.why_wrong(said, waited_s, faulty=faulty, lost=1, timeout_s=60)
    assert found.startswith(why) and bool(found) == bool(why)


@pytest.mark.slow
def test_a_rank_that_fails_says_so() -> None:
    pool = RankPool(2)
    try:
        _, own = pool.run(a_fault, True)
    finally:
        pool.close()
    assert (own.verdict, own.figures["failed"]) == (Verdict.PASS, True)
    assert "PlantedError" in own.figures["said"]


def test_a_fault_that_no_rank_notices_is_found(ranks: Pools) -> None:
    found = judged("faults", ranks(2).run(a_fault, False))
    assert found.verdict is Verdict.FAIL
    assert found.reason == "the step ended as if no rank had failed"
