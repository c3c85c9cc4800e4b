"""How fast rows are compressed and restored, beside the machine's copy.

Bytes are those that must be moved: encoding reads rows in float32 and writes what travels, decoding reads
that and writes rows. Compression is worth its time on a link that is slower than what it saves over what it
takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.layer.measure import COPY, THREADS, Band, Copy, Laps, in_turns, quiet_process
from penstock.moe.hooks.base import Hook
from penstock.moe.hooks.compression import Bfloat16Rows, Int8Rows

SHAPES: Final = ((4096, 512), (16384, 1024))
"""Rows and hidden size."""

ROUNDS: Final = 9
ENCODE, DECODE = "encode", "decode"


@dataclass(frozen=True, kw_only=True)
class CompressionCase:
    """One compression at one size.

    raw_bytes, wire_bytes: of all rows, before and after. of_copy: bytes moved by encoding and decoding over
    the time of both, over the copy's in the same round.
    """

    compression: str
    rows: int
    hidden_size: int
    raw_bytes: int
    wire_bytes: int
    encode_s: Band
    decode_s: Band
    both_s: Band
    copy_byte_per_s: Band
    of_copy: Band

    @property
    def moved_byte_per_s(self) -> float:
        """Read plus written, by both."""
        return 2 * (self.raw_bytes + self.wire_bytes) / self.both_s.median

    @property
    def pays_below_bit_per_s(self) -> float:
        """Rate of a link on which what is saved takes as long as encoding and decoding."""
        return 8 * (self.raw_bytes - self.wire_bytes) / self.both_s.median

    def to_dict(self) -> dict[str, Any]:
        derived = {
            "moved_byte_per_s": self.moved_byte_per_s,
            "pays_below_bit_per_s": self.pays_below_bit_per_s,
        }
        return asdict(self) | derived

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> CompressionCase:
        bands = ("encode_s", "decode_s", "both_s", "copy_byte_per_s", "of_copy")
        numbers = ("compression", "rows", "hidden_size", "raw_bytes", "wire_bytes")
        given: dict[str, Any] = {name: plain[name] for name in numbers}
        given |= {name: Band(**plain[name]) for name in bands}
        return CompressionCase(**given)


@dataclass(frozen=True, kw_only=True)
class CompressionResult:
    """All compressions at all sizes."""

    threads: int
    rounds: int
    cases: tuple[CompressionCase, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"cases": [case.to_dict() for case in self.cases]}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> CompressionResult:
        """The inverse of `to_dict`. Raises `KeyError` if a key is missing."""
        cases = tuple(map(CompressionCase.from_dict, plain["cases"]))
        return CompressionResult(**dict(plain) | {"cases": cases})


def measure_compression(
    *, shapes: Sequence[tuple[int, int]] = SHAPES, rounds: int = ROUNDS
) -> CompressionResult:
    """Encoding and decoding of random rows in float32. shapes: rows and hidden size."""
    with quiet_process(), torch.no_grad():
        cases = [case for count, hidden in shapes for case in _measure(count, hidden, rounds)]
    return CompressionResult(threads=THREADS, rounds=rounds, cases=tuple(cases))


def _measure(rows: int, hidden_size: int, rounds: int) -> list[CompressionCase]:
    rows_RM = torch.randn(rows, hidden_size, generator=torch.Generator().manual_seed(0))
    hooks: dict[str, Hook] = {"bfloat16": Bfloat16Rows(), "int8": Int8Rows(hidden_size)}
    copy = Copy(2 * rows_RM.nbytes)
    ways: dict[str, Callable[[], dict[str, float]]] = {COPY: lambda: {COPY: copy.seconds()}}
    ways |= {name: partial(there_and_back, hook, rows_RM) for name, hook in hooks.items()}
    found = in_turns(ways, rounds)
    copies = [copy.moved_bytes / turn[COPY] for turn in found[COPY]]
    wire_bytes = {name: hook.before_dispatch(rows_RM).nbytes for name, hook in hooks.items()}
    return [_case(name, rows_RM, wire_bytes[name], found[name], copies) for name in hooks]


def there_and_back(hook: Hook, rows_RM: Tensor) -> dict[str, float]:
    """Seconds of encoding and decoding."""
    clock = Laps()
    sent = hook.before_dispatch(rows_RM)
    clock.lap(ENCODE)
    hook.after_dispatch(sent)
    clock.lap(DECODE)
    return clock.times_s


def _case(
    name: str,
    rows_RM: Tensor,
    wire_bytes: int,
    turns: Sequence[Mapping[str, float]],
    copies: Sequence[float],
) -> CompressionCase:
    both_s = [turn[ENCODE] + turn[DECODE] for turn in turns]
    moved = 2 * (rows_RM.nbytes + wire_bytes)
    return CompressionCase(
        compression=name,
        rows=rows_RM.shape[0],
        hidden_size=rows_RM.shape[1],
        raw_bytes=rows_RM.nbytes,
        wire_bytes=wire_bytes,
        encode_s=Band.of([turn[ENCODE] for turn in turns]),
        decode_s=Band.of([turn[DECODE] for turn in turns]),
        both_s=Band.of(both_s),
        copy_byte_per_s=Band.of(copies),
        of_copy=Band.of_ratios([moved / value for value in both_s], copies),
    )
