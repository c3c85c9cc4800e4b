"""The loss in pieces against PyTorch's own function."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.runtime import statistics
from penstock.runtime.statistics import cross_entropy_sum

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}


@pytest.fixture(params=[1, 22, 1 << 20], ids=["a token each", "two tokens", "one piece"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "NUMBERS_AT_ONCE", request.param)


def drawn(dtype: torch.dtype, tokens: int = 7) -> tuple[Tensor, Tensor]:
    """Logits, some of them large, and labels, some of them missing."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, 11, generator=generator, dtype=torch.float64) * 30
    labels = torch.randint(0, 11, (tokens,), generator=generator)
    labels[::3] = -100
    return logits.to(dtype).requires_grad_(), labels


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [7, 1, 0])
def test_loss_and_gradient_are_those_of_torch(dtype: torch.dtype, tokens: int) -> None:
    logits, labels = drawn(dtype, tokens)
    loss = cross_entropy_sum(logits, labels)
    wide = logits.detach().double().requires_grad_()
    wanted = F.cross_entropy(wide, labels, reduction="sum", ignore_index=-100)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=1e-6)
    (found,) = torch.autograd.grad(loss * 0.3, logits)
    (theirs,) = torch.autograd.grad(wanted * 0.3, wide)
    assert found.dtype == dtype
    assert float((found.double() - theirs).norm()) <= TOLERANCE[dtype] * max(float(theirs.norm()), 1e-9)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("label", [11, -1])
def test_a_label_outside_the_vocabulary_is_refused(label: int) -> None:
    logits, labels = drawn(torch.float32)
    labels[2] = label
    with pytest.raises(IndexError):
        cross_entropy_sum(logits, labels)
