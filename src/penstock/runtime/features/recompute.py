"""Handlers of computation that is recomputed before its backward (phase R), and of its first run.

The first time a task runs without autograd and keeps its inputs; the second time the same handler makes
segments of them. Nothing else in the step knows: the backward finds in `saved` what it always finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from penstock.device import device_of
from penstock.graph import Phase, Task
from penstock.moe import ChunkRoute
from penstock.ops import OPS, Op
from penstock.runtime.handlers import Handler, Handlers, Inputs, Outputs, StepContext
from penstock.runtime.machinery import StackFeature
from penstock.runtime.ops import compute_slice, routes_of, take_slices


@dataclass(frozen=True)
class Kept:
    """What a task was given, and how it is repeated."""

    inputs: Inputs
    replay: Replay


@dataclass(frozen=True)
class Keep:
    """Runs a forward task and keeps its inputs, in `kept`, for a second run."""

    handler: Handler

    def __call__(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        replay = Replay(context.marks.device)
        with replay.first():
            outputs = self.handler(context, task, inputs)
        return {**outputs, "kept": Kept(inputs, replay)}


@dataclass(frozen=True)
class Repeat:
    """Runs a task again: leaves `saved` for the backward, and nothing else, since all else has been read."""

    handler: Handler

    def __call__(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        kept: Kept = inputs.one("kept")
        with kept.replay.second():
            outputs = self.handler(context, task, kept.inputs)
        return {"saved": outputs["saved"]}


@dataclass(frozen=True)
class KeptSlice:
    """The values that run a slice of X.F a second time."""

    rows_RM: Tensor
    route: ChunkRoute
    replay: Replay


def keep_experts(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return the rows of `experts`, without autograd; kept: by slice, what another run needs."""
    layer = context.layers[task.layer]
    routes = routes_of(inputs).at_experts[task.cut.first : task.cut.stop]
    kept = [
        KeptSlice(rows_RM, route, Replay(rows_RM.device))
        for rows_RM, route in zip(inputs.one("rows"), routes, strict=True)
    ]
    out = []
    for each in kept:
        with each.replay.first():
            out.append(compute_slice(context, layer, each.rows_RM, each.route)[0])
    return {"rows": tuple(out), "kept": dict(zip(task.cut.held, kept, strict=True))}


def recompute_experts(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return saved: what X.F would have left of the slices of a backward chunk."""
    layer, saved = context.layers[task.layer], {}
    for number, each in zip(task.cut.held, take_slices(task, inputs.all("kept")), strict=True):
        with each.replay.second():
            saved[number] = compute_slice(context, layer, each.rows_RM, each.route)[1]
    return {"saved": saved}


OWN: Handlers = {
    (Op.EXPERTS, Phase.FORWARD): keep_experts,
    (Op.EXPERTS, Phase.RECOMPUTE): recompute_experts,
}
"""Handlers of ops whose second run is not that of the first handler on the kept inputs: experts keep and
repeat their rows slice by slice."""


class Recompute(StackFeature):
    """Recomputation in a stack."""

    def twice(self, handlers: Handlers) -> Handlers:
        """Return the handlers of tasks that run twice, for every op that may: phases F and R."""
        found: dict[tuple[str, Phase], Handler] = {}
        for op, spec in OPS.items():
            if spec.recomputable and (op, Phase.FORWARD) in handlers:
                handler = handlers[op, Phase.FORWARD]
                found[op, Phase.FORWARD], found[op, Phase.RECOMPUTE] = Keep(handler), Repeat(handler)
        return {**found, **OWN}


# ---- replay of what a computation selected, read and drew, so that a second run does the same -------------
#
# Two runs of one computation may differ in the last bit, and a router that then chose another expert would
# get the gradient of a choice that was never made.
#
# Random numbers on the CPU come from one generator of the process, from which other threads draw as well:
# other lanes, or a loader of data. So it is not set back for a second run. Every operator that draws there is
# given a generator of its own, in the state that the process's had the first time. On a GPU all tasks are
# issued from one thread, and kernels of other packages draw without an operator that could be seen, so the
# device's generator is set for the whole run.


_ATEN = torch.ops.aten
SELECTING = frozenset(
    {
        _ATEN.topk.default,
        _ATEN.sort.default,
        _ATEN.sort.stable,
        _ATEN.argsort.default,
        _ATEN.argsort.stable,
        _ATEN.argmax.default,
        _ATEN.argmin.default,
        _ATEN.max.dim,
        _ATEN.min.dim,
        _ATEN.kthvalue.default,
    }
)
"""Operators whose results jump where their inputs change by little."""


def _is_repeated(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a second run takes what an operator found in the first.

    So it does what the host has read, for which it would wait for the device a second time.
    """
    if func is _ATEN._to_copy.default:
        to_host = kwargs.get("device") is not None and device_of(torch.device(kwargs["device"])).is_cpu
        return to_host and not device_of(args[0]).is_cpu
    return func in SELECTING


Record = tuple[Any, Any]
"""An operator, and what it selected, or the state from which it drew random numbers; None if it drew none."""


class _Noting(TorchDispatchMode):
    """Records what is selected, and from where random numbers are drawn."""

    def __init__(self, records: list[Record]) -> None:
        super().__init__()
        self._records = records

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        if _is_repeated(func, args, kwargs or {}):
            out = func(*args, **(kwargs or {}))
            self._records.append(
                (func, tree_map(torch.clone, out))
            )  # a router may divide its weights in place
            return out
        draw = _Draw.of(func, args, kwargs or {})
        if draw is None:
            return func(*args, **(kwargs or {}))
        out, state = draw.first()
        self._records.append((func, state))
        return out


class _Repeating(TorchDispatchMode):
    """Selects and draws what was recorded, in order. It stands below autograd, so gradients take their usual
    way.
    """

    def __init__(self, records: list[Record]) -> None:
        super().__init__()
        self._left = iter(records)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        if _is_repeated(func, args, kwargs or {}):
            return self._next(func)
        draw = _Draw.of(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if draw is None else draw.again(self._next(func))

    def end(self) -> None:
        """Raise RuntimeError unless all that was recorded was repeated."""
        self._next(None)

    def _next(self, func: Any) -> Any:
        before, found = next(self._left, (None, None))
        if before is not func:
            names = ("has ended" if each is None else f"ran {each}" for each in (before, func))
            raise RuntimeError(
                "what is recomputed before its backward takes another way than in the forward pass: it {} "
                "where it {} now, so gradients would be those of another computation. Modules must compute "
                "the same twice, the second time with gradients enabled; or set plan.recompute=none".format(
                    *names
                )
            )
        return found


@dataclass(frozen=True)
class _Draw:
    """A call of an operator that draws random numbers on the CPU, or from a generator that it is given.

    taking: the overload that takes a generator, and the argument's place; None for an operator that always
    uses the process's. given: the caller's generator.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    taking: tuple[Any, int] | None
    given: torch.Generator | None

    @staticmethod
    def of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Draw | None:
        """Return the call as one that draws; None if it does not, or from the generator of a GPU."""
        if not _draws(func):
            return None
        given = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)), None)
        if given is None and not device_of(_device(args, kwargs)).is_cpu:
            return None
        return _Draw(func, args, kwargs, _taking_a_generator(func), given)

    def first(self) -> tuple[Any, Tensor | None]:
        """Run it; return its results and the state from which it drew. The process's generator moves on."""
        generator = self.given or torch.default_generator
        state = generator.get_state()
        if self.given is not None or self.taking is None:
            out = self.func(*self.args, **self.kwargs)
            return out, None if torch.equal(generator.get_state(), state) else state
        own = _in_state(state, generator)
        out = self._run(own)
        if torch.equal(generator.get_state(), state):  # else another thread has moved it on
            generator.set_state(own.get_state())
        return out, state

    def again(self, state: Tensor | None) -> Any:
        """Run it from this state; no other draw is changed, unless the operator takes no generator."""
        if state is None:
            return self.func(*self.args, **self.kwargs)
        if self.taking is not None:
            return self._run(_in_state(state, self.given or torch.default_generator))
        with torch.random.fork_rng([]):
            torch.set_rng_state(state)
            return self.func(*self.args, **self.kwargs)

    def _run(self, generator: torch.Generator) -> Any:
        assert self.taking is not None, "it can be given a generator"
        func, place = self.taking
        if place < len(self.args):
            return func(*self.args[:place], generator, *self.args[place + 1 :], **self.kwargs)
        return func(*self.args, **{**self.kwargs, "generator": generator})


@cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _device(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    """Return where an operator runs."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    return next((each.device for each in args if isinstance(each, Tensor)), torch.device("cpu"))


@cache
def _taking_a_generator(func: Any) -> tuple[Any, int] | None:
    """Return the overload of an operator that takes a generator, and as which argument; None if none does."""
    wanted = [each for each in _arguments(func) if each[0] != "generator"]
    for name in func.overloadpacket.overloads():
        found = getattr(func.overloadpacket, name)
        taken = _arguments(found)
        names = [each[0] for each in taken]
        if "generator" in names and [each for each in taken if each[0] != "generator"] == wanted:
            return found, names.index("generator")
    return None


def _arguments(func: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in func._schema.arguments]


def _in_state(state: Tensor, like: torch.Generator) -> torch.Generator:
    generator = torch.Generator(like.device)
    generator.set_state(state)
    return generator


class Replay:
    """One computation that runs twice: inside `first`, and later inside `second`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._records = device, list[Record]()

    @contextmanager
    def first(self) -> Iterator[None]:
        """Run without keeping anything for a backward but selections and states of random numbers."""
        self._modes = tuple(_get_current_function_mode_stack())  # such as a default device
        self._random_there = device_of(self._device).random_state(self._device)
        with torch.no_grad(), _Noting(self._records):
            yield

    @contextmanager
    def second(self) -> Iterator[None]:
        """Run with the same selections and random numbers; generators then go on as if nothing was drawn.

        Autograd takes part, which is switched off inside a backward.

        Raises:
            RuntimeError: If the computation does not select and draw by the same operators.
        """
        repeating = _Repeating(self._records)
        with ExitStack() as modes:
            for mode in self._modes:  # a backward has none of them
                modes.enter_context(mode)
            if self._random_there is not None:
                modes.enter_context(_device_generator(self._device, self._random_there))
            with torch.enable_grad(), repeating:
                yield
        repeating.end()
        self._records = []


@contextmanager
def _device_generator(device: torch.device, state: Tensor) -> Iterator[None]:
    """Set a GPU's generator to a state while entered."""
    kind = device_of(device)
    before = kind.random_state(device)
    assert before is not None, "it has a generator of its own"
    kind.set_random_state(state, device)
    try:
        yield
    finally:
        kind.set_random_state(before, device)
