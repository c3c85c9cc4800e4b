"""What a step's predicted time means: tokens, operations and money."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.cost.model_flops import ModelFlops
from penstock.plan.candidate import Candidate, whole_s
from penstock.plan.subject import Subject

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The throughput of a plan, whole steps with their updates.

    Attributes:
        devices: Ranks, one device each.
        tokens_per_s: The tokens per second of all ranks.
        flops_per_s: The operations per second of one device: those of the model, without the ones that are
            computed again.
        peak_flops_per_s: The peak of one device by its data sheet, in the plan's precision; None = not known.
        price: The price of a device for an hour; None = not given.
    """

    devices: int
    tokens_per_s: float
    flops_per_s: float
    peak_flops_per_s: float | None
    price: float | None = None

    @staticmethod
    def of(subject: Subject, candidate: Candidate, price: float | None = None) -> Throughput:
        """Return the throughput of a plan of this subject.

        Args:
            price: The price of a device for an hour; None = not given.
        """
        samples = subject.problem.passes * subject.problem.workload.samples
        return Throughput.of_update(subject, samples, whole_s(subject.problem, candidate), 1, price)

    @staticmethod
    def of_update(
        subject: Subject, samples: int, seconds: float, stages: int, price: float | None = None
    ) -> Throughput:
        """Return the throughput of updates in pipeline stages.

        Args:
            samples: The samples of an update.
            seconds: The time of an update.
            stages: The number of stages; the subject is on the ranks of each.
            price: The price of a device for an hour; None = not given.
        """
        work, moe_layers = subject.problem.workload, subject.problem.shape.moe_layers
        devices, tokens_per_s = stages * work.world_size, samples * work.seq_len / seconds
        flops = ModelFlops.of(work, moe_layers, None, subject.device, subject.precision)
        return Throughput(
            devices=devices,
            tokens_per_s=tokens_per_s,
            flops_per_s=flops.per_token * tokens_per_s / devices,
            peak_flops_per_s=None if flops.peak_per_s is None else flops.peak_per_s / work.world_size,
            price=price,
        )

    @property
    def utilisation(self) -> float | None:
        """The share of the data sheet's peak that the model's own products use (MFU)."""
        return None if self.peak_flops_per_s is None else self.flops_per_s / self.peak_flops_per_s

    @property
    def price_of_a_billion(self) -> float | None:
        """The price of training on 1e9 tokens."""
        return None if self.price is None else self.price * self.devices * 1e9 / self.tokens_per_s / HOUR_S

    def lines(self) -> Iterator[str]:
        """Yield one or two lines of text."""
        rate, tflops = self.tokens_per_s / self.devices, self.flops_per_s / 1e12
        text = f"{self.tokens_per_s:,.0f} tokens/s, {rate:,.0f} per device; {tflops:.3g} TFLOP/s per device"
        if self.utilisation is not None and self.peak_flops_per_s is not None:
            peak = self.peak_flops_per_s / 1e12
            text += f", {100 * self.utilisation:.2g} % of the data sheet's {peak:g} (MFU)"
        yield f"Speed    {text}"
        if self.price_of_a_billion is not None:
            billion = f"{self.price_of_a_billion:,.0f}"
            yield f"Price    {billion} for a billion tokens, at {self.price:g} for a device and an hour"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_device": self.tokens_per_s / self.devices,
            "flops_per_s_per_device": self.flops_per_s,
            "utilisation_of_data_sheet": self.utilisation,
            "price_per_billion_tokens": self.price_of_a_billion,
        }
