"""Devices on which tensors are computed: the only module that asks torch what a GPU is and does.

`device_of` returns the device of a tensor. Everything else asks it: whether work is queued, for streams and
events, for memory that copies can reach, for random numbers. `using` puts another implementation in the place
of one: tests run the code for GPUs on tensors of the CPU, with streams and events that are recorded.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeGuard, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.random import fork_rng

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Wait = tuple[str, int, str]
"""What makes the host wait for the device: file, line, and what happens there."""

Numbers = float | Sequence[float] | Sequence[Sequence[float]] | np.ndarray[Any, Any]


class Pending(Protocol[T_co]):
    """The result of work on another thread."""

    def result(self) -> T_co:
        """Wait for the work, and return its result or raise its error."""
        ...


class Event(Protocol):
    """A point in the work of a stream. It has happened when all work before it is done."""

    def synchronize(self) -> None:
        """Make the host wait until it has happened."""
        ...

    def query(self) -> bool:
        """Return whether it has happened."""
        ...

    def elapsed_time(self, end_event: Event, /) -> float:
        """Return the milliseconds from this event to another, on the device's clock; both are timed."""
        ...


class Stream(Protocol):
    """A queue of work on a device. Work in one stream runs in order, work in several at the same time."""

    def __hash__(self) -> int: ...

    def wait_event(self, event: Event, /) -> None:
        """Let all later work of this stream wait for the event, and not the host."""
        ...

    def record_event(self, event: Event, /) -> Event:
        """Put the event after all work so far, and return it."""
        ...


class Device(ABC):
    """A kind of device.

    Attributes:
        kind: The name of the kind in torch.
        is_cpu: Whether kernels for processors are the fast ones.
        is_gpu: Whether work is queued, so that an operation returns before it has run and reading a number
            makes the host wait.
        backend: The back ends of process groups of such devices; those of GPUs can also send tensors of the
            CPU.
        refused: A value with which lanes would wait for each other, why, and what to do, by environment
            variable.
        ends_process: The environment variable by which process groups end the process after an error; "" if
            there is none.
    """

    kind: ClassVar[str]
    is_cpu: ClassVar[bool] = False
    is_gpu: ClassVar[bool] = False
    backend: ClassVar[str]
    refused: ClassVar[Mapping[str, tuple[str, str, str]]] = {}
    ends_process: ClassVar[str] = ""

    def set_environment(self, environ: MutableMapping[str, str]) -> None:
        """Set variables, where they are unset, that the device's libraries read before its first use."""
        del environ

    @abstractmethod
    def synchronize(self, device: torch.device) -> None:
        """Make the host wait until the device has done everything."""

    def issued(self, device: torch.device) -> Callable[[], bool]:
        """Return what tells whether the device has done all that this thread has given it so far."""
        del device
        return lambda: True

    def check(self, holds: Tensor, message: str) -> None:
        """Raise ValueError with the message unless a truth on the device holds; a GPU does so later."""
        if not holds:
            raise ValueError(message)

    # ---- memory ----

    @abstractmethod
    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory of the host, not filled, which copies reach without making the host wait."""

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        """Let tensors that another stream has made be freed by the current one."""
        del tensors

    @abstractmethod
    def to_host(self, tensor: Tensor) -> tuple[Tensor, Event | None]:
        """Return the tensor's numbers in memory of the host, and the event after which they are there."""

    def from_host(self, numbers: Tensor, device: torch.device) -> Tensor:
        """Return numbers of the host on the device. The host does not wait for the copy."""
        return numbers.to(device)

    def memory_bytes(self, device: torch.device, sharing: int = 1) -> int | None:
        """Return what tensors of this process may take of the device's own memory; None if it has none.

        That is what they have, and of what is free the part of one of `sharing` processes. What contexts and
        communicators take of the device is in neither: ask when they are there.

        Args:
            sharing: The number of processes that share what is free of the device.
        """
        del device, sharing
        return None

    def peak_memory_bytes(self, device: torch.device) -> int | None:
        """Return the most memory that tensors have had there; None if it computes in that of the host."""
        del device
        return None

    # ---- random numbers ----

    def random_state(self, device: torch.device) -> Tensor | None:
        """Return the state of the device's own generator; None if it draws from that of the host."""
        del device
        return None

    def set_random_state(self, state: Tensor, device: torch.device) -> None:
        """Set the state of the device's own generator."""
        raise NotImplementedError(f"{self.kind} has no generator beside that of the host")

    def seed(self, device: torch.device, number: int) -> None:
        """Seed the generators of host and device; `torch.manual_seed` seeds those of all devices."""
        del device
        torch.default_generator.manual_seed(number)

    @abstractmethod
    def fork_random(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context after which the generators of host and device are as they were."""

    # ---- the device itself ----

    @abstractmethod
    def make_current(self, device: torch.device) -> None:
        """Make it the device that this process uses where none is named."""

    def identity(self, device: torch.device) -> str:
        """Return what tells this device from all others in the world; "" where processes need not know."""
        del device
        return ""

    @abstractmethod
    def name(self, device: torch.device) -> str:
        """Return what the device is called by its maker."""

    def computes_in_bfloat16(self) -> bool:
        """Return whether products in bfloat16 are the faster ones."""
        return False

    def has_grouped_kernel(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether `grouped_mm` of this type is one kernel that reads groups' ends on the device."""
        del device, dtype
        return False

    def attends_in_groups(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether a fast kernel of attention reads heads of keys and values that queries share."""
        del device, dtype
        return True

    # ---- for those who examine a device ----

    def facts(self, device: torch.device) -> dict[str, Any]:
        """Return what tells people and plans what kind of device this is: plain data."""
        return {"name": self.name(device)}

    def used_bytes(self, device: torch.device) -> int | None:
        """Return the memory that is taken of the device, by whomever; None if that is not known."""
        del device
        return None

    def delay(self, seconds: float) -> None:
        """Let the work that this thread asks for next begin later."""
        time.sleep(seconds)

    def counting_waits(self) -> AbstractContextManager[Counter[Wait] | None]:
        """Return a context that counts what makes the host wait; of None where nothing can be counted."""
        return nullcontext()


class Gpu(Device):
    """A kind of device on which work is queued, in streams.

    Attributes:
        collectives: The back end of process groups that exchange its tensors and no others.
        loads_lazily: Whether a kernel is loaded when it is first launched.
    """

    is_gpu, loads_lazily = True, False
    collectives: ClassVar[str]

    def issued(self, device: torch.device) -> Callable[[], bool]:
        return self.asking(self.current_stream(device).record_event(self.event(timed=False)), device)

    def asking(self, event: Event, device: torch.device) -> Callable[[], bool]:
        """Return what tells whether the device has come to an event, for threads that have not used it."""
        del device
        return event.query

    def check(self, holds: Tensor, message: str) -> None:
        """Stop the device with the message unless a truth on it holds; the host does not wait to learn it.

        The error comes with whatever reads the device next, and the process cannot go on with this device.
        """
        torch._assert_async(holds, message)

    @abstractmethod
    def current_stream(self, device: torch.device) -> Stream:
        """Return the stream into which this thread's operations go."""

    @abstractmethod
    def new_stream(self, device: torch.device, name: str) -> Stream:
        """Return another stream.

        Args:
            name: The name of the stream, for people.
        """

    @abstractmethod
    def running(self, task: object, stream: Stream) -> AbstractContextManager[None]:
        """Return a context in which this thread's operations, part of a task, go into `stream`."""

    @abstractmethod
    def event(self, *, timed: bool) -> Event:
        """Return an event that has not been recorded.

        Args:
            timed: Whether its time can be asked for.
        """

    @abstractmethod
    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Keep the tensor's memory, when it is freed, until `stream` has done what is in it by then."""

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.record_stream(tensor, self.current_stream(tensor.device))

    def submit(self, threads: Executor, task: object, work: Callable[[], T]) -> Pending[T]:
        """Run a task's work on a thread of the host, beside the one that issues operations."""
        del task
        return threads.submit(work)

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Event | None]:
        host = self.pinned(tensor.shape, tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        return host, self.current_stream(tensor.device).record_event(self.event(timed=False))

    def group_options(self, device: torch.device, timeout: timedelta, *, connects: bool) -> dict[str, Any]:
        """Return the arguments with which `new_group` makes a group of such devices alone.

        Args:
            timeout: Limit of the group's exchanges.
            connects: Whether the group connects at once, and not with its first exchange.
        """
        del device, connects
        return {"backend": self.collectives, "timeout": timeout}

    @abstractmethod
    def abort(self, group: ProcessGroup) -> None:
        """End exchanges of a process group that have begun; it cannot be used afterwards.

        What waits for the exchanges goes on, with any numbers and without an error. It may last until other
        groups' exchanges have ended as well (`penstock.topology.groups.abort`).
        """


class Cpu(Device):
    """The processors of this machine. Every operation has run when it returns."""

    kind, is_cpu, backend = "cpu", True, "gloo"

    def synchronize(self, device: torch.device) -> None:
        """Do nothing: every operation has run when it returns."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Event | None]:
        return tensor, None

    def fork_random(self, device: torch.device) -> AbstractContextManager[None]:
        del device
        return fork_rng([])

    def make_current(self, device: torch.device) -> None:
        """Do nothing: there is one."""

    def name(self, device: torch.device) -> str:
        del device
        return "cpu"


GROUPED_KERNELS = (9, 10)
"""Major compute capabilities for which PyTorch 2.13 has a grouped kernel: Hopper, and Blackwell of data
centres.

On other GPUs `grouped_mm` copies the ends to the host, waits, and loops over the groups.
"""


CYCLES_PER_S = 1.5e9
"""About as fast as the clocks of GPUs run; a delay may be longer or shorter by a third."""

SYNCHRONIZES = "synchronizing CUDA operation"
"""What PyTorch says of an operation for which the host waits."""


class Cuda(Gpu):
    """GPUs of NVIDIA, and those of AMD under the same names."""

    kind, backend, collectives, loads_lazily = "cuda", "cpu:gloo,cuda:nccl", "nccl", True
    refused: ClassVar[Mapping[str, tuple[str, str, str]]] = {
        "CUDA_DEVICE_MAX_CONNECTIONS": (
            "1",
            "the streams of all lanes would share one queue of the GPU, so that exchanges wait for "
            "computation and computation for exchanges",
            "Unset it; Penstock orders its streams by events and needs no common queue.",
        )
    }
    ends_process = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

    def set_environment(self, environ: MutableMapping[str, str]) -> None:
        # Kernels of several communicators then run in the order in which this host has issued them.
        environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        # Row counts change with every step, and blocks of many sizes would leave memory in pieces.
        if "PYTORCH_CUDA_ALLOC_CONF" not in environ:
            environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

    def group_options(self, device: torch.device, timeout: timedelta, *, connects: bool) -> dict[str, Any]:
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream, options._timeout = True, timeout  # torch warns where these differ
        arguments: dict[str, Any] = {"backend": self.collectives, "timeout": timeout, "pg_options": options}
        if connects:
            numbered = ":" in str(device)
            arguments["device_id"] = device if numbered else torch.device("cuda", torch.cuda.current_device())
        return arguments

    def current_stream(self, device: torch.device) -> Stream:
        return cast(Stream, torch.cuda.current_stream(device))

    def new_stream(self, device: torch.device, name: str) -> Stream:
        del name
        # Before computation where both have blocks to run: few of them, and other ranks wait for these.
        return cast(Stream, torch.cuda.Stream(device, priority=-1))

    def running(self, task: object, stream: Stream) -> AbstractContextManager[None]:
        del task
        return torch.cuda.stream(cast(torch.cuda.Stream, stream))

    def event(self, *, timed: bool) -> Event:
        return cast(Event, torch.cuda.Event(enable_timing=timed))

    def asking(self, event: Event, device: torch.device) -> Callable[[], bool]:
        def has_come() -> bool:
            with torch.cuda.device(device):  # or a thread's first question would open the first GPU as well
                return event.query()

        if device.index is None:
            return event.query
        return has_come

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        tensor.record_stream(cast(torch.cuda.Stream, stream))

    def abort(self, group: ProcessGroup) -> None:
        group._get_backend(torch.device("cuda")).abort()

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def from_host(self, numbers: Tensor, device: torch.device) -> Tensor:
        # From pageable memory the host would wait until the stream has done all that was issued before.
        pinned = self.pinned(numbers.shape, numbers.dtype).copy_(numbers)
        return pinned.to(device, non_blocking=True)

    def memory_bytes(self, device: torch.device, sharing: int = 1) -> int | None:
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return torch.cuda.memory_reserved(device) + free_bytes // sharing

    def peak_memory_bytes(self, device: torch.device) -> int | None:
        return torch.cuda.max_memory_allocated(device)

    def random_state(self, device: torch.device) -> Tensor | None:
        return torch.cuda.get_rng_state(device)

    def set_random_state(self, state: Tensor, device: torch.device) -> None:
        torch.cuda.set_rng_state(state, device)

    def seed(self, device: torch.device, number: int) -> None:
        super().seed(device, number)
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)

    def fork_random(self, device: torch.device) -> AbstractContextManager[None]:
        return fork_rng([device])

    def make_current(self, device: torch.device) -> None:
        if device.index is not None:  # "cuda" is the current one, and torch does not take it
            torch.cuda.set_device(device)

    def identity(self, device: torch.device) -> str:
        return str(torch.cuda.get_device_properties(device).uuid)

    def name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def computes_in_bfloat16(self) -> bool:
        # PyTorch counts GPUs that emulate bfloat16, for which it is several times slower than float32.
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    def has_grouped_kernel(self, device: torch.device, dtype: torch.dtype) -> bool:
        capability = torch.cuda.get_device_capability(device)[0]
        return dtype is torch.bfloat16 and capability in GROUPED_KERNELS

    def attends_in_groups(self, device: torch.device, dtype: torch.dtype) -> bool:
        # FlashAttention and cuDNN's do. PyTorch's substitute keeps the weights of all pairs of tokens.
        half = dtype in (torch.bfloat16, torch.float16)
        return half and torch.cuda.get_device_capability(device) >= (8, 0)

    def facts(self, device: torch.device) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(device)
        here = torch.cuda.current_device()
        others = [each for each in range(torch.cuda.device_count()) if each != here]
        nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
        return {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "processors": properties.multi_processor_count,
            "toolkit": torch.version.cuda or torch.version.hip,
            "nccl": ".".join(map(str, nccl)),
            "bfloat16": self.computes_in_bfloat16(),
            "grouped_kernel": self.has_grouped_kernel(device, torch.bfloat16),
            "reaches": [each for each in others if torch.cuda.can_device_access_peer(here, each)],
            "of_devices": len(others) + 1,
        }

    def used_bytes(self, device: torch.device) -> int | None:
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return total_bytes - free_bytes

    def delay(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * CYCLES_PER_S))

    @contextmanager
    def counting_waits(self) -> Iterator[Counter[Wait] | None]:
        # PyTorch warns at every copy or read that waits. It does not see waits for events and streams.
        waits: Counter[Wait] = Counter()
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield waits
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for warning in said:
            if SYNCHRONIZES in str(warning.message):
                waits[warning.filename, warning.lineno, SYNCHRONIZES] += 1
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


class Other(Cpu):
    """Tensors without numbers (`meta`), and devices for which nothing here is made."""

    kind, is_cpu = "meta", False


_OTHER = Other()
_BY_KIND: dict[str, Device] = {"cpu": Cpu(), "cuda": Cuda()}


def device_of(where: Tensor | torch.device) -> Device:
    """Return what a tensor's device, or the device of this name, is and does."""
    device = where.device if isinstance(where, Tensor) else where
    return _BY_KIND.get(device.type, _OTHER)


def gpu_of(where: Tensor | torch.device) -> Gpu:
    """Return the same where work is known to be queued."""
    device = device_of(where)
    assert isinstance(device, Gpu), f"{device.kind} has no streams"
    return device


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return whether a tensor is spread over a mesh of devices.

    No DTensor exists before its module has been loaded, which takes a second.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def on_device(numbers: Numbers, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers of the host on a device, without a wait.

    `torch.tensor(numbers, device="cuda")` copies from pageable memory, for which the host waits until the
    stream has done all that was issued before. From pinned memory the copy is one more entry in the stream.
    """
    return device_of(device).from_host(torch.as_tensor(numbers, dtype=dtype, device="cpu"), device)


@contextmanager
def using(device: Device) -> Iterator[None]:
    """Let `device` stand for all of its kind, in all threads of this process."""
    before = dict(_BY_KIND)
    _BY_KIND[device.kind] = device
    try:
        yield
    finally:
        _BY_KIND.clear()
        _BY_KIND.update(before)


def count_gpus() -> int:
    """Return the number of GPUs that this process may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def best_kind() -> torch.device:
    """Return the kind of device on which this process can compute fastest: its GPUs, else the CPU."""
    return torch.device("cuda" if count_gpus() else "cpu")


def pick_device(local_rank: int) -> torch.device:
    """Return the GPU of this rank, or the CPU where there is no GPU, and make it the current device."""
    gpus = count_gpus()
    if not gpus:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % gpus)
    device_of(device).set_environment(os.environ)
    device_of(device).make_current(device)
    return device


def numbered(device: torch.device, local_rank: int) -> torch.device:
    """Return a device with its number: "cuda" is the current GPU, or this rank's where none was chosen."""
    if device.type != "cuda" or device.index is not None:
        return device
    device_of(device).set_environment(os.environ)  # read when the GPU is first used, as in the next line
    current = torch.cuda.current_device()
    return torch.device("cuda", current) if current else pick_device(local_rank)


def device_of_backend(backend: str) -> torch.device:
    """Return the kind of device whose tensors process groups of this backend are for.

    Args:
        backend: The back ends by kind of device, as `torch.distributed.get_backend_config` returns them. Gloo
            may stand there beside GPUs, too: it would copy their tensors to the host.
    """
    backends = backend.split(",")
    for kind, device in _BY_KIND.items():
        if isinstance(device, Gpu) and f"{kind}:{device.collectives}" in backends:
            return torch.device(kind)
    return torch.device("cpu")
