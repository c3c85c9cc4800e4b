"""Models of unknown families: their parts are found by structure, and checked before they are used.

Shapes: B samples, L tokens per sample, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.adapt.adapters import core_of
from penstock.adapt.decoder import CutLayer, Decoder, Inputs
from penstock.adapt.ep_plan import EpPlan, modules_of
from penstock.adapt.family import Family
from penstock.adapt.forms import TRAITS
from penstock.moe import SampleKeys

INSIDE = ".base_layer"
"""Part of a path that peft adds where it has put a wrapper around a module."""

PATH = re.compile(r"(?:(?P<base>.+)\.)?(?P<layers>\w+)\.\d+\.(?P<block>\w[\w.]*)\.(?P<experts>\w+)")
ROUTER = re.compile("Router|Gat(e|ing)$")
COEFFICIENT = re.compile("aux.*coef")
"""Pattern in the name of the weight of a router loss."""

LIMIT = 1e-4
"""Relative difference up to which two computations of one value in float32 agree."""

ROUNDING = 1e-6
"""Relative error of a loss in float32."""

SAMPLES, LENGTH = 2, 7


def guess(model: nn.Module, ep_plan: EpPlan | None) -> Family:
    """Guess where a model has its parts. Raises ValueError with what is not understood.

    ep_plan: which of its modules are experts; None = all that look like experts.
    """
    kind, config = type(model).__name__, getattr(model, "config", None)
    traits = (path for path, each in model.named_modules() if all(hasattr(each, t) for t in TRAITS))
    found = [path.removesuffix(INSIDE * path.count(INSIDE)) for path in traits]
    if ep_plan is not None:
        planned = modules_of(ep_plan, model)
        found = [path for path in found if path in planned]
    if config is None or not found:
        raise ValueError(
            f"{kind} is of no family that Penstock knows, and no module of it holds experts with stacked "
            "weights, as transformers 5 has them (use_experts_implementation)"
        )
    matches = [match for path in found if (match := PATH.fullmatch(path))]
    places = {match.group("base", "layers", "block", "experts") for match in matches}
    if len(places) != 1:
        raise ValueError(f"{kind}: experts stand in different places of its layers: {', '.join(found)}")
    base, layers, block, experts = places.pop()
    holder, decoder = model.get_submodule(found[0].rpartition(".")[0]), model.get_submodule(base or "")
    norms = [name for name, _ in decoder.named_children() if name.endswith("norm")]
    routers = [name for name, each in holder.named_children() if ROUTER.search(type(core_of(each)).__name__)]
    for what, names in (("norm after its layers", norms), (f"router in {block}", routers)):
        if len(names) != 1:
            raise ValueError(f"{kind}: it should have one {what}, and has {', '.join(names) or 'none'}")
    return Family(
        name=config.model_type,
        base=base or "",
        layers=layers,
        norm=norms[0],
        block=block,
        router=routers[0],
        experts=experts,
    )


def check(model: Any, decoder: Decoder) -> None:
    """Raise ValueError unless the model in pieces computes what it does whole: logits and all gradients.

    Runs some random tokens with all experts here, in evaluation and in training, where both draw the same
    random numbers: dropout of what the experts return would be left out.
    """
    was_training = model.training
    recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if recomputes:
        model.gradient_checkpointing_disable()
    try:
        for training in (False, True):
            _compare(model.train(training), decoder)
    finally:
        model.train(was_training)
        if recomputes:
            model.gradient_checkpointing_enable()


def _compare(model: Any, decoder: Decoder) -> None:
    tokens_BL = _tokens(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    with _same_numbers():
        whole = _outcome(decoder.plain(model, input_ids=tokens_BL, use_cache=False).logits, trained)
    with _same_numbers():
        parts = _outcome(_in_pieces(decoder, tokens_BL).view_as(whole[0]), trained)
    for what, one, other in zip(("logits", *["a gradient"] * len(trained)), whole, parts, strict=True):
        if not (one - other).norm() <= LIMIT * one.norm():  # written so that NaN is refused, too
            raise ValueError(
                f"{type(model).__name__} is of no family that Penstock knows, and cut where it calls its "
                f"experts it computes something else than whole: {what} of shape {list(one.shape)}. What its "
                "layers do with the outputs of their MoE blocks was not understood: describe the family, see "
                "docs/extending.md"
            )


def coefficient_of(model: Any, decoder: Decoder) -> str | None:
    """Return the model's name for its router loss's weight; None if training has to leave this loss out.

    That is so if a step would compute another loss, or if the model's own code for the loss fails. The loss
    is compared with that of the whole model for some random tokens.
    """
    try:
        return _coefficient(model, decoder)
    except Exception:  # foreign code may raise anything, and the user has not asked for this loss yet
        return None


def _coefficient(model: Any, decoder: Decoder) -> str | None:
    usual: str | None = decoder.family.coefficient
    names: list[str] = [name for name in vars(model) if COEFFICIENT.search(name)]
    tokens_BL = _tokens(model)
    given = {"input_ids": tokens_BL, "labels": tokens_BL, "use_cache": False}
    with torch.no_grad(), _same_numbers():
        try:
            out = decoder.plain(model, **given, output_router_logits=True)
        except TypeError:  # the model has no such argument
            return usual
    if getattr(out, "aux_loss", None) is None:
        return usual
    with torch.no_grad(), _same_numbers():
        added = out.loss - decoder.plain(model, **given, output_router_logits=False).loss
    logits_TE = _logits(decoder, tokens_BL)
    top_k = next(part.cut.top_k for part in decoder.parts if isinstance(part, CutLayer))
    chosen_TE = torch.zeros_like(logits_TE).scatter(1, logits_TE.topk(top_k, dim=1).indices, 1)
    aux = logits_TE.shape[1] * (chosen_TE.mean(0) * logits_TE.softmax(dim=1).mean(0)).sum()
    if not (aux - out.aux_loss).abs() <= LIMIT * aux:
        return None
    for name in names:
        weight = getattr(model, name)
        if weight is None:
            continue
        expected = weight * aux
        rounding = ROUNDING * out.loss.abs()  # `added` is the difference of two losses
        if (added - expected).abs() <= LIMIT * expected.abs() + rounding:
            return name
    return None


def _logits(decoder: Decoder, tokens_BL: Tensor) -> Tensor:
    """Return the logits of the routers of all layers, one below the other."""
    found: list[Tensor] = []
    with torch.no_grad(), _same_numbers():
        _in_pieces(decoder, tokens_BL, found)
    return torch.cat(found).float()


def _tokens(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    size = model.get_input_embeddings().weight.shape[0]
    tokens_BL: Tensor = torch.randint(size, (SAMPLES, LENGTH), generator=generator).to(model.device)
    return tokens_BL


@contextmanager
def _same_numbers() -> Iterator[None]:
    """Draw the same random numbers every time inside this context; afterwards they continue as before."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def _in_pieces(decoder: Decoder, tokens_BL: Tensor, logits: list[Tensor] | None = None) -> Tensor:
    """Return the model's logits, computed in pieces; those of routers are added to `logits`."""
    keys = SampleKeys(0, torch.arange(len(tokens_BL)))
    decoder.begin(Inputs(), keep_logits=False)
    h_BLM = decoder.embed(tokens_BL, keys)
    for part in decoder.parts:
        residual_BLM, x_TM = part.attend(h_BLM, keys)
        if logits is not None and isinstance(part, CutLayer):
            logits.append(part.cut.caught.logits_TE)
        out_TM = part.here() if isinstance(part, CutLayer) else x_TM
        h_BLM = part.add(residual_BLM, out_TM, keys)
    return decoder.logits(h_BLM)


def _outcome(logits_BLV: Tensor, trained: Sequence[Tensor]) -> list[Tensor]:
    """Return the logits, and the gradients of a random sum of them."""
    direction = torch.randn(logits_BLV.shape, generator=torch.Generator().manual_seed(1))
    weighed = (logits_BLV * direction.to(logits_BLV)).sum()
    grads = torch.autograd.grad(weighed, trained, allow_unused=True, materialize_grads=True)
    return [logits_BLV.detach(), *grads]
