"""A wish for another plan that not all ranks have, as a rank on a GPU finds it, which can ask no other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.device import Cpu, using
from penstock.runtime.checks.marks import WISH
from penstock.runtime.checks.wishes import check_wishes, with_wish
from penstock.runtime.errors import ScheduleMismatchError
from penstock.topology import Control, Layout

LAYOUT = Layout(world_size=2, ep_size=2, rank=0)


class OnGpu(Cpu):
    """Says of tensors of the CPU that reading them makes the host wait."""

    is_gpu = True


def sums_of(*wishes: str) -> Tensor:
    marks = (with_wish(torch.zeros(WISH + 1, dtype=torch.float64), wish) for wish in wishes)
    return sum(marks, torch.zeros(WISH + 1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("mine", "others", "told"),
    [
        ("experts were frozen", "", "rank 0 needs another plan, since experts were frozen, and not all"),
        (
            "",
            "experts were frozen",
            "another rank, whose own error says why, needs another plan, and",
        ),
    ],
)
def test_a_rank_on_a_gpu_says_what_it_knows(mine: str, others: str, told: str) -> None:
    with using(OnGpu()), pytest.raises(ScheduleMismatchError, match=told):
        check_wishes(sums_of(mine, others), mine, LAYOUT, Control(0, 2))


@pytest.mark.parametrize("wish", ["", "experts were frozen"])
def test_ranks_that_wish_alike_go_on(wish: str) -> None:
    with using(OnGpu()):
        check_wishes(sums_of(wish, wish), wish, LAYOUT, Control(0, 2))
