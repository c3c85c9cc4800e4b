"""Whole layers, forward and backward, side by side in one process, in float32.

A step makes the gradients of the input and of all weights; they are dropped before the next one, outside the
clock. Penstock's step also makes the values of its balance and z-losses, which the others do without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.layer.contenders import (
    PENSTOCK,
    LayerSize,
    build_contenders,
    check_agreement,
    require_transformers,
)
from benchmarks.layer.measure import THREADS, WARMUP, Band, in_turns, quiet_process
from benchmarks.progress import in_rows

SHAPES: Final = ((512, 512, 1024), (2048, 256, 512), (2048, 512, 1024), (4096, 256, 512))
"""Tokens, hidden size, expert hidden size."""

SIZES: Final = tuple(
    LayerSize(tokens=tokens, hidden_size=hidden, ffn_hidden_size=ffn, experts=experts)
    for experts, (tokens, hidden, ffn) in product((8, 64), SHAPES)
)
ROUNDS: Final = 9
HOPELESS: Final = 3.0
"""A contender that takes this many times as long as the fastest one is timed in `FEW` rounds only."""

FEW: Final = 3


@dataclass(frozen=True, kw_only=True)
class ContenderResult:
    """One contender at one size.

    Attributes:
        rounds: In how many rounds it was timed.
        step_s: Seconds of a step.
        to_penstock: Its time over Penstock's, round by round; above 1 it is slower.
    """

    name: str
    rounds: int
    step_s: Band
    to_penstock: Band


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """All contenders at one size."""

    size: LayerSize
    contenders: tuple[ContenderResult, ...]

    def contender(self, name: str) -> ContenderResult:
        return next(contender for contender in self.contenders if contender.name == name)

    @property
    def best_other(self) -> ContenderResult:
        """The fastest of the others, by its median."""
        others = (contender for contender in self.contenders if contender.name != PENSTOCK)
        return min(others, key=lambda contender: contender.step_s.median)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"best_other": self.best_other.name}


@dataclass(frozen=True, kw_only=True)
class LayerResult:
    """All contenders at all sizes.

    Attributes:
        threads: How many threads compute.
        rounds: How many rounds a contender was timed in at most.
        transformers: The version of the package transformers.
    """

    threads: int
    rounds: int
    transformers: str
    cases: tuple[LayerCase, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; the key `layers` tells it from other results."""
        return {"layers": asdict(self) | {"cases": [case.to_dict() for case in self.cases]}}


def measure_layers(*, sizes: Sequence[LayerSize] = SIZES, rounds: int = ROUNDS) -> LayerResult:
    """Measure one step of every contender at every size, in turns.

    Raises:
        ConfigError: If transformers is missing.
        RuntimeError: If contenders do not agree.
    """
    version = require_transformers()

    def result(cases: tuple[LayerCase, ...]) -> LayerResult:
        return LayerResult(threads=THREADS, rounds=rounds, transformers=version, cases=cases)

    named = [(f"{each.experts} experts, {each.tokens} tokens of {each.hidden_size}", each) for each in sizes]
    with quiet_process():
        return result(in_rows([(name, partial(_measure, each, rounds)) for name, each in named], result))


def _measure(size: LayerSize, rounds: int) -> LayerCase:
    contenders = build_contenders(size)
    generator = torch.Generator().manual_seed(1)
    x_TM, grad_TM = (
        torch.randn(size.tokens, size.hidden_size, generator=generator) for _ in ("x", "gradient")
    )
    check_agreement(contenders, x_TM, grad_TM)
    ways = {name: partial(step, each, x_TM, grad_TM) for name, each in contenders.items()}
    hopeless = _hopeless({name: way() for name, way in ways.items()})
    results = _compare({name: way for name, way in ways.items() if name not in hopeless}, rounds, WARMUP)
    if hopeless:
        slow = {name: way for name, way in ways.items() if name in {PENSTOCK, *hopeless}}
        results = _compare(slow, min(FEW, rounds), warmup=0) | results
    return LayerCase(size=size, contenders=tuple(results[name] for name in ways))


def _hopeless(step_s: Mapping[str, float]) -> list[str]:
    """Return the contenders that are so slow that few rounds say enough."""
    fastest_s = min(step_s.values())
    return [name for name, each_s in step_s.items() if name != PENSTOCK and each_s > HOPELESS * fastest_s]


def _compare(ways: Mapping[str, Callable[[], float]], rounds: int, warmup: int) -> dict[str, ContenderResult]:
    """Measure contenders in turns; Penstock must be among them."""
    times_s = in_turns(ways, rounds, warmup)
    return {
        name: ContenderResult(
            name=name,
            rounds=rounds,
            step_s=Band.of(values),
            to_penstock=Band.of_ratios(values, times_s[PENSTOCK]),
        )
        for name, values in times_s.items()
    }


def step(contender: nn.Module, x_TM: Tensor, grad_TM: Tensor) -> float:
    """Return seconds of forward and backward."""
    x_TM = x_TM.detach().requires_grad_()
    start_s = time.perf_counter()
    contender(x_TM).backward(grad_TM)
    took_s = time.perf_counter() - start_s
    contender.zero_grad()
    return took_s
