"""Inspection of a model: which layers have experts, how many, what they run, and what cannot be scheduled.

Steps run some modules in parts, by Penstock's knowledge of their family, and not by their own `forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

from torch import nn

from penstock.decision import Decision
from penstock.families.adapters import around, check_adapters, core_of
from penstock.families.described import setting_of
from penstock.families.experts import Shares
from penstock.families.known import Family
from penstock.families.sizes import ModelSizes, attention_of, matrices_of
from penstock.moe import MoEConfig
from penstock.moe.experts import ExpertShard
from penstock.placement import ExpertPlacement
from penstock.topology import Layout

LIBRARIES = ("transformers.", "torch.")
"""Packages of the functions that run where nothing was changed."""

Code = tuple[Callable[..., Any], Callable[..., Any]]
"""The `forward` and the `__call__` of a class."""


def code_of(module: nn.Module) -> Code:
    """Return the functions that a call of a module runs by its class."""
    return type(module).forward, type(module).__call__


def in_parts(layer: Any, block: Any, family: Family) -> list[nn.Module]:
    """Return the modules of a layer with experts that steps run in parts."""
    modules = [layer, block, core_of(family.experts_of(block))]
    return [*modules, family.router_of(block)] if family.form.rebuilds else modules


def is_patched(module: nn.Module) -> bool:
    """Return whether a module's own `forward` was replaced, as by accelerate or hooks of device maps."""
    return "forward" in module.__dict__


def patched(module: nn.Module, hint: str) -> str:
    """Return the message about such a module."""
    return (
        f"{type(module).__name__}.forward was replaced in this one module (accelerate does that for mixed "
        f"precision and device maps), and steps would go on without what that adds: {hint}"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """A model in its parts.

    Attributes:
        layers: The layers of its decoder.
        blocks: The MoE block of every layer; None in a dense one.
        num_experts: Experts of a layer that has any.
        top_k: Experts that a token chooses.
        bound_factor: See MoEConfig.
        choice: The decision that says how rows travel.
    """

    model: Any
    family: Family
    layers: list[Any]
    blocks: list[Any]
    num_experts: int
    top_k: int
    bound_factor: float | None = None
    choice: Decision = Decision()  # noqa: RUF009  # frozen

    def of(self, model: Any) -> Found:
        """Return the parts of another model of this structure."""
        layers = list(self.family.decoder(model).get_submodule(self.family.layers))
        return replace(self, model=model, layers=layers, blocks=list(map(self.family.block_of, layers)))

    def changed_code(self) -> list[str]:
        """Return the names of functions, of modules that steps run in parts, that are not transformers'."""
        modules = [self.model, self.family.decoder(self.model)]
        for layer, block in zip(self.layers, self.blocks, strict=True):
            if block is not None:
                modules += in_parts(layer, block, self.family)
        names: dict[str, None] = {}
        for module, name in product(modules, ("forward", "__call__")):
            owner = next(each for each in type(module).__mro__ if name in vars(each))
            function: Any = vars(owner)[name]
            qualified = getattr(function, "__qualname__", None)
            moved = name == "forward" and qualified != f"{owner.__qualname__}.{name}"
            places: list[str] = []
            while function is not None:  # it, and what decorators have put it around
                places.append(str(getattr(function, "__globals__", {}).get("__name__", "")))
                function = getattr(function, "__wrapped__", None)
            if moved or not all(place.startswith(LIBRARIES) for place in places):
                names[f"{type(module).__name__}.{name}"] = None  # of a user, or of another tool
        return list(names)

    @property
    def config(self) -> Any:
        """Configuration of the model's decoder."""
        return self.model.config.get_text_config()

    @property
    def experts(self) -> list[Any]:
        """The experts of all layers that have experts."""
        return [self.family.experts_of(block) for block in self.blocks if block is not None]

    def shared_of(self, block: Any) -> Any:
        """Return the module of a block's shared experts; None if it has none that run by themselves."""
        name = self.family.shared_module
        return None if name is None else getattr(block, name, None)

    def shares(self, layout: Layout) -> Shares:
        """Give up the experts of other ranks, and of each what other ranks have of it; see `Shares`."""
        held = ExpertPlacement.even(self.num_experts, layout.ep_size).held(layout.ep_rank)
        shard = ExpertShard(layout.etp_rank, layout.etp_size)
        return Shares(self.experts, held, self.num_experts, shard, self.family.form)

    @property
    def moe(self) -> MoEConfig:
        """Settings of the layers for a stack; coefficients of losses are those of a step."""
        return MoEConfig(
            num_experts=self.num_experts,
            top_k=self.top_k,
            moe_ffn_hidden_size=self.family.form.width(core_of(self.experts[0])),
            norm_topk_prob=False,
            bound_factor=self.bound_factor,
            dispatch=self.choice.dispatch,
            comm_dtype=None if self.choice.comm_dtype == "none" else self.choice.comm_dtype,
            aux_loss_coeff=0.0,
            z_loss_coeff=0.0,
        )

    @cached_property
    def sizes(self) -> ModelSizes:
        """Sizes of the model for a plan."""
        shared = [block and self.shared_of(block) for block in self.blocks]
        hidden, matrices = self.config.hidden_size, self.family.form.matrices(core_of(self.experts[0]))
        dense = [part for part, block in zip(self._feed_forward, self.blocks, strict=True) if block is None]
        apart = [
            [part] if block is None else [self.family.experts_of(block), self.family.router_of(block), aside]
            for part, block, aside in zip(self._feed_forward, self.blocks, shared, strict=True)
        ]
        return ModelSizes(
            hidden_size=hidden,
            vocab_size=self.config.vocab_size,
            heads=setting_of(self.config, "num_attention_heads", 1),
            key_value_heads=setting_of(self.config, "num_key_value_heads"),
            head_dim=setting_of(self.config, "qk_head_dim") or setting_of(self.config, "head_dim"),
            dense_width=_width(dense, 3 * hidden),
            shared_width=_width([part for part in shared if part is not None], matrices * hidden),
            expert_matrices=matrices,
            element_bytes=next(self.model.parameters()).element_size(),
            moe=self.moe,
            attention=attention_of(self.config, self.layers, apart),
        )

    @property
    def _feed_forward(self) -> list[Any]:
        """The feed-forward part of every layer, dense or not."""
        return [layer.get_submodule(self.family.block) for layer in self.layers]


def look(model: Any, family: Family) -> Found:
    """Return the parts of a model.

    Raises:
        ValueError: For a model that cannot be scheduled.
    """
    if not hasattr(model, "get_output_embeddings") or not hasattr(
        model, family.base.partition(".")[0] or "config"
    ):
        raise ValueError(
            f"{type(model).__name__} is no model with a head: it has no decoder of a {family.name} in "
            f"{family.base}, on whose hidden states a head computes. Use AutoModelForCausalLM, or "
            "AutoModelForSequenceClassification and the like"
        )
    layers = list(family.decoder(model).get_submodule(family.layers))
    blocks = [family.block_of(layer) for layer in layers]
    present = {number: block for number, block in enumerate(blocks) if block is not None}
    experts = {id(core_of(family.experts_of(block))) for block in present.values()}
    if len(set(map(id, layers))) < len(layers) or len(experts) < len(present):
        raise ValueError(
            f"{type(model).__name__}: some layers are, or have the experts of, another one, and where "
            "they call them cannot be told apart. Give each a module of its own; parameters may be shared"
        )
    config = model.config.get_text_config()
    for setting, wanted, why in family.only:
        value = setting_of(config, setting, wanted)
        if value != wanted:
            raise ValueError(
                f"{type(model).__name__}: {setting} = {value} cannot be scheduled, since {why}; set "
                f"config.{setting} = {wanted}"
            )
    sizes: set[int] = set()
    for number, block in present.items():
        check_adapters(family.experts_of(block), f"layer {number}")
        core = core_of(family.experts_of(block))
        family.form.check(core, f"layer {number}")
        count = family.form.count(core)
        for name, parameter in core.named_parameters():
            if len(parameter) != count * family.form.rows(core):
                raise ValueError(
                    f"layer {number}: {name} {list(parameter.shape)} is not stacked by the router's "
                    f"{count} experts. Load the model whole, and let parallelize spread it"
                )
        sizes.add(count)
    found = Found(
        model=model,
        family=family,
        layers=layers,
        blocks=blocks,
        num_experts=_only(sizes, "have", model),
        top_k=_only({_top_k(block, family) for block in present.values()}, "choose", model),
    )
    modules = [model, family.decoder(model)]
    for number, block in present.items():
        modules += [layers[number], block, *around(family.experts_of(block)), found.shared_of(block)]
    for module in modules:
        if module is not None and is_patched(module):
            raise ValueError(patched(module, "parallelize the model first, and prepare what that returns"))
    return found


def _width(parts: list[Any], numbers: int) -> int:
    """Return the mean width of feed-forward parts that have so many numbers for each unit of it; 0: none."""
    weights = sum(prod(shape) for part in parts for shape in matrices_of(part))
    return round(weights / (numbers * len(parts))) if parts else 0


def _only(numbers: set[int], what: str, model: Any) -> int:
    """Return the one number of experts of all layers that have any. Raises ValueError if it is not one."""
    if len(numbers) != 1:
        raise ValueError(
            f"{type(model).__name__}: its layers {what} {sorted(numbers) or 'no'} experts; a scheduled model "
            "needs the same number in all layers that have any"
        )
    return numbers.pop()


def _top_k(block: Any, family: Family) -> int:
    for holder in (core_of(family.router_of(block)), block):
        if isinstance(getattr(holder, "top_k", None), int):
            top_k: int = holder.top_k
            return top_k
    raise ValueError(f"{type(block).__name__} does not say how many experts a token chooses (top_k)")
