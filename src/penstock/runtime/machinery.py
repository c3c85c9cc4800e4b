"""The machinery on which a step runs, and features that take part in a stack and in its steps."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import nn

from penstock.copies import Shared
from penstock.device import device_of
from penstock.graph import Graph
from penstock.moe import MoELayer
from penstock.moe.config import MoEConfig
from penstock.partial_state import refuse_pickle
from penstock.runtime.batch import Sizes
from penstock.runtime.buckets import Buckets
from penstock.runtime.executor import Lanes, ThreadLanes
from penstock.runtime.groups import SilentTransport
from penstock.runtime.handlers import Handlers, StepContext
from penstock.runtime.parts import ModelParts
from penstock.runtime.streams import StreamLanes
from penstock.runtime.transport import Transports
from penstock.schedule import StepPlan
from penstock.step import StepShape
from penstock.topology import CommunicationError, Control, Layout
from penstock.topology.device_mesh import RankMeshes
from penstock.topology.faults import ACTIVITY, is_transport_error

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Machinery(Shared):
    """Everything that a stack runs on.

    Attributes:
        control: Connects all ranks, for checks outside of steps.
        autocast_dtype: The type in which tasks compute under autocast; None: they compute without it.
    """

    lanes: Lanes
    transports: Transports
    layout: Layout
    control: Control
    device: torch.device
    autocast_dtype: torch.dtype | None = None

    def close(self) -> None:
        """End the machinery's threads and connections, which no stack may use any more."""
        try:
            self.lanes.close()
        finally:
            self.transports.close()

    def exchange(self, purpose: str, work: Callable[[], T]) -> T:
        """Return what an exchange of tensors outside of the steps, without gradients, returns.

        Args:
            purpose: What it is for, in words.
            work: The exchange, which may run in another thread.

        Raises:
            CommunicationError: Ranks did not come, or were lost; the message names them. No later exchange
                succeeds.
        """
        inferring = torch.is_inference_mode_enabled()

        def run() -> T:
            ACTIVITY.check()
            with torch.inference_mode(inferring), torch.no_grad():  # modes belong to a thread
                return work()

        try:
            result = self.control.exchange(purpose, run)
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, CommunicationError) else None
            if cause is not None and not is_transport_error(cause):
                raise cause from None  # such as of memory: ranks go on
            if cause is not None or not isinstance(error, Exception):
                self.transports.abort()  # a thread that still waits would end Python by an abort
            raise
        ACTIVITY.issued(device_of(self.device).issued(self.device))  # the watch looks whether it ends
        return result

    def settle(self, purpose: str) -> None:
        """Make the host wait, outside of steps, until a GPU has done what was issued: no number is anything.

        Raises:
            CommunicationError: Exchanges were ended, as another rank is lost.
        """
        if device_of(self.device).is_gpu:
            with self.control.naming(purpose):
                with ACTIVITY.exchanging("device"):
                    device_of(self.device).synchronize(self.device)
                ACTIVITY.check()

    @cached_property
    def meshes(self) -> RankMeshes:
        """The layout as device meshes; all ranks ask for them together, the first time."""
        return RankMeshes.of(self.layout, self.device.type, self.control)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return refuse_pickle("a model or part of one that Penstock runs")

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which tasks compute: this precision, whatever the caller has switched on."""
        device, dtype = self.device.type, self.autocast_dtype
        if dtype is None and not torch.is_autocast_enabled(device):
            return nullcontext()  # entering and leaving a real context takes 4 us, a third of a small segment
        # What is cast without autograd has no history, and must not be found by tasks that need gradients.
        return torch.autocast(
            device, dtype=dtype, enabled=dtype is not None, cache_enabled=torch.is_grad_enabled()
        )


def silent(machinery: Machinery) -> Machinery:
    """Return the same machinery with a transport that sends nothing, and lanes of its own."""
    transport = SilentTransport(machinery.layout.mesh, machinery.layout.rank)
    lanes = build_lanes(machinery.device, transport.abort, alone=True)
    return replace(machinery, transports=Transports(transport, transport, sends=False), lanes=lanes)


def build_lanes(device: torch.device, on_failure: Callable[[], None], *, alone: bool = False) -> Lanes:
    """Return the lanes of a device.

    Args:
        on_failure: Wakes whoever waits in a collective.
        alone: Whether no task meets another rank.
    """
    if device_of(device).is_gpu:
        return StreamLanes(device, on_failure)
    return ThreadLanes(on_failure, alone=alone)


# ---- features: what takes part in a stack, and in each of its steps, beside the core ----------------------
#
# A stack and a step call these at their turns, and do not know which features there are. A feature overrides
# the turns that it needs.


class FeatureStack(Protocol):
    """A stack, as far as its features need it."""

    parts: ModelParts
    moe: MoEConfig
    machinery: Machinery
    plan: StepPlan

    @property
    def moe_layers(self) -> list[MoELayer | None]: ...

    @property
    def buckets(self) -> Buckets: ...


class StepFeature:
    """A feature in one step.

    Attributes:
        can_be_undone: Whether a backward pass that was issued can be given up and run again.
    """

    can_be_undone = True

    def prepare(self, context: StepContext) -> None:
        """Give the step's handlers what they work on."""

    def applied(self) -> AbstractContextManager[None]:
        """Return a context for half a step."""
        return nullcontext()

    def begin_backward(self, buckets: Buckets, name_of: Callable[[nn.Parameter], str]) -> None:
        """Begin a backward pass, whose gradients lie in these buckets. Nothing has been changed by then."""

    def over(self) -> None:
        """Take back what was lent to the step, whose last task has run.

        A step that runs a second time (`moe.bound_factor`) calls it after each run.
        """

    def end(self, context: StepContext, graph: Graph) -> None:
        """Use what a backward pass that has succeeded has found."""

    def failed(self, *, begun: bool) -> str:
        """Return in words what a failed backward pass has left in doubt.

        Args:
            begun: Whether gradients were changed.
        """
        del begun
        return ""


class StackFeature:
    """A feature in a stack, from step to step.

    It has no reference to the stack, which would be a circle.

    Attributes:
        active: Whether it takes part in the steps of the present plan.
    """

    active = False

    def copy(self) -> Self:
        """Return the feature for a copy of the stack."""
        return self

    def twice(self, handlers: Handlers) -> Handlers:
        """Return handlers of tasks that run a second time, and of their second run."""
        del handlers
        return {}

    def shape(self, shape: StepShape, stack: FeatureStack) -> StepShape:
        """Return the shape of a step with what the stack's model can do."""
        del stack
        return shape

    def leave(self, stack: FeatureStack) -> None:
        """Bring to its end what depends on the present plan, before another is adopted."""

    def check(self, plan: StepPlan, stack: FeatureStack) -> None:
        """Raise an error, on all ranks, for a plan that the stack cannot run."""

    def adopt(self, plan: StepPlan, stack: FeatureStack) -> None:
        """Prepare for a plan that nothing refuses."""

    def check_layers(self, stack: FeatureStack) -> None:
        """Raise ValueError if the present plan cannot be run with layers that were changed."""

    def check_dtype(self, autocast_dtype: torch.dtype | None, stack: FeatureStack) -> None:
        """Raise ValueError if the present plan cannot be run under autocast in this type."""

    def check_training(self) -> None:
        """Raise RuntimeError if no step can train."""

    def check_current(self) -> None:
        """Raise RuntimeError if this rank has old values of some parameters."""

    def sizes(self, stack: FeatureStack) -> Sizes | None:
        """Return how ranks deal with batches of different sizes, if that is this feature's affair."""
        del stack
        return None

    def settle(self, stack: FeatureStack) -> None:
        """Take up changes to the model and the plan."""

    def step(self, stack: FeatureStack) -> StepFeature | None:
        """Return what takes part in a step that begins now, if the feature does."""
        del stack
        return None


# ---- how this process treats memory -----------------------------------------------------------------------


@contextmanager
def without_collections() -> Iterator[None]:
    """Put off Python's collections of cyclic garbage to the end of this context.

    What half a step keeps for the other half makes Python look for garbage several times in every step, and
    now and then at all objects of the process: 0.1 s and more, for which the other ranks wait.
    """
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
NEVER, TOP_PAD_BYTES = 2**31 - 1, 64 * 2**20


def keep_freed_memory() -> bool:
    """Keep what tensors free instead of returning it to the kernel; return False where that cannot be set.

    A step on a CPU frees and makes the same tensors as the step before. By default the C library returns
    every large one to the kernel, which then hands out the same memory page by page, each page cleared first.
    Cost: the process stays as large as it ever was. The setting holds for the whole process, from now on.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # a C library that is not glibc
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER), (M_TOP_PAD, TOP_PAD_BYTES))
    return all(mallopt(name, value) == 1 for name, value in settings)
