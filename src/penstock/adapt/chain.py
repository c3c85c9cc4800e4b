"""Whether a decoder is a chain of layers, which is what steps run: looked at on some tokens, before any step.

A step hands hidden states from layer to layer, each layer's output to the next, and nothing else; what else a
layer is called with is recorded before the first one runs.
Shapes: B samples, L tokens per sample, M hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from penstock.adapt.decoder import Decoder, Inputs, LayerCall
from penstock.families.described import in_one_line
from penstock.moe import SampleKeys

SHOWN = 8
"""Most layers whose order a message shows."""


@dataclass(frozen=True)
class WatchedCall:
    """A call of a layer in a forward pass of the whole model.

    entered: the first argument. others: all other arguments.
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


@dataclass(frozen=True)
class Chain:
    """The calls of the layers in a forward pass. broken: in what they are no chain; None: in nothing."""

    calls: list[WatchedCall]
    broken: str | None


@torch.no_grad()
def chain_of(decoder: Decoder, tokens_BL: Tensor) -> Chain:
    """Return the calls of the layers when the whole model, in evaluation mode, runs these tokens.

    Raises ValueError where the model's own code does not run.
    """
    with _hooked(decoder) as watched, naming(decoder.model, "on random tokens"):
        decoder.plain(decoder.model, input_ids=tokens_BL, use_cache=False)
    broken = _unlike_a_chain(decoder, watched, tokens_BL)
    if broken is None:
        keys = SampleKeys(0, torch.arange(len(tokens_BL)))
        decoder.begin(Inputs())
        with naming(decoder.model, "where its layers only record how they are called"):
            decoder.embed(tokens_BL, keys)
        broken = _unlike_recorded(watched.calls, decoder.calls.of(keys).layers)
    return Chain(watched.calls, broken)


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
    order = [call.layer for call in calls]
    if order != list(range(count)):
        shown = ", ".join(map(str, order[:SHOWN])) + (", ..." if len(order) > SHOWN else "")
        return f"its decoder calls its {count} layers in the order {shown or 'none'}, and not each once"
    for call, following in zip(calls, [*calls[1:], None], strict=True):
        alone = _unlike_a_link(
            call, type(decoder.layers[call.layer]).__name__, (*tokens_BL.shape, decoder.hidden_size)
        )
        if alone is not None:
            return alone
        if following is not None and not _same(call.left, following.entered):
            return f"its decoder changes hidden states between layers {call.layer} and {following.layer}"
    norm = decoder.family.norm
    if not watched.normed or not _same(calls[-1].left, watched.normed[-1][0]):
        return f"its decoder changes hidden states between its last layer and {norm}"
    if not watched.last or not _same(watched.normed[-1][1], watched.last[-1]):
        return f"its decoder changes hidden states after {norm}"
    return None


def _unlike_a_link(call: WatchedCall, kind: str, shape: tuple[int, ...]) -> str | None:
    """Return why a layer is no link of a chain; None if it is one. shape: of hidden states."""
    if isinstance(call.returned, tuple) and len(call.returned) > 1:
        return f"{kind} returns {len(call.returned)} values, more than hidden states"
    left: Any = call.left
    for found in (call.entered, left):
        if not isinstance(found, Tensor) or found.shape != shape:
            what = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            return f"{kind} works on hidden states {what}, where {list(shape)} are expected"
    return None


def _unlike_recorded(calls: Sequence[WatchedCall], recorded: Sequence[LayerCall]) -> str | None:
    """Return which argument of a layer depends on what earlier layers have computed; None if none does."""
    for call, before in zip(calls, recorded, strict=True):
        found, wanted = (_leaves(each) for each in (call.others, before))
        for place in found.keys() | wanted.keys():
            if not _same(found.get(place), wanted.get(place)):
                return f"layer {call.layer} gets what earlier layers have computed, in its argument {place}"
    return None


def _leaves(call: LayerCall) -> dict[str, Any]:
    """Return tensors among arguments, also inside dictionaries and the like, by place."""
    named: dict[str, Any] = {str(number + 1): each for number, each in enumerate(call.arguments)}
    pairs, _ = tree_flatten_with_path({**named, **call.named})
    return {keystr(path): leaf for path, leaf in pairs if isinstance(leaf, Tensor)}


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other
    return one.shape == other.shape and torch.equal(one.to(other).nan_to_num(), other.nan_to_num())
