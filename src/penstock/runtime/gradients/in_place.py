"""The fate of gradients when a backward pass fails: earlier gradients are restored, or are in doubt.

Buckets put earlier gradients aside. Experts that are in no bucket accumulate their gradients in place:
putting these aside would cost every pass the reading and writing of all expert gradients. So what a failed
pass has changed is remembered, and refused until it is cleared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from penstock.runtime.gradients.buckets import GradientBucket

NameOf = Callable[[nn.Parameter], str]


@dataclass(frozen=True)
class _Before:
    """The gradient that a parameter had, and how often that had been changed in place."""

    parameter: nn.Parameter
    grad: Tensor | None
    version: int


class InPlace:
    """Gradients to which a pass adds in place: `check` and `begin`, then `finish` or `abandon`."""

    def __init__(self) -> None:
        self._before: Sequence[_Before] = ()
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
        self._before = [_Before(p, grad, 0 if grad is None else grad._version) for p, grad in grads]

    def finish(self) -> None:
        """End a pass that has succeeded."""
        self._before = ()

    def abandon(self, name_of: NameOf) -> str:
        """Restore earlier gradients; return in words what could not be restored, "" if all could."""
        changed = []
        for each in self._before:
            each.parameter.grad = each.grad
            if each.grad is not None and each.grad._version != each.version:
                changed.append((each.parameter, each.grad))
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

    apart: parameters whose gradients are added to in place.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        in_place: InPlace,
        apart: Sequence[nn.Parameter],
        name_of: NameOf,
    ) -> None:
        self._buckets, self._in_place, self._apart, self._name_of = buckets, in_place, apart, name_of

    @property
    def can_be_undone(self) -> bool:
        """Whether `abandon` leaves nothing in doubt: what is added to in place had no gradient before."""
        return all(parameter.grad is None for parameter in self._apart)

    def check(self) -> None:
        """Raise RuntimeError as `InPlace.check` and `GradientBucket.check` do.

        All are checked before anything is cleared: a buffer may hold sums of earlier passes, which only the
        optimiser that owns them knows of.
        """
        self._in_place.check(self._name_of)
        for bucket in self._buckets:
            bucket.check()

    def begin(self) -> None:
        """Put earlier gradients aside. Call it after `check`; call `abandon` if it fails."""
        self._in_place.begin(self._apart)
        for bucket in self._buckets:
            bucket.begin()

    def finish(self) -> list[nn.Parameter]:
        """Add to earlier gradients; return parameters whose gradient was replaced in backward."""
        self._in_place.finish()
        return [parameter for bucket in self._buckets for parameter in bucket.finish()]

    def abandon(self) -> str:
        """Restore earlier gradients; return in words what is in doubt, "" if nothing is."""
        for bucket in self._buckets:
            bucket.abandon()
        return self._in_place.abandon(self._name_of)
