"""Models of unknown families: their parts are found by structure, and checked before they are used.

A step hands hidden states from layer to layer, each layer's output to the next, and nothing else; what else a
layer is called with is recorded before the first one runs. So it is looked at, on some tokens, whether a
decoder is such a chain.
Shapes: B samples, L tokens per sample, M hidden size, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from penstock.adapt.cut import Caught
from penstock.adapt.decoder import CutLayer, Decoder, Inputs, LayerCall, WholeLayer
from penstock.config import ConfigError
from penstock.device import device_of
from penstock.families.adapters import core_of
from penstock.families.described import in_one_line
from penstock.families.experts import TRAITS
from penstock.families.known import Family
from penstock.moe import SampleKeys

SHOWN = 8
"""Most layers whose order a message shows."""


@dataclass(frozen=True)
class WatchedCall:
    """A call of a layer in a forward pass of the whole model.

    Attributes:
        layer: Number of the layer.
        entered: The first argument.
        others: All other arguments.
        returned: What the layer returned.
    """

    layer: int
    entered: Any
    others: LayerCall
    returned: Any

    @property
    def left(self) -> Tensor:
        """Hidden states after the layer."""
        left: Tensor = self.returned[0] if isinstance(self.returned, tuple) else self.returned
        return left


@dataclass(frozen=True)
class _Watched:
    calls: list[WatchedCall]
    normed: list[tuple[Tensor, Tensor]]
    last: list[Tensor]


@torch.no_grad()
def chain_of(decoder: Decoder, tokens_BL: Tensor) -> tuple[list[WatchedCall], str | None]:
    """Run the whole model, in evaluation mode, on these tokens, and compare its layers with a chain.

    Returns:
        The calls of the layers, and a clause about where they are no chain; None if they are one.

    Raises:
        ValueError: Where the model's own code does not run.
    """
    with _hooked(decoder) as watched, naming(decoder.model, "on random tokens"):
        decoder.plain(decoder.model, input_ids=tokens_BL, use_cache=False)
    broken = _unlike_a_chain(decoder, watched, tokens_BL)
    if broken is None:
        keys = SampleKeys(0, torch.arange(len(tokens_BL), device="cpu"))
        decoder.begin(Inputs())
        with naming(decoder.model, "where its layers only record how they are called"):
            decoder.embed(tokens_BL, keys)
        for call, recorded in zip(watched.calls, decoder.calls.of(keys).layers, strict=True):
            actual, wanted = _leaves(call.others), _leaves(recorded)
            for place in actual.keys() | wanted.keys():
                if not _same(actual.get(place), wanted.get(place)):
                    what = f"layer {call.layer} gets what earlier layers have computed"
                    return watched.calls, f"{what}, in its argument {place}"
    return watched.calls, broken


@contextmanager
def naming(model: nn.Module, when: str) -> Iterator[None]:
    """Turn what a model's own code raises inside this context into a ValueError that names the model."""
    try:
        yield
    except Exception as error:  # foreign code may raise anything
        raise ValueError(
            f"{type(model).__name__} cannot be scheduled: {when} its own code raises {in_one_line(error)}"
        ) from error


@contextmanager
def _hooked(decoder: Decoder) -> Iterator[_Watched]:
    """Record, inside this context, calls of layers, of the norm after them and of the decoder."""
    watched, hooks = _Watched([], [], []), []
    for number, layer in enumerate(decoder.layers):

        def note(_: Any, given: Any, named: dict[str, Any], returned: Any, number: int = number) -> None:
            others = dict(named)
            entered = given[0] if given else others.pop("hidden_states", None)  # as a `_Recorder` takes them
            watched.calls.append(WatchedCall(number, entered, LayerCall(given[1:], others), returned))

        hooks.append(layer.register_forward_hook(note, with_kwargs=True))

    def note_norm(_: Any, given: Any, named: dict[str, Any], returned: Any) -> None:
        watched.normed.append(((*given, *named.values())[0], returned))

    def note_last(_: Any, given: Any, returned: Any) -> None:
        del given
        watched.last.append(returned[0])

    norm = decoder.base.get_submodule(decoder.family.norm)
    hooks.append(norm.register_forward_hook(note_norm, with_kwargs=True))
    hooks.append(decoder.base.register_forward_hook(note_last))
    try:
        yield watched
    finally:
        for hook in hooks:
            hook.remove()


def _unlike_a_chain(decoder: Decoder, watched: _Watched, tokens_BL: Tensor) -> str | None:
    """Return in what a forward pass was none of a chain of layers; None if it was one."""
    calls, count = watched.calls, len(decoder.layers)
    shape = (*tokens_BL.shape, decoder.hidden_size)
    order = [call.layer for call in calls]
    if order != list(range(count)):
        shown = ", ".join(map(str, order[:SHOWN])) + (", ..." if len(order) > SHOWN else "")
        return f"its decoder calls its {count} layers in the order {shown or 'none'}, and not each once"
    for call in calls:
        kind = type(decoder.layers[call.layer]).__name__
        if isinstance(call.returned, tuple) and len(call.returned) > 1:
            return f"{kind} returns {len(call.returned)} values, more than hidden states"
        for hidden in (call.entered, call.left):
            if not isinstance(hidden, Tensor) or hidden.shape != shape:
                what = list(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
                return f"{kind} works on hidden states {what}, where {list(shape)} are expected"
    norm, (entered, left) = decoder.family.norm, watched.normed[-1] if watched.normed else (None, None)
    handed = [
        *((a.left, b.entered, f"between layers {a.layer} and {b.layer}") for a, b in pairwise(calls)),
        (calls[-1].left, entered, f"between its last layer and {norm}"),
        (left, watched.last[-1] if watched.last else None, f"after {norm}"),
    ]
    changed = next((where for one, other, where in handed if not _same(one, other)), None)
    return None if changed is None else f"its decoder changes hidden states {changed}"


def _leaves(call: LayerCall) -> dict[str, Any]:
    """Return tensors among arguments, also inside dictionaries and the like, by place."""
    named: dict[str, Any] = {str(number + 1): each for number, each in enumerate(call.arguments)}
    pairs, _ = tree_flatten_with_path({**named, **call.named})
    return {keystr(path): leaf for path, leaf in pairs if isinstance(leaf, Tensor)}


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other
    return one.shape == other.shape and torch.equal(one.to(other).nan_to_num(), other.nan_to_num())


EpPlan = Mapping[str, str]
"""Paths in the decoder, with `*` for the number of a layer, and the style of the module at each."""

EXPERTS: Final = "ep_dispatch_experts"
"""The style of modules whose experts are spread over ranks."""

WEIGHTS: Final = "grouped_gemm"
"""The style of the stacked weights of such modules, which follow the modules."""


def check_ep_plan(ep_plan: EpPlan) -> None:
    """Raise ConfigError for a plan with modules that cannot be spread, or without experts."""
    for path, style in ep_plan.items():
        if style not in (EXPERTS, WEIGHTS):
            why = f"only modules of experts ({EXPERTS}) and their weights ({WEIGHTS}) are spread over ranks"
            raise ConfigError(
                "ep_plan", f"{path}: {style}", why, "Leave it out; the model's own code runs it."
            )
    if EXPERTS not in ep_plan.values():
        why = "names no module of experts"
        raise ConfigError("ep_plan", dict(ep_plan), why, f'Add "layers.*.mlp.experts": "{EXPERTS}".')


def brought_by(model: nn.Module) -> EpPlan | None:
    """Return the plan in a model's configuration; None if it has none that spreads experts."""
    config = getattr(model, "config", None)
    text = None if config is None else config.get_text_config()
    plan: EpPlan | None = getattr(text, "base_model_ep_plan", None)
    return plan if plan and EXPERTS in plan.values() else None


def modules_of(ep_plan: EpPlan, model: nn.Module) -> list[str]:
    """Return the paths of the modules that a plan spreads."""
    wanted = [re.escape(path).replace(r"\*", r"\d+") for path, style in ep_plan.items() if style == EXPERTS]
    pattern = re.compile(rf"(?:.+\.)?(?:{'|'.join(wanted)})")
    return [path for path, _ in model.named_modules() if pattern.fullmatch(path)]


def check_spread(ep_plan: EpPlan, model: nn.Module, experts: list[nn.Module]) -> None:
    """Raise ConfigError unless a plan spreads exactly the experts that a model is known to have."""
    named = modules_of(ep_plan, model)
    if {id(model.get_submodule(path)) for path in named} != {id(each) for each in experts}:
        there = [path for path, each in model.named_modules() if any(each is one for one in experts)]
        why = f"names {', '.join(named) or 'no module'}, and the experts are {', '.join(there)}"
        hint = "Leave it out: where this model has its experts is known."
        raise ConfigError("ep_plan", dict(ep_plan), why, hint)


INSIDE = ".base_layer"
"""Part of a path that peft adds where it has put a wrapper around a module."""

PATH = re.compile(r"(?:(?P<base>.+)\.)?(?P<layers>\w+)\.\d+\.(?:(?P<block>\w[\w.]*)\.)?(?P<experts>\w+)")
NORM = re.compile(r"norm(_f)?$")
"""Pattern in the name of the norm after the layers."""

MOE = re.compile("expert|moe", re.IGNORECASE)
"""Pattern in the names of classes of modules with experts, of whatever form."""

ROUTER = re.compile("Router|Gat(e|ing)$")
COEFFICIENT = re.compile("aux.*coef")
"""Pattern in the name of the weight of a router loss."""

PLACEHOLDER = re.compile("_token_(id|index)$")
"""Pattern in the name of a setting that is a token for what is no text, or the beginning or end of one."""

LIMIT = 1e-4
"""Relative difference up to which two computations of one value in float32 agree."""

ROUNDINGS = 8
"""The same in types with fewer digits, in units of their precision."""

ROUNDING = 1e-6
"""Relative error of a loss in float32."""

SAMPLES, LENGTH = 2, 7


def guess(model: nn.Module, ep_plan: EpPlan | None) -> Family:
    """Guess where a model has its parts.

    Args:
        ep_plan: Which of its modules are experts; None = all that look like experts.

    Raises:
        ValueError: A part is not understood.
    """
    kind, config = type(model).__name__, getattr(model, "config", None)
    traits = (path for path, each in model.named_modules() if all(hasattr(each, t) for t in TRAITS))
    paths = [path.removesuffix(INSIDE * path.count(INSIDE)) for path in traits]
    if ep_plan is not None:
        planned = modules_of(ep_plan, model)
        paths = [path for path in paths if path in planned]
    if config is None or not paths:
        if not any(MOE.search(type(module).__name__) for module in model.modules()):
            raise ValueError(
                f"{kind} has no experts: Penstock spreads those of mixture-of-experts models over ranks. "
                "Train a dense model with transformers alone"
            )
        raise ValueError(
            f"{kind} is of no family that Penstock knows, and no module of it holds experts with stacked "
            "weights, as transformers 5 has them (use_experts_implementation)"
        )
    places = {
        match.group("base", "layers", "block", "experts") for match in map(PATH.fullmatch, paths) if match
    }
    if len(places) != 1:
        raise ValueError(f"{kind}: experts stand in different places of its layers: {', '.join(paths)}")
    base, layers, block, experts = places.pop()
    if block is None:
        raise ValueError(
            f"{kind} cannot be scheduled: its layers call router and experts themselves ({paths[0]}), and "
            "layers are cut in a block that calls both"
        )
    holder, decoder = model.get_submodule(paths[0].rpartition(".")[0]), model.get_submodule(base or "")
    norms = [name for name, _ in decoder.named_children() if NORM.search(name)]
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


def check(model: Any, decoder: Decoder, changed: Sequence[str] = ()) -> None:
    """Raise ValueError unless the model in pieces computes what it does whole: logits, loss and gradients.

    Runs some random tokens with all experts here, in evaluation and in training, where both draw the same
    random numbers: dropout of what the experts return would be left out.

    Args:
        changed: Names of the functions that are not those of transformers, for a family that is known.
    """
    was_training = model.training
    recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if recomputes:
        model.activation_checkpointing_disable()
    try:
        calls, broken = chain_of(decoder, _tokens(model.eval()))
        if broken is not None:
            raise ValueError(_refusal(model, broken, changed, NO_CHAIN))
        different = _compare_layers(decoder, calls)
        for training in (False, True):
            different = different or _compare(model.train(training), decoder)
        if different is not None:
            raise ValueError(_refusal(model, different, changed))
    finally:
        model.train(was_training)
        if recomputes:
            model.activation_checkpointing_enable()


NOT_UNDERSTOOD = (
    "{kind} is of no family that Penstock knows, and cut where it calls its experts it computes something "
    "else than whole: {different}. What its layers do with the outputs of their experts was not understood: "
    "describe the family, see docs/extending.md"
)
NO_CHAIN = (
    "{kind} cannot be scheduled: {different}. A step hands hidden states from layer to layer, [samples, "
    "tokens, hidden size], and nothing else"
)


def _refusal(model: Any, different: str, changed: Sequence[str], unknown: str = NOT_UNDERSTOOD) -> str:
    """Return the message about a difference. unknown: that of a family which is not known."""
    kind = type(model).__name__
    if changed:
        return (
            f"{kind}: {', '.join(changed)} is not the function that transformers defines for this family. "
            "Steps run the model cut where it calls its experts, with Penstock's own code for what follows, "
            f"and would compute something else than the model: {different}. Leave these functions as "
            "transformers has them, or put the change into modules that steps call whole: attention, norms, "
            "the router, shared experts, embeddings"
        )
    return unknown.format(kind=kind, different=different)


def _compare(model: Any, decoder: Decoder) -> str | None:
    """Return what the model computes differently in pieces; None if it is all the same."""
    tokens_BL = _tokens(model)
    experts = {id(p) for layer in range(len(decoder.parts)) for p in decoder.expert_parameters(layer)}
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in experts]
    with _same_numbers(tokens_BL.device), naming(model, "on random tokens"):
        whole = _outcome(decoder.plain(model, input_ids=tokens_BL, use_cache=False).logits, trained)
    with _same_numbers(tokens_BL.device), naming(model, "in the pieces that a step runs"):
        caught: list[Caught] = []
        logits_TV = decoder.logits(_in_pieces(decoder, tokens_BL, caught))
        parts = _outcome(logits_TV.view_as(whole[0]), trained)
    for what, one, other in zip(("logits", *["a gradient"] * len(trained)), whole, parts, strict=True):
        if not _agree(one, other):
            return f"{what} of shape {list(one.shape)}"
    del whole, parts
    return _compare_losses(decoder, tokens_BL, trained) or _compare_experts(decoder, caught)


def _compare_layers(decoder: Decoder, whole: Sequence[WatchedCall]) -> str | None:
    """Compare what layers by themselves make of the hidden states that they had in the whole model."""
    keys = SampleKeys(0, torch.arange(len(whole[0].entered), device="cpu"))
    for call, part in zip(whole, decoder.parts, strict=True):
        with (
            torch.no_grad(),
            naming(decoder.model, f"in layer {call.layer}, cut where it calls its experts,"),
        ):
            left = _through(part, call.entered, keys)
        if not _agree(call.left, left):
            return f"the output of layer {call.layer} ({type(part.layer).__name__})"
    return None


def _compare_losses(decoder: Decoder, tokens_BL: Tensor, trained: Sequence[Tensor]) -> str | None:
    with _same_numbers(tokens_BL.device), naming(decoder.model, "with labels"):
        given = {"input_ids": tokens_BL, "labels": tokens_BL, "use_cache": False}
        try:
            wanted: Tensor = decoder.plain(decoder.model, **given, output_router_logits=False).loss
        except TypeError:  # the model has no such argument
            wanted = decoder.plain(decoder.model, **given).loss
        whole = _outcome(wanted, trained)
    targets_BL = F.pad(tokens_BL[:, 1:], (0, 1), value=-100)
    with _same_numbers(tokens_BL.device):
        loss = decoder.head(_in_pieces(decoder, tokens_BL), targets_BL) / (targets_BL != -100).sum()
        parts = _outcome(loss.to(wanted), trained)
    if not abs(float(whole[0] - parts[0])) <= _limit(decoder.dtype, 0.25) * abs(float(whole[0])):
        return f"the loss ({float(whole[0]):.6g} by the model, {float(parts[0]):.6g} in a step)"
    different = [one for one, other in zip(whole[1:], parts[1:], strict=True) if not _agree(one, other)]
    return f"a gradient of the loss, of shape {list(different[0].shape)}" if different else None


def _compare_experts(decoder: Decoder, caught: Sequence[Caught]) -> str | None:
    """Compare the experts' own code with that of steps, which sorts rows by expert."""
    for part, call in zip(decoder.cut_layers, caught, strict=True):
        cut = part.cut
        trained = [p for p in cut.experts.parameters() if p.requires_grad]
        given = replace(call, x_TM=call.x_TM.detach().requires_grad_(), weights_Tk=call.weights_Tk.detach())
        with torch.enable_grad():
            own, ours = (_outcome(run(given), [given.x_TM, *trained]) for run in (cut.run, cut.run_rows))
        if not all(_agree(one, other) for one, other in zip(own, ours, strict=True)):
            return f"what {type(core_of(cut.experts)).__name__} returns, or its gradients"
    return None


def _agree(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= _limit(one.dtype) * one.norm())  # NaN agrees with nothing


def _limit(dtype: torch.dtype, roundings: float = ROUNDINGS) -> float:
    return max(LIMIT, roundings * torch.finfo(dtype).eps)


def coefficient_of(model: Any, decoder: Decoder) -> str | None:
    """Return the model's name for its router loss's weight; None if training has to leave this loss out.

    That is so if a step would compute another loss, or if the model's own code for the loss fails. The loss
    is compared with that of the whole model for some random tokens.
    """
    with suppress(Exception):  # foreign code may raise anything, and the user has not asked for this loss yet
        usual: str | None = decoder.family.coefficient
        tokens_BL = _tokens(model)
        given = {"input_ids": tokens_BL, "labels": tokens_BL, "use_cache": False}
        with torch.no_grad(), _same_numbers(tokens_BL.device):
            try:
                out = decoder.plain(model, **given, output_router_logits=True)
            except TypeError:  # the model has no such argument
                return usual
        if getattr(out, "aux_loss", None) is None:
            return usual
        with torch.no_grad(), _same_numbers(tokens_BL.device):
            added = out.loss - decoder.plain(model, **given, output_router_logits=False).loss
        caught: list[Caught] = []
        with torch.no_grad(), _same_numbers(tokens_BL.device):
            _in_pieces(decoder, tokens_BL, caught)
        # Of all layers, one below the other.
        logits_TE = torch.cat([each.logits_TE for each in caught]).float()
        top_k = decoder.cut_layers[0].cut.top_k
        chosen_TE = torch.zeros_like(logits_TE).scatter(1, logits_TE.topk(top_k, dim=1).indices, 1)
        aux = logits_TE.shape[1] * (chosen_TE.mean(0) * logits_TE.softmax(dim=1).mean(0)).sum()
        limit = _limit(decoder.dtype)
        if not (aux - out.aux_loss).abs() <= limit * aux:
            return None
        rounding = ROUNDING * out.loss.abs()  # `added` is the difference of two losses
        # What may weigh the router loss: numbers of the model, then of its text configuration.
        config, text = model.config, model.config.get_text_config()
        of_text = next((f"config.{name}." for name, part in vars(config).items() if part is text), "config.")
        for path, holder in (("", model), (of_text, text)):
            for name, weight in vars(holder).items():
                if COEFFICIENT.search(name) and isinstance(weight, int | float):
                    expected = weight * aux
                    if (added - expected).abs() <= limit * expected.abs() + rounding:
                        return f"{path}{name}"
    return None


def _tokens(model: Any) -> Tensor:
    """Return random tokens, none of which stands for an image or the like."""
    size = model.get_input_embeddings().weight.shape[0]
    others = {each for name, each in vars(model.config).items() if PLACEHOLDER.search(name)}
    allowed_V = torch.tensor([token for token in range(size) if token not in others], device="cpu")
    shape, generator = (SAMPLES, LENGTH), torch.Generator().manual_seed(0)
    tokens_BL = allowed_V[torch.randint(len(allowed_V), shape, generator=generator, device="cpu")]
    return tokens_BL.to(model.device)


@contextmanager
def _same_numbers(device: torch.device) -> Iterator[None]:
    """Draw the same random numbers every time inside this context; afterwards they continue as before."""
    kind = device_of(device)
    with kind.fork_random(device):
        kind.seed(device, 0)
        yield


def _in_pieces(decoder: Decoder, tokens_BL: Tensor, caught: list[Caught] | None = None) -> Tensor:
    """Return the output of the last layer, computed in pieces; calls of experts are added to `caught`."""
    keys = SampleKeys(0, torch.arange(len(tokens_BL), device="cpu"))
    decoder.begin(Inputs())
    h_BLM = decoder.embed(tokens_BL, keys)
    for part in decoder.parts:
        h_BLM = _through(part, h_BLM, keys, caught)
    return h_BLM


def _through(
    part: CutLayer | WholeLayer, h_BLM: Tensor, keys: SampleKeys, caught: list[Caught] | None = None
) -> Tensor:
    """Return the output of a layer, computed in pieces; a call of experts is added to `caught`."""
    residual_BLM, x_TM = part.attend(h_BLM, keys)
    if caught is not None and isinstance(part, CutLayer):
        caught.append(part.cut.caught)
    out_TM = part.here() if isinstance(part, CutLayer) else x_TM
    return part.add(residual_BLM, out_TM, keys)


def _outcome(out: Tensor, trained: Sequence[Tensor]) -> list[Tensor]:
    """Return the output, and the gradients of a random sum of its numbers."""
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), device="cpu")
    weighed = (out * direction.to(out)).sum()
    grads = torch.autograd.grad(weighed, trained, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]
