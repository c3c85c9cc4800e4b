"""Tensor parallelism of models of transformers: ranks share heads, dense widths and vocabulary.

A rank keeps its part of the weights, in the modules that had the whole ones. Every module runs its own code
on its part: heads are counted by the width of projections. What a rank computes of a sum is added up between
the tasks of a step, and outside of steps where it is computed.
Shapes: B samples, L tokens per sample, M hidden size, V vocabulary of this rank, T tokens, P ranks that share
attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from penstock.adapt.cut import Inside, is_foreign
from penstock.config import ConfigError
from penstock.copies import Shared
from penstock.device import on_device
from penstock.families.adapters import core_of
from penstock.families.experts import KeptWhole
from penstock.families.inspection import Found, patched
from penstock.families.sections import DENSE_COLUMN, DENSE_ROWS, of_linear
from penstock.graph import Lane
from penstock.mesh import Group
from penstock.models.decoder import TensorShard, held_rows
from penstock.moe.experts import ExpertShard
from penstock.runtime import Machinery
from penstock.runtime.batch import check_vocabulary
from penstock.runtime.transport import Later, Transport, to_host
from penstock.sharding import Sharding
from penstock.topology import Layout

T = TypeVar("T")

KEY = "tp_size"


class TensorRanks(Shared):
    """The ranks that share attention, where a model runs outside of steps. They run the same passes.

    Attributes:
        shard: This rank's place among them.
        inside: Whether a step runs a module now.
        machinery: What connects them; None until they are.
    """

    def __init__(self, shard: TensorShard, inside: Inside) -> None:
        self.shard, self.inside = shard, inside
        self.machinery: Machinery | None = None

    def open(self, machinery: Machinery) -> None:
        """Connect these ranks; all ranks call it."""
        machinery.transports.open([(Lane.INTRA, Group.TENSOR)])
        self.machinery = machinery

    def added(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts; this rank's part where a step adds them up itself."""
        if self.inside.depth:
            return part
        if torch.is_grad_enabled() and part.requires_grad:
            raise ValueError(
                f"attention or embeddings of a model with tp_size = {self.shard.size} were called with "
                "gradients enabled, outside of a training step: use torch.no_grad(), or call the model or "
                "its decoder in training mode"
            )
        return self.total(part)

    def entering(self, x: Tensor) -> Tensor:
        """Return what all ranks have alike, for code that has a part of the weights on every rank.

        Its gradient is the sum of what all parts make.
        """
        return x if self.inside.depth else cast(Tensor, _Entering.apply(self, x))

    def joined(self, part: Tensor) -> Tensor:
        """Return all ranks' parts along the last dimension; this rank's where a step joins them itself.

        The gradient of a part is the mean of those that all ranks make of the whole, each by its own loss.
        """
        return part if self.inside.depth else cast(Tensor, _Joined.apply(self, part))

    def total(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts."""
        total = part.detach().clone(memory_format=torch.contiguous_format)
        self.exchange(lambda link: link.all_reduce(total, Group.TENSOR))
        return total

    def compare(self, tokens_BL: Tensor) -> None:
        """Raise ValueError, on all of these ranks, if they were given different tokens outside of a step."""
        if self.inside.depth:
            return
        places = torch.arange(1, tokens_BL.numel() + 1, device=tokens_BL.device)
        sums = (tokens_BL.flatten() * places).sum().view(1, 1)
        mark = torch.cat([sums, on_device([[len(tokens_BL), tokens_BL.shape[-1]]], sums.device)], dim=1)
        once = [1] * self.shard.size
        every = self.exchange(lambda link: Later.of(to_host(link.all_gather(mark, once, Group.TENSOR))))
        if (every != every[:1]).any():
            raise ValueError(
                f"ranks that share attention (tp_size = {self.shard.size}) were given different tokens: give "
                "all ranks of a group the same samples and prompts, and where they sample, the same seed"
            )

    def exchange(self, work: Callable[[Transport], T]) -> T:
        """Return what an exchange between these ranks returns.

        Raises:
            CommunicationError: See `Machinery.exchange`.
        """
        assert self.machinery is not None, "ranks are connected before a model runs"
        transport = self.machinery.transports.of(Lane.INTRA, Group.TENSOR)
        return self.machinery.exchange(
            "meeting at shared attention outside of a step", partial(work, transport)
        )


class _Entering(torch.autograd.Function):
    """Returns a tensor unchanged; backward adds up what all ranks' parts of the weights make."""

    @staticmethod
    def forward(ctx: Any, ranks: TensorRanks, x: Tensor) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, ctx.ranks.total(grad)


class _Joined(torch.autograd.Function):
    """Joins what ranks have along the last dimension; backward gives each its part of the mean gradient."""

    @staticmethod
    def forward(ctx: Any, ranks: TensorRanks, part: Tensor) -> Tensor:
        ctx.ranks = ranks
        columns = part.flatten(0, -2).t().contiguous()
        sizes = [len(columns)] * ranks.shard.size
        every = ranks.exchange(lambda link: link.all_gather(columns, sizes, Group.TENSOR))
        whole: Tensor = every.t().unflatten(0, part.shape[:-1])
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        columns, size = grad.flatten(0, -2).t().contiguous(), ctx.ranks.shard.size
        sizes = [each.shape[0] for each in columns.chunk(size)]
        own = ctx.ranks.exchange(lambda link: link.reduce_scatter(columns, sizes, Group.TENSOR)) / size
        return None, own.t().unflatten(0, grad.shape[:-1])


class StandIn:
    """Replaces the `forward` of one module, which keeps its class."""

    def __init__(self, module: nn.Module, ranks: TensorRanks) -> None:
        self.module, self.ranks = module, ranks
        module.forward = self  # `nn.Module.__call__` looks into the module first

    def __call__(self, *given: Any, **named: Any) -> Any:
        raise NotImplementedError

    def plain(self, *given: Any, **named: Any) -> Any:
        """Run the code of the module's class."""
        return type(self.module).forward(self.module, *given, **named)

    def undo(self) -> None:
        """Let the module run its own code again."""
        del self.module.forward


class Summed(StandIn):
    """A linear layer of which this rank has columns: it returns a part of a sum. One rank adds the bias."""

    def __call__(self, input: Tensor) -> Tensor:  # torch's name
        module: Any = self.module
        out = F.linear(input, module.weight)
        if module.bias is not None:
            out = out + module.bias * float(self.ranks.shard.rank == 0)
        return self.ranks.added(out)


class Narrowed(StandIn):
    """A norm over all heads, which every rank computes; its own heads go on from there."""

    def __call__(self, x: Tensor) -> Tensor:
        whole: Tensor = self.plain(x)
        return self.ranks.shard.cut(whole.dim() - 1, whole.shape).part(whole).contiguous()


class Embedded(StandIn):
    """An embedding of which this rank has a part of the vocabulary: other tokens get zeros."""

    def __init__(self, module: Any, ranks: TensorRanks) -> None:
        super().__init__(module, ranks)
        self.vocabulary, padding = module.weight.shape[0], module.padding_idx
        rows = ranks.shard.cut(0, module.weight.shape).part_shape[0]
        self.first = ranks.shard.rank * rows
        here = padding is not None and self.first <= padding < self.first + rows
        self.padding = padding - self.first if here else None

    def __call__(self, input: Tensor) -> Tensor:  # torch's name
        check_vocabulary("token", input, self.vocabulary)
        self.ranks.compare(input)
        module: Any = self.module
        return self.ranks.added(held_rows(input, module.weight, self.first, self.padding))


class Head(StandIn):
    """An output head of which this rank has a part of the vocabulary."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.ranks.joined(self.plain(self.ranks.entering(x)))


class Attended(StandIn):
    """Attention, which gives a layer what was computed before, where that is set."""

    attended_BLM: Tensor | None = None

    def __call__(self, *given: Any, **named: Any) -> Any:
        if self.attended_BLM is None:
            return self.plain(*given, **named)
        return self.attended_BLM, None


class Skipped(StandIn):
    """A dense feed-forward part, which inside `skipping` notes what it is given and returns zeros."""

    _entered: list[Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._entered is None:
            out: Tensor = self.plain(x)
            return out
        self._entered.append(x)
        return torch.zeros_like(x)

    @contextmanager
    def skipping(self) -> Iterator[list[Tensor]]:
        """Yield what the part is given inside this context."""
        entered: list[Tensor] = []
        self._entered = entered
        try:
            yield entered
        finally:
            self._entered = None


@dataclass(frozen=True)
class SharedLayer:
    """What ranks share of a layer.

    Attributes:
        norm: The norm before attention; None = there is none.
        dense: The feed-forward part of a layer without experts; None in a layer with experts.
    """

    attention: Attended
    norm: nn.Module | None
    dense: Skipped | None


class TensorShares(KeptWhole):
    """This rank's parts of a model's attention, dense layers and vocabulary, and what runs on them."""

    def __init__(self, ranks: TensorRanks, found: Found) -> None:
        super().__init__()
        self.ranks, self.layers, self._found = ranks, list[SharedLayer](), found
        self._stands: list[StandIn] = []
        self._modules = [module for _, module in shared_modules(found)]

    @staticmethod
    def of(found: Found, layout: Layout) -> TensorShares | None:
        """Cut a model's parameters; None where no ranks share attention.

        Raises:
            ConfigError: Where they cannot be cut; the model is then whole.
        """
        if layout.tp_size == 1:
            return None
        check_can_share(found, layout.tp_size)
        shard = TensorShard(layout.tp_rank, layout.tp_size)
        shares = TensorShares(TensorRanks(shard, Inside()), found)
        try:
            shares._cut()
        except BaseException:
            shares.undo()
            raise
        return shares

    def undo(self) -> None:
        """Give the modules their own code again, too."""
        super().undo()
        for stand in self._stands:
            stand.undo()
        self._stands = []

    def check(self) -> None:
        """Raise ValueError unless what ranks share is as it was when it was cut: every step asks.

        It costs about five microseconds per module.
        """
        for stand in self._stands:
            if stand.module.__dict__.get("forward") is not stand:
                raise ValueError(patched(stand.module, "parallelize the model without it"))
        now, gone = shared_modules(self._found), ("a module", None)
        for before, (path, module) in zip_longest(self._modules, now, fillvalue=gone):
            if before is not module or has_hooks(module):
                why = f"{path} was replaced, wrapped or given hooks after the model was parallelized"
                raise ConfigError(
                    KEY, self.ranks.shard.size, f"{why}, which ranks cannot share", "Undo that, or use 1."
                )

    def _cut(self) -> None:
        found, family, model = self._found, self._found.family, self._found.model
        cut = family.attention
        assert cut is not None, "it was checked"
        embedding, *heads = _vocabulary(model)
        self._stands += [Embedded(embedding, self.ranks), *(Head(head, self.ranks) for head in heads)]
        for module in (embedding, *heads):
            self._parts(module, {name: 0 for name, _ in module.named_parameters()})
        for layer, block in zip(found.layers, found.blocks, strict=True):
            attention = layer.get_submodule(cut.module)
            self._parts(
                attention, {**of_linear(attention, cut.rows, cut.columns), **dict.fromkeys(cut.heads, 0)}
            )
            self._stands += [Summed(getattr(attention, name), self.ranks) for name in cut.columns]
            self._stands += [Narrowed(getattr(attention, name), self.ranks) for name in cut.narrowed]
            dense = None
            if block is None:
                part = layer.get_submodule(family.block)
                self._parts(part, of_linear(part, DENSE_ROWS, (DENSE_COLUMN,)))
                self._stands += [Summed(getattr(part, DENSE_COLUMN), self.ranks)]
                self._stands += [dense := Skipped(part, self.ranks)]
            self._stands += [stand := Attended(attention, self.ranks)]
            norm = None if cut.norm is None else layer.get_submodule(cut.norm)
            self.layers.append(SharedLayer(stand, norm, dense))

    def _parts(self, module: nn.Module, dims: dict[str, int]) -> None:
        """Keep of every parameter this rank's part along a dimension, and declare it."""
        shard, shardings = self.ranks.shard, dict[str, Sharding]()
        for name, dim in dims.items():
            parameter = module.get_parameter(name)
            whole = self._whole.get(parameter, (parameter.data, None))[0]  # tied ones are met twice
            shardings[name] = sharding = shard.cut(dim, whole.shape)
            if parameter not in self._whole:
                self._whole[parameter] = whole, parameter.grad
                parameter.grad = None  # it has another shape
                parameter.data = sharding.part(whole)
        module.shardings = shardings  # type: ignore[assignment]  # no module or parameter
        self._declared.append(module)


def _vocabulary(model: Any) -> list[nn.Module]:
    """Return the embedding, and the head over the vocabulary, if the model has one."""
    return [
        module
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module is not None
    ]


def shared_modules(found: Found) -> Iterator[tuple[str, nn.Module]]:
    """Yield what ranks share of a model now, with all modules inside, and its layers, each with its path."""
    family = found.family
    assert family.attention is not None, "it was checked"
    attention = [layer.get_submodule(family.attention.module) for layer in found.layers]
    blocks = zip(found.layers, found.blocks, strict=True)
    dense = [layer.get_submodule(family.block) for layer, block in blocks if block is None]
    yield from ((type(layer).__name__, layer) for layer in found.layers)
    for shared in (*attention, *dense, *_vocabulary(found.model)):
        for name, module in shared.named_modules():
            yield f"{type(shared).__name__}{name and '.'}{name}", module


def has_hooks(module: nn.Module) -> bool:
    """Return whether calls of a module, or their backward, run hooks of others."""
    after = (module._forward_hooks, module._backward_hooks)
    before = (module._forward_pre_hooks, module._backward_pre_hooks)
    return any(is_foreign(hook) for hooks in (*after, *before) for hook in hooks.values())


def check_can_share(found: Found, size: int) -> None:
    """Raise ConfigError unless `size` ranks can share a model's attention, dense layers and vocabulary."""
    family, config = found.family, found.config
    what = f"a model of {family.name}"
    if (cut := family.attention) is None:
        why = f"{family.uncut}, so ranks cannot share the attention of {what}"
        raise ConfigError(KEY, size, why, "Use 1, and spread experts with ep_size.")
    if changed := found.changed_code():
        why = f"{what} runs other code than that of transformers ({', '.join(changed)})"
        raise ConfigError(KEY, size, why, "Use 1, or leave these functions as transformers has them.")
    sizes = {name: getattr(config, name) for name in cut.counts}
    sizes["vocab_size"] = found.model.get_input_embeddings().weight.shape[0]
    dense = [layer for layer, block in zip(found.layers, found.blocks, strict=True) if block is None]
    for layer in dense:
        sizes["intermediate_size"] = getattr(layer.get_submodule(family.block), DENSE_COLUMN).weight.shape[1]
    for name, number in sizes.items():
        if number % size:
            raise ConfigError(KEY, size, f"must divide {name} ({number}) of {what}", "Use a divisor of it.")
    for path, module in shared_modules(found):
        for what, has in (
            ("adapters", hasattr(module, "adapter_layer_names") or hasattr(module, "base_layer")),
            ("a parametrization", is_parametrized(module)),
            ("hooks", has_hooks(module)),
            ("a forward of its own", "forward" in module.__dict__),
        ):
            if has:
                raise ConfigError(KEY, size, f"{path} has {what}, which ranks cannot share", "Use 1.")


def check_can_narrow(found: Found, size: int) -> None:
    """Raise ConfigError unless `size` ranks can share every expert of a model, each a part of its width."""
    form, what = found.family.form, f"experts of a model of {found.family.name}"
    whole = "Use 1, and spread them with ep_size."
    if size == 1:
        return
    if not form.narrows:
        raise ConfigError("etp_size", size, f"{what} have several rows of a parameter each", whole)
    for experts in found.experts:
        core = core_of(experts)
        sizes = {"width": form.width(core), "hidden size": form.entering(core)}
        for name, number in sizes.items():
            if number % size:
                raise ConfigError("etp_size", size, f"must divide the {name} ({number}) of {what}", whole)
        if core is not experts:
            raise ConfigError("etp_size", size, f"{what} have adapters, which are those of whole ones", whole)
        try:
            form.cut(core, ExpertShard(0, size))
        except ValueError as error:
            raise ConfigError("etp_size", size, str(error), whole) from error
