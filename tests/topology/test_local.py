"""How many processes a command starts on this machine by itself."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config import ConfigError
from penstock.topology import Layout, ParallelConfig
from penstock.topology.local import Places, local_processes


def cores(number: int) -> Places:
    return Places(number=number, gpus=False)


def gpus(number: int) -> Places:
    return Places(number=number, gpus=True)


SHARES, STAGED = {"tp_size": 4, "etp_size": 4}, {"transport": "staged"}


@pytest.mark.parametrize(
    ("settings", "num_experts", "places", "processes"),
    [
        ({"processes": 3}, 8, cores(16), 3),  # whoever says a number gets it
        ({}, 8, cores(2), 2),
        ({}, 8, cores(1), 2),  # one process has nothing to overlap
        ({}, 8, cores(7), 4),  # the largest number below that shares 8 experts evenly
        ({}, 64, cores(16), 16),
        ({}, 8, cores(64), 8),
        (SHARES, 8, cores(2), 4),  # fewer cannot: the smallest number above
        ({"ep_size": 2}, 8, cores(6), 6),  # three replicas of every expert
        # A GPU takes one process. Where too few are there, whoever builds the run says so.
        ({}, 8, gpus(1), 1),
        ({}, 8, gpus(8), 8),
        ({}, 8, gpus(7), 4),
        ({"processes": 1}, 8, gpus(4), 1),
        (SHARES, 8, gpus(2), 2),
        # Processes share GPUs where tensors are staged.
        (STAGED, 8, gpus(1), 2),
        ({**STAGED, "processes": 4}, 8, gpus(1), 4),
        (STAGED, 8, gpus(4), 4),
        ({**STAGED, **SHARES}, 8, gpus(2), 4),
    ],
)
def test_one_for_each_place_as_far_as_experts_can_be_shared(
    settings: dict[str, Any], num_experts: int, places: Places, processes: int
) -> None:
    parallel = ParallelConfig(**settings)

    def check(ranks: int) -> object:
        return Layout.build(parallel, ranks, 0, num_experts)

    assert local_processes(parallel, places, check) == processes


def test_more_processes_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        local_processes(ParallelConfig(processes=2), gpus(1), lambda _: None)
    assert caught.value.key == "parallel.processes"
    assert "parallel.transport=staged" in caught.value.hint


def test_nothing_is_staged_where_there_is_no_gpu() -> None:
    with pytest.raises(ConfigError) as caught:
        local_processes(ParallelConfig(transport="staged"), cores(2), lambda _: None)
    assert caught.value.key == "parallel.transport"


def test_where_none_is_possible_whoever_builds_the_run_says_why() -> None:
    def check(ranks: int) -> None:
        raise ConfigError("moe.num_experts", 9, f"cannot be shared by {ranks}", "Use 8.")

    assert local_processes(ParallelConfig(), cores(3), check) == 3


def test_places_are_described() -> None:
    assert cores(2).describe(2) == "2 processes on 2 processor cores, one thread each"
    assert "which they share" in gpus(1).describe(2)
    assert "nothing is sent" in gpus(1).describe(1)
    assert Places.here().number >= 1
