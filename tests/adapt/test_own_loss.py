"""Losses that a user makes of a scheduled model: gradients are those of one process, averaged over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

import penstock
from penstock.adapt.scheduled import stack_of
from penstock.decision import Decision
from penstock.step.shape import Updating
from tests.support.adapted import (
    DIVISIBLE,
    Batch,
    check_grads,
    distance,
    exactly,
    grads_of,
    part_of,
    small,
    with_adapters,
    without_labels,
)
from tests.support.ranks import Pools

LIMIT = 1e-10
WEIGHT = 0.02
Given = dict[str, Tensor]
Loss = Callable[[Any, Given], Tensor]


def cross_entropy(logits_BLV: Tensor, labels_BL: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean over the tokens that have a label."""
    logits_TV, labels_T = logits_BLV[:, :-1].flatten(0, 1), labels_BL[:, 1:].flatten()
    return F.cross_entropy(logits_TV, labels_T, label_smoothing=smoothing)


def of_logits(model: Any, given: Given) -> Tensor:
    return cross_entropy(model(**without_labels(given)).logits, given["labels"], 0.1)


def of_tuple(model: Any, given: Given) -> Tensor:
    """Positional arguments and a tuple, as older code has them."""
    logits_BLV = model(given["input_ids"], given.get("attention_mask"), return_dict=False)[0]
    return cross_entropy(logits_BLV, given["labels"])


def of_last_token(model: Any, given: Given) -> Tensor:
    out = model(**without_labels(given), logits_to_keep=2, output_hidden_states=True)
    loss: Tensor = out.logits[:, -1].logsumexp(-1).mean() + out.hidden_states[-1].square().mean()
    return loss


def of_critic(model: Any, given: Given) -> Tensor:
    """A head of one's own beside the model's, both on what the decoder returns."""
    hidden_BLM = model.model(given["input_ids"], logits_to_keep=5).last_hidden_state  # no decoder reads that
    values_BL = model.critic(hidden_BLM).squeeze(-1)
    loss: Tensor = values_BL.square().mean() + model.lm_head(hidden_BLM[:, -1]).logsumexp(-1).mean()
    return loss


def of_critic_alone(model: Any, given: Given) -> Tensor:
    """The first use of a head comes before the decoder's, whose backward it so follows."""
    other: Tensor = model.critic(torch.ones_like(model.critic.weight)).mean()
    return other * of_critic(model, given)


def log_probs(model: Any, given: Given) -> Tensor:
    logits_BLV = model(**without_labels(given)).logits[:, :-1].log_softmax(-1)
    found_B: Tensor = logits_BLV.gather(2, given["input_ids"][:, 1:, None]).sum((1, 2))
    return found_B


def of_pairs(model: Any, given: Given) -> Tensor:
    """Preference of each sample to its mirror image: two forward passes, and two without gradients."""
    mirrored = {**given, "input_ids": given["input_ids"].flip(1)}
    with torch.no_grad():
        before = log_probs(model, given) - log_probs(model, mirrored)
    margin = log_probs(model, given) - log_probs(model, mirrored)
    return -F.logsigmoid(0.1 * (margin - 0.5 * before)).mean()


def of_router(model: Any, given: Given) -> Tensor:
    """With the balance loss of all ranks' samples, which a scheduled model hands out."""
    out = model(**without_labels(given), output_router_logits=True)
    balance: Tensor = out.aux_loss
    return cross_entropy(out.logits, given["labels"]) + WEIGHT * balance


def of_router_logits(model: Any, given: Given) -> Tensor:
    """With a loss of what routers return, by the decoder's own call."""
    out = model.model(given["input_ids"], given.get("attention_mask"), output_router_logits=True)
    loss: Tensor = out.last_hidden_state.tanh().mean()
    for logits_TE in out.router_logits:
        loss = loss + logits_TE.logsumexp(-1).square().mean()
    return loss


def of_classes(model: Any, given: Given) -> Tensor:
    """The model's own loss of classes: its head has no vocabulary."""
    labels_B = given["input_ids"][:, 0] % model.config.num_labels
    loss: Tensor = model(given["input_ids"], given["attention_mask"], labels=labels_B).loss
    return loss


def of_function(model: Any, given: Given) -> Tensor:
    """The loss of labels that the model's `loss_function` makes, with that of its routers."""
    model.loss_function = lambda logits, labels, **_: cross_entropy(logits, labels, 0.2)
    loss: Tensor = model(**given).loss
    return loss


def of_both(model: Any, given: Given) -> Tensor:
    """Two batches of other lengths in one backward, the later of them used first."""
    short = {name: each[:, :7] for name, each in given.items()}
    one, other = of_logits(model, given), of_logits(model, short)
    return other * 2 + one


def of_weighed_router(model: Any, given: Given) -> Tensor:
    """Ranks weigh the balance loss differently: gradients are those of the mean."""
    out = model(**without_labels(given), output_router_logits=True)
    balance: Tensor = out.aux_loss
    return cross_entropy(out.logits, given["labels"]) + (given["input_ids"][0, 0] % 5) * balance


def leave(model: Any) -> None:
    del model


def thaw_head(model: Any) -> None:
    model.lm_head.requires_grad_(True)


def replace_head(model: Any) -> None:
    torch.manual_seed(6)
    model.lm_head = nn.Linear(32, 61, bias=False, dtype=torch.float64)


def evaluate_decoder(model: Any) -> None:
    model.model.eval()


@dataclass(frozen=True)
class Case:
    """A loss of one's own, on a model, with a schedule."""

    loss: Loss
    family: str = "qwen3_moe"
    plan: str | Decision = "flowmoe"
    changes: dict[str, Any] = field(default_factory=dict)
    ep_size: int | None = None
    etp_size: int = 1
    tp_size: int = 1
    adapters: bool = False
    frozen: str = ""  # parameters with this in their names
    again: bool = False  # layers are computed again
    bound_factor: float | None = None
    summed: bool = False
    padded: bool = False
    sharded: bool = False
    then: Callable[[Any], None] = leave  # is done to the model afterwards
    classes: int = 0  # the model is one of sequences; 0: of language
    uneven: bool = False  # the last rank has fewer samples
    weighed: bool = False  # ranks weigh their losses differently, also those that share samples

    def model(self) -> Any:
        changes = {**(DIVISIBLE if self.tp_size > 1 else {}), **self.changes}
        model = small(self.family, dtype=torch.float64, **changes)
        if self.classes:
            model.config.num_labels = self.classes
            torch.manual_seed(4)
            model = AutoModelForSequenceClassification.from_config(model.config).double().train()
        model.critic = nn.Linear(32, 1, dtype=torch.float64)
        torch.manual_seed(3)
        nn.init.normal_(model.critic.weight)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not self.frozen or self.frozen not in name)
        return with_adapters(model) if self.adapters else model

    def parts(self, world: int) -> list[Given]:
        batch = Batch(samples=2 * world, padded=self.padded, length=13)
        ends = [2 * (rank + 1) for rank in range(world)]
        ends[-1] -= self.uneven
        return [batch.inputs(2 * rank, end) for rank, end in enumerate(ends)]

    def losses(self, model: Any, parts: list[Given]) -> list[Tensor]:
        """The loss of every rank, on one process; that of routers is of all samples."""
        if self.loss not in (of_router, of_weighed_router):
            return [self.loss(model, part) for part in parts]
        whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        out = model(**without_labels(whole), output_router_logits=True)
        logits = out.logits.split([len(part["labels"]) for part in parts])
        losses = []
        for each, part in zip(logits, parts, strict=True):
            weight = WEIGHT if self.loss is of_router else part["input_ids"][0, 0] % 5
            losses.append(cross_entropy(each, part["labels"]) + weight * out.aux_loss)
        return losses

    def check(self, rank: int, world: int) -> dict[str, float]:
        """Distances of this rank's loss and gradients from those of one process."""
        tp_size = min(self.tp_size, world)
        place = rank // tp_size
        parts, wanted, ours = self.parts(groups := world // tp_size), self.model(), self.model()
        penstock.parallelize(
            ours,
            plan=self.plan,
            ep_size=self.ep_size,
            etp_size=(etp_size := min(self.etp_size, world)),
            tp_size=tp_size,
            bound_factor=self.bound_factor,
            gradient_reduction="sum" if self.summed else "mean",
            updating=Updating(clips=False) if self.sharded else None,
        )
        for each in (wanted, ours):
            self.then(each)
        if self.again:
            ours.activation_checkpointing_enable()
        optimizer = None
        if self.sharded:
            optimizer = penstock.ShardedAdamW(
                stack_of(ours), [{"params": list(ours.parameters()), "weight_decay": 0.01}], lr=1e-3
            )
        with exactly(torch.float64):
            for _ in range(2):  # the second is accumulated, with bounds of rows from the first
                losses = self.losses(wanted, parts)
                weights = [self.weight(range(at * tp_size, (at + 1) * tp_size)) for at in range(groups)]
                total = torch.stack([w * each for w, each in zip(weights, losses, strict=True)]).sum()
                (total if self.summed else total / groups).backward()
                loss = self.loss(ours, parts[place])
                (self.weight([rank]) * loss).backward()
        if optimizer is not None:
            torch.optim.AdamW(wanted.parameters(), lr=1e-3).step()
            optimizer.step()
            theirs, mine = (dict(each.named_parameters()) for each in (wanted, ours))
        else:
            theirs, mine = grads_of(wanted), grads_of(ours)
            whole = dict(wanted.named_parameters())
            unused = {name: torch.zeros_like(whole[name]) for name in mine.keys() - theirs.keys()}
            theirs |= unused
        experts, named = rank // etp_size % (self.ep_size or world // etp_size), dict(ours.named_parameters())
        # Some gradients cancel to the rounding of their terms, as those of a bias of keys do.
        least = 1e-4 * max(float(each.norm()) for each in theirs.values())
        found = {
            name: float((grad - part).norm()) / max(float(part.norm()), least)
            for name, grad in mine.items()
            for part in [part_of(named[name], theirs[name], experts)]
        }
        return {**found, "loss": distance(loss.detach(), losses[place].detach())}

    def weight(self, ranks: Sequence[int]) -> float:
        """The mean of the weights that these ranks give their losses."""
        return sum(1.0 + rank for rank in ranks) / len(ranks) if self.weighed else 1.0


CASES = {
    "logits": Case(of_logits),
    "tied": Case(of_logits, "mixtral", changes={"tie_word_embeddings": True}),
    "padded": Case(of_logits, "deepseek_v3", "penstock", padded=True),
    "tuple": Case(of_tuple, "gpt_oss", "sequential"),
    "last token": Case(of_last_token, "olmoe", "fsmoe"),
    "critic": Case(of_critic),
    "critic first": Case(of_critic_alone),
    "pairs": Case(of_pairs, "mixtral"),
    "both": Case(of_both, changes={"tie_word_embeddings": True}),
    "adapters": Case(of_logits, adapters=True),
    "frozen head": Case(of_logits, frozen="lm_head"),
    "frozen layers": Case(of_critic, frozen="model."),
    "frozen layers, critic first": Case(of_critic_alone, frozen="model."),
    "again": Case(of_pairs, again=True),
    "bounded": Case(of_logits, bound_factor=1.0),
    "summed": Case(of_logits, summed=True),
    "replicas": Case(of_logits, ep_size=1),
    "shards of experts": Case(of_pairs, "gpt_oss", etp_size=2),
    "shards of experts, sharded": Case(of_critic, etp_size=2, sharded=True),
    "sharded": Case(of_critic, sharded=True),
    "router": Case(of_router, "mixtral", padded=True),
    "classes": Case(of_classes, classes=3, padded=True),
    "classes, summed": Case(of_classes, "mixtral", classes=3, padded=True, summed=True),
    "loss function": Case(of_function, "deepseek_v3"),
    "router logits": Case(of_router_logits, "mixtral", "fsmoe", padded=True),
    "router logits, again": Case(of_router_logits, "gpt_oss", padded=True, again=True),
    "router logits, uneven": Case(of_router_logits, padded=True, uneven=True),
    "router, weighed by rank": Case(of_weighed_router),
    "frozen, thawed head": Case(of_logits, frozen=".", then=thaw_head),
    "frozen, another head": Case(of_logits, frozen=".", then=replace_head),
    "another head": Case(of_logits, then=replace_head),
    "decoder in evaluation": Case(of_logits, then=evaluate_decoder),
    "router, summed": Case(of_router, summed=True),
    "uneven": Case(of_logits, uneven=True),
    "shared": Case(of_logits, tp_size=2, padded=True),
    "shared, tied": Case(of_both, "mixtral", tp_size=2, changes={"tie_word_embeddings": True}),
    "shared, tuple": Case(of_tuple, "gpt_oss", "sequential", tp_size=2),
    "shared, last token": Case(of_last_token, "olmoe", "fsmoe", tp_size=2),
    "shared, critic": Case(of_critic, "deepseek_v3", "penstock", tp_size=2),
    "shared, critic first": Case(of_critic_alone, tp_size=2, weighed=True),
    "shared, pairs": Case(of_pairs, "mixtral", tp_size=2, again=True, weighed=True),
    "shared, frozen layers": Case(of_critic, tp_size=2, frozen="model.", weighed=True),
    "shared, frozen head": Case(of_critic, tp_size=2, frozen="lm_head"),
    "shared, sharded": Case(of_critic, tp_size=2, sharded=True),
    "shared, bounded": Case(of_logits, tp_size=2, bound_factor=1.0),
    "shared, summed": Case(of_critic, tp_size=2, summed=True, weighed=True),
    "shared, router": Case(of_router, "mixtral", tp_size=2, padded=True),
    "shared, router logits": Case(of_router_logits, "gpt_oss", tp_size=2, padded=True, weighed=True),
    "shared, classes": Case(of_classes, tp_size=2, classes=3, padded=True),
    "shared, loss function": Case(of_function, "deepseek_v3", tp_size=2),
    "shared, replicas": Case(of_pairs, tp_size=2, ep_size=1, etp_size=2, uneven=True),
    "shared, routers of all tokens": Case(
        of_router_logits,
        "qwen3_moe",
        Decision(schedule="penstock", expert_form="s2"),
        tp_size=2,
        weighed=True,
    ),
    "shared, copies of tokens": Case(
        of_router_logits, "gpt_oss", Decision(schedule="flowmoe", expert_form="baseline"), tp_size=2
    ),
    "shared, thawed head": Case(of_logits, tp_size=2, frozen=".", then=thaw_head),
}


def check_all(rank: int, world: int, names: list[str]) -> dict[str, dict[str, float]]:
    return {name: CASES[name].check(rank, world) for name in names}


SHARED = [name for name, case in CASES.items() if case.tp_size > 1]
BY_TWO = ["shared, critic", "shared, router", "shared, replicas", "shared, routers of all tokens"]
BY_FOUR = ["shared, tied", "shared, critic first", "shared, router logits", "shared, classes"]
"""Of four ranks, those of which two share samples, and those of which all do."""

LIKE_ALONE = [
    f"shared, {name}" for name in ("tuple", "last token", "frozen head", "bounded", "loss function")
]
"""Nothing in them depends on who shares samples."""

ON_TWO = [
    pytest.param(name, marks=pytest.mark.soak if name in (*BY_TWO, *BY_FOUR, *LIKE_ALONE) else ())
    for name in CASES
]


@pytest.mark.few(14)
@pytest.mark.parametrize("name", ON_TWO)
def test_gradients_of_ones_own_loss_are_those_of_one_process(ranks: Pools, name: str) -> None:
    for found in ranks(2).run(check_all, 2, [name]):
        assert max(found[name].values()) < LIMIT, found


@pytest.mark.usefixtures("alone")
def test_router_logits_are_those_of_the_run_that_counts() -> None:
    """Where rows exceed their bounds, the forward half runs again."""
    wanted, ours = (small("mixtral", dtype=torch.float64) for _ in range(2))
    penstock.parallelize(ours, plan="flowmoe", bound_factor=1.0)
    with exactly(torch.float64):
        for tokens_BL in (torch.arange(3, 35).view(4, 8), torch.full((4, 8), 5)):
            for model in (wanted, ours):
                of_router_logits(model, {"input_ids": tokens_BL}).backward()
    bounds = stack_of(ours).bounds
    assert bounds.repeats == 1
    mine, theirs = grads_of(ours), grads_of(wanted)
    assert theirs and all(distance(mine[name], theirs[name]) < LIMIT for name in theirs)


@pytest.mark.parametrize(
    ("tp_size", "names"),
    [
        (2, BY_TWO),
        (4, BY_FOUR),
        *(pytest.param(tp_size, SHARED, marks=pytest.mark.soak) for tp_size in (2, 4)),
    ],
    ids=str,
)
def test_four_ranks_that_share_samples(ranks: Pools, tp_size: int, names: list[str]) -> None:
    for found in ranks(4).run(check_shared, 4, tp_size, names, timeout_s=300):
        assert max(map(max, (each.values() for each in found.values()))) < LIMIT, found


def check_shared(rank: int, world: int, tp_size: int, names: list[str]) -> dict[str, dict[str, float]]:
    return {name: replace(CASES[name], tp_size=tp_size).check(rank, world) for name in names}


@pytest.mark.slow
def test_on_one_rank() -> None:
    of_each_loss = {case.loss: name for name, case in CASES.items()}
    for name, found in check_all(0, 1, [*of_each_loss.values()]).items():
        assert max(found.values()) < LIMIT, (name, found)


@pytest.mark.parametrize("labelled", [False, True])
def test_a_tuple_has_the_router_loss_where_the_model_has_it(labelled: bool) -> None:
    wanted, model = small("mixtral"), penstock.parallelize(small("mixtral"), plan="flowmoe")
    given, outs = Batch().inputs(), []
    for each in (wanted, model):
        each.loss_function = lambda logits, labels, *_, **__: cross_entropy(logits, labels, 0.2)
        out = each(
            **(given if labelled else without_labels(given)), output_router_logits=True, return_dict=False
        )
        outs.append(out[: 2 + labelled])  # losses and logits
        sum(each.square().mean() for each in outs[-1]).backward()
    assert all(distance(mine.detach(), whole.detach()) < 1e-5 for whole, mine in zip(*outs, strict=True))
    check_grads(model, wanted)


def of_labels(model: Any, given: Given) -> Tensor:
    loss: Tensor = model(**given).loss
    return loss


@pytest.mark.parametrize("again", [{}, {"create_graph": True}], ids=str)
@pytest.mark.parametrize("then", [of_logits, of_labels])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_backward_that_is_refused_leaves_nothing_for_the_next(then: Loss, again: dict[str, bool]) -> None:
    """Gradients of the head are made before a step's own backward can be refused."""
    wanted, model = small("qwen3_moe"), penstock.parallelize(small("qwen3_moe"), plan="flowmoe")
    for each in (wanted, model):
        one, other = of_logits(each, Batch().inputs()), then(each, Batch(seed=6).inputs())
        one.backward(retain_graph=True)
        if each is model:
            with pytest.raises(RuntimeError):
                one.backward(**again)
        other.backward()
    check_grads(model, wanted)


def penalised(rank: int, first: bool) -> None:
    """The loss of labels is that of all ranks, whatever is done with gradients of others."""
    wanted, model = small("qwen3_moe"), small("qwen3_moe")
    penstock.parallelize(model, plan="flowmoe", gradient_reduction="sum")

    def penalty(of: Any) -> Tensor:
        return 0.1 * torch.stack([p.square().sum() for p in of.parameters()]).sum()

    for each, given in (wanted, Batch().inputs()), (model, Batch().inputs(2 * rank, 2 * rank + 2)):
        before = penalty(each) if first else None
        loss = of_labels(each, given)
        (loss + (penalty(each) if before is None else before)).backward()
    check_grads(model, wanted, rank)


@pytest.mark.parametrize("first", [False, True])
def test_a_term_of_weights_beside_labels_counts_once(ranks: Pools, first: bool) -> None:
    ranks(2).run(penalised, first)


def own_beside_labels(rank: int) -> None:
    """The head is called after the forward pass of another loss, and its gradient is still its own loss's."""
    wanted, model = small("qwen3_moe"), small("qwen3_moe")
    penstock.parallelize(model, plan="flowmoe", gradient_reduction="sum")
    for each, first, last in (wanted, 0, 4), (model, 2 * rank, 2 * rank + 2):
        given = Batch().inputs(first, last)
        hidden = each.model(**without_labels(given)).last_hidden_state
        loss = of_labels(each, given)
        (each.lm_head(hidden).square().sum() + loss).backward()
    check_grads(model, wanted, rank)


def test_a_head_that_is_called_late_has_the_gradient_of_its_loss(ranks: Pools) -> None:
    ranks(2).run(own_beside_labels)
