"""Steps that are not one forward pass and its backward, and batches that are not like others."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

import penstock
from penstock.adapt.decoder import LayerCall
from penstock.adapt.scheduled import engine_of
from penstock.runtime import TaskError
from tests.support.adapted import Batch, check_grads, grads_of, pair, small, without_labels
from tests.support.ranks import Pools


def calls_kept() -> int:
    """How many calls of layers are remembered in this process."""
    gc.collect()
    return sum(type(each) is LayerCall for each in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_a_second_forward_pass_before_the_first_backward(again: bool) -> None:
    """Each with masks, positions and losses of its own; nothing is kept afterwards."""
    before = calls_kept()
    wanted, model = pair("mixtral")
    if again:
        model.gradient_checkpointing_enable()
    first = {**Batch(padded=True).inputs(), "output_router_logits": True}
    second = Batch(samples=3, length=9, seed=6).inputs()
    for each in (wanted, model):
        losses = [each(**given).loss for given in (first, second)]
        each(**second)  # without any backward
        for loss in losses:
            loss.backward()
    check_grads(model, wanted)
    assert calls_kept() <= before, "losses are still there"


@pytest.mark.parametrize(("name", "number"), [("token", 64), ("token", -1), ("label", 64), ("label", -1)])
def test_what_is_no_token_is_named(name: str, number: int) -> None:
    given = Batch().inputs()
    given["input_ids" if name == "token" else "labels"][1, 2] = number
    with pytest.raises(TaskError, match=rf"IndexError: {name} {number} .* 0 to 60"):
        penstock.parallelize(small("mixtral"))(**given)


def without_gradients_first(
    rank: int, world: int, context: type[AbstractContextManager[None]]
) -> tuple[float, bool]:
    model = penstock.parallelize(small("mixtral"), ep_size=world)
    with context():
        loss: Tensor = model(**Batch().inputs(2 * rank, 2 * rank + 2)).loss
    return loss.item(), loss.requires_grad


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_first_step_without_gradients_needs_no_plan(
    ranks: Pools, context: type[AbstractContextManager[None]]
) -> None:
    wanted = small("mixtral")(**Batch().inputs()).loss.item()
    assert ranks(2).run(without_gradients_first, 2, context) == [(pytest.approx(wanted, rel=1e-5), False)] * 2


def unequal_step(rank: int, world: int) -> None:
    """One rank has all samples, another none; of its own it has the gradients all the same."""
    wanted, model = (small("mixtral") for _ in range(2))
    penstock.parallelize(model, ep_size=world, plan="flowmoe")
    given = Batch(padded=True).inputs()
    found = model(**{name: each[: len(each) * (1 - rank)] for name, each in given.items()})
    expected = wanted(**given).loss
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    found.loss.backward()
    expected.backward()
    check_grads(model, wanted, rank)


def test_a_rank_may_have_no_samples(ranks: Pools) -> None:
    ranks(2).run(unequal_step, 2)


def step_with_another_default(rank: int, world: int) -> None:
    """A rank's step, and an evaluation, where what names no device is made on another one."""
    whole, batch = small("qwen3_moe"), Batch()
    whole(**batch.inputs()).loss.backward()
    model, mine = small("qwen3_moe"), batch.inputs(2 * rank, 2 * rank + 2)
    with torch.device("meta"):  # as Lightning makes a GPU the default
        penstock.parallelize(model, ep_size=world, plan="flowmoe")
        model(**mine).loss.backward()
        model.eval()(**mine)
    check_grads(model, whole, rank)


@pytest.mark.slow
def test_what_hosts_need_is_made_there_whatever_the_default(ranks: Pools) -> None:
    ranks(2).run(step_with_another_default, 2)


@pytest.mark.slow
@pytest.mark.parametrize("balanced", [False, True])
def test_a_batch_without_labels_to_predict(balanced: bool) -> None:
    """The mean of nothing is no number, as in transformers; gradients are those of the router loss alone."""
    wanted, model = pair("mixtral")
    given: dict[str, Any] = {**Batch().inputs(), "output_router_logits": balanced}
    given["labels"].fill_(-100)
    for each in (wanted, model):
        assert math.isnan(each.eval()(**given).loss.item())
        loss = each.train()(**given).loss
        loss.backward()
        assert math.isnan(loss.item())
    assert balanced == any(grad.any() for grad in grads_of(wanted).values())
    check_grads(model, wanted)
    assert wanted(**given, num_items_in_batch=5).loss.item() == pytest.approx(
        model(**given, num_items_in_batch=5).loss.item()
    )


def threads_of_models(rank: int, world: int) -> list[int]:
    """How many threads there are with each of three models, of which the earlier ones are gone."""
    found = []
    for _ in range(3):
        model = penstock.parallelize(small("qwen3_moe"), plan="flowmoe")
        model(**Batch(samples=world).inputs(rank, rank + 1)).loss.backward()
        found.append(len(list(Path("/proc/self/task").iterdir())))
        del model
    return found


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted there")
def test_models_that_are_gone_leave_no_groups(ranks: Pools) -> None:
    for first, second, third in ranks(2).run(threads_of_models, 2):
        assert third == second <= first + 1  # the default group may have opened its own meanwhile


def resized(model: Any) -> Any:
    torch.manual_seed(3)
    model.resize_token_embeddings(70)
    return model


@pytest.mark.slow
def test_embeddings_may_be_resized(tmp_path: Any) -> None:
    wanted, model = resized(small("mixtral")), penstock.parallelize(small("mixtral"))
    model(**Batch().inputs()).loss.backward()
    model.zero_grad()
    resized(model)
    given = Batch().inputs()
    given["input_ids"][0, 0] = 69
    for each in (wanted, model):
        each(**given).loss.backward()
    check_grads(model, wanted)
    model.save_pretrained(tmp_path)
    assert type(wanted).from_pretrained(tmp_path).lm_head.weight.equal(model.lm_head.weight)


@pytest.mark.slow
def test_several_tables_of_positions() -> None:
    """As models have them that also see: of time, height and width, for every sample."""
    wanted, model = pair("qwen3_5_moe_text")
    generator = torch.Generator().manual_seed(3)
    positions_3BL = torch.randint(12, (3, 4, 12), generator=generator).sort(-1).values
    given = {**Batch().inputs(), "position_ids": positions_3BL}
    for each in (wanted, model):
        each(**given).loss.backward()
    check_grads(model, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "positions", [torch.arange(12), torch.zeros(2, 12).long(), torch.zeros(4, 3, 12).long()]
)
def test_positions_of_other_samples_are_refused(positions: Tensor) -> None:
    model: Callable[..., Any] = penstock.parallelize(small("mixtral"))
    with pytest.raises(ValueError, match=r"position_ids must be \[4, 12\] or \[1, 12\]"):
        model(**Batch().inputs(), position_ids=positions)


# ---- another plan, for which all ranks are needed ----------------------------------------------------------


def freeze_all_but_the_head(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name)


def thaw(model: Any) -> None:
    model.requires_grad_(True)


def switch(model: Any) -> None:
    model.gradient_checkpointing_enable()


CHANGES: dict[str, Callable[[Any], None]] = {"thawed": thaw, "switched": switch}


def changed(rank: int, world: int, what: str, alone: bool) -> tuple[str, dict[str, Tensor], bool]:
    """A step, a change on rank 1 or all, another step: the error, gradients, whether the plan is new."""
    model = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe")
    if what == "thawed":
        freeze_all_but_the_head(model)
    given = Batch().inputs(2 * rank, 2 * rank + 2)
    model(**given).loss.backward()
    model.zero_grad()
    before = engine_of(model).stack.plan
    torch.manual_seed(rank)
    drawn = torch.rand(1)
    torch.manual_seed(rank)
    if rank == 1 or not alone:
        CHANGES[what](model)
    try:
        model(**given).loss.backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", {}, False
    assert torch.equal(torch.rand(1), drawn), "asking has drawn random numbers"
    return "", grads_of(model), engine_of(model).stack.plan is not before


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("thawed", "is trained now and was not when its plan was made"),
        ("switched", "gradient checkpointing was switched to 'blocks'"),
    ],
)
def test_a_rank_that_needs_another_plan_alone_is_named_on_all(ranks: Pools, what: str, told: str) -> None:
    for message, _, _ in ranks(2).run(changed, 2, what, True):
        assert message.startswith("ScheduleMismatchError: rank 1 needs another plan, since")
        assert f"{told}, and not all ranks do" in message


@pytest.mark.parametrize("what", CHANGES)
def test_ranks_that_change_together_get_another_plan(ranks: Pools, what: str) -> None:
    wanted = small("mixtral")
    wanted(**Batch().inputs()).loss.backward()
    for rank, (message, grads, is_new) in enumerate(ranks(2).run(changed, 2, what, False)):
        assert (message, is_new) == ("", True)
        check_grads(grads, wanted, rank)


# ---- documents in one row ----------------------------------------------------------------------------------


LENGTHS = ([5, 7], [3, 1, 8])
"""Of the documents in each rank's row."""


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **named: Any
) -> tuple[Tensor, None]:
    """Attend to one's own document, by the arguments of kernels alone."""
    assert attention_mask is None and module.is_causal
    places_L = torch.arange(query.shape[2])
    document_L = torch.bucketize(places_L, named["cu_seq_lens_q"], right=True)
    seen_LL = (document_L[:, None] == document_L) & (places_L[:, None] >= places_L)
    out = F.scaled_dot_product_attention(query, key, value, seen_LL, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


def told_by_lengths(**changes: Any) -> Any:
    AttentionInterface.register("by_lengths", attend)
    model = small("mixtral", **changes)
    model.set_attn_implementation("by_lengths")
    return model


def row(number: int) -> dict[str, Any]:
    """The row of a rank."""
    bounds = torch.tensor([0, *LENGTHS[number]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    given: dict[str, Any] = Batch().inputs(number, number + 1)
    positions_1L = torch.cat([torch.arange(length) for length in LENGTHS[number]]).unsqueeze(0)
    most = max(LENGTHS[number])
    told = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": most, "max_length_k": most}
    return {**given, "position_ids": positions_1L, **told}


def steps(rank: int, world: int) -> list[tuple[float, dict[str, Tensor]]]:
    """Losses and gradients of a step with labels, of one without, and of one whose layers are recomputed."""
    model = penstock.parallelize(told_by_lengths(), ep_size=world, plan="penstock")
    found = []
    for kind in ("labels", "own loss", "again"):
        model.zero_grad()
        if kind == "again":
            model.gradient_checkpointing_enable()
        given = row(rank)
        loss = (
            model(**without_labels(given)).logits.square().mean()
            if kind == "own loss"
            else model(**given).loss
        )
        loss.backward()
        found.append((loss.item(), grads_of(model)))
    return found


def test_documents_in_one_row_are_told_apart_by_their_lengths(ranks: Pools) -> None:
    results = ranks(2).run(steps, 2)
    whole, wanted = told_by_lengths(), []
    labels = sum(int((row(number)["labels"][:, 1:] >= 0).sum()) for number in range(2))
    for own in (False, True, False):
        whole.zero_grad()
        losses = []
        for number in range(2):
            given = {**row(number), "use_cache": False}
            out = whole(**given, num_items_in_batch=labels)
            losses.append(out.logits.square().mean() if own else out.loss)
        ((sum(losses) / 2) if own else sum(losses)).backward()
        wanted.append(
            ([each.item() for each in losses] if own else [sum(losses).item()] * 2, grads_of(whole))
        )
    for rank, found in enumerate(results):
        for (loss, grads), (losses_of_ranks, expected) in zip(found, wanted, strict=True):
            assert loss == pytest.approx(losses_of_ranks[rank], rel=1e-5)
            check_grads(grads, expected, rank)


@pytest.mark.slow
def test_documents_in_several_rows_are_refused() -> None:
    model = penstock.parallelize(told_by_lengths())
    given = {**row(0), "input_ids": Batch().inputs()["input_ids"], "labels": Batch().inputs()["labels"]}
    with pytest.raises(
        ValueError, match=r"cu_seq_lens_q, .*packed into one row, and input_ids are \[4, 12\]"
    ):
        model(**{**given, "position_ids": None})
