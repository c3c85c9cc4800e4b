"""Checks that a scheduled model is still what its steps run: changes that steps would miss are refused."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module as _modules

from penstock.adapt.cut import READERS, is_foreign
from penstock.adapt.decoder import CutLayer, Decoder
from penstock.families.adapters import around
from penstock.families.inspection import code_of, is_patched, patched

COUNTERS = ("torch.",)
"""Package of hooks on all modules that only count, such as those of torch's counter of operations."""


def check_unchanged(decoder: Decoder, *, balances: bool) -> None:
    """Raise ValueError if a step would not compute what the model computes now.

    balances: whether the step has a router loss.
    """
    if is_patched(decoder.base):
        raise ValueError(patched(decoder.base, "parallelize the model without it"))
    kind = decoder.base_kind
    if (kind.forward, kind.__call__) != decoder.code or kind not in type(decoder.base).__mro__[:2]:
        raise ValueError(_exchanged(kind))
    if decoder.kind.forward is not decoder.plain:
        raise ValueError(_exchanged(decoder.kind))
    after = (_modules._global_forward_hooks, _modules._global_backward_hooks)
    before = (_modules._global_backward_pre_hooks, _modules._global_forward_pre_hooks)
    for hook in (hook for hooks in (*after, *before) for hook in hooks.values()):
        if is_foreign(hook, (*READERS, *COUNTERS)):
            raise ValueError(
                f"a hook on all modules ({getattr(hook, '__qualname__', type(hook).__name__)}) would not see "
                "what layers with experts get and return in a training step, which runs them without their "
                "experts. Remove it (register_module_forward_hook and the like return a handle), or "
                "register it on the modules that it is meant for"
            )
    for module in decoder.changed():
        raise ValueError(patched(module, "parallelize the model without it"))
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
            _check_hooks(part, layer, decoder, balances=balances)


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
    for module, code in part.code.items():
        if code_of(module) != code:
            raise ValueError(_exchanged(type(module)))
    if not cut.is_whole():
        raise ValueError(patched(experts, "leave those of a scheduled model as they are"))


def _check_hooks(part: CutLayer, layer: Any, decoder: Decoder, *, balances: bool) -> None:
    """Raise ValueError for hooks on a layer with experts that its steps would not follow."""
    cut, form = part.cut, decoder.family.form
    for module in (layer, cut.block, *around(cut.experts), cut.shared):
        if module is None:
            continue
        after = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
        if any(is_foreign(hook) for hooks in after for hook in hooks.values()):
            raise ValueError(
                f"a hook on {type(module).__name__} of layer {part.index} would not see what the module "
                "returns: in a training step it runs without its experts, which are tasks of their own. "
                "Remove the hook, or put it on a module inside attention"
            )
    outer, *inner = around(cut.experts)
    entering = [*inner, outer] if form.rebuilds or cut.shared is not None else inner
    routers = [cut.router] if form.rebuilds else []
    for module in (*entering, *routers):
        hooks: list[Any] = list(module._forward_pre_hooks.values())
        if module in routers:
            hooks += [hook for hook in module._forward_hooks.values() if not cut.owns(hook)]
        if any(map(is_foreign, hooks)):
            raise ValueError(
                f"a hook on {type(module).__name__} of layer {part.index} may change what its experts get, "
                "and a training step takes that from elsewhere in this family. Remove the hook, or put it "
                f"on {type(cut.block).__name__}, before its forward pass (register_forward_pre_hook)"
            )
    others = [hook for hook in cut.router._forward_hooks.values() if not cut.owns(hook)]
    if balances and any(map(is_foreign, others)):
        raise ValueError(
            f"output_router_logits = True: a hook on {type(cut.router).__name__} of layer {part.index} may "
            "change its logits, and whether the router loss counts them before or after it depends on the "
            "order of hooks. Remove the hook, or make a subclass of the router and parallelize the model then"
        )


def _exchanged(kind: type) -> str:
    return (
        f"{kind.__name__}.forward was replaced in its class, or the class by another one, after the model "
        "was parallelized, and its steps would go on with the former one: change it first, and parallelize "
        "the model then"
    )


def _replaced(what: str, found: object) -> str:
    return (
        f"{what} replaced or wrapped ({type(found).__name__}) after the model was parallelized, and its "
        "steps would go on without what that adds: change the model first, and parallelize it then"
    )
