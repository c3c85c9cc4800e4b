"""Ranks that scale gradients differently are told so, and not after a long time."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

import penstock
from penstock.adapt.scheduled import engine_of
from penstock.runtime import ParameterMismatchError
from tests.adapt.test_adapters import EXPERTS, adapted
from tests.support.adapted import Batch, small
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow


def clip_by_rank(rank: int, world: int, folder: str, with_adapters: bool) -> list[str]:
    """What is said after an update with gradients that were scaled by each rank's own norm."""
    whole = adapted(small("mixtral")) if with_adapters else small("mixtral")
    model = penstock.parallelize(whole, ep_size=world, plan="flowmoe")
    given = Batch().inputs(rank, rank + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**given).loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    for gradient in (p.grad for p in model.parameters() if p.grad is not None):
        gradient.mul_(0.1 / norm)
    optimizer.step()
    with pytest.raises(ParameterMismatchError) as caught:
        model(**given)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.save_pretrained(folder)
    return [str(caught.value), *(str(each.message) for each in told if "Clip with" in str(each.message))]


@pytest.mark.parametrize("with_adapters", [False, True])
def test_a_norm_of_one_rank_is_no_norm_to_clip_by(ranks: Pools, tmp_path: Path, with_adapters: bool) -> None:
    """The next step is refused, and what was trained is saved all the same, with a word."""
    first, second = ranks(2).run(clip_by_rank, 2, str(tmp_path), with_adapters)
    assert all("Clip with penstock.clip_grad_norm_" in each for each in (*first, *second))
    assert first[1].startswith("rank 0's values are saved") and len(first) == 2 and len(second) == 1
    assert list(tmp_path.glob("adapter_model.safetensors" if with_adapters else "model*.safetensors"))


def round_by_rank(rank: int, world: int) -> list[str]:
    """What is said of parameters that differ by a unit in the last place of some, and by much more."""
    model = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe")
    weight = model.model.layers[1].self_attn.q_proj.weight
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine_of(model).stack.compare_values()
        assert not told
        weight[::2] *= 1 + rank * torch.finfo(weight.dtype).eps
        engine_of(model).stack.compare_values()
        weight[0, 0] += 1e-4 * rank
    engine = engine_of(model)
    with pytest.raises(ParameterMismatchError):
        engine.stack.compare_values()
    with torch.no_grad():
        weight[0, 0] = torch.nan if rank else 1.0
    with pytest.raises(ParameterMismatchError):
        engine.stack.compare_values()
    with torch.no_grad():
        weight.fill_(1 + 0.3 * rank)
    model.bfloat16()  # whose rounding would add up to any difference
    with pytest.raises(ParameterMismatchError):
        engine.stack.consistency.steps = 10**6
        engine.stack.compare_values()
    return [str(each.message) for each in told]


def mask_by_rank(rank: int, world: int) -> tuple[list[str], str]:
    """What is said of ranks that round differently, with a mask of infinities; and of other infinities."""
    model = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe")
    model.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
    weight = model.model.layers[1].self_attn.q_proj.weight
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        weight[::2] *= 1 + rank * torch.finfo(weight.dtype).eps
        engine_of(model).stack.compare_values()
    model.mask = torch.full((4, 4), -torch.inf).triu(1 - rank)
    with pytest.raises(ParameterMismatchError) as caught:
        engine_of(model).stack.compare_values()
    return [str(each.message) for each in told], str(caught.value)


def test_equal_infinities_are_no_difference(ranks: Pools) -> None:
    (first, said), (second, _) = ranks(2).run(mask_by_rank, 2)
    assert len(first) == 1 and "q_proj.weight differs" in first[0] and not second
    assert said.startswith("the buffer mask differs between ranks")


def test_rounding_of_other_machines_is_told_and_no_more(ranks: Pools) -> None:
    first, second = ranks(2).run(round_by_rank, 2)
    assert len(first) == 1 and not second
    assert "q_proj.weight differs" in first[0]


def scale_by_rank(rank: int, world: int) -> None:
    """An update of adapters of experts, and of nothing else, with gradients that each rank scales."""
    model = penstock.parallelize(small("mixtral"), ep_size=world // 2, plan="flowmoe")
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(target_parameters=EXPERTS, target_modules=[]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1 + rank)
    given = Batch().inputs(rank, rank + 1)
    model(**given).loss.backward()
    optimizer.step()
    with pytest.raises(ParameterMismatchError, match="experts"):
        model(**given)


def test_experts_that_several_ranks_have_are_compared(ranks: Pools) -> None:
    ranks(4).run(scale_by_rank, 4)


def bias_by_rank(rank: int, world: int) -> tuple[str, list[str]]:
    """What is said of a router's bias that each rank has updated by its own tokens."""
    model = penstock.parallelize(small("deepseek_v3"), ep_size=world, plan="flowmoe")
    model.register_buffer("steps", torch.tensor(7))
    model.model.layers[1].mlp.experts.register_buffer("held", torch.full((2,), float(rank)))
    model.model.register_buffer("scratch", torch.full((2,), float(rank)), persistent=False)
    engine, given = engine_of(model), Batch().inputs(rank, rank + 1)
    model(**given)
    engine.stack.compare_values()
    model.steps += rank
    with pytest.raises(ParameterMismatchError, match="the buffer steps differs between ranks"):
        engine.stack.compare_values()
    model.steps -= rank
    model.model.layers[1].mlp.gate.e_score_correction_bias += rank * torch.arange(8)
    with pytest.raises(ParameterMismatchError) as caught:
        model(**given)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine.warn_if_different()
    return str(caught.value), [str(each.message) for each in told]


def test_a_buffer_that_ranks_update_by_themselves_is_named(ranks: Pools) -> None:
    (first, told), (second, silent) = ranks(2).run(bias_by_rank, 2)
    name = "the buffer model.layers.1.mlp.gate.e_score_correction_bias differs between ranks"
    assert first.startswith(name) and second.startswith(name)
    assert len(told) == 1 and name in told[0] and not silent


class OwnNorm(torch.nn.BatchNorm1d):
    """A user's class, which torch's code runs."""


def statistics_by_rank(rank: int, world: int) -> None:
    """Statistics of a rank's own samples, which torch keeps."""
    model = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe")
    for kind in (torch.nn.BatchNorm1d, OwnNorm):
        model.model.extra = kind(3)
        model.model.extra(torch.randn(5, 3) + rank)
        engine_of(model).stack.compare_values()


def test_statistics_of_a_ranks_own_samples_may_differ(ranks: Pools) -> None:
    ranks(2).run(statistics_by_rank, 2)


def compare_parts(rank: int, world: int) -> None:
    """Ranks that share attention compare nothing of which each has a part: before a step, and in a copy."""
    del rank
    model = penstock.parallelize(
        small("mixtral", vocab_size=64), tp_size=world, ep_size=world, plan="flowmoe"
    )
    stack = engine_of(model).stack
    stack.compare_values()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine_of(model).warn_if_different()
    model(**Batch().inputs()).loss.backward()
    stack.compare_values()


def test_parts_of_ranks_that_share_are_not_compared(ranks: Pools) -> None:
    ranks(2).run(compare_parts, 2)
