"""What gates should do, written as loops over numbers, and inputs to try it on.

The numbers are scalar float64 tensors, so that gradients of the loops come out as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import torch
from hypothesis import strategies as st
from torch import Tensor

from penstock.moe.routers import Choice, Router, SampleKeys, TokenChoice, Tokens

Row = list[Tensor]
"""One number per expert (or slot, or feature)."""

HIDDEN = 4


@dataclass(frozen=True)
class Case:
    """A batch of tokens and the experts it meets."""

    samples: int
    length: int
    num_experts: int
    top_k: int
    padded: bool
    seed: int
    renormalise: bool = True
    scale: float = 1.0

    @property
    def count(self) -> int:
        return self.samples * self.length

    @property
    def valid(self) -> list[bool]:
        if not self.padded:
            return [True] * self.count
        drawn: list[bool] = (torch.rand(self.count, generator=self._generator(1)) < 0.6).tolist()
        return drawn

    @property
    def tokens(self) -> Tokens:
        return Tokens(
            samples=self.samples,
            keys=SampleKeys(self.seed, torch.arange(self.samples) * 7 + self.seed),
            valid_T=torch.tensor(self.valid) if self.padded else None,
        )

    @property
    def options(self) -> dict[str, bool | float]:
        return {"renormalise": self.renormalise, "scale": self.scale}

    def x(self) -> Tensor:
        x_TM = torch.randn(self.count, HIDDEN, generator=self._generator(2), dtype=torch.float64)
        return x_TM.requires_grad_()

    def fill(self, gate: Router) -> Router:
        """The gate in float64, with weights large enough that no two experts are alike."""
        gate = gate.double()
        generator = self._generator(3)
        for parameter in gate.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        return gate

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 10 + stream)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_experts = draw(st.integers(1, 6))
    return Case(
        samples=draw(st.integers(1, 3)),
        length=draw(st.integers(1, 4)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        padded=draw(st.booleans()),
        seed=draw(st.integers(0, 9999)),
        renormalise=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
    )


@dataclass
class Decision:
    """What the loops decide; `weights` of tokens that are not padding."""

    experts: list[list[int]] = field(default_factory=list)
    weights: list[Row] = field(default_factory=list)
    chosen: list[list[int]] = field(default_factory=list)
    probability: list[Row] = field(default_factory=list)
    z: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))


def dot(left: Tensor, right: Tensor) -> Tensor:
    return torch.stack([left[i] * right[i] for i in range(len(left))]).sum()


def length(vector: Tensor) -> Tensor:
    return dot(vector, vector).sqrt()


def total(row: Row) -> Tensor:
    return torch.stack(row).sum()


def softmax(row: Row) -> Row:
    return [value.exp() / total([other.exp() for other in row]) for value in row]


def squared_log_partition(row: Row) -> Tensor:
    return total([value.exp() for value in row]).log() ** 2


def best(row: Sequence[Tensor], count: int) -> list[int]:
    return sorted(range(len(row)), key=lambda i: -float(row[i].detach()))[:count]


def decide(
    case: Case,
    logits: list[Row],
    *,
    scores: Callable[[Row], Row] = softmax,
    select: Callable[[Row], list[int]] | None = None,
) -> Decision:
    """Token after token: score all experts, take the best, weigh them."""
    made = Decision(
        chosen=[[0] * case.num_experts for _ in range(case.samples)],
        probability=[[torch.zeros(()).double()] * case.num_experts for _ in range(case.samples)],
    )
    for t, row in enumerate(logits):
        if not case.valid[t]:
            made.experts.append([-1] * case.top_k)
            continue
        score, sample = scores(row), t // case.length
        taken = best(score, case.top_k) if select is None else select(score)
        made.experts.append(taken)
        divisor = total([score[e] for e in taken]) if case.renormalise else torch.ones(())
        made.weights.append([score[e] / divisor * case.scale for e in taken])
        made.z = made.z + squared_log_partition(row)
        for e in range(case.num_experts):
            made.chosen[sample][e] += e in taken
            made.probability[sample][e] = made.probability[sample][e] + score[e] / total(score)
    return made


def check_token_choice(case: Case, gate: Router, x_TM: Tensor, expected: Decision) -> None:
    """The gate decides as the loops did, with the same gradients."""
    choice = gate(x_TM, case.tokens)
    assert isinstance(choice, TokenChoice)
    assert choice.experts_Tk.tolist() == expected.experts
    assert choice.masked == case.padded
    assert choice.sums.chosen_BE.tolist() == expected.chosen
    weights = choice.weights[torch.tensor(case.valid)]
    check_values(
        gate,
        x_TM,
        [weights, choice.sums.probability_BE, choice.sums.z],
        [stacked(expected.weights, case.top_k), stacked(expected.probability, case.num_experts), expected.z],
    )


def check_values(gate: Router, x_TM: Tensor, found: list[Tensor], expected: list[Tensor]) -> None:
    """Equal values, and equal gradients of inputs and parameters for an arbitrary gradient of the values."""
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right)
    for left, right in zip(gradients(gate, x_TM, found), gradients(gate, x_TM, expected), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-7, atol=1e-9)


def gradients(gate: Router, x_TM: Tensor, outputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    loss = x_TM.sum() * 0
    for output in outputs:
        loss = loss + (output * torch.randn(output.shape, generator=generator, dtype=torch.float64)).sum()
    return list(torch.autograd.grad(loss, [x_TM, *gate.parameters()], materialize_grads=True))


def stacked(rows: list[Row], columns: int) -> Tensor:
    return torch.stack([torch.stack(row) for row in rows]) if rows else torch.zeros(0, columns).double()


def parts(choice: Choice) -> list[Tensor]:
    """Every tensor of a decision."""
    sums = choice.sums
    own = [
        value for value in (getattr(choice, part.name) for part in fields(choice)) if torch.is_tensor(value)
    ]
    return [*own, sums.chosen_BE, sums.probability_BE, sums.z]
