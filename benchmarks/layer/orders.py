"""How near order and un-order come to the machine's copy, by the bytes that they must move.

Bytes are those of rows, each counted once where it must be read and once where it must be written. T tokens
of M numbers, of which U go to any expert; R rows, of which K are no padding (K = R where nothing is padded):

    order              reads U, writes R       backward reads K, writes T
    un-order           reads K, writes T       backward reads U gradients and K rows, writes R

Un-order's backward reads rows because the gradients of the weights are made of them. Integers do not count:
the plan, which sorts the choices and moves no row, takes time and no bytes. Nor is what only one order needs:
einsum's mask has as many numbers as T * R.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor

from benchmarks.layer.measure import COPY, FLOAT_BYTES, THREADS, Band, Copy, Laps, in_turns, quiet_process
from penstock.moe.choices import TokenChoice
from penstock.moe.gates.softmax import SoftmaxGate
from penstock.moe.orders.base import Order
from penstock.moe.orders.einsum import EinsumOrder
from penstock.moe.orders.index import IndexOrder
from penstock.moe.orders.sort import SortOrder
from penstock.moe.tokens import Tokens

Stage = Literal["plan", "order", "un-order", "order backward", "un-order backward", "together"]
STAGES: Final[tuple[Stage, ...]] = ("plan", "order", "un-order", "un-order backward", "order backward")
TOGETHER: Final[Stage] = "together"

SHAPES: Final = ((2048, 512), (8192, 1024))
"""Tokens and hidden size: one that stays in a large cache, one that does not."""

EXPERTS: Final = (8, 64)
TOP_K: Final = 2
CAPACITY_FACTOR: Final = 1.25
MOST_MASK_BYTES: Final = 100e6
ROUNDS: Final = 7


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """T, U, R and K of one routing, see above. All that must be moved follows from them."""

    tokens: int
    used: int
    rows: int
    kept: int

    @staticmethod
    def of(order: Order, choice: TokenChoice) -> RowCounts:
        """Counted by sending ones: a row without a token stays 0, a token without a row gets 0 back."""
        plan = order.plan(choice, 1)
        rows_R1 = order.order(torch.ones(plan.tokens, 1), choice, plan)
        back_T1 = order.unorder(rows_R1, torch.ones_like(choice.weights), plan)
        return RowCounts(
            tokens=plan.tokens,
            used=int((back_T1 > 0).sum()),
            rows=len(rows_R1),
            kept=int((rows_R1 > 0).sum()),
        )

    def bytes_of(self, stage: Stage, row_bytes: int) -> int:
        """Bytes that a stage must read and write, `row_bytes` for a row or token."""
        moved: dict[Stage, int] = {
            "plan": 0,
            "order": self.used + self.rows,
            "un-order": self.kept + self.tokens,
            "un-order backward": self.used + self.kept + self.rows,
            "order backward": self.kept + self.tokens,
        }
        return (sum(moved.values()) if stage == TOGETHER else moved[stage]) * row_bytes


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """One stage of one order. of_copy: bandwidth over the copy's in the same round; None for the plan."""

    stage: Stage
    moved_bytes: int
    time_s: Band
    of_copy: Band | None

    @property
    def byte_per_s(self) -> float:
        """At the median time."""
        return self.moved_bytes / self.time_s.median


@dataclass(frozen=True, kw_only=True)
class OrderCase:
    """One order at one size. copy_byte_per_s: of the machine, read plus written, beside these rounds."""

    experts: int
    tokens: int
    hidden_size: int
    top_k: int
    order: str
    counts: RowCounts
    copy_byte_per_s: Band
    stages: tuple[StageResult, ...]

    def stage(self, name: Stage) -> StageResult:
        return next(stage for stage in self.stages if stage.stage == name)

    def to_dict(self) -> dict[str, Any]:
        stages = [asdict(stage) | {"byte_per_s": stage.byte_per_s} for stage in self.stages]
        return asdict(self) | {"stages": stages}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> OrderCase:
        stages = tuple(_stage_from(stage) for stage in plain["stages"])
        counts, copy = RowCounts(**plain["counts"]), Band(**plain["copy_byte_per_s"])
        return OrderCase(**dict(plain) | {"counts": counts, "copy_byte_per_s": copy, "stages": stages})


def _stage_from(plain: Mapping[str, Any]) -> StageResult:
    of_copy = plain["of_copy"]
    return StageResult(
        stage=plain["stage"],
        moved_bytes=plain["moved_bytes"],
        time_s=Band(**plain["time_s"]),
        of_copy=None if of_copy is None else Band(**of_copy),
    )


@dataclass(frozen=True, kw_only=True)
class OrderResult:
    """All orders at all sizes, in float32. Einsum is left out where its mask would be too large."""

    threads: int
    rounds: int
    capacity_factor: float
    most_mask_bytes: float
    cases: tuple[OrderCase, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"cases": [case.to_dict() for case in self.cases]}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> OrderResult:
        """The inverse of `to_dict`. Raises `KeyError` if a key is missing."""
        return OrderResult(**dict(plain) | {"cases": tuple(map(OrderCase.from_dict, plain["cases"]))})


def measure_orders(
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    experts: Sequence[int] = EXPERTS,
    top_k: int = TOP_K,
    capacity_factor: float = CAPACITY_FACTOR,
    most_mask_bytes: float = MOST_MASK_BYTES,
    rounds: int = ROUNDS,
) -> OrderResult:
    """Plan, order, un-order and both backward passes of every order, beside the machine's copy.

    shapes: tokens T and hidden size M. The copy has the size of dropless order's forward pass.
    """
    cases: list[OrderCase] = []
    with quiet_process():
        for tokens, hidden_size in shapes:
            for count in experts:
                choice = draw_choice(tokens, count, top_k)
                orders = _orders(tokens, count, top_k, capacity_factor, most_mask_bytes)
                cases += _measure(choice, hidden_size, orders, count, rounds)
    return OrderResult(
        threads=THREADS,
        rounds=rounds,
        capacity_factor=capacity_factor,
        most_mask_bytes=most_mask_bytes,
        cases=tuple(cases),
    )


def draw_choice(tokens: int, experts: int, top_k: int) -> TokenChoice:
    """What a fresh softmax gate chooses for random tokens: uneven, as routing is. The weights are a leaf."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        gate = SoftmaxGate(64, experts, top_k)
    choice = gate(torch.randn(tokens, 64, generator=generator), Tokens())
    assert isinstance(choice, TokenChoice)
    return replace(choice, weights=choice.weights.detach().requires_grad_())


def _orders(tokens: int, experts: int, top_k: int, factor: float, most_mask_bytes: float) -> list[Order]:
    orders: list[Order] = [SortOrder(experts), IndexOrder(experts, capacity_factor=factor)]
    mask_bytes = tokens * factor * top_k * tokens * FLOAT_BYTES
    return orders if mask_bytes > most_mask_bytes else [*orders, EinsumOrder(experts, capacity_factor=factor)]


def _measure(
    choice: TokenChoice, hidden_size: int, orders: Sequence[Order], experts: int, rounds: int
) -> list[OrderCase]:
    """All orders at one size, beside one copy."""
    tokens, top_k = choice.experts_Tk.shape
    x_TM = torch.randn(tokens, hidden_size, requires_grad=True)
    copy = Copy((1 + top_k) * x_TM.nbytes)
    ways: dict[str, Callable[[], dict[str, float]]] = {COPY: lambda: {COPY: copy.seconds()}}
    ways |= {order.name: partial(round_trip, order, x_TM, choice) for order in orders}
    found = in_turns(ways, rounds)
    copies = [copy.moved_bytes / turn[COPY] for turn in found[COPY]]
    return [
        OrderCase(
            experts=experts,
            tokens=tokens,
            hidden_size=hidden_size,
            top_k=top_k,
            order=order.name,
            counts=(counts := RowCounts.of(order, choice)),
            copy_byte_per_s=Band.of(copies),
            stages=_stages(counts, hidden_size * FLOAT_BYTES, found[order.name], copies),
        )
        for order in orders
    ]


def round_trip(order: Order, x_TM: Tensor, choice: TokenChoice) -> dict[str, float]:
    """Seconds of every stage of one step; experts do nothing."""
    grad_TM = x_TM.detach()
    clock = Laps()
    plan = order.plan(choice, 1)
    clock.lap("plan")
    rows_RM = order.order(x_TM, choice, plan)
    clock.lap("order")
    leaf_RM = rows_RM.detach().requires_grad_()
    out_TM = order.unorder(leaf_RM, choice.weights, plan)
    clock.lap("un-order")
    grad_RM, _ = torch.autograd.grad(out_TM, (leaf_RM, choice.weights), grad_TM)
    clock.lap("un-order backward")
    torch.autograd.grad(rows_RM, x_TM, grad_RM)
    clock.lap("order backward")
    return clock.times_s


def _stages(
    counts: RowCounts, row_bytes: int, turns: Sequence[Mapping[str, float]], copies: Sequence[float]
) -> tuple[StageResult, ...]:
    """Every stage, and all of them together. copies: bytes per second of the copy in every round."""
    times_s = {stage: [turn[stage] for turn in turns] for stage in STAGES}
    times_s[TOGETHER] = [sum(turn.values()) for turn in turns]
    found = []
    for stage, values in times_s.items():
        moved = counts.bytes_of(stage, row_bytes)
        speeds = [moved / value for value in values]
        of_copy = Band.of_ratios(speeds, copies) if moved else None
        found.append(StageResult(stage=stage, moved_bytes=moved, time_s=Band.of(values), of_copy=of_copy))
    return tuple(found)
