"""Where rows and samples go: against a table of every single row, moved one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.features.dispatch import FlatDispatch, Place
from penstock.moe import RouteMaker
from penstock.placement import PlacementError
from penstock.routing.samples import ExchangeGroup, SampleHomes, SampleTable, settle
from penstock.routing.sizes import split_sizes
from tests.support.placers import RandomHomes

Row = tuple[int, int, int, int]
"""Position, sample, number of the row; and its slice first."""


@dataclass(frozen=True)
class Group:
    """ExchangeGroup that are devices of their own. counts: [I, positions]; samples_P: of every member."""

    counts: tuple[tuple[int, ...], ...]
    samples_P: tuple[int, ...]
    slots: int
    chunks: int
    seed: int

    @property
    def ranks(self) -> int:
        return len(self.samples_P)

    @property
    def table(self) -> SampleTable:
        found = np.array(self.counts, np.int64).reshape(sum(self.samples_P), self.ranks * self.slots)
        return SampleTable.of(
            found,
            self.samples_P,
            ExchangeGroup.alone([0] * self.ranks),
            ranks=self.ranks,
            positions=found.shape[1],
            chunks=self.chunks,
        )

    @property
    def homes(self) -> tuple[int, ...]:
        return tuple(RandomHomes(self.seed).homes(self.table, None, 0).tolist())

    def settled(self, member: int) -> SampleHomes:
        maker = RouteMaker(FlatDispatch(), Place(member, self.ranks, self.ranks))
        return settle(self.table, np.array(self.homes, np.int64), member, maker, (1, self.chunks))

    def numbered(self) -> Iterator[tuple[int, int, int]]:
        """Every sample with its device and chunk."""
        sample = 0
        for device, samples in enumerate(self.samples_P):
            for chunk, size in enumerate(split_sizes(samples, self.chunks)):
                for _ in range(size):
                    yield sample, device, chunk
                    sample += 1

    def on(self, devices: tuple[int, ...]) -> dict[int, list[int]]:
        """The samples of every device, in their order: by chunk, then by number."""
        chunk = {sample: chunk for sample, _, chunk in self.numbered()}
        held = {d: [s for s in sorted(chunk) if devices[s] == d] for d in range(self.ranks)}
        return {d: sorted(samples, key=lambda s: (chunk[s], s)) for d, samples in held.items()}

    def arriving(self, rank: int, devices: tuple[int, ...], chunk: int) -> list[Row]:
        """The rows at a rank's experts if samples are on these devices, as a dispatch brings them."""
        chunk_of = {sample: c for sample, _, c in self.numbered()}
        positions = range(rank * self.slots, (rank + 1) * self.slots)
        return [
            (chunk, position, sample, row)
            for device in range(self.ranks)
            for position in positions
            for sample in self.on(devices)[device]
            if chunk_of[sample] == chunk
            for row in range(self.counts[sample][position])
        ]


@st.composite
def groups(draw: st.DrawFn) -> Group:
    samples = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    slots = draw(st.integers(1, 3))
    row = st.tuples(*[st.integers(0, 3)] * (slots * len(samples)))
    counts = draw(st.lists(row, min_size=sum(samples), max_size=sum(samples)))
    return Group(tuple(counts), tuple(samples), slots, draw(st.integers(1, 3)), draw(st.integers(0, 9)))


@given(groups())
def test_rows_are_ordered_as_if_samples_had_been_at_home_when_they_left(group: Group) -> None:
    here = tuple(device for _, device, _ in group.numbered())
    for rank in range(group.ranks):
        homes = group.settled(rank)
        for chunk, order in enumerate(homes.rows):
            before, wanted = (group.arriving(rank, each, chunk) for each in (here, group.homes))
            forward, back = (
                (range(len(before)),) * 2 if order is None else (order.forward.tolist(), order.back.tolist())
            )
            assert [before[row] for row in forward] == wanted
            assert [wanted[row] for row in back] == before
            received = [sum(sizes) for sizes in homes.routes.slices[chunk].received]
            assert sum(received) == len(wanted)


@given(groups())
def test_every_sample_is_sent_where_it_is_expected(group: Group) -> None:
    """What leaves and what comes fit together, and everybody ends with its samples in their order."""
    here = tuple(device for _, device, _ in group.numbered())
    before, after = group.on(here), group.on(group.homes)
    sent: dict[tuple[int, int], list[int]] = {}
    for rank in range(group.ranks):
        crossing = group.settled(rank).crossing
        if crossing is not None:
            leaving = iter([before[rank][number] for number in crossing.leaving])
            for target, count in enumerate(crossing.sent):
                sent[rank, target] = [next(leaving) for _ in range(count)]
            assert next(leaving, None) is None
    for rank in range(group.ranks):
        crossing = group.settled(rank).crossing
        if crossing is None:
            assert before == after
            continue
        found: dict[int, int] = {}
        came = [sample for source in range(group.ranks) for sample in sent[source, rank]]
        found |= dict(zip(crossing.arriving.tolist(), came, strict=True))
        stayed = [before[rank][number] for number in crossing.kept_from]
        found |= dict(zip(crossing.kept_to.tolist(), stayed, strict=True))
        assert [found[number] for number in range(len(found))] == after[rank]
        assert tuple(len(sent[source, rank]) for source in range(group.ranks)) == crossing.received
        assert crossing.back.back == crossing


GROUP = Group(((1, 0), (0, 2), (1, 1), (3, 0)), (2, 2), 1, 1, 0)


@pytest.mark.parametrize(
    ("homes", "words"),
    [
        ([0, 0, 0, 1], "device 0 is given 3 samples of chunk 0 and had 2: every device keeps as many"),
        ([0, 1, 0], "3 homes for 4 samples"),
        ([0, 1, 0, 2], "samples are given homes outside devices 0 to 1"),
    ],
)
def test_homes_that_cannot_be_are_refused(homes: list[int], words: str) -> None:
    maker = RouteMaker(FlatDispatch(), Place(0, 2, 2))
    with pytest.raises(PlacementError, match=words):
        settle(GROUP.table, np.array(homes), 0, maker, (1,))


def test_samples_do_not_leave_the_ranks_that_they_exchange_rows_with() -> None:
    table = replace(GROUP.table, exchange_group=replace(GROUP.table.exchange_group, plane_B=(0, 1)))
    with pytest.raises(PlacementError, match="shares no expert group with its own"):
        settle(table, np.array([0, 1, 0, 1]), 0, RouteMaker(FlatDispatch(), Place(0, 2, 2)), (1,))


def test_equal_homes_have_equal_digests_and_others_do_not() -> None:
    first, same = (GROUP.settled(rank).digest for rank in (0, 1))
    other = settle(GROUP.table, np.array([1, 1, 0, 0]), 0, RouteMaker(FlatDispatch(), Place(0, 2, 2)), (1,))
    assert first == same != other.digest
