"""Small exchanges between all ranks outside the steps, whose errors name the purpose of the exchange."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from itertools import count
from threading import Event, Lock
from typing import Final, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.distributed_c10d import _get_default_store

from penstock.config import ConfigError
from penstock.copies import Shared
from penstock.topology.faults import ACTIVITY, ANSWER_S, explain, named, reason, unless_lost
from penstock.topology.meeting_point import (
    SPARE_S,
    check_interface,
    in_thread,
    remedy,
    within,
)

T = TypeVar("T")
Raises = tuple[type[Exception], ...]

BEAT_S: Final = 0.2
"""How often ranks meet that wait for slow work of others, so that they know that these still run."""

HOST_GROUP_S: Final = 60.0
"""How long ranks wait for each other to make a group for tensors of the CPU, where nothing else is said."""

FILES_S: Final = 1800.0
"""How long ranks wait for one that reads or writes a model, where nothing else is said."""


class _Limit(NamedTuple):
    """How long an exchange may last, and the setting that says so, if it is to be named where one fails."""

    duration: timedelta
    setting: str = ""


_HOST_GROUPS: Final[WeakKeyDictionary[ProcessGroup, ProcessGroup]] = WeakKeyDictionary()
"""By default group, the one that takes tensors of the CPU in its place."""
_LIMITS: Final[WeakKeyDictionary[ProcessGroup, _Limit]] = WeakKeyDictionary()
"""How long exchanges of Penstock may last now, by group; those of the program have the group's own limit."""
_ENTERED: Final[WeakKeyDictionary[ProcessGroup, tuple[int, timedelta]]] = WeakKeyDictionary()
"""By group the number of exchanges that are limited now, and the group's own limit."""
_ENTERING: Final = Lock()
_ATTEMPTS: Final = count()
"""Counts the host groups that this process has tried to make, alike on all ranks."""


class CommunicationError(RuntimeError):
    """An exchange between ranks outside a step failed: a rank died, was cut off, or did not come in time."""


class Control(Shared):
    """Exchanges between all ranks of the run. With one rank nothing is sent."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._group = host_group() if world_size > 1 else None

    def any(self, flag: bool, purpose: str) -> bool:
        """Return whether the flag of any rank is True."""
        return bool(self.largest((float(flag),), purpose)[0])

    def largest(self, mine: Sequence[float], purpose: str) -> list[float]:
        """Return, for every entry, the largest value of any rank; all ranks get exactly the same numbers."""
        if self._group is None:
            return list(mine)

        def vote() -> list[float]:
            votes = torch.tensor(mine, dtype=torch.float64, device="cpu")
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group)
            values: list[float] = votes.tolist()
            return values

        return self.exchange(purpose, vote)

    def sum_later(self, mine: Sequence[float], purpose: str) -> Callable[[], list[float]]:
        """Begin to sum over all ranks; return the function that waits for the sums and returns them.

        The exchange is one of hosts, so that no device has to be waited for. All ranks call this function.
        """
        if self._group is None:
            return lambda: list(mine)
        sums = torch.tensor(mine, dtype=torch.float64, device="cpu")
        with self._limited():
            work = dist.all_reduce(sums, group=self._group, async_op=True)

        def wait() -> list[float]:
            assert work is not None, "this rank belongs to the group"
            work.wait()
            totals: list[float] = sums.tolist()
            return totals

        return lambda: self.exchange(purpose, wait)

    def gather(self, mine: T, purpose: str) -> list[T]:
        """Return one picklable object of every rank, by rank."""
        if self._group is None:
            return [mine]

        def collect() -> list[T]:
            everyone = [mine] * self.world_size
            dist.all_gather_object(everyone, mine, group=self._group)
            return everyone

        return self.exchange(purpose, collect)

    def agreed(
        self,
        work: Callable[[], T],
        purpose: str,
        *,
        by: int | None = None,
        raises: Raises = (ValueError,),
        slowly: bool = False,
        given_up: Event | None = None,
    ) -> T:
        """Return what `work` returns on this rank, which every rank does, or rank `by` alone; all call it.

        A ValueError that not all ranks found names the first rank that did, since machines may differ.

        Args:
            purpose: What the message of a failed exchange says was done.
            by: The only rank that works, others get None and do not read it; None = all work.
            raises: Errors of the work that all ranks raise, whichever rank found them.
            slowly: Whether the work may last longer than ranks wait for each other. It then has a thread, and
                ranks meet until all have done it or one has failed.
            given_up: Set once nobody waits for slow work any more, so that it can end.

        Raises:
            ConfigError: The work has raised it on any rank; all ranks raise it.
            ValueError: Likewise.
        """
        own = work if by in (None, self.rank) else lambda: cast(T, None)
        result = cast(T, None)
        problem: Exception | None = None
        is_done = True
        if slowly:
            outcome = in_thread(own)
            is_done, own = self._done(outcome, given_up or Event(), purpose), outcome.result
        if is_done:
            try:
                result = own()
            except raises as error:
                problem = error
        everyone = self.gather(problem, purpose)
        for rank, refusal in enumerate(everyone):
            if refusal is None:
                continue
            if by is not None or None not in everyone or not isinstance(refusal, ValueError):
                raise refusal
            if isinstance(refusal, ConfigError):
                raise ConfigError(refusal.key, refusal.value, f"on rank {rank}, {refusal.why}", refusal.hint)
            raise ValueError(f"on rank {rank}, {refusal}")
        return result

    def _done(self, outcome: Future[T], given_up: Event, purpose: str) -> bool:
        """Meet until all ranks have done their work or one has failed; tell whether this one has done its."""
        limit = self._limit
        beat_s = BEAT_S if limit is None else min(BEAT_S, limit.duration.total_seconds() / 4)
        try:
            while True:
                done = bool(wait((outcome,), beat_s).done)
                failed = done and outcome.exception() is not None
                some_work, some_failed = self.largest((not done, failed), purpose)
                if some_failed or not some_work:
                    return done
        finally:
            given_up.set()

    def decided(self, work: Callable[[], T], purpose: str, *, slowly: bool = False) -> T:
        """Return on all ranks what `work` returns on rank 0, which alone does it: see `agreed`."""
        return self.gather(self.agreed(work, purpose, by=0, slowly=slowly), purpose)[0]

    def collect(self, part: Tensor, ranks: Sequence[int], at: int, purpose: str) -> list[Tensor]:
        """Return the tensors of these ranks, in this order, at one of them; [] elsewhere.

        Exactly these ranks must call it.

        Args:
            part: This rank's tensor, on the CPU, of the same shape and type on all of these ranks.
            at: The rank that gets all of them.
        """
        raw = part.contiguous().reshape(-1).view(torch.uint8)  # Gloo does not support every type of numbers
        buffers = [raw if rank == at else torch.empty_like(raw) for rank in ranks] if self.rank == at else []

        def bring() -> None:
            if self.rank == at:
                pairs = zip(ranks, buffers, strict=True)
                begun = [dist.irecv(each, rank, group=self._group) for rank, each in pairs if rank != at]
            else:
                begun = [dist.isend(raw, at, group=self._group)]
            for work in begun:  # between two ranks the limit is that of the group as it was made
                assert work is not None, "this rank belongs to the group"
                if (limit := self._limit) is None:
                    work.wait()
                else:
                    work.wait(limit.duration)

        self.exchange(purpose, bring)
        return [each.view(part.dtype).view(part.shape) for each in buffers]

    @contextmanager
    def waiting(self, timeout_s: float, setting: str = "") -> Iterator[None]:
        """Let every exchange last `timeout_s` while entered.

        Args:
            setting: The setting that has the value `timeout_s`, which is named where an exchange fails.
        """
        before, group = self._limit, self._group
        if group is None:
            yield
            return
        _LIMITS[group] = _Limit(timedelta(seconds=timeout_s), setting)
        try:
            yield
        finally:
            if before is None:
                del _LIMITS[group]
            else:
                _LIMITS[group] = before

    def waiting_for_files(self) -> AbstractContextManager[None]:
        """Let every exchange last `FILES_S` at least while entered, or as `waiting` says that is entered."""
        limit, backend = self._limit, self._gloo
        if limit is not None and limit.setting:
            return nullcontext()
        usual = limit.duration if limit else backend.options._timeout if backend else timedelta()
        return self.waiting(max(FILES_S, usual.total_seconds()))

    @property
    def _limit(self) -> _Limit | None:
        return None if self._group is None else _LIMITS.get(self._group)

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Limit exchanges that begin while entered, and none that the program begins in the same group."""
        backend, group = self._gloo, self._group
        if (limit := self._limit) is None or backend is None or group is None:
            yield
            return
        with _ENTERING:
            threads, of_program = _ENTERED.get(group, (0, backend.options._timeout))
            _ENTERED[group] = threads + 1, of_program
            backend._set_default_timeout(limit.duration)
        try:
            yield
        finally:
            with _ENTERING:
                threads, of_program = _ENTERED.pop(group)
                if threads > 1:
                    _ENTERED[group] = threads - 1, of_program
                else:
                    backend._set_default_timeout(of_program)

    @property
    def _gloo(self) -> dist.ProcessGroupGloo | None:
        """The back end of the group, if its limit can be changed."""
        backend = None if self._group is None else self._group._get_backend(torch.device("cpu"))
        return backend if isinstance(backend, dist.ProcessGroupGloo) else None

    def barrier(self, purpose: str) -> None:
        """Wait for all ranks."""
        self.any(False, purpose)

    def exchange(self, purpose: str, work: Callable[[], T]) -> T:
        """Return what an exchange of hosts returns, which ends soon after another rank has (`unless_lost`).

        Raises:
            CommunicationError: It failed.
        """
        with self.naming(purpose), self._limited():
            return unless_lost(work)

    @contextmanager
    def naming(self, purpose: str) -> Iterator[None]:
        """Turn a transport's bare error into one that says which rank was doing what, and who was missing."""
        try:
            with ACTIVITY.exchanging(purpose):
                yield
        except RuntimeError as error:
            limit, which = self._limit, ""
            if limit is not None and limit.setting:
                which = f" ({limit.setting} = {limit.duration.total_seconds():g} limits each exchange here)"
            why = f"rank {self.rank}: {purpose} failed: {explain(error)}{which}"
            raise CommunicationError(why) from error


def find_node_size(control: Control, local_rank: int) -> int:
    """Return the ranks per node; 0 if nodes differ in size, or a node's ranks are not consecutive.

    All ranks must call this.

    Args:
        local_rank: Number of this rank in its node, as torchrun, Slurm and the emulator count them.
    """
    places = control.gather(local_rank, "finding out which ranks share a node")
    size = next((rank for rank, place in enumerate(places) if rank and place == 0), len(places))
    regular = len(places) % size == 0 and places == list(range(size)) * (len(places) // size)
    return size if regular else 0


def limit_exchanges(timeout_s: float) -> None:
    """Limit what Penstock exchanges in the default group that it has made; others get torch's own limit."""
    default = dist.group.WORLD
    assert default is not None, "ranks have joined"
    _LIMITS[default] = _Limit(timedelta(seconds=timeout_s))
    for kind in default._device_types:
        backend = default._get_backend(kind)
        if isinstance(backend, dist.ProcessGroupGloo):
            backend._set_default_timeout(default_pg_timeout)
        elif dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL):
            backend._set_default_timeout(default_pg_nccl_timeout)


def host_group(timeout_s: float = HOST_GROUP_S) -> ProcessGroup:
    """Return the group of all ranks that takes tensors of the CPU: the default group if that does.

    A default group that others have made with backend="nccl" alone takes only those of GPUs. Beside it a Gloo
    group is made, once, by way of the store at which its ranks have met. All ranks call this at the same
    point.

    Raises:
        CommunicationError: That does not succeed within the timeout; the message names the ranks that have
            not come.
    """
    default = dist.group.WORLD
    assert default is not None, "ranks have joined"
    if torch.device("cpu") in default._device_types:
        return default
    if (cached := _HOST_GROUPS.get(default)) is not None:
        return cached
    store, here, ranks = _get_default_store(), f"penstock/host-group-{next(_ATTEMPTS)}", range(default.size())

    def make() -> ProcessGroup:
        store.set(f"{here}/{default.rank()}", "")
        # Gloo for all devices: torch looks for a back end of the device that others have bound to the group.
        made = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(made, ProcessGroup), "it has all ranks"
        return made

    def absent() -> list[int]:
        return [rank for rank in ranks if not store.check([f"{here}/{rank}"])]

    check_interface(os.environ)
    try:
        _HOST_GROUPS[default] = made = within(timeout_s + SPARE_S, make)
        return made
    except RuntimeError as error:
        try:
            missing = within(ANSWER_S, absent)
        except RuntimeError as silent:
            why = f"the store of the process group does not answer ({reason(silent)})"
        else:
            why = (
                f"{named(missing)} did not come: every rank must call Penstock at the same point"
                if missing
                else f"all ranks came, and Gloo could not connect them ({reason(error)}). "
                f"{remedy(error, os.environ)}"
            )
        raise CommunicationError(
            f"rank {default.rank()} of {default.size()}: the default process group takes no tensors of the "
            f"CPU (backend {dist.get_backend_config()}), and no Gloo group could be made beside it within "
            f"{timeout_s:g} s: {why}. With init_process_group(backend='cpu:gloo,cuda:nccl') none is needed."
        ) from error
