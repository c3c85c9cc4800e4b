"""What `parallelize` refuses, and that a model that was refused is what it was."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.parametrizations import spectral_norm

import penstock
from penstock.config import ConfigError
from penstock.decision import Decision
from penstock.runtime.sockets import Sockets
from tests.support.adapted import DIVISIBLE, Batch, check_grads, grads_of, small, with_adapters
from tests.support.ranks import Pools


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Decision(samples="netmoe"), r'plan\.samples = "netmoe": masks and positions'),
        (Decision(dispatch="node_once"), r'plan\.dispatch = "node_once": .* over several nodes'),
        (Decision(schedule="nonsense"), r'schedule = "nonsense"'),
        ("nonsense", r'name = "nonsense"'),
    ],
)
def test_decisions_that_steps_do_not_know_are_refused(plan: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        penstock.parallelize(small("mixtral"), plan=plan)


@pytest.mark.parametrize(
    ("family", "tp_size", "changes", "words"),
    [
        ("jamba", 2, {}, "some of its layers mix tokens .* a model of jamba"),
        ("llama4_text", 2, {}, "how heads lie in its attention is not described, .* llama4_text"),
        (
            "qwen3_moe",
            4,
            {"vocab_size": 64},
            r"must divide num_key_value_heads \(2\) of a model of qwen3_moe",
        ),
        ("olmoe", 2, {}, r"must divide vocab_size \(61\) of a model of olmoe"),
        ("deepseek_v3", 2, {**DIVISIBLE, "intermediate_size": 23}, r"must divide intermediate_size \(23\)"),
    ],
)
def test_attention_that_ranks_cannot_share_is_refused_by_family(
    family: str, tp_size: int, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"^tp_size = {tp_size}: .*{words}"):
        penstock.parallelize(small(family, **changes), tp_size=tp_size)


def as_it_is(model: Any) -> None:
    del model


def with_a_scale(model: Any) -> None:
    model.model.layers[1].mlp.experts.scale = torch.nn.Parameter(torch.ones(8))


def with_a_softmax(model: Any) -> None:
    """An activation to which a part of the width is not enough."""
    model.model.layers[1].mlp.experts.act_fn = torch.nn.Softmax(-1)


def with_a_norm(model: Any) -> None:
    model.model.layers[1].mlp.experts.has_post_expert_norm = True


@pytest.mark.parametrize(
    ("family", "etp_size", "change", "words"),
    [
        ("dbrx", 2, as_it_is, "experts of a model of dbrx have several rows of a parameter each"),
        ("mixtral", 5, as_it_is, r"must divide the width \(24\) of experts of a model of mixtral"),
        ("mixtral", 2, with_a_scale, r"MixtralExperts has more than weights and biases \(scale\)"),
        ("mixtral", 2, with_a_softmax, "MixtralExperts makes of a part of its width no part"),
        ("mixtral", 2, with_a_norm, "MixtralExperts norms what each expert returns"),
    ],
)
def test_experts_that_ranks_cannot_share_are_refused(
    family: str, etp_size: int, change: Callable[[Any], None], words: str
) -> None:
    model = small(family)
    change(model)
    with pytest.raises(ConfigError, match=f"^etp_size = {etp_size}: {words}"):
        penstock.parallelize(model, etp_size=etp_size)


def adapt_experts(rank: int, world: int) -> list[str]:
    """What is said where experts that ranks share get adapters, before the model is scheduled and after."""
    from peft import LoraConfig, get_peft_model  # here: it takes seconds to import

    lora = LoraConfig(r=2, target_parameters=["experts.down_proj"])
    model = penstock.parallelize(small("mixtral"), etp_size=world, plan="flowmoe")
    adapted, said = get_peft_model(model, lora), []
    for run in (
        lambda: penstock.parallelize(get_peft_model(small("mixtral"), lora), etp_size=world),
        lambda: adapted(**Batch().inputs(rank, rank + 1)),
    ):
        with pytest.raises(ValueError) as caught:
            run()
        said.append(str(caught.value))
    return said


def normed(path: str, name: str = "weight", family: str = "qwen3_moe", **changes: Any) -> Any:
    """A model of which one weight is computed from another one of its shape."""
    model = small(family, **changes)
    torch.manual_seed(3)
    spectral_norm(model.get_submodule(path), name)
    return model


def step_with_a_norm(rank: int, world: int) -> None:
    wanted, model = (normed("model.layers.1.self_attn.q_proj") for _ in range(2))
    penstock.parallelize(model, ep_size=world, plan="sequential")
    model(**Batch().inputs(2 * rank, 2 * rank + 2)).loss.backward()
    wanted(**Batch().inputs()).loss.backward()
    check_grads(model, wanted, rank)
    with pytest.raises(ValueError, match="down_proj of ParametrizedQwen3MoeExperts"):
        penstock.parallelize(normed("model.layers.1.mlp.experts", "down_proj"), ep_size=world)
    with pytest.raises(ValueError, match="w1 of ParametrizedDbrxExpertGLU"):
        inside = "transformer.blocks.1.ffn.experts.mlp"
        penstock.parallelize(normed(inside, "w1", "dbrx"), ep_size=world)


def test_weights_that_are_computed_from_others_are_right_or_refused(ranks: Pools) -> None:
    ranks(2).run(step_with_a_norm, 2)
    for path in ("model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head"):
        with pytest.raises(ConfigError, match=r"^tp_size = 2: .* has a parametrization"):
            penstock.parallelize(normed(path, **DIVISIBLE), tp_size=2)


def test_adapters_of_experts_that_ranks_share_are_refused(ranks: Pools) -> None:
    for said in ranks(2).run(adapt_experts, 2):
        assert all("etp_size" in each and "adapters" in each for each in said)


@pytest.mark.slow
def test_adapters_and_hooks_on_what_ranks_would_share_are_refused() -> None:
    changes: dict[str, Any] = DIVISIBLE
    model = small("mixtral", **changes)
    hook = model.model.layers[1].self_attn.v_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"MixtralAttention\.v_proj has hooks"):
        penstock.parallelize(model, tp_size=2)
    hook.remove()
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: None)  # steps run attention apart
    with pytest.raises(ConfigError, match=r"MixtralDecoderLayer has hooks"):
        penstock.parallelize(model, tp_size=2)
    hook.remove()
    with pytest.raises(ConfigError, match=r"MixtralAttention\.q_proj has adapters"):
        penstock.parallelize(with_adapters(model), tp_size=2)


def share_and_misuse(rank: int, world: int) -> list[str]:
    """What is said to ranks that share attention and do what they cannot; a copy is a model of its own."""
    changes: dict[str, Any] = DIVISIBLE
    model = penstock.parallelize(small("qwen3_moe", **changes), tp_size=world, plan="flowmoe")
    batch, said = Batch(), []
    given = batch.inputs(0, 2)
    copied = copy.deepcopy(model)
    copied(**given).loss.backward()
    assert all(p.grad is None for p in model.parameters())
    loss = model(**given).loss
    assert loss.item() == copied(**given).loss.item()
    loss.backward()
    of_both = [torch.nn.utils.clip_grad_norm_(each.parameters(), math.inf) for each in (model, copied)]
    assert of_both[0].equal(of_both[1])
    model.zero_grad()
    prompt = given["input_ids"].clone()
    prompt[1, rank] = 7 + rank
    for run in (
        lambda: model(**batch.inputs(rank, rank + 1)),
        lambda: model(**given, logits_to_keep=1),
        lambda: model.eval()(prompt),
        lambda: step_with_another_head(model, given),
    ):
        with pytest.raises(ValueError) as caught:
            run()
        said.append(str(caught.value))
    return said


def step_with_another_head(model: Any, given: dict[str, Tensor]) -> None:
    model.lm_head.forward = lambda x: x
    model.train()(**given)


def test_what_ranks_that_share_attention_cannot_do_is_refused(ranks: Pools) -> None:
    wanted = (
        "share attention .* were given different samples",
        "^tp_size = 2: logits_to_keep in a training step",
        r"share attention \(tp_size = 2\) were given different tokens",
        "Linear.forward was replaced in this one module",
    )
    for said in ranks(2).run(share_and_misuse, 2):
        for words, text in zip(wanted, said, strict=True):
            assert re.search(words, text), text


def change_what_is_shared(rank: int, world: int) -> None:
    """Steps are refused after each change, and go on when it is undone."""
    from peft import LoraConfig, get_peft_model

    del rank
    changes: dict[str, Any] = DIVISIBLE
    model = penstock.parallelize(small("qwen3_moe", **changes), tp_size=world, plan="flowmoe")
    given, (dense, moe) = Batch().inputs(0, 2), model.model.layers
    wanted = model(**given).loss.item()
    for register in (
        model.model.embed_tokens.register_forward_hook,
        moe.self_attn.register_forward_hook,
        moe.self_attn.o_proj.register_full_backward_pre_hook,
        moe.register_forward_pre_hook,
        dense.register_forward_hook,
        dense.mlp.register_forward_hook,
    ):
        hook = register(lambda *_: None)
        with pytest.raises(ConfigError, match=r"^tp_size = 2: .* given hooks"):
            model(**given)
        hook.remove()
    head, model.lm_head = model.lm_head, torch.nn.Linear(32, 64)
    with pytest.raises(ConfigError, match=r"^tp_size = 2: Linear was replaced"):
        model(**given)
    model.lm_head = head
    head.probe = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"^tp_size = 2: .* was replaced"):
        model(**given)
    del head.probe
    model.enable_input_require_grads()
    assert model(**given).loss.item() == wanted
    for name in ("embed_tokens", "q_proj"):
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=[name]))
        with pytest.raises(ConfigError, match=r"^tp_size = 2: .* wrapped"):
            adapted(**given)
        adapted.unload()
    assert model(**given).loss.item() == wanted


def test_what_ranks_share_can_only_be_changed_before(ranks: Pools) -> None:
    ranks(2).run(change_what_is_shared, 2)


def refuse_late(rank: int, world: int) -> None:
    """First by the plan, then by the last parameter that the runtime looks at, in several layouts."""
    changes: dict[str, Any] = DIVISIBLE
    model, given = small("mixtral", **changes), Batch().inputs(rank, rank + 1)
    model.activation_checkpointing_enable()
    model(**given).loss.backward()
    before, grads = {name: p.detach().clone() for name, p in model.named_parameters()}, grads_of(model)
    hooks = hooks_of(model)
    names, joined = model.state_dict().keys(), len(Sockets.now().targets)
    head = model.lm_head.weight
    layouts: list[dict[str, Any]] = [{}, {"etp_size": world}, {"tp_size": world}]
    for layout, (plan, weight, words) in product(
        layouts,
        (
            ("nonsense", head, "nonsense"),
            ("flowmoe", torch.nn.Parameter(head.to("meta")), "lm_head.weight is on meta"),
        ),
    ):
        model.lm_head.weight = weight
        with pytest.raises(ValueError, match=words):
            penstock.parallelize(model, plan=plan, **layout)
        model.lm_head.weight = head
        check_unchanged(model, before, grads)
        assert model.state_dict().keys() == names
        model.load_state_dict(model.state_dict())
        assert hooks_of(model) == hooks and len(Sockets.now().targets) == joined
    model(**given).loss.backward()
    model.zero_grad()
    penstock.parallelize(model, ep_size=world, plan="flowmoe")
    model(**given).loss.backward()
    held = model.model.layers[0].mlp.experts.down_proj
    assert (
        held.untyped_storage().nbytes()
        == held.nbytes
        == before["model.layers.0.mlp.experts.down_proj"].nbytes / world
    )


def hooks_of(model: Any) -> list[int]:
    return [len(module._forward_hooks) for module in model.modules()]


def check_unchanged(model: Any, before: dict[str, Tensor], grads: dict[str, Tensor]) -> None:
    assert all(p.equal(before[name]) for name, p in model.named_parameters())
    assert all(grad.equal(grads[name]) for name, grad in grads_of(model).items())
    assert len(grads_of(model)) == len(grads)
    assert model.is_activation_checkpointing
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_model_that_was_refused_is_what_it_was(ranks: Pools) -> None:
    ranks(2).run(refuse_late, 2)
