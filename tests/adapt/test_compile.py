"""Scheduled models inside `torch.compile`."""

from __future__ import annotations

import pytest
import torch

import penstock
from tests.support.adapted import Batch, distance, grads_of, small, without_labels


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_runs_as_it_is(in_place: bool) -> None:
    """The compiler would look into the whole schedule, and fail after a long time."""
    wanted, model = (penstock.parallelize(small("mixtral"), plan="flowmoe") for _ in range(2))
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, examples: object) -> object:
        del examples
        graphs.append(graph)
        return graph.forward

    compiled = model
    if in_place:
        model.compile(backend=backend)
    else:
        compiled = torch.compile(model, backend=backend)
    given = Batch().inputs()
    expected, found = wanted(**given).loss, compiled(**given).loss
    assert found.item() == expected.item() and not graphs
    expected.backward()
    found.backward()
    grads = grads_of(model)
    assert all(distance(grads[name], grad) < 1e-6 for name, grad in grads_of(wanted).items())
    with torch.no_grad():
        both = [each.eval()(**without_labels(given)).logits for each in (wanted, compiled)]
    assert both[0].equal(both[1]) and not graphs
