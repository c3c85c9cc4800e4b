"""Process groups of GPUs: made and tried in one order on all ranks, with the variables that GPUs need."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, _ProcessGroupWrapper
from torch.testing._internal.distributed.fake_pg import FakeStore

from penstock.config import ConfigError
from penstock.device import Cuda, device_of, using
from penstock.graph import Lane
from penstock.mesh import Axes, Group
from penstock.runtime.groups import build_transports
from penstock.topology import (
    CommunicationError,
    Layout,
    ParallelConfig,
    faults,
    groups,
    lane_groups,
)
from tests.support.card import CardDevice, install
from tests.support.cardccl import NAME
from tests.support.patience import HANG_S
from tests.support.ranks import Pools
from tests.support.recording.gpu import RecordedGpu
from tests.support.recording.recorder import Recorder

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def test_variables_are_set_where_they_are_unset() -> None:
    environ = {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}
    groups.prepare(CUDA, environ)
    assert environ == {
        "NCCL_LAUNCH_ORDER_IMPLICIT": "0",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}
    groups.prepare(CUDA, environ)
    assert "PYTORCH_ALLOC_CONF" not in environ, "the one that is set means the same"
    groups.prepare(CPU, environ := {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert list(environ) == ["CUDA_DEVICE_MAX_CONNECTIONS"]


@pytest.mark.parametrize(("connections", "refused"), [("1", True), ("8", False)])
def test_one_queue_for_all_streams_is_refused(connections: str, refused: bool) -> None:
    environ = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    if not refused:
        groups.prepare(CUDA, environ)
        return
    with pytest.raises(ConfigError) as caught:
        groups.prepare(CUDA, environ)
    assert (caught.value.key, caught.value.value) == ("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert caught.value.hint


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize(
    "own",
    [
        {},
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"},
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCHELASTIC_RUN_ID": "none"},
    ],
)
def test_nccl_ends_the_process_unless_ranks_watch(
    monkeypatch: pytest.MonkeyPatch, watched: bool, own: dict[str, str]
) -> None:
    monkeypatch.setattr(groups, "is_watched", lambda: watched)
    environ = dict(own)
    by_user = bool(own) and "TORCHELASTIC_RUN_ID" not in own  # torchrun sets it to 1 where nobody has
    with groups.left_to_the_watch(CUDA, environ):
        changed = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"} if watched and not by_user else {}
        assert environ == own | changed
    assert environ == own, "groups that others make are as before"
    timeout = timedelta(seconds=60)
    with using(CardDevice()):
        longer = [
            groups.options_of(where, (0, 1), timeout)["timeout"] > timeout for where in (install(), CPU)
        ]
    assert longer == [watched, False], (
        "torch would end an exchange first, as it counts from when it is issued"
    )
    assert not faults.is_watched()


# ---- aborts ------------------------------------------------------------------------------------------------


def test_a_group_that_torch_examines_in_detail_is_aborted() -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the back end in one that has none of NCCL's own functions."""
    store, group = HashStore(), dist.ProcessGroup(HashStore(), 0, 1)
    inside, helper = (
        dist.ProcessGroupGloo(PrefixStore(name, store), 0, 1, timedelta(seconds=HANG_S))
        for name in ("inside", "helper")
    )
    wrapped = _ProcessGroupWrapper(inside, helper)
    group._register_backend(CUDA, dist.ProcessGroup.BackendType.CUSTOM, wrapped)
    Cuda().abort(group)


class Hanging(CardDevice):
    """Its aborts do not end, or fail."""

    def __init__(self, *, ends: bool) -> None:
        super().__init__()
        self.ends = ends

    def abort(self, group: dist.ProcessGroup) -> None:
        del group
        if not self.ends:
            threading.Event().wait()
        raise dist.DistBackendError("no such communicator")


@pytest.mark.parametrize("ends", [False, True])
def test_an_abort_without_end_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: bool
) -> None:
    monkeypatch.setattr(groups, "ABORT_S", HANG_S if ends else 0.0)
    groups.abort(Hanging(ends=ends), [dist.ProcessGroup(HashStore(), 0, 1)])
    assert [each.levelname for each in caplog.records] == ["WARNING"]


# ---- the order ---------------------------------------------------------------------------------------------


class FakeGpu(RecordedGpu):
    """A GPU in a world of any size, of whose ranks one runs: its process groups exchange nothing."""

    collectives = "fake"


@contextmanager
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What this rank asks of torch.distributed, in order."""
    calls: list[Any] = []
    make, add, swap = dist.new_group, dist.all_reduce, dist.all_to_all_single

    def new_group(ranks: list[int], **options: Any) -> Any:
        calls.append(("new", tuple(ranks), options["backend"]))
        return make(ranks, **options)

    def all_reduce(tensor: torch.Tensor, group: Any) -> None:
        calls.append(("sum", tuple(dist.get_process_group_ranks(group))))
        add(tensor, group=group)

    def all_to_all(out: torch.Tensor, tensor: torch.Tensor, group: Any) -> None:
        calls.append(("rows", tuple(dist.get_process_group_ranks(group))))
        swap(out, tensor, group=group)

    with monkeypatch.context() as patch:
        patch.setattr(dist, "new_group", new_group)
        patch.setattr(dist, "all_reduce", all_reduce)
        patch.setattr(dist, "all_to_all_single", all_to_all)
        yield calls


def calls_of(rank: int, world_size: int, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a rank asks for as it builds all transports, with every group that a plan may need."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with using(FakeGpu(Recorder(None))), seen(monkeypatch) as calls:
            layout = Layout(world_size=world_size, rank=rank, **sizes)  # type: ignore[arg-type]  # a table
            transports = build_transports(layout, CPU, ParallelConfig())
            kinds = [(lane, axes) for lane in (Lane.INTER, Lane.INTRA) for axes in Group.NAMES.values()]
            transports.open(kinds if rank % 2 else kinds[::-1])
        return calls
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (16, {"ep_size": 4, "tp_size": 2, "etp_size": 2, "node_size": 4}),
        pytest.param(64, {"ep_size": 64, "node_size": 8}, marks=pytest.mark.soak),
        pytest.param(64, {"ep_size": 16, "node_size": 8}, marks=pytest.mark.soak),
        pytest.param(
            64, {"ep_size": 16, "tp_size": 4, "etp_size": 2, "node_size": 8}, marks=pytest.mark.soak
        ),
    ],
    ids=str,
)
def test_all_ranks_of_a_large_layout_make_the_same_groups(
    monkeypatch: pytest.MonkeyPatch, world_size: int, sizes: dict[str, int]
) -> None:
    """In one order; and of every group all members, and no others, have its first exchange, at one place."""
    by_rank = [calls_of(rank, world_size, sizes, monkeypatch) for rank in range(world_size)]
    plans = [[call for call in calls if call[0] == "new"] for calls in by_rank]
    assert all(plan == plans[0] for plan in plans)
    assert {backend for _, _, backend in plans[0]} == {"fake"}
    firsts: dict[tuple[int, tuple[int, ...], str], set[int]] = {}
    for rank, calls in enumerate(by_rank):
        made = 0
        for what, ranks, *_ in calls:
            made += what == "new"
            if what != "new":
                firsts.setdefault((made, ranks, what), set()).add(rank)
    assert all(members == set(ranks) for (_, ranks, _), members in firsts.items())
    several = sum(len(ranks) > 1 for _, ranks, _ in plans[0])
    assert len(firsts) == several, "every group of several ranks has one"


@pytest.mark.slow
def test_a_swapped_group_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above sees a rank that makes groups in another order."""
    sizes = {"ep_size": 2, "node_size": 2}
    first = calls_of(0, 4, sizes, monkeypatch)
    kinds = groups.INTER_GROUPS
    monkeypatch.setattr("penstock.runtime.groups.INTER_GROUPS", kinds[::-1])
    second = calls_of(1, 4, sizes, monkeypatch)
    made = [[call for call in calls if call[0] == "new"] for calls in (first, second)]
    assert made[0] != made[1]


def lane_of(rank: int, comes: bool) -> dict[Axes, str] | str:
    """The back ends of a lane's groups, or the error if rank 1 does not come to the first exchange."""
    device = install()
    if rank == 1 and not comes:
        vars(groups)["first_exchange"] = lambda *given: None
    layout = Layout(world_size=2, ep_size=2, rank=rank)
    with using(CardDevice()):
        try:
            found = lane_groups(layout, 60.0 if comes else 1.0, device=device)
        except CommunicationError as error:
            return str(error)
        assert device_of(device).is_gpu
        return {kind: dist.get_backend_config(group) for kind, group in found.items()}


@pytest.mark.slow
def test_groups_of_a_lane_are_of_the_device_alone(cards: Pools) -> None:
    wanted = dict.fromkeys(groups.INTER_GROUPS, f"card:{NAME}")
    assert cards(2).run(lane_of, True) == [wanted, wanted]


@pytest.mark.slow
def test_a_first_exchange_without_answer_names_the_group(cards: Pools) -> None:
    pool = cards(2)
    try:
        said, _ = pool.run(lane_of, False)
    finally:
        pool.close()  # rank 1 has no first exchanges
    assert "group world of ranks 0, 1" in said
