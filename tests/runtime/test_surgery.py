"""A model that is changed after its stack was built: taken up on all ranks, or refused with what to do."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from penstock.decision import ScheduleConfig
from penstock.models import MoEDecoder
from penstock.models.decoder import Block, Rotary
from penstock.moe import build_layer
from penstock.runtime import PipelinedStack
from tests.support.close import check_all_close, check_close
from tests.support.layouts import tiny_case
from tests.support.parity import Case, batch_of, own_batch, stack_of
from tests.support.ranks import Pools
from tests.support.surgery import APART, TAKEN_UP, apart, operated, operated_before, run

CASE = tiny_case(2, all_reduce_chunk_bytes=512, moe_ffn_hidden_size=6, aux_loss_coeff=0.1, double=True)
ALONE = replace(CASE, world_size=1, ep_size=1)


@pytest.mark.every_value
@pytest.mark.slow
@pytest.mark.parametrize("name", TAKEN_UP)
@pytest.mark.parametrize("ep_size", [1, 2])
def test_changes_between_steps_are_taken_up(ranks: Pools, name: str, ep_size: int) -> None:
    case, wanted = replace(CASE, ep_size=ep_size), operated_before(CASE, name)
    tolerance = 1e-5 if "float32" in name else 1e-10
    for found in ranks(2).run(operated, case, name):
        assert abs(found.loss - wanted.loss) <= tolerance * abs(wanted.loss)
        assert abs(found.norm - wanted.norm) <= tolerance * wanted.norm
        assert found.gradients.keys() <= wanted.gradients.keys()
        for key, gradient in found.gradients.items():
            assert gradient.dtype == wanted.gradients[key].dtype
            check_close(gradient, wanted.gradients[key], tolerance, key)


@pytest.mark.parametrize("name", APART)
def test_changes_on_one_rank_are_an_error_that_names_them(ranks: Pools, name: str) -> None:
    case = replace(CASE, ep_size=1 if name == "replica" else 2)
    for text, goes_on in ranks(2).run(apart, case, name):
        assert re.search(APART[name][1], text), text
        assert "on rank 1 against rank 0" in text, text
        assert "on all ranks before the same step" in text
        assert goes_on


def freeze_experts_of_one(rank: int, case: Case) -> list[tuple[str, bool]]:
    """Which parameters have a gradient after rank 0 froze its experts."""
    stack = stack_of(rank, case)
    run(stack, rank, case)
    for name, parameter in stack.model.named_parameters():
        parameter.requires_grad_(not (rank == 0 and ".experts." in name))
    run(stack, rank, case)
    return [(name, p.grad is not None) for name, p in stack.model.named_parameters()]


def test_a_rank_may_freeze_experts_of_its_own(ranks: Pools) -> None:
    first, second = ranks(2).run(freeze_experts_of_one, CASE)
    assert all(has is (".experts." not in name) for name, has in first)
    assert all(has for _, has in second)


# ---- what a plan does not cover ----------------------------------------------------------------------------


def thawed(rank: int, case: Case, replan: bool) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Gradients with all layers, of a stack whose plan was made when only layer 0 was trained."""
    found = []
    for early in (True, False):
        stack = stack_of(rank, case)
        if early:
            for name, parameter in stack.model.named_parameters():
                parameter.requires_grad_("model.layers.0." in name)
            plan = stack.replan()
            assert plan.shape.pieces["replicated"][1] == 0
            assert run(stack, rank, case).norm > 0
            stack.model.requires_grad_(True)
            if replan:
                assert stack.replan().shape.pieces["replicated"][1] > 0
        stepped = run(stack, rank, case)
        found.append((stepped.norm, stepped.gradients))
    return found


@pytest.mark.every_value
@pytest.mark.parametrize("schedule", ["flowmoe", "fsmoe", "penstock"])
@pytest.mark.parametrize("replan", [True, False])
def test_thawed_layers_are_reduced_with_or_without_a_new_plan(
    ranks: Pools, schedule: str, replan: bool
) -> None:
    case = replace(CASE, ep_size=1, schedule=ScheduleConfig(name=schedule, microbatches=2, chunks=2))
    for (norm, gradients), (wanted, expected) in ranks(2).run(thawed, case, replan):
        assert abs(norm - wanted) <= 1e-12 * wanted
        check_all_close(gradients, expected, 1e-12)


def test_a_plan_without_any_reduction_says_how_to_get_one() -> None:
    stack = stack_of(0, ALONE)
    for name, parameter in stack.model.named_parameters():
        parameter.requires_grad_(".experts." in name)
    stack.replan()
    stack(*batch_of(ALONE)).backward()
    stack.model.requires_grad_(True)
    with pytest.raises(ValueError, match=r"is trained now, and the plan reduces no .* Call stack.replan\(\)"):
        stack(*batch_of(ALONE))
    stack.replan()
    stack(*batch_of(ALONE)).backward()


# ---- what is refused ---------------------------------------------------------------------------------------


def gpt(stack: PipelinedStack) -> MoEDecoder:
    assert isinstance(stack.model, MoEDecoder)
    return stack.model


def to_meta(stack: PipelinedStack) -> None:
    stack.to("meta")


def add_layer(stack: PipelinedStack) -> None:
    gpt(stack).model.layers.append(copy.deepcopy(gpt(stack).model.layers[0]))


def make_dense(stack: PipelinedStack) -> None:
    config = replace(ALONE.model, moe_layers=(0,))
    gpt(stack).model.layers[1] = Block(
        config, 1, lambda layer: build_layer(8, ALONE.moe, layer=layer), Rotary(config)
    ).double()


def other_experts(stack: PipelinedStack) -> None:
    eight = replace(ALONE.moe, num_experts=8)
    gpt(stack).parts[1].mlp = build_layer(8, eight, layer=1).double()


def replace_model(stack: PipelinedStack) -> None:
    stack.model = copy.deepcopy(stack.model)


def share_with_expert(stack: PipelinedStack) -> None:
    moe = gpt(stack).parts[0].moe
    assert moe is not None
    gpt(stack).parts[1].self_attn.register_module("borrowed", moe.experts)


def wider_gradient(stack: PipelinedStack) -> None:
    parameter = next(stack.parameters())
    parameter.grad, parameter.grad_dtype = None, torch.float32


REFUSED: dict[str, tuple[Callable[[PipelinedStack], None], str]] = {
    "meta": (to_meta, r"norm.weight is on meta, and the model's steps run on cpu: move the model back"),
    "layer": (add_layer, r"moe_layers is \(True, True, True\) and was .* Build a new stack"),
    "dense": (make_dense, r"moe_layers is \(True, False\) and was .* Build a new stack"),
    "experts": (other_experts, r"layer 1 was built with num_experts = 8, the stack with 4"),
    "model": (replace_model, r"stack.model was replaced, .* build a new stack"),
    "gradient": (wider_gradient, r"its gradient was to be torch.float32 \(grad_dtype\).* to None"),
    "shared": (share_with_expert, r"is used by an expert, .* and by a part that all ranks hold"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_up_is_refused_with_what_to_do(name: str) -> None:
    stack = stack_of(0, ALONE)
    stack(*batch_of(ALONE)).backward()
    operation, words = REFUSED[name]
    operation(stack)
    with pytest.raises(ValueError, match=words):
        stack(*batch_of(ALONE))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_stack_is_refused(reentrant: bool) -> None:
    stack = stack_of(0, ALONE)
    dummy = torch.ones((), requires_grad=True)

    def function(one: torch.Tensor, *batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = stack(*batch)
        return one * loss

    with pytest.raises(RuntimeError, match=r"around a whole scheduled model .* Put it around modules"):
        checkpoint(function, dummy, *batch_of(ALONE), use_reentrant=reentrant).backward()
    stack(*batch_of(ALONE)).backward()


class Recomputed(nn.Module):
    """A module whose activations are computed again in backward."""

    def __init__(self, module: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.module, self.reentrant = module, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.module, x, use_reentrant=self.reentrant)
        return out


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_inside_the_blocks_changes_nothing(reentrant: bool) -> None:
    stack = stack_of(0, ALONE)
    wanted = run(stack, 0, ALONE)
    for block in gpt(stack).parts:
        block.register_module("self_attn", Recomputed(block.self_attn, reentrant=reentrant))
    found = run(stack, 0, ALONE)
    assert found.norm == pytest.approx(wanted.norm, rel=1e-12)
    assert found.loss == wanted.loss


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.mlp.experts.w_up"])
def test_a_hook_that_takes_gradients_away_is_told(name: str) -> None:
    stack = stack_of(0, ALONE)
    weight = stack.model.get_parameter(name)
    handle = weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with pytest.raises(RuntimeError, match=rf"of {name} was replaced or removed while backward"):
        stack(*batch_of(ALONE)).backward()
    handle.remove()
    run(stack, 0, ALONE)


SGD: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
FUSED: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, fused=True)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.mlp.experts.w_up"])
@pytest.mark.parametrize("optimizer", [SGD, FUSED])
@pytest.mark.parametrize("schedule", ["sequential", "flowmoe"])
def test_a_hook_that_updates_its_parameter_is_told(
    name: str, optimizer: Callable[..., torch.optim.Optimizer], schedule: str
) -> None:
    """Also if it leaves the gradient where it is. The fused AdamW does not raise a tensor's version."""
    case = replace(ALONE, schedule=ScheduleConfig(name=schedule))  # autograd refuses it in several
    stack = stack_of(0, case)
    weight = stack.model.get_parameter(name)
    own = optimizer([weight], lr=0.1)

    def update(parameter: nn.Parameter) -> None:
        del parameter
        own.step()
        own.zero_grad(set_to_none=False)

    handle = weight.register_post_accumulate_grad_hook(update)
    with pytest.raises(RuntimeError) as caught:
        stack(*batch_of(case)).backward()
    said = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert any(re.search(rf"gradient of {name} .*parameter was\s+updated, before", each) for each in said)
    handle.remove()
    run(stack_of(0, case) if schedule == "flowmoe" else stack, 0, case)


def data_parallel(rank: int, case: Case) -> None:
    nn.parallel.DistributedDataParallel(stack_of(rank, case))


def test_data_parallel_around_a_stack_is_refused(ranks: Pools) -> None:
    for text in ranks(2).told(TypeError, data_parallel, CASE):
        assert re.search(r"needs no DistributedDataParallel .* Use the model as it is", text)


def test_a_stack_cannot_be_pickled_and_its_model_can() -> None:
    stack = stack_of(0, ALONE)
    with pytest.raises(TypeError, match=r"cannot be pickled"):
        pickle.dumps(stack)
    with pytest.raises(TypeError, match=r"cannot be pickled"):
        copy.copy(stack)
    assert isinstance(pickle.loads(pickle.dumps(stack.model)), MoEDecoder)


def test_a_copy_trains_by_itself() -> None:
    stack = stack_of(0, ALONE)
    wanted = run(stack, 0, ALONE)
    copied = copy.deepcopy(stack)
    stack.zero_grad()
    found = run(copied, 0, ALONE)
    assert (found.loss, found.norm) == (wanted.loss, wanted.norm)
    assert all(p.grad is None for p in stack.parameters())
    assert {id(copied.parts), id(copied.gradients.model)} == {id(copied.model)}
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in stack.parameters()}


def averaged(rank: int, case: Case) -> tuple[float, float]:
    """Losses of a stack and of the average of its weights over equal steps."""
    stack = stack_of(rank, case)
    average = AveragedModel(stack)
    run(stack, rank, case)
    average.update_parameters(stack)
    batch = own_batch(rank, case)
    with torch.no_grad():
        return float(stack(*batch)), float(average(*batch))


def test_weights_can_be_averaged_on_several_ranks(ranks: Pools) -> None:
    for loss, of_average in ranks(2).run(averaged, CASE):
        assert loss == of_average
