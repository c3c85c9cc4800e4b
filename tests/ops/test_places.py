"""Where ops stand in a step: the order in which its forward half passes through them."""

from __future__ import annotations

import pytest

from penstock.features.build import build_graph
from penstock.ops.base import place_of
from penstock.step import Sharing, StepShape
from penstock.step.shape import FORM_TOKENS, ExpertForm


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
