"""A GPU that this machine does not have: tensors of a device of their own, whose numbers the CPU computes.

A `Card` tensor says that it lies on the device `card:0`, holds a tensor of the CPU, and lets PyTorch compute
with that, autograd and process groups included. So whole steps run on real ranks, with real routing and with
the code for GPUs, and what a GPU would refuse or wait for is seen:

- an operation on tensors of both devices, other than a copy or a scalar, is an error, as is `numpy()`;
- whatever makes the host wait for the device is noted with the line of Penstock that asked: `item()`, copies
that block,
  sizes that depend on data, events and streams that are waited for.

What it cannot show: how long anything takes, and whether streams are ordered (`tests.support.recording`
does that).
"""

# ruff: noqa: TID251 - events of a pretended device note when they happened, as those of a GPU do

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

import penstock
from penstock.device import Event, Gpu, Stream
from penstock.runtime.buckets import InShares
from tests.support import card_autocast, cardccl
from tests.support.cardccl import KIND

ROOT = Path(penstock.__file__).parent

Wait = tuple[str, int, str]
"""The file inside the package, the line, and what is waited for."""

PINNED: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
NOTED: list[Counter[Wait]] = []
"""The counters that are open, of all threads: tasks of lane `host` run on one of their own."""

SIZES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal"}
"""Operations that read numbers of the device on the host to know a size or a truth."""


class Memory:
    """Bytes that tensors of the device have: a storage counts from its first tensor until it is freed."""

    def __init__(self) -> None:
        self.now_bytes = self.peak_bytes = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known or storage in PINNED:
            return
        self._known.add(storage)
        size_bytes = storage.nbytes()
        self.now_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(storage, self._free, size_bytes)

    def _free(self, size_bytes: int) -> None:
        self.now_bytes -= size_bytes


MEMORY = Memory()


class _Work:
    """Whether the device has done everything: from a wait for the whole device until something is
    computed."""

    done = False


WORK = _Work()


def note(what: str) -> None:
    """Count a wait for the line of the package that is running, or for its caller.

    Tasks of lane `host` wait on a thread of their own, and no operation is issued later for it. Nothing is
    waited for where the device has done everything.
    """
    if WORK.done or threading.current_thread().name.startswith("penstock-host"):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _issues(Path(frame.f_code.co_filename)):
        frame = frame.f_back
    where = ("outside", 0, what)
    if frame is not None:
        where = Path(frame.f_code.co_filename).relative_to(ROOT).as_posix(), frame.f_lineno, what
    for counter in NOTED:
        counter[where] += 1


def _issues(path: Path) -> bool:
    return path.is_relative_to(ROOT) and path.name != "device.py"


DATA: Any = Tensor.data
"""The attribute as torch has it."""


class Card(Tensor):
    """A tensor on the device; `held` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Card:
        made: Card = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(KIND, 0),
        )
        made.held = held
        MEMORY.add(held.untyped_storage())
        return made

    @property
    def data(self) -> Tensor:
        found: Tensor = DATA.__get__(self)
        return found

    @data.setter
    def data(self, other: Tensor) -> None:
        DATA.__set__(self, other)
        self.held = _held(other)

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        del tensor_contents
        return f"Card({self.held!r})"

    def tolist(self) -> Any:
        note("copy to the host")
        return self.held.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(
            f"can't convert {KIND}:0 device type tensor to numpy, force={force}: use .cpu() first"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's has no defaults
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:
        del types
        if func is torch.ops.aten.add.Tensor and isinstance(args[1], NoNumbers):
            return args[0]  # as autograd adds a gradient to nothing
        operator, kwargs = _operator(func), dict(kwargs or {})
        to_host = _moves(operator, args, kwargs)
        if operator.computes:
            OPERATIONS[operator.name] += 1
        held = [_held(each) for each in args]
        if operator.name in ADDS:
            _check_adds(operator.name, held[0])
        if kwargs:
            kwargs = {name: _held(each) for name, each in kwargs.items()}
        out = cardccl.exchange(func, held, kwargs) if operator.exchanges else func(*held, **kwargs)
        if operator.name == "_grouped_mm" and held[1].dim() == 2:
            _leave_empty(out, *held[2:3], **kwargs)
        if to_host:
            return out
        written = {
            id(held[place]): args[place]
            for place in operator.writes
            if place < len(args) and isinstance(args[place], Card)
        }
        return _on_card(out, written)


@dataclass(frozen=True)
class _Operator:
    """What is known of one of PyTorch's operators before it is called.

    computes: whether the device gets something to do. exchanges: it is one of process groups. writes: the
    places of the arguments that it changes.
    """

    func: Any
    name: str
    computes: bool
    exchanges: bool
    writes: tuple[int, ...]


@cache
def _operator(func: Any) -> _Operator:
    name, arguments = func.overloadpacket.__name__, func._schema.arguments
    aliases = [each.alias_info for each in arguments]
    computes = all(each is None or each.is_write for each in aliases) and name not in SETS_ASIDE
    writes = tuple(place for place, each in enumerate(aliases) if each is not None and each.is_write)
    return _Operator(func, name, computes, func.namespace == "c10d", writes)


OPERATIONS: Counter[str] = Counter()
"""What the device was given to do, by name, without views and memory that is only set aside."""

SETS_ASIDE = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "record_stream"}


class NoNumbers(InShares):
    """The stand-in for a gradient on the device: PyTorch makes it as a sparse tensor, with no numbers."""

    @staticmethod
    def __new__(cls, size: Sequence[int], dtype: torch.dtype | None) -> NoNumbers:
        device, layout = torch.device(KIND, 0), torch.sparse_coo
        made: NoNumbers = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device, layout=layout)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's has no defaults
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types, kwargs
        match func.overloadpacket.__name__:
            case "zero_":
                return args[0]
            case "detach":
                return NoNumbers(args[0].size(), args[0].dtype)
        raise NotImplementedError(f"{func} of a gradient that is in shares")


def _held(value: Any) -> Any:
    """The value with tensors of the CPU; operators take lists, and lists of lists, and nothing else that is
    nested. PyTorch's trees would find the same at ten times the price."""
    if isinstance(value, Card):
        return value.held
    return [_held(each) for each in value] if isinstance(value, (list, tuple)) else value


def _on_card(value: Any, written: Mapping[int, Card]) -> Any:
    if isinstance(value, Tensor):
        known = written.get(id(value))
        return Card(value) if known is None else known
    if isinstance(value, (list, tuple)):
        return type(value)([_on_card(each, written) for each in value])
    return value


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for each in values:
        if isinstance(each, (list, tuple)):
            yield from _leaves(each)
        else:
            yield each


def _moves(operator: _Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Note what the host waits for, refuse tensors of two devices; return whether the result is on the
    host."""
    name, values = operator.name, [*_leaves(args), *_leaves(kwargs.values())]
    WORK.done = WORK.done and name in ("_to_copy", "copy_", "_local_scalar_dense", "detach", "view", "alias")
    if operator.exchanges:
        _check_exchange(name, values)
        return False
    device = kwargs.get("device")
    if device is not None:
        leaves = torch.device(device).type != KIND
        kwargs["device"] = torch.device("cpu")
        if name == "_to_copy":
            source = args[0]
            if leaves and isinstance(source, Card):
                note("copy to the host")
            elif not leaves and not isinstance(source, Card):
                _note_upload(source, bool(kwargs.get("non_blocking")))
        return leaves
    if name == "copy_":
        target, source = args[0], args[1]
        waits = not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking")
        if isinstance(source, Card) and not isinstance(target, Card) and (waits or not is_pinned(target)):
            note("copy to the host")
        elif isinstance(target, Card) and not isinstance(source, Card):
            _note_upload(source, not waits)
        return not isinstance(target, Card)
    if name == "_local_scalar_dense":
        note("number read on the host")
        return True
    indices = _leaves([args[1]]) if name in ("index", "index_put_", "_index_put_impl_") else []
    if name in SIZES or any(isinstance(each, Tensor) and each.dtype == torch.bool for each in indices):
        note(f"size or truth of {name}")
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        note("size of repeat_interleave")
    if strangers := [e for e in values if isinstance(e, Tensor) and not isinstance(e, Card) and e.dim()]:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{KIND}:0 and cpu! ({operator.func}, of the host: {[list(each.shape) for each in strangers]})"
        )
    return name in ("equal", "is_nonzero")


def _leave_empty(out: Tensor, offs: Tensor, **more: Any) -> None:
    """Leave sums over no rows undefined, as the kernel of sm100 does."""
    del more
    out[torch.diff(offs, prepend=offs.new_zeros(1)) == 0] = float("nan")


ADDS = {"index_add", "index_add_", "scatter_add", "scatter_add_"}


def _check_adds(name: str, total: Tensor) -> None:
    """Refuse sums by which a GPU adds one number after the other, in any order and in their own type."""
    if total.is_floating_point() and total.element_size() < 4:
        raise RuntimeError(f"{name} of {total.dtype} is neither precise nor the same twice on a GPU")


def _note_upload(source: Tensor, non_blocking: bool) -> None:
    """A copy from pageable memory waits for the device."""
    if source.numel() and not (non_blocking and is_pinned(source)):
        note("copy from pageable memory")


def _check_exchange(name: str, values: Sequence[Any]) -> None:
    """Raise what NCCL raises for tensors of the host, beside those of the device."""
    if any(isinstance(each, Tensor) and not isinstance(each, Card) for each in values):
        raise RuntimeError(
            f"No backend type associated with device type cpu ({name}: a process group of GPUs)"
        )


def is_pinned(tensor: Tensor) -> bool:
    """Return whether copies reach this memory of the host without a wait."""
    return tensor.untyped_storage() in PINNED


class CardStream:
    """A stream in which everything has run when it is asked for."""

    def wait_event(self, event: Event, /) -> None:
        """Do nothing: the event has happened."""

    def record_event(self, event: Event, /) -> Event:
        assert isinstance(event, CardEvent)
        event.at_s = time.perf_counter()
        return event

    def synchronize(self) -> None:
        note("wait for a stream")


class CardEvent:
    """An event that has happened; whoever waits for it would wait on a GPU."""

    def __init__(self, *, timed: bool) -> None:
        self.timed, self.at_s = timed, 0.0

    def synchronize(self) -> None:
        note("wait for an event")

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event, /) -> float:
        assert isinstance(end_event, CardEvent)
        if not (self.timed and end_event.timed):
            raise ValueError("both events must be made with timing, as on a GPU")
        return 1e3 * (end_event.at_s - self.at_s)


class CardDevice(Gpu):
    """The device of `Card` tensors, for `penstock.device`. kernel: whether it has grouped kernels.

    shared: whether all ranks have the same one.
    """

    kind, backend, collectives = KIND, f"cpu:gloo,{KIND}:{cardccl.NAME}", cardccl.NAME
    loads_lazily = True

    def __init__(self, *, kernel: bool = False, shared: bool = False) -> None:
        self.kernel, self.shared = kernel, shared
        self._stream = CardStream()

    def synchronize(self, device: torch.device) -> None:
        del device
        note("wait for the device")
        WORK.done = True

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        made = torch.empty(tuple(shape), dtype=dtype)
        PINNED.add(made.untyped_storage())
        return made

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Event | None]:
        host = self.pinned(tensor.shape, tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        return host, CardEvent(timed=False)

    def from_host(self, numbers: Tensor, device: torch.device) -> Tensor:
        return self.pinned(numbers.shape, numbers.dtype).copy_(numbers).to(device, non_blocking=True)

    def memory_bytes(self, device: torch.device, sharing: int = 1) -> int | None:
        del device
        return (1 << 36) // sharing

    def peak_memory_bytes(self, device: torch.device) -> int | None:
        del device
        return MEMORY.peak_bytes

    def random_state(self, device: torch.device) -> Tensor | None:
        del device
        return torch.zeros(16, dtype=torch.uint8)

    def set_random_state(self, state: Tensor, device: torch.device) -> None:
        pass

    def fork_random(self, device: torch.device) -> AbstractContextManager[None]:
        del device
        return torch.random.fork_rng([])

    def make_current(self, device: torch.device) -> None:
        pass

    def identity(self, device: torch.device) -> str:
        return str(device) if self.shared else ""

    def name(self, device: torch.device) -> str:
        return str(device)

    def computes_in_bfloat16(self) -> bool:
        return False

    def has_grouped_kernel(self, device: torch.device, dtype: torch.dtype) -> bool:
        del device
        return self.kernel and dtype in (torch.bfloat16, torch.float32)

    def current_stream(self, device: torch.device) -> Stream:
        del device
        return self._stream

    def new_stream(self, device: torch.device, name: str) -> Stream:
        del device, name
        return CardStream()

    def running(self, task: object, stream: Stream) -> AbstractContextManager[None]:
        del task, stream
        return nullcontext()

    def event(self, *, timed: bool) -> Event:
        return CardEvent(timed=timed)

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        del stream
        if not isinstance(tensor, Card):
            raise NotImplementedError("Could not run 'aten::record_stream' with the 'CPU' backend")

    def abort(self, group: ProcessGroup) -> None:
        communicator = cardccl.communicator_of(group)
        if communicator is not None:
            communicator.abort()


class _Backend(_DummyBackendModule):
    """What PyTorch asks of the module `torch.card`, which draws with the generator of the host."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)


@cache
def install() -> torch.device:
    """Make `card:0` a device of this process, once; returns it."""
    _setup_privateuseone_for_python_backend(KIND, _Backend())
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    library.impl("empty.memory_format", _empty)
    library.impl("empty_strided", _empty_strided)
    library.impl("_copy_from", _copy_from)
    sparse = torch.library.Library("aten", "IMPL", "SparsePrivateUse1")
    sparse.impl("empty.memory_format", _empty_sparse)
    KEPT.extend([library, sparse, *card_autocast.register(KIND)])
    cardccl.register()
    return torch.device(KIND, 0)


KEPT: list[Any] = []
"""Registrations last as long as the objects that made them."""


def _empty(size: Sequence[int], *, dtype: torch.dtype | None = None, **more: Any) -> Tensor:
    del more
    return Card(torch.empty(size, dtype=dtype))


def _empty_sparse(size: Sequence[int], *, dtype: torch.dtype | None = None, **more: Any) -> Tensor:
    del more
    return NoNumbers(size, dtype)


def _empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **more: Any
) -> Tensor:
    del more
    return Card(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy for `torch.tensor(..., device=...)`, which goes past the dispatch of subclasses."""
    if isinstance(target, Card):
        _note_upload(source, non_blocking)
        target.held.copy_(_held(source))
    else:
        note("copy to the host")
        target.copy_(_held(source))
    return target


@contextmanager
def counted() -> Iterator[Counter[Wait]]:
    """Count what the host waits for, by line."""
    counter: Counter[Wait] = Counter()
    NOTED.append(counter)
    try:
        yield counter
    finally:
        NOTED.remove(counter)
