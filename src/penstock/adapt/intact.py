"""Checks that a scheduled model is still what its steps run: changes that steps would miss are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from penstock.adapt.adapters import around
from penstock.adapt.decoder import CutLayer, Decoder

READERS = "transformers."
"""Package of hooks that only record outputs, and only on request: those of transformers."""


def check_intact(decoder: Decoder) -> None:
    """Raise ValueError if a step would not compute what the model computes now."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if decoder.model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            "model.loss_function was replaced, and a scheduled model computes the cross-entropy of the next "
            "tokens itself: leave it as transformers has it"
        )
    if is_patched(decoder.base):
        raise ValueError(patched(decoder.base, "parallelize the model without it"))
    layers = decoder.layers
    if len(layers) != len(decoder.parts):
        raise ValueError(
            f"the model has {len(layers)} layers now, and {len(decoder.parts)} were parallelized"
        )
    for part, layer in zip(decoder.parts, layers, strict=True):
        if layer is not part.layer:
            raise ValueError(_replaced(f"layer {part.index} was", layer))
        if getattr(layer, "gradient_checkpointing", False):
            raise ValueError(
                f"layer {part.index} would run again in backward by itself, with what it sends: call "
                "gradient_checkpointing_enable() of the scheduled model, and not of what is in it"
            )
        if isinstance(part, CutLayer):
            _check_cut(part, layer, decoder)


def is_patched(module: nn.Module) -> bool:
    """Return whether a module's own `forward` was replaced, as by accelerate or hooks of device maps."""
    return "forward" in module.__dict__


def patched(module: nn.Module, hint: str) -> str:
    """Return the message about such a module."""
    return (
        f"{type(module).__name__}.forward was replaced in this one module (accelerate does that for mixed "
        f"precision and device maps), and steps would go on without what that adds: {hint}"
    )


def _check_cut(part: CutLayer, layer: Any, decoder: Decoder) -> None:
    block, family, cut = decoder.family.block_of(layer), decoder.family, part.cut
    if block is not cut.block:
        raise ValueError(_replaced(f"the MoE block of layer {part.index} was", block))
    cut.follow()
    experts = family.experts_of(block)
    if experts is not cut.experts:
        raise ValueError(_replaced(f"the experts of layer {part.index} were", experts))
    shared = None if family.shared_module is None else getattr(block, family.shared_module, None)
    for what, found, wanted in (
        ("router", family.router_of(block), cut.router),
        ("shared expert", shared, cut.shared),
    ):
        if found is not wanted:
            raise ValueError(_replaced(f"the {what} of layer {part.index} was", found))
    for module in (layer, block, *around(experts)[1:]):
        if is_patched(module):
            raise ValueError(patched(module, "parallelize the model without it"))
    if not cut.is_whole():
        raise ValueError(patched(experts, "leave those of a scheduled model as they are"))
    for module in (layer, block, *around(experts), shared):
        if module is not None and any(_acting(module)):
            raise ValueError(
                f"a hook on {type(module).__name__} of layer {part.index} would not see what the module "
                "returns: in a training step it runs without its experts, which are tasks of their own. "
                "Remove the hook, or put it on a module inside attention"
            )


def _acting(module: nn.Module) -> Iterator[bool]:
    """Yield for every hook that gets outputs or their gradients whether it is not transformers' own."""
    for hooks in (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks):
        for hook in hooks.values():
            yield not str(getattr(hook, "__module__", "")).startswith(READERS)


def _replaced(what: str, found: object) -> str:
    return (
        f"{what} replaced or wrapped ({type(found).__name__}) after the model was parallelized, and its "
        "steps would go on without what that adds: change the model first, and parallelize it then"
    )
