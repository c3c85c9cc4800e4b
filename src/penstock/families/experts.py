"""A model's own experts: how those of a family are called and multiply, and the share that this rank keeps.

Shapes: T tokens, M hidden size, H width of an expert, E experts (of this rank, where they multiply),
k choices per token, R rows, sorted by expert, X = E * T rows, W = H or 2 * H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.parametrize import is_parametrized

from penstock.families.adapters import active, axes_of, core_of, wrappers
from penstock.mesh import Group
from penstock.moe.experts import ONE_SHARD, Experts, ExpertShard, StackedExperts
from penstock.moe.products import (
    ROW_ALIGNMENT_BYTES,
    Product,
    as_cast,
    ends_of,
    grouped_product,
    weight_gradient,
)
from penstock.partial_state import unmark_share
from penstock.sharding import Shard, Sharding, StackedSharding
from penstock.topology import Layout

TRAITS = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_apply_gate")
"""Attributes by which transformers describes experts with stacked weights (`use_experts_implementation`)."""

Routed = tuple[Tensor, Tensor, Tensor]
"""Tokens [T, M], choices [T, k], weights [T, k]."""


@dataclass(frozen=True)
class RouterCall:
    """Arguments of a router's call, tokens [T, M] first, and the returned value."""

    given: tuple[Any, ...]
    returned: Any


class ExpertForm:
    """Form of most families: weights stacked in one module, called with tokens, choices and weights.

    Its router is called before the experts, and returns logits first, or nothing else.

    Attributes:
        rebuilds: Whether what experts get is recomputed from the router's call, instead of taken from the
            experts' call.
        moves: Whether every parameter has one row for each expert, so that an expert can be brought to
            another rank.
        narrows: Whether ranks can share every expert, each a part of its width.
    """

    rebuilds = False
    moves = True
    narrows = True

    def check(self, experts: nn.Module, where: str) -> None:
        """Raise ValueError unless it is known how the experts multiply."""
        missing = [trait for trait in TRAITS if not hasattr(experts, trait)]
        if missing:
            raise ValueError(
                f"{where}: {type(experts).__name__} does not say how its experts multiply (it has no "
                f"{', '.join(missing)}): only experts with stacked weights, as transformers 5 has them, can "
                "be spread"
            )
        weights = ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
        if not all(hasattr(experts, name) for name in weights):
            raise ValueError(f"{where}: {type(experts).__name__} has no {' and '.join(weights)}")

    def count(self, experts: Any) -> int:
        """Return the number of experts, with all of them on this rank."""
        return len(next(iter(experts.parameters())))

    def rows(self, experts: Any) -> int:
        """Return the number of rows of every parameter that belong to one expert."""
        del experts
        return 1

    def width(self, experts: Any) -> int:
        """Return the width of one whole expert between its matrices."""
        cut = getattr(experts, "shardings", {}).get("down_proj")
        shape = experts.down_proj.shape[1:] if cut is None else cut.shape
        size: int = shape[0 if self.transposed(experts) else 1]
        return size

    def entering(self, experts: Any) -> int:
        """Return the width of what experts get and return."""
        size: int = experts.down_proj.shape[2 if self.transposed(experts) else 1]
        return size

    def transposed(self, experts: Any) -> bool:
        """Return whether rows are multiplied by weights as they are, [M, H], and not turned, [H, M]."""
        transposed: bool = experts.is_transposed
        return transposed

    def inward(self, experts: Any) -> str:
        """Return the name of the weight that rows meet first."""
        return "gate_up_proj" if experts.has_gate else "up_proj"

    def activated(self, experts: Any, inner_RW: Tensor) -> Tensor:
        """Return what the outward weight multiplies, [R, H], from the inward weight's product."""
        activated_RH: Tensor = experts._apply_gate(inner_RW) if experts.has_gate else experts.act_fn(inner_RW)
        return activated_RH

    def cut(self, experts: Any, shard: Shard) -> dict[str, Sharding]:
        """Return, by parameter, which part of every expert's a rank has where ranks share each expert.

        A bias of outputs is cut, too: each rank adds its part to its own columns of the sum.

        Raises:
            ValueError: Where it is not understood how parts add up to the whole.
        """
        kind, inward = type(experts).__name__, self.inward(experts)
        shapes = {name: tuple(each.shape[1:]) for name, each in experts.named_parameters()}
        biases = {f"{name}_bias" for name in (inward, "down_proj")}
        if others := shapes.keys() - {inward, "down_proj", *biases}:
            raise ValueError(f"{kind} has more than weights and biases ({', '.join(sorted(others))})")
        if getattr(experts, "has_post_expert_norm", False):
            raise ValueError(f"{kind} norms what each expert returns, which has to be whole for that")
        narrow = shard.cut(0, (self.width(experts),))
        outputs = shard.cut(0, (self.entering(experts),)) if "down_proj_bias" in shapes else narrow
        dim, wide = int(self.transposed(experts)), self._cut_of_inner(experts, shard)
        cuts = {inward: (dim, wide), f"{inward}_bias": (0, wide)}
        cuts |= {"down_proj": (1 - dim, narrow), "down_proj_bias": (0, outputs)}
        return {name: _along(shard, shape, *cuts[name]) for name, shape in shapes.items()}

    def _cut_of_inner(self, experts: Any, shard: Shard) -> Sharding:
        """Return which part of what the activation gets belongs to a part of what it returns: gate and up may
        lie one after the other, or in turn. Raises ValueError if it is none of them."""
        weight = getattr(experts, self.inward(experts))
        size, generator = weight.shape[1 + self.transposed(experts)], torch.Generator().manual_seed(0)
        inner_RW = torch.randn(4, size, generator=generator, device="cpu")
        with torch.no_grad():
            whole_RH = self.activated(experts, inner_RW)
            for view in ((size,), (2, size // 2)) if size % 2 == 0 else ((size,),):
                cut = shard.cut(len(view) - 1, (size,), view)
                given, wanted = (
                    _along(shard, tuple(tensor.shape), 1, how).part(tensor)
                    for tensor, how in ((inner_RW, cut), (whole_RH, shard.cut(0, whole_RH.shape[1:])))
                )
                computed = self.activated(experts, given)
                if computed.shape == wanted.shape and torch.allclose(computed, wanted):
                    return cut
        raise ValueError(f"{type(experts).__name__} makes of a part of its width no part of what all makes")

    def matrices(self, experts: Any) -> int:
        """Return the number of matrices that a row meets, a fused one counted as two."""
        return 3 if experts.has_gate else 2

    def logits(self, router: RouterCall) -> Tensor:
        """Return the logits of all experts, [T, E]."""
        logits: Tensor = router.returned[0] if isinstance(router.returned, tuple) else router.returned
        return logits.flatten(0, -2)

    def called(self, router: RouterCall, given: tuple[Tensor, ...]) -> Routed:
        """Return tokens, choices and weights from the arguments of the experts' call."""
        del router
        x, experts_Tk, weights_Tk = given
        return x.flatten(0, -2), experts_Tk, weights_Tk

    def whole(self, experts: Any, routed: Routed) -> Tensor:
        """Return what the experts' own `forward` computes, with all of them on this rank, [T, M]."""
        out: Tensor = type(experts).forward(experts, *routed)
        return out.view_as(routed[0])

    def returned(self, out_TM: Tensor, given: tuple[Tensor, ...]) -> Tensor:
        """Return the sum of experts' outputs for every token in the form that the experts' call returns."""
        return out_TM.view_as(given[0])

    def compute(self, experts: Any, rows_RM: Tensor, times: Times) -> Tensor:
        """Return the experts' outputs for rows that are sorted by expert."""
        inner_RW = _multiply(experts, self.inward(experts), rows_RM, times)
        out_RM = _multiply(experts, "down_proj", self.activated(experts, inner_RW), times)
        if experts.has_post_expert_norm:
            return experts.post_expert_norm(out_RM)  # type: ignore[no-any-return]  # any module of theirs
        return out_RM


class FlatForm(ExpertForm):
    """DBRX's form: three matrices of all experts one below the other, [E * H, M], in an inner module."""

    moves = narrows = False

    def check(self, experts: nn.Module, where: str) -> None:
        if not all(hasattr(getattr(experts, "mlp", None), name) for name in ("w1", "v1", "w2")):
            raise ValueError(f"{where}: {type(experts).__name__} has no mlp.w1, mlp.v1 and mlp.w2")

    def count(self, experts: Any) -> int:
        return len(experts.mlp.w1) // self.rows(experts)

    def rows(self, experts: Any) -> int:
        return self.width(experts)

    def width(self, experts: Any) -> int:
        size: int = experts.mlp.ffn_hidden_size
        return size

    def entering(self, experts: Any) -> int:
        size: int = experts.mlp.w1.shape[1]
        return size

    def matrices(self, experts: Any) -> int:
        del experts
        return 3

    def compute(self, experts: Any, rows_RM: Tensor, times: Times) -> Tensor:
        gate_RH = experts.mlp.activation_fn(times(rows_RM, "mlp.w1", turned=True))
        return times(gate_RH * times(rows_RM, "mlp.v1", turned=True), "mlp.w2")


class WeighedForm(ExpertForm):
    """Llama-4's form: every expert is called with all tokens, times their scores; a token chooses one.

    The scores of the other experts are zero, for which experts return zeros: only the chosen rows need to
    travel.
    """

    rebuilds = True

    def check(self, experts: nn.Module, where: str) -> None:
        if not all(hasattr(experts, name) for name in ("gate_up_proj", "down_proj", "act_fn")):
            raise ValueError(f"{where}: {type(experts).__name__} has no gate_up_proj, down_proj and act_fn")

    def transposed(self, experts: Any) -> bool:
        del experts
        return True

    def inward(self, experts: Any) -> str:
        del experts
        return "gate_up_proj"

    def activated(self, experts: Any, inner_RW: Tensor) -> Tensor:
        gate_RH, up_RH = inner_RW.chunk(2, dim=-1)
        activated_RH: Tensor = up_RH * experts.act_fn(gate_RH)
        return activated_RH

    def matrices(self, experts: Any) -> int:
        del experts
        return 3

    def logits(self, router: RouterCall) -> Tensor:
        logits_TE: Tensor = router.returned[1]
        return logits_TE

    def called(self, router: RouterCall, given: tuple[Tensor, ...]) -> Routed:
        x_TM, (scores_TE, logits_TE) = router.given[0], router.returned
        experts_T1 = logits_TE.topk(1, dim=1).indices
        if torch.is_grad_enabled():  # the gradient of what experts get would be as large as that, E * T rows
            x_TM = x_TM * scores_TE.gather(1, experts_T1)
        else:
            x_ETM = given[0].view(scores_TE.shape[1], *x_TM.shape)
            x_TM = x_ETM[experts_T1.squeeze(1), torch.arange(len(x_TM), device=x_TM.device)]
        return x_TM, experts_T1, torch.ones_like(experts_T1, dtype=x_TM.dtype)

    def whole(self, experts: Any, routed: Routed) -> Tensor:
        x_TM, experts_T1, _ = routed
        experts_E = torch.arange(self.count(core_of(experts)), device=experts_T1.device)
        chosen_ET = experts_E.unsqueeze(1) == experts_T1.t()
        given_XM = (x_TM * chosen_ET.unsqueeze(2)).flatten(0, 1)
        out_XM: Tensor = type(experts).forward(experts, given_XM)
        return out_XM.view(*chosen_ET.shape, -1).sum(0)

    def returned(self, out_TM: Tensor, given: tuple[Tensor, ...]) -> Tensor:
        zeros = torch.zeros_like(given[0][len(out_TM) :])  # the caller adds up what all experts return
        return torch.cat([out_TM, zeros])

    def compute(self, experts: Any, rows_RM: Tensor, times: Times) -> Tensor:
        return times(self.activated(experts, times(rows_RM, "gate_up_proj")), "down_proj")


STACKED = ExpertForm()


def _along(shard: Shard, shape: tuple[int, ...], dim: int, numbers: Sharding) -> Sharding:
    """Return the part of a tensor in which these numbers, and a part of them, are one dimension."""
    view = (*shape[:dim], *numbers.view, *shape[dim + 1 :])
    return shard.cut(dim + numbers.dim, shape, view)


class Biased(torch.autograd.Function):
    """Adds to the rows of every expert its bias, of which the gradient is a grouped product as well.

    That of a gather adds rows one by one on a GPU, in any order and in their own type: of 8,192 rows of
    bfloat16 sums are a tenth off.
    """

    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, bias_EH: Tensor, sizes: Sequence[int]) -> Tensor:
        ctx.sizes, ctx.dtype = sizes, bias_EH.dtype
        ends_E = ends_of(sizes, rows_RH.device)
        places_R = torch.arange(len(rows_RH), device=rows_RH.device, dtype=ends_E.dtype)
        experts_R = torch.bucketize(places_R, ends_E, right=True)
        return rows_RH + bias_EH.to(rows_RH.dtype).index_select(0, experts_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        if not ctx.needs_input_grad[1]:
            return grads[0], None, None
        grad_RH = grads[0].contiguous()
        ones_R8 = grad_RH.new_ones(len(grad_RH), ROW_ALIGNMENT_BYTES // grad_RH.element_size())
        shape = (len(ctx.sizes), ones_R8.shape[1], grad_RH.shape[1])
        total_E8H = grad_RH.new_empty(shape, dtype=ctx.dtype)
        with as_cast(grad_RH.device):
            weight_gradient(ones_R8, grad_RH, ctx.sizes, total_E8H, add=False)
        return grads[0], total_E8H[:, 0], None


def _multiply(experts: Any, name: str, rows_RM: Tensor, times: Times) -> Tensor:
    out_RH = times(rows_RM, name, turned=not experts.is_transposed)
    if not experts.has_bias:
        return out_RH
    bias_EH = getattr(experts, f"{name}_bias")
    if more := out_RH.shape[1] - bias_EH.shape[1]:  # where outputs are added up, each column is biased once
        before = times.shard.rank * bias_EH.shape[1]
        bias_EH = F.pad(bias_EH, (before, more - before))
    biased_RH: Tensor = Biased.apply(out_RH, bias_EH, times.sizes)
    return biased_RH


class ModelExperts(StackedExperts):
    """The experts in a module of transformers.

    Attributes:
        source: The module, inside any wrappers of peft; its parameters stay in place and keep their names.
        form: How the experts multiply.
        shard: The part of each expert that the module has; outputs are then parts of sums.
    """

    def __init__(
        self,
        source: nn.Module,
        num_local_experts: int,
        form: ExpertForm,
        shard: ExpertShard = ONE_SHARD,
    ) -> None:
        super().__init__(num_local_experts)
        self.source: Any = source
        self.form, self.shard = form, shard

    def forward(self, rows_RM: Tensor, sizes: Sequence[int], product: Product = grouped_product) -> Tensor:
        core = core_of(self.source)
        return self.form.compute(
            core, rows_RM, Times(core, wrappers(self.source), sizes, product, self.shard)
        )

    def replicas(self, slots: int) -> Experts:
        if not self.form.moves or wrappers(self.source):
            raise ValueError(
                f"{type(core_of(self.source)).__name__} has several rows of a parameter for every expert, or "
                "adapters, which are not moved: move no experts (placement.experts = none)"
            )
        cut = self.source.__dict__.pop("forward", None)  # a copy would have a copy of all that it refers to
        try:
            return super().replicas(slots)
        finally:
            if cut is not None:
                self.source.forward = cut


@dataclass(frozen=True)
class Times:
    """Multiplies rows, sorted by expert, by one of the experts' weights.

    Attributes:
        around: peft's adapters, which are multiplied and not merged.
        sizes: Number of rows of every expert.
        shard: The part of each weight that is here.
    """

    experts: Any
    around: Sequence[Any]
    sizes: Sequence[int]
    product: Product
    shard: ExpertShard

    def __call__(self, rows_RM: Tensor, name: str, *, turned: bool = False) -> Tensor:
        """Multiply rows [R, M] by the weight `name`: [E, M, H], [E, H, M] (turned), or [E * M, H]."""
        # Adapters come first: one that was merged and is disabled now changes the weight when it is read.
        adapters = [
            adapter
            for wrapper in self.around
            if wrapper.parameter_name == name
            for adapter in active(wrapper)
        ]
        weight: Tensor = attrgetter(name)(self.experts)
        if weight.dim() != 3:  # they lie one below the other
            weight = weight.unflatten(0, (len(self.sizes), -1))
        out_RH = self._by(rows_RM, weight, turned)
        for left, right, scale in adapters:
            first, second = (right, left) if turned else (left, right)
            inner_Rr = scale * self._by(rows_RM, first, turned)
            out_RH = out_RH + self._by(inner_Rr, second, turned)
        return out_RH

    def _by(self, rows_RM: Tensor, weight_EMH: Tensor, turned: bool) -> Tensor:
        return self.product(rows_RM, weight_EMH.transpose(1, 2) if turned else weight_EMH, self.sizes)


class KeptWhole:
    """Parameters cut to this rank's part; whole ones are kept until it is certain that they are given up."""

    def __init__(self) -> None:
        self._whole: dict[nn.Parameter, tuple[Tensor, Tensor | None]] = {}  # values and gradient
        self._declared: list[Any] = []  # modules whose `shardings` say what they have

    def settle(self) -> None:
        """Give up what other ranks have: this rank's part gets memory of its own."""
        while self._whole:  # one by one, so that at most one parameter is in memory twice
            parameter = self._whole.popitem()[0]
            parameter.data = parameter.data.clone()

    def undo(self) -> None:
        """Give the modules whole parameters and their gradients again."""
        for parameter, (whole, grad) in self._whole.items():
            parameter.data, parameter.grad = whole, grad
        for module in self._declared:
            del module.shardings
            unmark_share(module)
        self._whole, self._declared = {}, []


class Shares(KeptWhole):
    """This rank's share of the experts in some modules: consecutive experts, and of each its shard.

    Args:
        modules: The modules, one for each layer with experts.
        held: Numbers of the experts that this rank has.
        num_experts: Number of experts in each module.
        shard: The part of each of these experts that this rank has.
        form: How experts multiply; where they are cut, it must have said that they can be.

    Raises:
        ValueError: For weights of several experts that are computed from other ones.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        held: Sequence[int],
        num_experts: int,
        shard: ExpertShard = ONE_SHARD,
        form: ExpertForm = STACKED,
    ) -> None:
        super().__init__()
        cut, place, ranks = len(held) < num_experts, held[0] // len(held), num_experts // len(held)
        for module in (each for experts in modules for each in core_of(experts).modules()):
            if cut and is_parametrized(module):
                raise ValueError(
                    f"{', '.join(module.parametrizations)} of {type(module).__name__} is computed by a "
                    "parametrization, which may be one of all experts together, as spectral_norm is: leave "
                    "it out where ranks have different experts, or use ep_size=1"
                )
        self._declared = [core_of(experts) for experts in modules] if shard.size > 1 else []
        cuts = [form.cut(core, shard) for core in self._declared]
        axes = {p: axis for experts in modules for p, axis in axes_of(experts).items()}
        self._whole = {p: (p.data, p.grad) for p in axes if cut or shard.size > 1}
        self._around = [each for experts in modules for each in wrappers(experts) if cut]
        self._num_experts = num_experts
        for parameter, (whole, _) in self._whole.items():
            parameter.grad = None  # it has another shape
            parameter.data = axes[parameter].part(whole, place, ranks)  # an optimizer may hold the parameter
        for core, own in zip(self._declared, cuts, strict=True):
            core.shardings = own
            for name, each in own.items():
                parameter = core.get_parameter(name)
                stacked = StackedSharding.of(each, len(held), len(held))
                parameter.data = stacked.part(parameter.data)
        self._tell(len(held))

    def undo(self) -> None:
        super().undo()
        self._tell(self._num_experts)

    def _tell(self, num_experts: int) -> None:
        """Set the number of experts of peft's adapters."""
        for wrapper in self._around:
            wrapper.num_experts = num_experts


def sharding_of_experts(shape: Sequence[int], each: Sharding | None, layout: Layout) -> Sharding | None:
    """Return which part of a parameter of all experts a rank has; None: all of it.

    Args:
        shape: Shape of this part.
        each: Which part of every expert a rank has; None = all of it.
    """
    if each is not None:
        slots = shape[0]
        return StackedSharding.of(each, slots, slots * layout.ep_size, layout.ep_rank, Group.EXPERT_SHARDS)
    if layout.ep_size == 1:
        return None
    whole = (shape[0] * layout.ep_size, *shape[1:])
    return Sharding.along(0, whole, Group.EXPERT, layout.ep_rank, layout.ep_size)
