"""Whether ranks can host experts of others at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.runtime.features.expert_replicas.manager import check_replicas
from penstock.runtime.machinery import silent
from penstock.step import StepShape
from tests.support.parity import machinery


def test_nothing_moves_between_ranks_that_send_nothing() -> None:
    """Ranks would plan replicas by what each alone has, and homes by counts of nobody."""
    still, quiet = StepShape(moe_layers=(True,)), silent(machinery(1, 1, 0))
    for shape in (replace(still, replica_slots=1), replace(still, moves_samples=True)):
        with pytest.raises(ValueError, match="nothing is sent between the ranks of this stack"):
            check_replicas([None], shape, quiet)
    check_replicas([None], still, quiet)
    quiet.lanes.close()
