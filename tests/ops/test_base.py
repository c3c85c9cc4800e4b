"""The register of ops: what is refused, and what the facts of ours say together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock.features.build import build_graph
from penstock.graph import ScheduleError
from penstock.ops import OPS, Backward, Kind, Op, OpSpec, register, spec_of
from penstock.ops.base import place_of
from penstock.ops.core import COMBINE_OF, DISPATCH_OF, GRADIENT_KINDS, TRANSFERS
from penstock.step import Sharing, StepShape
from penstock.step.shape import FORM_TOKENS, ExpertForm
from tests.steps import no_work

OWN = OpSpec(name="Q8", title="quantise rows", kind=Kind.COMPUTE, work=no_work)


@pytest.fixture(autouse=True)
def ops_as_before() -> Iterator[None]:
    before = dict(OPS)
    yield
    OPS.clear()
    OPS.update(before)


def test_a_registered_op_is_found() -> None:
    register(OWN)
    assert spec_of("Q8") is OWN
    assert list(OPS)[-1] == "Q8"


def test_the_same_op_may_be_registered_again() -> None:
    """As when a file is imported under two names; another op of that name may not."""
    register(OWN)
    register(replace(OWN))
    with pytest.raises(ScheduleError, match=r"^op Q8 is registered already: quantise rows$"):
        register(replace(OWN, kind=Kind.COPY))
    assert spec_of("Q8") == OWN


@pytest.mark.parametrize("name", ["", "q", "Qx", "8Q", "Q.8", "Q 8", "Q_8", "-", "Ω", "Q²"])
def test_a_name_that_no_task_can_carry_is_refused(name: str) -> None:
    before = list(OPS)
    with pytest.raises(ScheduleError, match="use upper-case letters and digits, a letter first"):
        register(replace(OWN, name=name))
    assert list(OPS) == before


def test_an_op_that_nobody_registered_is_answered_with_those_there_are() -> None:
    with pytest.raises(
        ScheduleError, match=r"^no op is called Q8; there are EM, .* Add it with ops\.register\."
    ):
        spec_of("Q8")


def test_what_computes_saves_and_what_sends_does_not() -> None:
    saving = {kind: replace(OWN, kind=kind).saves for kind in Kind}
    assert saving == {Kind.COMPUTE: True, Kind.COPY: True, Kind.COLLECTIVE: False, Kind.HOST: False}


def test_every_op_that_has_a_name_has_facts() -> None:
    named = {value for key, value in vars(Op).items() if key.isupper()}
    assert named == set(OPS)
    assert all(name == spec.name and spec.title for name, spec in OPS.items())


def test_transposes_of_transfers_are_the_legs_home() -> None:
    assert {op: OPS[op].transpose for op in TRANSFERS} == {**COMBINE_OF, **DISPATCH_OF}
    assert all(OPS[OPS[op].transpose].transpose == op for op in TRANSFERS)


def test_sums_of_gradients_have_no_backward_and_those_of_the_loss_stand_for_one() -> None:
    assert {OPS[kind.reduce].backward for kind in GRADIENT_KINDS.values()} == {Backward.NONE}
    assert OPS[Op.STATISTICS].backward is Backward.VALUE
    assert OPS[Op.COUNTS].backward is Backward.NONE


def test_an_op_without_work_is_refused() -> None:
    with pytest.raises(ScheduleError, match="op Q8 does not say what work its tasks are: give it `work`"):
        register(replace(OWN, work=None))


def test_a_collective_with_a_backward_needs_a_transpose() -> None:
    with pytest.raises(ScheduleError, match="op Q8 is a collective with a backward and no transpose"):
        register(replace(OWN, kind=Kind.COLLECTIVE))


# ---- places ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORM_TOKENS)
@pytest.mark.parametrize("sharing", [Sharing(), Sharing(tp_size=2, etp_size=2)])
def test_a_step_passes_from_its_input_through_its_layers_to_its_output(
    sharing: Sharing, form: ExpertForm
) -> None:
    shape = StepShape(moe_layers=(True, False), sharing=sharing, expert_form=form, shared_experts=True)
    tasks = [task for task in build_graph(shape).tasks if task.forward and task.microbatch is not None]
    places = [place_of(task.op) for task in tasks]
    assert places == sorted(places, key=lambda place: (place == "output") - (place == "input"))
    assert {task.layer for task in tasks if place_of(task.op) == "output"} == {1}
    first = [place_of(task.op) for task in tasks if task.layer == 0 and place_of(task.op) != "input"]
    after = first.index("after")
    assert set(first[after:]) == {"after"} and "beside" in first[:after]
