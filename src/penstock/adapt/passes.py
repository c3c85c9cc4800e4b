"""Forward passes of a scheduled model outside of its steps: ranks meet at the experts of every layer.

Ranks have different things to do there: prompts of other lengths, caches that hold so many tokens and no
more, an error. A rank that has no pass of its own takes part in those of others with no rows. Adapters of the
experts are saved and read as those of all ranks.
Shapes: T tokens, M hidden size, k choices per token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import lcm
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from penstock.adapt.cut import Cut
from penstock.device import on_device
from penstock.families.adapters import ExpertAxis, axes_of, core_of
from penstock.features.dispatch import find_dispatch
from penstock.graph import Lane
from penstock.mesh import Group
from penstock.moe import MoELayer, RouteMaker
from penstock.moe.permute.sort import SortPermutation
from penstock.runtime import Machinery
from penstock.runtime.consistency import UNTRAINED, Turns
from penstock.runtime.step import check_no_transform
from penstock.runtime.transport import Later, exchange_counts, send_home, send_out, to_host
from penstock.topology import Control
from penstock.topology.faults import MOST_REASON, give_up, reason

T = TypeVar("T")

PURPOSE = "meeting at the experts in a pass without gradients"


class OtherRankError(RuntimeError):
    """Another rank could not generate, or compute its experts, and says why itself."""


class Passes:
    """The forward passes of a model on this rank. Every pass meets the other ranks once in every layer.

    Attributes:
        meetings: The layers' meetings, in their order; none where no rank needs another one.
    """

    def __init__(self, control: Control, turns: Turns) -> None:
        self._control, self._turns = control, turns
        self.meetings: list[Spread] = []
        self._next: int | None = None  # the meeting that comes next in the running pass; None: there is none
        self._generates = False
        self._broken: BaseException | None = None  # by which a meeting ended half-way
        self._failure: Exception | None = None  # for which this rank's experts could not compute in the pass

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the passes of a copied model, of which none has begun or failed."""
        twin = memo[id(self)] = type(self)(self._control, copy.deepcopy(self._turns, memo))
        twin.meetings = copy.deepcopy(self.meetings, memo)
        return twin

    @contextmanager
    def one(self) -> Iterator[None]:
        """Run a forward pass inside this context; if it fails, other ranks are not left waiting."""
        if self._next is not None or not self.meetings:
            yield
            return
        check_no_transform()
        if self._generates:
            self._agree(runs=True)
        else:
            self._begin()
        self._next = 0
        try:
            try:
                yield
            except Exception:
                self._complete()
                with suppress(OtherRankError):
                    self._judge()
                raise
            except BaseException as error:
                _tell(error)
                raise
            self._complete()
            self.meetings[-1].settle()
            self._judge()
        finally:
            self._next = None

    @contextmanager
    def at(self, meeting: Spread) -> Iterator[None]:
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
        if self._next is None:  # a layer that was called by itself
            self._judge()

    def generate(self, run: Callable[[], T]) -> T:
        """Generate by `run` on this rank, and take part in the passes of others until all have finished.

        Raises what `run` raises, and on the other ranks OtherRankError.
        """
        if self._generates or not self.meetings:
            return run()
        self._begin()
        self._generates, failure = True, None
        try:
            try:
                result = run()
            except OtherRankError:
                raise
            except Exception as error:
                if self._broken:
                    raise
                failure = error
            except BaseException as error:
                _tell(error)
                raise
            while self._agree(runs=False, fails=failure is not None):
                self._next = 0
                self._complete()
                self._next = None
                failure, self._failure = self._failure, None
        finally:
            self._generates, self._next = False, None
        if failure is not None:
            raise failure
        return result

    def computed(self, work: Callable[[], Tensor], instead: Tensor) -> Tensor:
        """Return what experts compute, or where they fail, as without memory, `instead`.

        Other ranks then get as many rows as they wait for, and the pass ends in an error on all of them.
        """
        try:
            return work()
        except Exception as error:
            self._failure = self._failure or error
            return instead

    def check_whole(self) -> None:
        """Raise RuntimeError after a meeting that failed half-way: other ranks might take what comes next
        for what they still wait for.
        """
        if self._broken is not None:
            raise RuntimeError(
                "a pass without gradients has failed while ranks exchanged rows "
                f"({type(self._broken).__name__}: {reason(self._broken)}), and others may still wait there: "
                "this rank can exchange nothing more. End the program and start again"
            ) from self._broken

    def _begin(self) -> None:
        """Begin passes."""
        self.check_whole()
        self._failure = None
        self._turns.begin(UNTRAINED)

    def _judge(self) -> None:
        """Raise, on all ranks that met in this pass, the error for which experts of one could not compute."""
        failure, self._failure = self._failure, None
        said = ""
        if not (self._generates or self._broken):
            text = "" if failure is None else f"{type(failure).__name__}: {failure}"
            with self._whole():
                said = self.meetings[-1].told(text, of_model=self._next is not None)
        if failure is not None:
            raise failure
        if said:
            raise OtherRankError(f"experts could not compute on {said}")

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
        except BaseException as error:
            self._broken = error
            raise


def _tell(error: BaseException) -> None:
    """Tell the other ranks that this one was interrupted or ends: it comes to no more meetings."""
    give_up(f"a pass without gradients: {type(error).__name__}")


def _init_continuous_batching(plain: Any, model: Any, *arguments: Any, **named: Any) -> Any:
    if _passes_of(model).meetings:
        raise ValueError(
            "continuous batching (paged caches, generate_batch) runs forward passes on a thread, for "
            "which other ranks would not wait, and experts are spread over ranks: leave "
            "cache_implementation out, or generate on one process"
        )
    return plain(model, *arguments, **named)


def _generate(plain: Any, model: Any, /, *arguments: Any, **named: Any) -> Any:
    """Generate, and take part until all ranks have finished."""
    passes = _passes_of(model)
    if not passes.meetings:
        return plain(model, *arguments, **named)
    named["synced_gpus"] = False  # would run every rank as long as the last one, beyond what caches hold
    given = [*arguments[:1], *(named.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))]
    prompts = next((each for each in given if isinstance(each, Tensor)), None)

    def run() -> Any:
        if prompts is not None and not len(prompts):
            from transformers.generation.utils import GenerateDecoderOnlyOutput

            tokens_BL = prompts.new_empty(0, 0, dtype=torch.long) if prompts.is_floating_point() else prompts
            config = named.get("generation_config") or model.generation_config
            as_dict = named.get("return_dict_in_generate", config.return_dict_in_generate)
            return GenerateDecoderOnlyOutput(sequences=tokens_BL) if as_dict else tokens_BL
        assistant = named.get("assistant_model")
        if assistant is not None and "_penstock" in vars(assistant) and _passes_of(assistant).meetings:
            raise ValueError(
                "assistant_model is spread over ranks, too, and ranks would ask it at different times: "
                "give an assistant that every rank holds whole"
            )
        return plain(model, *arguments, **named)

    return passes.generate(run)


TOGETHER = {"generate": _generate, "init_continuous_batching": _init_continuous_batching}
"""Functions with which a model generates on several ranks, each of which gets the model's own one first."""


def _passes_of(model: Any) -> Passes:
    passes: Passes = model.__dict__["_penstock"].passes
    return passes


class Spread:
    """Sends tokens to the experts of all ranks and back, without gradients.

    All ranks that share them call it.

    Args:
        moe: The layer with this rank's experts.
        passes: The passes of the model, each of which comes here once.
        width: Numbers that experts get for a token.
    """

    def __init__(self, machinery: Machinery, moe: MoELayer, passes: Passes, width: int) -> None:
        self._machinery, self._moe, self._passes, self._width = machinery, moe, passes, width
        self._maker = RouteMaker(find_dispatch("flat"), machinery.layout.place, False)
        passes.meetings.append(self)

    def __call__(self, x_TM: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        with self._passes.at(self), torch.no_grad():
            return self._exchanged(x_TM.to(self._dtype), experts_Tk, weights_Tk).to(x_TM.dtype)

    @torch.no_grad()
    def take_part(self) -> None:
        """Compute this rank's experts on the tokens of others, with none of its own."""
        x_TM = torch.empty(0, self._width, dtype=self._dtype, device=self._machinery.device)
        none_Tk = x_TM.new_empty(0, 1)
        self._exchanged(x_TM, none_Tk.long(), none_Tk)

    @property
    def _dtype(self) -> torch.dtype:
        """The type of rows, in which experts multiply them: the same on all ranks."""
        device = self._machinery.device.type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return next(self._moe.experts.parameters()).dtype

    def _exchanged(self, x_TM: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        order, transport = self._moe.permutation, self._machinery.transports.of(Lane.INTER, Group.EXPERT)
        assert isinstance(order, SortPermutation)
        plan = order.arrange(experts_Tk, (len(x_TM),), masked=False)
        counts_CN = plan.counts_CN
        assert counts_CN is not None
        routes = self._exchange(lambda: Later.of(exchange_counts(counts_CN, self._maker, transport)))
        route = routes.slices[0]
        rows_RM = plan.rows.take(x_TM)
        for leg in route.legs:
            rows_RM = self._exchange(partial(send_out, rows_RM, leg, transport))
        rows_RM = self._passes.computed(partial(self._moe.expert_rows, rows_RM, route), rows_RM)
        for leg in reversed(route.legs):
            rows_RM = self._exchange(partial(send_home, rows_RM, leg, transport))
        received_RM = rows_RM
        return self._passes.computed(lambda: order.unpermute(received_RM, weights_Tk, plan), x_TM)

    def _exchange(self, work: Callable[[], T]) -> T:
        return self._machinery.exchange(PURPOSE, work)

    def settle(self) -> None:
        """Wait until what was exchanged can be read."""
        self._machinery.settle(PURPOSE)

    def told(self, text: str, *, of_model: bool) -> str:
        """Return which rank of those that meet has a text, and the text; "" where none has. All call it.

        Args:
            of_model: Whether the whole model ran, whose attention hands numbers on to ranks that share it.
        """
        rank = self._machinery.layout.rank
        (teller,) = self._largest([rank + 1 if text else 0], of_model)
        if not teller:
            return ""
        own = text.encode()[:MOST_REASON] if teller == rank + 1 else b""
        said = bytes(self._largest(list(own.ljust(MOST_REASON, b"\0")), of_model)).rstrip(b"\0")
        return f"rank {teller - 1}: {said.decode(errors='ignore')}"

    def _largest(self, numbers: list[int], of_model: bool) -> list[int]:
        """Return, for every entry, the largest number of any rank of those that meet."""
        machinery, layout = self._machinery, self._machinery.layout
        numbers_X = on_device(numbers, machinery.device)
        groups = [(Lane.INTER, Group.EXPERT), (Lane.INTER, Group.SHARDS)]
        times = 1
        if of_model and layout.tp_size > 1:
            groups.append((Lane.INTRA, Group.TENSOR))
            sizes = layout.tp_size, layout.ep_size * layout.etp_size
            times = lcm(*sizes) // max(sizes)  # from group to group, where neither kind holds the other

        def exchange() -> list[int]:
            for lane, group in groups * times:
                machinery.transports.of(lane, group).maximum(numbers_X, group)
            largest: list[int] = Later.of(to_host(numbers_X)).tolist()
            return largest

        return self._exchange(exchange)


class NarrowSpread(Spread):
    """The same where ranks share every expert: they bring their tokens together, and add up parts of sums."""

    def _exchanged(self, x_TM: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        layout, transport = self._machinery.layout, self._machinery.transports.of(Lane.INTER, Group.SHARDS)
        size_12 = on_device([list(experts_Tk.shape)], x_TM.device)
        gather = partial(transport.all_gather, group=Group.SHARDS)
        shapes_S2 = self._exchange(lambda: Later.of(to_host(gather(size_12, [1] * layout.etp_size))))
        sizes, top_k = shapes_S2[:, 0].tolist(), int(shapes_S2[:, 1].max())
        given = (x_TM, *(each.reshape(len(x_TM), top_k) for each in (experts_Tk, weights_Tk)))
        every = self._exchange(lambda: [gather(each.contiguous(), sizes) for each in given])
        sum_TM = super()._exchanged(*every)
        self._exchange(partial(transport.all_reduce, sum_TM, Group.SHARDS))
        own_TM: Tensor = sum_TM.split(sizes)[layout.etp_rank]
        return own_TM


class _Hook:
    """A hook on state dictionaries of a block whose experts, and so their adapters, are spread over ranks.

    A class, since torch marks such hooks, which is impossible for a method. All ranks ask for state
    dictionaries together, and peft saves and reads adapters as those of the whole model.
    """

    def __init__(self, cut: Cut, machinery: Machinery) -> None:
        self.cut, self.machinery = cut, machinery

    def adapters(self, prefix: str) -> Iterator[tuple[str, nn.Parameter, ExpertAxis]]:
        """Yield the adapters' names in a state dictionary, the parameters, and how experts lie in them."""
        self.cut.follow()
        experts, path = self.cut.experts, self.cut.family.experts
        own, axes = set(core_of(experts).parameters()), axes_of(experts)
        for name, parameter in experts.named_parameters():
            if parameter not in own:
                yield f"{prefix}{path}.{name}", parameter, axes[parameter]


class JoinAdapters(_Hook):
    """Joins the adapters of all ranks' experts in a state dictionary."""

    def __call__(self, block: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        del block, metadata
        layout, control = self.machinery.layout, self.machinery.control
        for name, _, axis in self.adapters(prefix):
            everyone = control.gather(state[name].detach().cpu(), f"gathering {name}")
            parts = [everyone[rank] for rank in layout.mesh.members(layout.rank, Group.EXPERT)]
            state[name] = axis.join(parts).to(state[name].device)


class TakeAdapters(_Hook):
    """Takes this rank's part of adapters that are loaded.

    Raises:
        ValueError: They are not those of all experts.
    """

    def __call__(self, block: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        del block, others
        layout = self.machinery.layout
        for name, parameter, axis in self.adapters(prefix):
            if (whole := state.get(name)) is None:
                continue
            if tuple(whole.shape) != (wanted := axis.whole_shape(tuple(parameter.shape), layout.ep_size)):
                raise ValueError(
                    f"{name} {list(whole.shape)} is no adapter of all experts here, which is {list(wanted)}: "
                    "read adapters of this model, of the same rank"
                )
            state[name] = axis.part(whole, layout.ep_rank, layout.ep_size).clone()
