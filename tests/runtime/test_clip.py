"""`penstock.clip_grad_norm_`: like torch's on one process, and the norm of the whole model on several."""

from __future__ import annotations

import io
import math
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock import ExpertParallel, clip_grad_norm_, expert_parameters, ignore_experts
from penstock.runtime.clip import ExpertRanks, mark_experts
from penstock.runtime.groups import LocalTransport
from penstock.topology import Layout
from tests.support.exchange import (
    EXPERTS,
    Case,
    Model,
    batch,
    exchange_of,
    model_of,
    numbers,
    rank_loss,
)
from tests.support.ranks import Pools

# One process: as torch does it


def parameters_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """Parameters with gradients."""
    found = [nn.Parameter(numbers(*shape, seed=i).to(dtype)) for i, shape in enumerate(shapes)]
    for i, parameter in enumerate(found):
        parameter.grad = numbers(*parameter.shape, seed=100 + i).to(dtype)
    return found


SHAPES = ((3, 4), (5,), (), (2, 3, 4))


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
def test_one_process_has_what_torch_has(norm_type: float, foreach: bool | None) -> None:
    ours, theirs = parameters_of(*SHAPES), parameters_of(*SHAPES)
    ours[1].grad = theirs[1].grad = None
    found = clip_grad_norm_(ours, 0.7, norm_type, foreach=foreach)
    wanted = torch.nn.utils.clip_grad_norm_(theirs, 0.7, norm_type)
    assert found.dtype == torch.float64 and found.shape == ()
    assert float(found) == pytest.approx(float(wanted), rel=1e-14)
    assert float(wanted) > 0.7
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None and other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-13, atol=0)


def test_gradients_with_a_smaller_norm_stay_as_they_are() -> None:
    given = parameters_of((3, 2), (4,))
    before = [parameter.grad.clone() for parameter in given if parameter.grad is not None]
    clip_grad_norm_(given, 100.0)
    assert all(torch.equal(p.grad, each) for p, each in zip(given, before, strict=True) if p.grad is not None)


def test_a_single_tensor_an_iterator_and_no_parameter_at_all() -> None:
    one = parameters_of((3,))[0]
    assert one.grad is not None
    norm = float(one.grad.norm())
    assert float(clip_grad_norm_(one, math.inf)) == pytest.approx(norm)
    assert float(clip_grad_norm_(iter([one]), math.inf)) == pytest.approx(norm)
    assert float(clip_grad_norm_([], 1.0)) == 0.0
    assert float(clip_grad_norm_([nn.Parameter(torch.ones(2)), *parameters_of((0, 3))], 1.0, math.inf)) == 0.0
    with pytest.warns(UserWarning, match="perhaps a used one"):
        assert float(clip_grad_norm_(iter([]), 1.0)) == 0.0


def test_a_parameter_in_the_list_twice_counts_once_and_is_scaled_once() -> None:
    tied, other = parameters_of((3, 4), (5,))
    assert tied.grad is not None and other.grad is not None
    before = tied.grad.clone()
    norm = math.hypot(float(tied.grad.norm()), float(other.grad.norm()))
    assert float(clip_grad_norm_([tied, other, tied], 0.5)) == pytest.approx(norm, rel=1e-14)
    torch.testing.assert_close(tied.grad, before * 0.5 / (norm + 1e-6))


def test_the_order_of_parameters_changes_no_bit() -> None:
    found = set()
    for seed in range(8):
        parameters = parameters_of(*((1 + i, 7) for i in range(40)), dtype=torch.float32)
        random.Random(seed).shuffle(parameters)
        found.add(float(clip_grad_norm_(parameters, math.inf)))
    assert len(found) == 1


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_sparse_gradients(norm_type: float) -> None:
    """A row that occurs twice is the sum of both, and counts as that."""
    table = nn.Embedding(6, 3, sparse=True)
    dense = nn.Embedding(6, 3, _weight=table.weight.detach().clone())
    for module in (table, dense):
        module(torch.tensor([1, 4, 1])).square().sum().backward()
    wanted = torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.1, norm_type)
    assert float(clip_grad_norm_(table, 0.1, norm_type)) == pytest.approx(float(wanted), rel=1e-6)
    assert table.weight.grad is not None and table.weight.grad.is_sparse
    torch.testing.assert_close(table.weight.grad.to_dense(), dense.weight.grad)


def test_bfloat16_is_summed_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(3000, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.0123)
    wanted = float(parameter.grad.double().norm())
    assert float(clip_grad_norm_(parameter, math.inf)) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite(value: float) -> None:
    parameters = parameters_of(*SHAPES)
    for parameter in parameters:
        assert parameter.grad is not None
    parameters[0].grad = torch.full_like(parameters[0], value)
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    with pytest.raises(RuntimeError, match=r"norm of order 2 .* cannot be clipped"):
        clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    assert not math.isfinite(float(clip_grad_norm_(parameters, math.inf)))
    for parameter, gradient in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ((-1.0, 2.0), "max_norm = -1.0: must be 0 or more"),
        ((math.nan, 2.0), "max_norm = nan"),
        ((1.0, 0.0), "norm_type = 0.0: must be above 0"),
        ((1.0, -math.inf), "norm_type = -inf"),
    ],
)
def test_settings_that_make_no_sense(settings: tuple[float, float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        clip_grad_norm_(parameters_of((2,)), *settings)


def test_names_instead_of_parameters() -> None:
    with pytest.raises(TypeError, match=r"not tuple: use model\.parameters\(\)"):
        clip_grad_norm_(nn.Linear(2, 2).named_parameters(), 1.0)  # type: ignore[arg-type]  # the mistake


# Several ranks; steps with clipping are in tests/runtime/expert_parallel/test_exchange.py


def frozen_on_one_rank(rank: int) -> list[float]:
    """Experts of rank 1 are frozen, those of rank 0 are not: rank 1 takes part all the same."""
    case = Case(world=2)
    model = model_of(case, exchange_of(None, None))
    model.layer.experts.requires_grad_(rank == 0)
    wrapped = DistributedDataParallel(ignore_experts(model))
    rank_loss(wrapped, batch(case, 0, rank)).backward()
    mine = sum(float(p.grad.square().sum()) for p in model.layer.experts.parameters() if p.grad is not None)
    shared = [p for p in model.parameters() if p not in expert_parameters(model)]
    rest = sum(float(p.grad.square().sum()) for p in shared if p.grad is not None)
    return [float(clip_grad_norm_(model, math.inf)), mine, rest]


@pytest.mark.slow
def test_experts_frozen_on_one_rank(ranks: Pools) -> None:
    (norm, first, rest), (other, second, _) = ranks(2).run(frozen_on_one_rank)
    assert norm == other == pytest.approx(math.sqrt(first + rest), rel=1e-12)
    assert first > 0 and second == 0


def called_by_one_rank(rank: int) -> str:
    """Rank 1 stays, since a connection that it closed would end the wait as well."""
    case = Case(world=2)
    model = model_of(case, ExpertParallel(num_experts=EXPERTS, timeout_s=3.0))
    dist.barrier()  # they begin together: only what a step exchanges counts
    rank_loss(model, batch(case, 0, rank)).backward()
    message = ""
    if rank == 0:
        with pytest.raises(RuntimeError) as caught:
            clip_grad_norm_(model, 1.0)
        message = str(caught.value)
    dist.barrier()
    return message


@pytest.mark.slow
def test_a_rank_that_does_not_call_it_ends_in_a_sentence(ranks: Pools) -> None:
    message, _ = ranks(2).run(called_by_one_rank)
    assert message.startswith("rank 0: clip_grad_norm_ did not hear from all others: ")
    assert "Every rank must call it" in message


def test_an_expert_of_unknown_ranks_is_refused() -> None:
    """A parameter read from a file knows that it is an expert's, and not where."""
    file, parameters = io.BytesIO(), parameters_of((2, 3))
    layout = Layout(world_size=2, ep_size=2, rank=0)
    mark_experts(parameters, ExpertRanks(layout, LocalTransport(), torch.device("cpu")))
    torch.save(parameters, file)
    file.seek(0)
    with pytest.raises(ValueError, match="pass the module"):
        clip_grad_norm_(torch.load(file, weights_only=True), 1.0)


def test_a_layer_alone_has_no_expert_of_its_own() -> None:
    model: Model = model_of(Case(world=1), None)
    assert expert_parameters(model) == set()
