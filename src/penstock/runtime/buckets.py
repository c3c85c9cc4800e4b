"""Gradients of one layer in flat buffers, so that a piece of an all-reduce is a view and copies nothing.

Where no rank has a gradient whole, a stand-in takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from penstock.ops.core import GRADIENT_KINDS, KindName
from penstock.routing.sizes import part_sizes


class FlatGradients:
    """The gradients of parameters of one type and device, back to back in one buffer.

    Call `check` and `begin` before a backward pass, `piece` for the pieces to reduce, and `finish` after the
    last piece, or `abandon`. Gradients that existed before (gradient accumulation) are kept aside and added
    to by `finish`, so that they are not reduced twice.

    Between two backward passes the buffer belongs to the code that holds a gradient in it. If any code does
    when the next pass begins, that pass gets a new buffer; otherwise it reuses the old one, since memory
    fresh from the system costs several times as much as clearing what is there.

    Attributes:
        share: The fraction of the sum over ranks that is the gradient.
    """

    _compares_values = True

    def __init__(self, parameters: Sequence[nn.Parameter], share: float = 1.0) -> None:
        self.parameters, self.share = list(parameters), share
        self.sizes = [p.numel() for p in self.parameters]
        self._kinds = [(p.dtype, p.shape, p.device) for p in self.parameters]
        # The views of the buffer, which one operation makes in a third of the time of a split and a view.
        starts = accumulate(self.sizes, initial=0)
        self._places = [
            (p.shape, torch.empty(p.shape, device="meta").stride(), start)
            for p, start in zip(self.parameters, starts, strict=False)
        ]
        self._flat: Tensor | None = None
        self._idle = 0
        self._views: list[Tensor] = []
        self._before: list[Tensor | None] = []
        self._were: _Values | None = None
        self._parts: tuple[int, ...] = ()
        self._pieces: list[tuple[int, int]] = []

    @property
    def flat(self) -> Tensor:
        """The buffer of the current backward pass."""
        assert self._flat is not None, "`begin` makes the buffer"
        return self._flat

    def check(self) -> None:
        """Raise RuntimeError for a parameter with which no pass can begin; nothing is changed.

        Such a parameter has another type, shape or device than when the bucket was made, which is when the
        forward pass ran.
        """
        for parameter, kind in zip(self.parameters, self._kinds, strict=True):
            if (parameter.dtype, parameter.shape, parameter.device) != kind:
                raise RuntimeError(
                    f"a parameter was {_words(*kind)} in the forward pass and is "
                    f"{_words(parameter.dtype, parameter.shape, parameter.device)} in its backward pass: "
                    "convert a model between steps, and compute the loss again"
                )

    def begin(self) -> None:
        """Point every `param.grad` at its zeroed part of the buffer; put aside the gradients that existed."""
        if self._flat is not None and _holders(self._flat) == self._idle:
            self._flat.zero_()
        else:
            dtype, _, device = self._kinds[0]
            self._flat = torch.zeros(sum(self.sizes), dtype=dtype, device=device)
            self._idle = _holders(self._flat)
        self._views = [self._flat.as_strided(*place) for place in self._places]
        self._before = [p.grad for p in self.parameters]
        self._were = _Values.of(self.parameters, deeply=self._compares_values)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def piece(self, index: int, parts: tuple[int, ...]) -> Tensor:
        """Return piece `index` of the pieces whose relative sizes are `parts`.

        A step asks for every piece with the same tuple, so their starts are worked out once.
        """
        if parts is not self._parts:
            sizes = part_sizes(self.flat.numel(), parts)
            starts = accumulate(sizes, initial=0)
            self._parts, self._pieces = parts, list(zip(starts, sizes, strict=False))
        return self.flat.narrow(0, *self._pieces[index])

    @torch.no_grad()
    def finish(self) -> list[nn.Parameter]:
        """Add the sums to earlier gradients; return parameters that something else has used in the pass.

        Such a parameter's gradient is not in the buffer, or its values have changed since `begin`. As in
        PyTorch, an earlier gradient is added to in place, and a parameter that has been frozen since the
        forward pass keeps its earlier gradient.
        """
        replaced = self._changed()
        if self.share != 1.0 and self._views:
            self.flat.mul_(self.share)
        for parameter, view, before in zip(self.parameters, self._views, self._before, strict=True):
            if parameter.grad is not view:
                replaced.append(parameter)
            elif not parameter.requires_grad:
                parameter.grad = before
            elif before is not None:
                parameter.grad = before.add_(view)
        self._views, self._before = [], []
        return replaced

    def _changed(self) -> list[nn.Parameter]:
        """Return parameters that something has updated since `begin`: an optimiser in a hook, say."""
        were, self._were = self._were, None
        if were is None:
            return []
        return were.changed(_Values.of(self.parameters, deeply=self._compares_values))

    def abandon(self) -> None:
        """Restore every parameter's earlier gradient after a failed pass, whether that had begun or not."""
        for parameter, before in zip(self.parameters, self._before, strict=False):
            parameter.grad = before
        self._views, self._before, self._were = [], [], None


@dataclass(frozen=True)
class _Values:
    """What tells whether parameters have changed. norms: int64, the bits of norms of those with a hook.

    Not every update raises the version of a tensor: the fused AdamW does not.
    """

    parameters: Sequence[nn.Parameter]
    versions: Sequence[int]
    hooked: Sequence[nn.Parameter]
    norms: Tensor | None

    @classmethod
    @torch.no_grad()
    def of(cls, parameters: Sequence[nn.Parameter], *, deeply: bool) -> _Values:
        """Return the present values. deeply: also where parameters with a hook may change unnoticed."""
        hooked = [p for p in parameters if deeply and getattr(p, "_post_accumulate_grad_hooks", None)]
        norms = [torch.linalg.vector_norm(p, dtype=torch.float64) for p in hooked]
        bits = torch.stack(norms).view(torch.int64) if norms else None  # of a NaN, too, to be equal
        return cls(parameters, [p._version for p in parameters], hooked, bits)

    def changed(self, now: _Values) -> list[nn.Parameter]:
        """Return the parameters whose values are others now."""
        versions = zip(self.parameters, self.versions, now.versions, strict=True)
        changed = [p for p, before, after in versions if before != after]
        if changed or self.norms is None or now.norms is None or len(self.hooked) != len(now.hooked):
            return changed
        return [
            p for p, differs in zip(self.hooked, (self.norms != now.norms).tolist(), strict=True) if differs
        ]


class ScatteredGradients(FlatGradients):
    """Gradients of which every rank keeps the sum of its share alone, for an optimiser that owns the shares.

    No parameter has a gradient after a backward pass, but a stand-in that refuses to be used: some parts of
    the buffer hold the sum, others what this rank has added.
    """

    _compares_values = False  # the optimiser itself may update parameters while backward runs

    def __init__(self, parameters: Sequence[nn.Parameter], share: float = 1.0) -> None:
        super().__init__(parameters, share)
        self._stand_ins = [InShares.of(parameter) for parameter in self.parameters]

    def check(self) -> None:
        """Raise RuntimeError also for a parameter that has a gradient, or was frozen since forward."""
        super().check()
        for parameter in self.parameters:
            if has_gradient(parameter) or not parameter.requires_grad:
                problem = "has a gradient" if parameter.requires_grad else "was frozen after the forward pass"
                raise RuntimeError(
                    f"a parameter of shape {list(parameter.shape)} {problem}, and its gradients are summed "
                    "in shares, which a sharded optimizer keeps itself. Freeze parameters between steps, and "
                    "leave .grad alone, or use optimizer.zero_stage=0"
                )

    def finish(self) -> list[nn.Parameter]:
        """Take the gradients away; return parameters that something else has used in the pass."""
        replaced = self._changed()
        replaced += [p for p, view in zip(self.parameters, self._views, strict=True) if p.grad is not view]
        self._stand_in()
        self._views, self._before = [], []
        return replaced

    def _stand_in(self) -> None:
        for parameter, stand_in in zip(self.parameters, self._stand_ins, strict=True):
            parameter.grad = stand_in if parameter.requires_grad else None


class ReleasedGradients(ScatteredGradients):
    """Gradients that are made while backward runs, and freed piece by piece once they are summed.

    There is no buffer of all gradients: a parameter has a gradient from the first task that adds to it to the
    sum of the last piece that it is in.
    """

    def check(self) -> None:
        """Raise RuntimeError also for a parameter with a hook that would look at its gradient."""
        super().check()
        for parameter in self.parameters:
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise RuntimeError(
                    f"a parameter of shape {list(parameter.shape)} has a hook on its gradient "
                    "(register_post_accumulate_grad_hook), which is in parts, and given up while backward "
                    "runs: remove the hook, or use optimizer.zero_stage=1"
                )

    def begin(self) -> None:
        """Leave the parameters without gradients: autograd makes every one."""
        give_up_stand_ins(self.parameters)

    def finish(self) -> list[nn.Parameter]:
        """Free gradients that no sum has freed."""
        self._stand_in()
        return []

    def abandon(self) -> None:
        """Free gradients: before a pass there were none, or `check` would have raised."""
        for parameter in self.parameters:
            parameter.grad = None


Bucket = Sequence[FlatGradients]
"""The gradients of some parameters, in one buffer per type, device and share."""


def bucket_of(
    parameters: Iterable[nn.Parameter],
    shares: Mapping[int, float] | None = None,
    flat: type[FlatGradients] = FlatGradients,
) -> Bucket:
    """Return the buffers for the gradients of these parameters.

    Args:
        shares: By id of a parameter, the fraction of the sum that is its gradient, where that is not the
            whole sum.
        flat: The kind of buffer, which decides what is done with sums.
    """
    kinds: dict[tuple[torch.dtype, torch.device, float], list[nn.Parameter]] = {}
    for parameter in parameters:
        share = 1.0 if shares is None else shares.get(id(parameter), 1.0)
        kinds.setdefault((parameter.dtype, parameter.device, share), []).append(parameter)
    return [flat(members, share) for (_, _, share), members in kinds.items()]


@dataclass(frozen=True)
class Buckets:
    """The gradient buckets of a model.

    Attributes:
        by_kind: The bucket of every layer, by kind of gradients; experts without replicas have empty ones.
        at_once: Ids of expert parameters whose weight gradients must not be deferred, since they are reduced
            with a layer below those that use them.
    """

    by_kind: Mapping[KindName, Sequence[Bucket]]
    at_once: frozenset[int] = frozenset()

    @property
    def all(self) -> Bucket:
        return [flat for kind in GRADIENT_KINDS for bucket in self.by_kind[kind] for flat in bucket]


def _holders(flat: Tensor) -> int:
    """Return how many tensors, in Python or not, share the memory of `flat`."""
    return torch._C._storage_Use_Count(flat.untyped_storage()._cdata)


def _words(dtype: torch.dtype, shape: torch.Size, device: torch.device) -> str:
    return f"{dtype} {list(shape)} on {device}"


# ---- stand-ins for gradients that no rank has whole: an error says so where one would be used -------------
#
# Without them `.grad` would be None after a backward pass, and everything that goes over gradients would do
# nothing and say nothing: clipping and norms of torch, a scaler of losses, another optimiser.


ALLOWED = {
    *(
        "to",
        "double",
        "float",
        "half",
        "bfloat16",
        "cpu",
        "cuda",
        "type",
    ),  # a model converts them with itself
    *("detach_", "requires_grad_", "zero_"),  # they are cleared
    *("__get__", "__set__", "_has_compatible_shallow_copy_type"),  # looked at, but for numbers
    *("dim", "size", "is_floating_point", "is_complex"),
}
"""Functions that do not use a gradient's numbers."""


class InShares(Tensor):
    """The gradient of which every rank has a share: with the shape, type and device of its parameter.

    It is an empty sparse tensor, which takes no memory, and to which autograd adds a gradient of another
    backward pass as if there were none.
    """

    @staticmethod
    def of(parameter: nn.Parameter) -> InShares:
        """Return a stand-in for the gradient of a parameter."""
        empty = torch.zeros(
            parameter.shape, layout=torch.sparse_coo, dtype=parameter.dtype, device=parameter.device
        )
        return _standing_in(empty)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        name = getattr(func, "__name__", str(func))
        if name in ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            return _standing_in(result) if type(result) is Tensor else result
        if name == "__repr__":
            return f"InShares({args[0].dtype}, {list(args[0].shape)})"
        raise RuntimeError(
            f"{name} would use a gradient that a sharded optimizer has in shares, and that no rank has "
            "whole. Such an optimizer clips by itself (max_norm, or optimizer.clip_grad_norm), has the norm "
            "of all gradients after a step (optimizer.norm), updates all parameters of its stack, and leaves "
            "out steps that are not finite. Use that, or optimizer.zero_stage=0"
        )


def has_gradient(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has a gradient that is no stand-in."""
    return parameter.grad is not None and not isinstance(parameter.grad, InShares)


def give_up_stand_ins(parameters: Iterable[nn.Parameter]) -> None:
    """Leave no gradient where there is a stand-in."""
    for parameter in parameters:
        if isinstance(parameter.grad, InShares):
            parameter.grad = None


def _standing_in(empty: Tensor) -> InShares:
    stand_in: InShares = Tensor._make_subclass(InShares, empty)
    return stand_in


# ---- the fate of gradients when a backward pass fails: earlier gradients are restored, or are in doubt ----
#
# Buckets put earlier gradients aside. Experts that are in no bucket accumulate their gradients in place:
# putting these aside would cost every pass the reading and writing of all expert gradients. So what a failed
# pass has changed is remembered, and refused until it is cleared.


NameOf = Callable[[nn.Parameter], str]


class InPlace:
    """Gradients to which a pass adds in place: `check` and `begin`, then `finish` or `abandon`."""

    def __init__(self) -> None:
        # The gradients that parameters had, and how often these had been changed in place.
        self._before: Sequence[tuple[nn.Parameter, Tensor | None, int]] = ()
        self._doubtful: list[tuple[nn.Parameter, Tensor]] = []

    def check(self, name_of: NameOf) -> None:
        """Raise RuntimeError where a gradient still has a part of a failed pass."""
        if self._doubtful:
            still = [(p, grad) for p, grad in self._doubtful if p.grad is grad and bool(grad.any())]
            self._doubtful = still
            if still:
                raise RuntimeError(self._words(name_of))

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note the present gradients."""
        grads = ((p, p.grad) for p in parameters)
        self._before = [(p, grad, 0 if grad is None else grad._version) for p, grad in grads]

    def finish(self) -> None:
        """End a pass that has succeeded."""
        self._before = ()

    def abandon(self, name_of: NameOf) -> str:
        """Restore earlier gradients; return in words what could not be restored, "" if all could."""
        changed = []
        for parameter, grad, version in self._before:
            parameter.grad = grad
            if grad is not None and grad._version != version:
                changed.append((parameter, grad))
        self._before, self._doubtful = (), [*self._doubtful, *changed]
        return self._words(name_of) if changed else ""

    def _words(self, name_of: NameOf) -> str:
        names = [name_of(parameter) for parameter, _ in self._doubtful]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return (
            f"a backward pass failed after it had added a part of its gradients to that of {names[0]}{more}, "
            "which was there before (gradient accumulation): call zero_grad() before the next backward pass "
            "or update, and compute again what was accumulated since the last update"
        )


class BackwardPass:
    """All gradients of one backward pass: `check`, `begin`, then `finish`, or `abandon` if it fails.

    Args:
        apart: Parameters to whose gradients the pass adds in place.
    """

    def __init__(
        self,
        flats: Bucket,
        in_place: InPlace,
        apart: Sequence[nn.Parameter],
        name_of: NameOf,
    ) -> None:
        self._flats, self._in_place, self._apart, self._name_of = flats, in_place, apart, name_of

    @property
    def can_be_undone(self) -> bool:
        """Whether `abandon` leaves nothing in doubt: what is added to in place had no gradient before."""
        return all(parameter.grad is None for parameter in self._apart)

    def check(self) -> None:
        """Raise RuntimeError as `InPlace.check` and `FlatGradients.check` do.

        All are checked before anything is cleared: a buffer may hold sums of earlier passes, which only the
        optimiser that owns them knows of.
        """
        self._in_place.check(self._name_of)
        for flat in self._flats:
            flat.check()

    def begin(self) -> None:
        """Put earlier gradients aside. Call it after `check`; call `abandon` if it fails."""
        self._in_place.begin(self._apart)
        for flat in self._flats:
            flat.begin()

    def finish(self) -> list[nn.Parameter]:
        """Add to earlier gradients; return parameters whose gradient was replaced in backward."""
        self._in_place.finish()
        return [parameter for flat in self._flats for parameter in flat.finish()]

    def abandon(self) -> str:
        """Restore earlier gradients; return in words what is in doubt, "" if nothing is."""
        for flat in self._flats:
            flat.abandon()
        return self._in_place.abandon(self._name_of)
