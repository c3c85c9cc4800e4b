"""Generation on several ranks, each with prompts, caches and lengths of its own: all finish, or all raise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

import penstock
from penstock.adapt.passes import Spread
from penstock.moe.permute.sort import SortPermutation
from tests.adapt.stopped import STOPS
from tests.support.adapted import Batch, check_grads, small
from tests.support.forked import run_forked
from tests.support.ranks import Pools

LONG = 6

CASES: dict[str, dict[str, Any]] = {
    "static": {"cache_implementation": "static"},
    "stopping": {"cache_implementation": "static", "eos_token_id": [7, 8, 9, 10], "max_new_tokens": 20},
    "no cache": {"use_cache": False},
    "chunks of the prompt": {"prefill_chunk_size": 3},
    "beams": {"num_beams": 3, "cache_implementation": "static"},
    "drawn": {"do_sample": True, "top_k": 5},
    "a lookup": {"prompt_lookup_num_tokens": 2},
    "an assistant": {"assistant": True},
    "early exit": {"assistant_early_exit": 1},
}
"""Settings of generation with which ranks run different numbers of forward passes."""


def prompts(rank: int, rows: int = 1) -> Tensor:
    """Those of the second rank are longer."""
    tokens_BL: Tensor = Batch().inputs(rank, rank + rows)["input_ids"][:, : 3 + 7 * rank]
    return tokens_BL


def written(model: Any, rank: int, *, assistant: bool = False, **settings: Any) -> Tensor:
    """What follows this rank's prompts; the second rank writes less."""
    torch.manual_seed(rank)
    more = {"assistant_model": small("mixtral", seed=4).eval()} if assistant else {}
    common: dict[str, Any] = {"do_sample": False, "max_new_tokens": LONG - 3 * rank, "eos_token_id": None}
    found: Tensor = model.eval().generate(prompts(rank), **{**common, **more, **settings})
    return found


def all_written(rank: int, world: int, cases: dict[str, dict[str, Any]]) -> dict[str, Tensor]:
    model = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe")
    return {name: written(model, rank, **settings) for name, settings in cases.items()}


def test_ranks_with_different_prompts_and_lengths_write_what_one_process_does(ranks: Pools) -> None:
    whole = small("mixtral")
    for rank, found in enumerate(ranks(2).run(all_written, 2, CASES)):
        for name, settings in CASES.items():
            assert found[name].equal(written(whole, rank, **settings)), name
        assert found["stopping"].shape[1] - prompts(rank).shape[1] == (13, 2)[rank]


def written_by_one(rank: int, world: int) -> tuple[Tensor, Any, Tensor]:
    """With prompts on the first rank alone, as tokens and as embeddings."""
    model = penstock.parallelize(small("llama4_text"), ep_size=world, plan="flowmoe").eval()
    given = prompts(0, rows=1 - rank)
    with torch.no_grad():
        embedded = model.get_input_embeddings()(given)
    common = {"max_new_tokens": LONG, "do_sample": False, "eos_token_id": None}
    return (
        model.generate(given, **common),
        model.generate(input_ids=given, return_dict_in_generate=True, **common).sequences,
        model.generate(inputs_embeds=embedded, **common),
    )


def test_a_rank_may_have_no_prompts(ranks: Pools) -> None:
    whole = small("llama4_text").eval()
    expected = whole.generate(prompts(0), max_new_tokens=LONG, do_sample=False, eos_token_id=None)
    first, second = ranks(2).run(written_by_one, 2)
    assert first[0].equal(expected) and first[1].equal(expected)
    assert first[2].equal(expected[:, prompts(0).shape[1] :])
    assert [tuple(each.shape) for each in second] == [(0, 3), (0, 3), (0, 0)]


class Failing(LogitsProcessor):
    """Fails at the third token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > prompts(1).shape[1] + 1:
            raise KeyError("third token")
        return scores


def beyond(model: Any) -> None:
    """A token that the model does not know: there is no pass at all."""
    model.generate(prompts(1) + 61)


def while_choosing(model: Any) -> None:
    """Between two passes."""
    model.generate(prompts(1), logits_processor=[Failing()], max_new_tokens=LONG)


def in_a_layer(model: Any) -> None:
    """Between the experts of two layers, in the second pass; the second rank has an expert no token chose."""
    calls = iter(range(9))

    def fail(*_: Any) -> None:
        if next(calls) == 1:
            raise KeyError("second pass")

    hook = model.model.layers[1].self_attn.register_forward_pre_hook(fail)
    try:
        model.generate(prompts(1), max_new_tokens=LONG)
    finally:
        hook.remove()


@contextmanager
def failing_experts(model: Any, wanted: int) -> Iterator[None]:
    """Inside, the experts of the second layer find no memory when they multiply for this time."""
    experts, calls = model.model.layers[1].mlp.experts, count()
    plain = experts.act_fn

    def act(x: Tensor) -> Tensor:
        if next(calls) == wanted:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        acted: Tensor = plain(x)
        return acted

    experts._modules.pop("act_fn")
    experts.act_fn = act
    try:
        yield
    finally:
        del experts.act_fn
        experts.act_fn = plain


def in_experts(model: Any) -> None:
    """While they multiply for all ranks, in the second pass."""
    with failing_experts(model, 1):
        model.generate(prompts(1), max_new_tokens=LONG)


def in_experts_for_others(model: Any) -> None:
    """The same on a rank that has written what it wants, and takes part in passes of others."""
    with failing_experts(model, 2):
        model.generate(prompts(1), max_new_tokens=2)


def before(model: Any) -> None:
    """A setting that generate refuses."""
    model.generate(prompts(1), max_new_tokens=-1)


def paged(model: Any) -> None:
    """Continuous batching, which runs passes on another thread."""
    model.generate(prompts(1), max_new_tokens=LONG, cache_implementation="paged")


def with_a_spread_assistant(model: Any) -> None:
    model.generate(prompts(1), assistant_model=copy.deepcopy(model))


FAILURES: dict[str, Callable[[Any], None]] = {
    each.__name__: each
    for each in (
        beyond,
        while_choosing,
        in_a_layer,
        in_experts,
        in_experts_for_others,
        before,
        paged,
        with_a_spread_assistant,
    )
}


def fail_on_the_second(rank: int, world: int) -> list[str]:
    """What is raised on this rank by each failure; afterwards the model writes, is judged and trains."""
    model = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe")
    raised = []
    for fail in FAILURES.values():
        with pytest.raises(Exception) as caught:  # on every rank its own
            fail(model.eval()) if rank else written(model, rank, cache_implementation="static")
        raised.append(type(caught.value).__name__)
    given = Batch().inputs(2 * rank, 2 * rank + 2)
    if rank:
        with pytest.raises(IndexError):
            model(input_ids=prompts(1) + 61)
    else:
        model(input_ids=prompts(0))
    assert written(model, rank).equal(written(small("mixtral"), rank))
    wanted = small("mixtral")
    wanted(**Batch().inputs()).loss.backward()
    model.train()(**given).loss.backward()
    check_grads(model, wanted, rank)
    return raised


def test_all_ranks_raise_where_one_fails_and_go_on_afterwards(ranks: Pools) -> None:
    """No rank waits for one that has failed, in whatever place, and communication is whole."""
    first, second = ranks(2).run(fail_on_the_second, 2)
    assert first == ["OtherRankError"] * len(FAILURES)
    memory = ["OutOfMemoryError"] * 2
    assert second == ["IndexError", "KeyError", "KeyError", *memory, *["ValueError"] * 3]


@contextmanager
def failing(owner: Any, name: str, fails: bool) -> Iterator[None]:
    """Inside, this function finds no memory when it is called first, if it is to fail."""
    plain, calls = getattr(owner, name), count()

    def call(*given: Any, **named: Any) -> Any:
        if fails and not next(calls):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return plain(*given, **named)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def judge_without_memory(rank: int, layout: dict[str, Any], where: str) -> list[str]:
    """What passes say where the second rank, then all find no memory at first: among experts or at home."""
    sizes: dict[str, Any] = {"num_key_value_heads": 4, "vocab_size": 64}
    model = penstock.parallelize(small("mixtral", **sizes), plan="flowmoe", **layout).eval()
    place = rank // layout.get("tp_size", 1)
    given = Batch().inputs(2 * place, 2 * place + 2)["input_ids"]
    said = []
    for fails in (rank == 1, True):
        home = failing(SortPermutation, "unpermute", fails)
        broken = home if where == "home" else failing_experts(model, 0 if fails else -1)
        with broken, pytest.raises(RuntimeError) as caught:
            model(given)
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    wanted = small("mixtral", **sizes).eval()(given).logits
    assert torch.allclose(model(given).logits, wanted, atol=1e-5)
    return said


@pytest.mark.parametrize(
    ("layout", "where"),
    [
        ({"ep_size": 2}, "experts"),
        ({"ep_size": 2}, "home"),
        ({"etp_size": 2}, "experts"),
        ({"etp_size": 2}, "home"),
        ({"tp_size": 4, "ep_size": 2}, "experts"),  # attention hands numbers on beyond ranks that meet
    ],
    ids=str,
)
def test_ranks_without_memory_are_named_to_all(ranks: Pools, layout: dict[str, Any], where: str) -> None:
    """And all may try a smaller batch: loops look for the words of torch."""
    own = "OutOfMemoryError: CUDA out of memory."
    for rank, said in enumerate(ranks(layout.get("tp_size", 2)).run(judge_without_memory, layout, where)):
        other = f"OtherRankError: experts could not compute on rank 1: {own}"
        assert said == [own if rank == 1 else other, own]


def go_on_after_half_a_meeting(rank: int) -> list[str]:
    """What is said of a pass, of writing and of a step after a meeting that rows never left."""
    model = penstock.parallelize(small("mixtral"), plan="flowmoe").eval()
    batch = Batch().inputs(2 * rank, 2 * rank + 2)
    with failing(Spread, "_exchange", True), pytest.raises(torch.OutOfMemoryError):
        model(batch["input_ids"])
    said = []
    for call in (lambda: model(batch["input_ids"]), lambda: model.generate(prompts(1), max_new_tokens=2)):
        with pytest.raises(RuntimeError, match=r"OutOfMemoryError.*exchange nothing more") as caught:
            call()
        said.append(type(caught.value).__name__)
    with pytest.raises(RuntimeError, match="exchange nothing more") as caught:
        model.train()(**batch)
    return [*said, type(caught.value).__name__]


def test_a_rank_that_left_a_meeting_half_way_exchanges_nothing_more(ranks: Pools) -> None:
    """Others might take what it sends next for what they still wait for."""
    assert ranks(2).run(go_on_after_half_a_meeting) == [["RuntimeError"] * 3] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", STOPS)
def test_a_rank_that_is_stopped_is_named_by_the_other(kind: str) -> None:
    program = Path(__file__).parent / "stopped.py"
    found = run_forked(2, kind, program=str(program))
    assert f"rank 1 had failed: a pass without gradients: {STOPS[kind].__name__}" in found.stderr
    assert "CommunicationError" in found.stderr
