"""Forward passes of a scheduled model outside of its steps: ranks meet at the experts of every layer.

Ranks have different things to do there: prompts of other lengths, caches that hold so many tokens and no
more, an error. A rank that has no pass of its own takes part in those of others with no rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from penstock.runtime.consistency import Turns
from penstock.topology import Control

T = TypeVar("T")


class OtherRankError(RuntimeError):
    """Another rank could not generate, and says why itself."""


class Meeting(Protocol):
    """The experts of one layer, at which ranks meet."""

    def take_part(self) -> None:
        """Meet the other ranks with no rows, as if a forward pass had come here."""
        ...


class Passes:
    """The forward passes of a model on this rank. Every pass meets the other ranks once in every layer.

    meetings: in the order of the layers; none where no rank needs another one.
    """

    def __init__(self, control: Control, turns: Turns) -> None:
        self._control, self._turns = control, turns
        self.meetings: list[Meeting] = []
        self._next: int | None = None  # the meeting that comes next in the running pass; None: there is none
        self._generates = self._broken = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the passes of a copied model, between the same ranks."""
        twin = memo[id(self)] = type(self)(self._control, copy.deepcopy(self._turns, memo))
        twin.meetings = copy.deepcopy(self.meetings, memo)
        return twin

    @contextmanager
    def one(self) -> Iterator[None]:
        """Run a forward pass inside this context; if it fails, other ranks are not left waiting."""
        if self._next is not None or not self.meetings:
            yield
            return
        if self._generates:
            self._agree(runs=True)
        else:
            self._turns.untrained()
        self._next = 0
        try:
            try:
                yield
            except Exception:
                self._complete()
                raise
            self._complete()
        finally:
            self._next = None

    @contextmanager
    def at(self, meeting: Meeting) -> Iterator[None]:
        """Meet the other ranks inside this context, after the meetings that the pass has left out."""
        if self._next is not None:
            place = self.meetings.index(meeting)
            if place < self._next:
                raise ValueError(
                    "a layer ran twice in one forward pass, where ranks meet once: call the model again"
                )
            self._complete(place)
            self._next = place + 1
        with self._whole():
            yield

    def generate(self, run: Callable[[], T]) -> T:
        """Generate by `run` on this rank, and take part in the passes of others until all have finished.

        Raises what `run` raises, and on the other ranks OtherRankError.
        """
        if self._generates or not self.meetings:
            return run()
        self._turns.untrained()
        self._generates, failure = True, None
        try:
            try:
                found = run()
            except OtherRankError:
                raise
            except Exception as error:
                if self._broken:
                    raise
                failure = error
            while self._agree(runs=False, fails=failure is not None):
                self._next = 0
                self._complete()
                self._next = None
        finally:
            self._generates, self._next = False, None
        if failure is not None:
            raise failure
        return found

    def _agree(self, *, runs: bool, fails: bool = False) -> bool:
        """Return whether any rank runs a pass now. Raises OtherRankError if another one has failed."""
        number = self._control.rank + 1
        running, failed = self._control.largest((runs, number if fails else 0), "generating")
        if failed and not fails:
            raise OtherRankError(f"rank {failed - 1:.0f} could not generate: see its error")
        return bool(running) and not failed

    def _complete(self, stop: int | None = None) -> None:
        """Take part in the meetings of the pass before `stop` that have not been; None: in all."""
        assert self._next is not None
        while not self._broken and self._next < (len(self.meetings) if stop is None else stop):
            self._next += 1
            with self._whole():
                self.meetings[self._next - 1].take_part()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Note a meeting that fails: what comes after it on other ranks is not known."""
        try:
            yield
        except BaseException:
            self._broken = True
            raise


def together_from(plain: Any) -> dict[str, Callable[..., Any]]:
    """Return the functions with which models of the class `plain` generate on several ranks."""

    @wraps(plain.init_continuous_batching)
    def init_continuous_batching(self: Any, *arguments: Any, **named: Any) -> Any:
        if _passes_of(self).meetings:
            raise ValueError(
                "continuous batching (paged caches, generate_batch) runs forward passes on a thread, for "
                "which other ranks would not wait, and experts are spread over ranks: leave "
                "cache_implementation out, or generate on one process"
            )
        return plain.init_continuous_batching(self, *arguments, **named)

    return {"generate": _generate(plain), "init_continuous_batching": init_continuous_batching}


def _generate(plain: Any) -> Callable[..., Any]:
    """Return `generate` for models of the class `plain`, in which ranks take part until all have finished."""

    @wraps(plain.generate)
    def generate(self: Any, *arguments: Any, **named: Any) -> Any:
        passes = _passes_of(self)
        if not passes.meetings:
            return plain.generate(self, *arguments, **named)
        named["synced_gpus"] = False  # would run every rank as long as the last one, beyond what caches hold

        given = [*arguments[:1], *(named.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))]
        prompts = next((each for each in given if isinstance(each, Tensor)), None)

        def run() -> Any:
            if prompts is not None and not len(prompts):
                from transformers.generation.utils import GenerateDecoderOnlyOutput

                tokens_BL = (
                    prompts.new_empty(0, 0, dtype=torch.long) if prompts.is_floating_point() else prompts
                )
                config = named.get("generation_config") or self.generation_config
                as_dict = named.get("return_dict_in_generate", config.return_dict_in_generate)
                return GenerateDecoderOnlyOutput(sequences=tokens_BL) if as_dict else tokens_BL
            assistant = named.get("assistant_model")
            if assistant is not None and "_penstock" in vars(assistant) and _passes_of(assistant).meetings:
                raise ValueError(
                    "assistant_model is spread over ranks, too, and ranks would ask it at different times: "
                    "give an assistant that every rank holds whole"
                )
            return plain.generate(self, *arguments, **named)

        return passes.generate(run)

    return generate


def _passes_of(model: Any) -> Passes:
    passes: Passes = model.__dict__["_penstock"].passes
    return passes
