"""How many processes a command starts on this machine by itself."""

from __future__ import annotations

import pytest

from penstock.config import ConfigError
from penstock.topology import Layout, ParallelConfig
from penstock.topology.local import Places, local_processes


def cores(number: int) -> Places:
    return Places(number=number, gpus=False)


@pytest.mark.parametrize(
    ("settings", "num_experts", "places", "processes"),
    [
        ({"processes": 3}, 8, 16, 3),  # whoever says a number gets it
        ({}, 8, 2, 2),
        ({}, 8, 1, 2),  # one process has nothing to overlap
        ({}, 8, 7, 4),  # the largest number below that shares 8 experts evenly
        ({}, 64, 16, 16),
        ({}, 8, 64, 8),
        ({"tp_size": 4, "etp_size": 4}, 8, 2, 4),  # fewer cannot: the smallest number above
        ({"ep_size": 2}, 8, 6, 6),  # three replicas of every expert
    ],
)
def test_one_for_each_place_as_far_as_experts_can_be_shared(
    settings: dict[str, int], num_experts: int, places: int, processes: int
) -> None:
    parallel = ParallelConfig(**settings)  # type: ignore[arg-type]  # a table of settings

    def check(ranks: int) -> object:
        return Layout.build(parallel, ranks, 0, num_experts)

    assert local_processes(parallel, cores(places), check) == processes


@pytest.mark.parametrize(
    ("settings", "places", "processes"),
    [({}, 1, 1), ({}, 8, 8), ({}, 7, 4), ({"processes": 1}, 4, 1), ({"tp_size": 4, "etp_size": 4}, 2, 2)],
)
def test_a_gpu_takes_one_process(settings: dict[str, int], places: int, processes: int) -> None:
    """On one of them nothing is sent. Where too few are there, whoever builds the run says so."""
    parallel = ParallelConfig(**settings)  # type: ignore[arg-type]  # a table of settings

    def check(ranks: int) -> object:
        return Layout.build(parallel, ranks, 0, 8)

    assert local_processes(parallel, Places(number=places, gpus=True), check) == processes


def test_more_processes_than_gpus_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        local_processes(ParallelConfig(processes=2), Places(number=1, gpus=True), lambda _: None)
    assert caught.value.key == "parallel.processes"
    assert "parallel.transport=staged" in caught.value.hint


@pytest.mark.parametrize(
    ("settings", "places", "processes"),
    [({}, 1, 2), ({"processes": 4}, 1, 4), ({}, 4, 4), ({"tp_size": 4, "etp_size": 4}, 2, 4)],
)
def test_processes_share_gpus_where_tensors_are_staged(
    settings: dict[str, int], places: int, processes: int
) -> None:
    parallel = ParallelConfig(transport="staged", **settings)  # type: ignore[arg-type]  # a table of settings

    def check(ranks: int) -> object:
        return Layout.build(parallel, ranks, 0, 8)

    assert local_processes(parallel, Places(number=places, gpus=True), check) == processes


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
    assert "which they share" in Places(number=1, gpus=True).describe(2)
    assert "nothing is sent" in Places(number=1, gpus=True).describe(1)
    assert Places.here().number >= 1
