"""A scheduled model in a training loop: it follows transformers, and is saved as transformers saves it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.adapt import FAMILIES
from penstock.adapt.scheduled import engine_of
from penstock.config import ConfigError
from penstock.families.experts import Shares
from penstock.sharding import sharding_of
from tests.support.adapted import (
    DIVISIBLE,
    Batch,
    check_grads,
    cut,
    distance,
    grads_of,
    pair,
    small,
    with_adapters,
    without_labels,
)
from tests.support.ranks import Pools

FEW = ("mixtral", "deepseek_v3", "gpt_oss")
ALL = sorted(FAMILIES)
NARROW = [name for name in ALL if FAMILIES[name].form.narrows]


def train(model: Any, batches: list[dict[str, Any]], clip: Callable[..., Any]) -> list[float]:
    """Losses of as many steps of AdamW as there are batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        clip(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fine_tune(
    rank: int, world: int, folder: str, families: Sequence[str], layout: dict[str, Any]
) -> dict[str, Any]:
    """Train, save and generate on this rank. layout: sizes of `parallelize`."""
    tp_size = layout.get("tp_size", 1)
    batch, groups, place = Batch(samples=4), world // tp_size, rank // tp_size
    each = 4 // groups
    mine = batch.inputs(place * each, (place + 1) * each)
    changes: dict[str, Any] = {} if tp_size == 1 else DIVISIBLE
    found: dict[str, Any] = {}
    for family in families:
        model = small(family, initializer_range=0.1, tie_word_embeddings=family == "mixtral", **changes)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.0.self_attn" not in name)  # frozen
        penstock.parallelize(model, plan="flowmoe", **layout)
        count = model.num_parameters()
        assert train(model, [mine] * 3, penstock.clip_grad_norm_)[2] > 0
        model.save_pretrained(f"{folder}/{family}")
        prompt = without_labels(batch.inputs(place, place + 1))["input_ids"][:, : 4 + place]
        tokens = model.eval().generate(prompt, max_new_tokens=3 + 2 * place, do_sample=False)
        held = {name: (p.detach(), sharding_of(p)) for name, p in model.named_parameters()}
        found[family] = held, prompt, tokens, count
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("world", "families", "layout"),
    [
        (2, FEW, {"ep_size": 2}),
        (2, ("gpt_oss",), {"ep_size": 2, "tp_size": 2}),
        (2, ("mixtral",), {"etp_size": 2}),
        pytest.param(2, FEW, {"ep_size": 2, "tp_size": 2}, marks=pytest.mark.soak),
        (4, ("mixtral", "gpt_oss"), {"ep_size": 2, "etp_size": 2, "tp_size": 2}),
        pytest.param(2, ALL, {"ep_size": 2}, marks=pytest.mark.soak),
        pytest.param(2, NARROW, {"etp_size": 2}, marks=pytest.mark.soak),
        pytest.param(4, FEW, {"ep_size": 2}, marks=pytest.mark.soak),
        pytest.param(4, FEW, {"ep_size": 2, "tp_size": 2}, marks=pytest.mark.soak),
        pytest.param(4, FEW, {"ep_size": 1, "etp_size": 2}, marks=pytest.mark.soak),
    ],
)
def test_what_ranks_save_together_transformers_reads(
    ranks: Pools, tmp_path: Path, world: int, families: Sequence[str], layout: dict[str, Any]
) -> None:
    results = ranks(world).run(fine_tune, world, str(tmp_path), families, layout, timeout_s=300)
    experts = layout.get("ep_size", world // layout.get("etp_size", 1))
    for family in families:
        kind = type(small(family))
        read, told = kind.from_pretrained(tmp_path / family, output_loading_info=True)
        assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
        whole = dict(read.named_parameters())
        for rank, found in enumerate(results):
            held, prompt, tokens, count = found[family]
            assert held.keys() == whole.keys() and count == read.num_parameters()
            for name, (mine, sharding) in held.items():
                theirs = whole[name]
                place = rank // layout.get("etp_size", 1) % experts
                assert torch.equal(cut(mine, sharding, theirs, place), mine), name
            length = tokens.shape[1] - prompt.shape[1]
            assert read.eval().generate(prompt, max_new_tokens=length, do_sample=False).equal(tokens)


def ask_for_different_losses(rank: int, world: int) -> list[str]:
    """What is said where ranks divide by different numbers, or one alone asks for the balance loss."""
    model = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe")
    given, found = Batch().inputs(rank, rank + 1), []
    for asked in ({"num_items_in_batch": 20 + rank}, {"output_router_logits": rank == 0}):
        with pytest.raises(ValueError) as caught:
            model(**given, **asked)
        found.append(str(caught.value))
    model(**given, num_items_in_batch=20).loss.backward()
    return found


def test_ranks_must_ask_for_the_same_loss(ranks: Pools) -> None:
    for said in ranks(2).run(ask_for_different_losses, 2):
        assert all("ranks were asked for different losses" in each for each in said)


def test_gradients_accumulate_and_losses_are_scaled() -> None:
    """As the Trainer asks for it: the sum of losses by the tokens of all parts of a batch."""
    wanted, model = pair("qwen2_moe")
    batch = Batch()
    for first in (0, 2):
        part = {**batch.inputs(first, first + 2), "num_items_in_batch": torch.tensor(41)}
        for each in (wanted, model):
            (each(**part).loss * 0.5).backward()
    check_grads(model, wanted)


def test_logits_positions_and_copies() -> None:
    """Packed samples are told by their positions; a copy of a scheduled model is one, too."""
    wanted, model = pair("mixtral")
    positions_BL = torch.cat([torch.arange(5), torch.arange(7)]).expand(4, -1)
    given = {**Batch().inputs(), "position_ids": positions_BL}
    copied = copy.deepcopy(model)
    copied.gradient_checkpointing_enable()
    theirs = wanted(**given, use_cache=False)  # with a cache transformers takes them for one
    for each in (model, copied):
        ours = each(**given, logits_to_keep=0)
        assert distance(ours.logits, theirs.logits.detach()) < 1e-5
        assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5)
        ours.loss.backward()
        assert type(each).__name__ == type(wanted).__name__
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None
    theirs.loss.backward()
    check_grads(copied, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_bfloat16(family: str) -> None:
    """Under autocast and in a model of that type; experts add up in another order than in transformers."""
    given = Batch(padded=True).inputs()
    for dtype, cast in ((torch.float32, True), (torch.bfloat16, False)):
        wanted, model = (small(family, dtype=dtype, initializer_range=0.1) for _ in range(2))
        penstock.parallelize(model, plan="penstock")
        losses = []
        for each in (wanted, model):
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                loss = each(**given).loss
            loss.backward()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-2)
        expected, found = grads_of(wanted), grads_of(model)
        assert found.keys() == expected.keys()
        norms = [sum(g.float().square().sum().item() for g in grads.values()) for grads in (found, expected)]
        assert norms[0] == pytest.approx(norms[1], rel=0.1)


def test_experts_drawn_by_chance_are_the_same_in_one_microbatch() -> None:
    """Also where layers are computed again: they draw what they drew."""
    wanted, model, again = (small("phimoe") for _ in range(3))
    for each in (model, again):
        penstock.parallelize(each, plan="sequential")
    again.gradient_checkpointing_enable()
    for each in (wanted, model, again):
        torch.manual_seed(11)
        each(**Batch().inputs()).loss.backward()
    for each in (model, again):
        check_grads(each, wanted)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="Linear has no experts"):
        penstock.parallelize(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"router_jitter_noise = 0.1 cannot be scheduled"):
        penstock.parallelize(small("mixtral", router_jitter_noise=0.1))
    with pytest.raises(ConfigError, match="tp_size"):
        penstock.parallelize(small("mixtral"), tp_size=2)
    model = penstock.parallelize(small("mixtral"))
    with pytest.raises(ValueError, match="already"):
        penstock.parallelize(model)
    given = Batch().inputs()
    with pytest.raises(ValueError, match=r"hidden_states\[0\]: a training step"):
        model(**without_labels(given), output_hidden_states=True).hidden_states[0].sum()
    with pytest.raises(ValueError, match=r"output_attentions cannot be used in one"):
        model(**given, output_attentions=True)
    with pytest.raises(ValueError, match=r"input_ids must be \[samples, tokens\]"):
        model(**{name: each[0] for name, each in given.items()})
    with pytest.raises(ValueError, match="every_n_layers = 2"):
        model.activation_checkpointing_enable(every_n_layers=2)
    with pytest.raises(TypeError, match="a scheduled model needs no DistributedDataParallel"):
        torch.nn.parallel.DistributedDataParallel(model)
    with pytest.raises(ValueError, match="is no model with a head"):
        penstock.parallelize(small("mixtral").model)
    twice = small("mixtral")
    twice.model.layers[1].mlp.experts = twice.model.layers[0].mlp.experts
    with pytest.raises(ValueError, match="the experts of, another one"):
        penstock.parallelize(twice)


def test_what_was_made_to_infer_is_refused() -> None:
    """A model, a model that is spread, and a parameter that takes another's place."""
    with torch.inference_mode():
        made = small("mixtral")
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight"):
        penstock.parallelize(made)
    model = small("mixtral")
    with torch.inference_mode(), pytest.raises(ValueError, match=r"Call parallelize outside"):
        penstock.parallelize(model)
    penstock.parallelize(model)(**Batch().inputs()).loss.backward()
    model.lm_head.weight = made.lm_head.weight
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        model(**Batch().inputs())


@pytest.mark.parametrize("mode", ["train", "eval", "stack"])
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_of_torch_are_refused(mode: str, transform: Callable[..., Any]) -> None:
    model = penstock.parallelize(small("mixtral"), plan="sequential").train(mode != "eval")
    given, stack = Batch().inputs(), engine_of(model).stack
    run = partial(stack, *given.values()) if mode == "stack" else lambda: model(**given).loss
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        transform(lambda x: x.sum() * run())(torch.ones(2, 2))
    model.train()(**given).loss.backward()


def test_parameters_may_be_those_of_a_call() -> None:
    made: list[dict[str, torch.Tensor]] = []
    for model in pair("mixtral"):
        own = {name: (1.1 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
        torch.func.functional_call(model, own, (), Batch().inputs()).loss.backward()
        made.append({name: p.grad for name, p in own.items() if p.grad is not None})
    check_grads(made[1], made[0])


@pytest.mark.slow
def test_a_model_that_was_read_trains_by_a_schedule(tmp_path: Path) -> None:
    small("mixtral").save_pretrained(tmp_path)
    for wrap in (lambda model: model, with_adapters):
        read = type(small("mixtral")).from_pretrained(tmp_path)
        assert not read.training
        model = penstock.parallelize(wrap(read))
        model(**Batch().inputs()).loss.backward()
        assert model.training and engine_of(model).stack.statistics is not None
        assert grads_of(model)


def test_a_loss_of_an_evaluation_trains_nothing() -> None:
    given, whole = Batch().inputs(), small("mixtral").eval()
    model = penstock.parallelize(small("mixtral")).eval()
    for found in (model(**given).loss, model(**given, return_dict=False)[0], 0.5 * model(**given).loss):
        with pytest.raises(ValueError, match=r"evaluation mode.*call model\.train\(\)"):
            found.backward()
        assert not grads_of(model)
    assert model(**given).loss.item() == whole(**given).loss.item()
    with torch.no_grad():
        assert not model(**given).loss.requires_grad
    assert not model.requires_grad_(False)(**given).loss.requires_grad
    model.requires_grad_().train()(**given).loss.backward()
    assert grads_of(model)


@pytest.mark.parametrize("part", ["logits", "aux_loss"])
def test_a_step_with_labels_drops_no_gradient_in_silence(part: str) -> None:
    model = penstock.parallelize(small("mixtral", output_router_logits=True))
    out = model(**Batch().inputs())
    with pytest.raises(ValueError, match="without labels"):
        (out.loss + out[part].mean()).backward()
    out.loss.backward()
    assert grads_of(model) and out[part].detach().isfinite().all()
    with torch.no_grad():
        assert not model(**Batch().inputs())[part].requires_grad


def layer(model: Any, number: int = 1) -> Any:
    return model.model.layers[number]


def other(path: str) -> Callable[[Any], object]:
    """The same part of another model."""
    *way, name = path.split(".")
    there = small("qwen2_moe").get_submodule(path)
    return lambda model: setattr(model.get_submodule(".".join(way)), name, copy.deepcopy(there))


def wrapped(path: str) -> Callable[[Any], object]:
    *way, name = path.split(".")
    return lambda model: setattr(
        model.get_submodule(".".join(way)), name, torch.nn.Sequential(model.get_submodule(path))
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other("model.layers.1"), r"layer 1 was replaced or wrapped \(Qwen2MoeDecoderLayer\)"),
        (wrapped("model.layers.0"), r"layer 0 was replaced or wrapped \(Sequential\)"),
        (
            lambda model: setattr(model.model, "layers", model.model.layers[:1]),
            "1 layers now, and 2 were parallelized",
        ),
        (
            wrapped("model.layers.1.mlp.experts"),
            r"experts of layer 1 were replaced or wrapped \(Sequential\)",
        ),
        (other("model.layers.1.mlp.gate"), "the router of layer 1 was replaced"),
        (other("model.layers.1.mlp.shared_expert"), "the shared expert of layer 1 was replaced"),
        (
            lambda model: layer(model).mlp.register_forward_hook(lambda *given: 2 * given[2]),
            "a hook on Qwen2MoeSparseMoeBlock of layer 1 would not see",
        ),
        (
            lambda model: model.model.gradient_checkpointing_enable({"use_reentrant": True}),
            "layer 0 would run again in backward",
        ),
    ],
)
def test_what_steps_would_leave_out_is_refused(change: Callable[[Any], object], words: str) -> None:
    model = penstock.parallelize(small("qwen2_moe", mlp_only_layers=[0]), plan="sequential")
    given = Batch().inputs()
    model.eval()(**without_labels(given), output_router_logits=True)  # transformers' own hooks are taken
    model.train()(**given)
    change(model)
    with pytest.raises(ValueError, match=words):
        model(**given)


def test_what_changes_between_steps_is_followed() -> None:
    """What is trained, which the first plan does not reckon with, and the weight of the balance loss."""
    wanted, model = pair("mixtral")
    given = Batch().inputs()
    for trained, coefficient in (("lm_head", 0.0), ("", 5.0)):
        for each in (wanted, model):
            each.zero_grad()
            each.router_aux_loss_coef = coefficient
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(trained in name)
            each(**given, output_router_logits=True).loss.backward()
        check_grads(model, wanted)


def test_a_share_of_experts_is_the_parameter_that_was_whole() -> None:
    """An optimizer made before goes on training it, and layers that share it still do."""
    one, other = (layer.mlp.experts for layer in small("mixtral").model.layers)
    other.down_proj = one.down_proj
    whole, before = one.down_proj.detach().clone(), dict(one.named_parameters())
    Shares((one, other), [2, 3], 8).settle()
    assert all(parameter is before[name] for name, parameter in one.named_parameters())
    assert other.down_proj is one.down_proj and one.down_proj.equal(whole[[2, 3]])


@pytest.mark.slow
def test_kept_logits_are_those_asked_for() -> None:
    """Also where labels of all samples lie in one place of memory."""
    wanted, model = pair("mixtral")
    tokens_BL = Batch().inputs()["input_ids"]
    given = {"input_ids": tokens_BL, "shift_labels": tokens_BL[:1].expand(4, -1)}
    for asked in (0, 3, torch.tensor([1, 4])):
        expected = wanted(tokens_BL, logits_to_keep=asked).logits.detach()
        assert distance(model(**given, logits_to_keep=asked).logits.detach(), expected) < 1e-5
    out = model(**given)
    out.loss.backward()
    _, plain = model(**given, return_dict=False)
    for read in (plain, out[1], out[:2][1], out.get("logits")):
        assert read.equal(out.logits) and "logits" in out
    assert distance(out.logits.detach(), wanted(tokens_BL).logits) < 1e-5
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(ValueError, match="read them before"):
        out["logits"].sum()
    assert out[0] is out.loss


@pytest.mark.parametrize("labelled", [True, False])
def test_tokens_may_be_of_32_bits(labelled: bool) -> None:
    wanted, model = pair("mixtral")
    given = Batch().inputs()
    given["input_ids"] = given["input_ids"].int()
    for each in (wanted, model):
        loss = each(**given).loss if labelled else each(**without_labels(given)).logits.square().mean()
        loss.backward()
    check_grads(model, wanted)


def test_an_error_of_this_rank_alone_stays_what_it_is() -> None:
    """In an exchange outside of steps, as one of memory, after which a smaller batch may be tried."""
    machinery = engine_of(penstock.parallelize(small("mixtral"), plan="flowmoe")).stack.machinery

    def fail() -> None:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        machinery.exchange("meeting", fail)
