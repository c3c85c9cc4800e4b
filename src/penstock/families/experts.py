"""A model's own experts, of which this rank keeps its share, run over rows that are sorted by expert.

Shapes: R rows, M hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from penstock.families.adapters import active, axes_of, core_of, wrappers
from penstock.families.forms import STACKED, ExpertForm
from penstock.mesh import Group
from penstock.moe.experts import ONE_SHARD, Experts, ExpertShard, StackedExperts
from penstock.moe.products import Product, grouped_product
from penstock.partial_state import unmark_share
from penstock.sharding import Sharding, StackedSharding
from penstock.topology import Layout


class ModelExperts(StackedExperts):
    """The experts in a module of transformers.

    source: the module, inside any wrappers of peft; its parameters stay in place and keep their names. form:
    how the experts multiply. shard: the part of each that the module has; outputs are then parts of sums.
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
            core, rows_RM, _Times(core, wrappers(self.source), sizes, product, self.shard)
        )

    def replicas(self, slots: int) -> Experts:
        if not self.form.moves or wrappers(self.source):
            raise ValueError(
                f"{type(core_of(self.source)).__name__} has several rows of a parameter for every expert, or "
                "adapters, which are not moved: move no experts (plan.experts = none)"
            )
        cut = self.source.__dict__.pop("forward", None)  # a copy would have a copy of all that it refers to
        try:
            return super().replicas(slots)
        finally:
            if cut is not None:
                self.source.forward = cut


@dataclass(frozen=True)
class _Times:
    """Multiplication by weights, see `Times`.

    around: peft's adapters, which are multiplied and not merged.
    """

    experts: Any
    around: Sequence[Any]
    sizes: Sequence[int]
    product: Product
    shard: ExpertShard

    def __call__(self, rows_RM: Tensor, name: str, *, turned: bool = False) -> Tensor:
        # Adapters come first: one that was merged and is disabled now changes the weight when it is read.
        adapters = [
            each for wrapper in self.around if wrapper.parameter_name == name for each in active(wrapper)
        ]
        weight: Tensor = attrgetter(name)(self.experts)
        out_RH = self._by(rows_RM, weight if weight.dim() == 3 else self._apart(weight), turned)
        for left, right, scale in adapters:
            first, second = (right, left) if turned else (left, right)
            inner_Rr = scale * self._by(rows_RM, first, turned)
            out_RH = out_RH + self._by(inner_Rr, second, turned)
        return out_RH

    def _by(self, rows_RM: Tensor, weight_EMH: Tensor, turned: bool) -> Tensor:
        return self.product(rows_RM, weight_EMH.transpose(1, 2) if turned else weight_EMH, self.sizes)

    def _apart(self, weight: Tensor) -> Tensor:
        """Separate weights that lie one below the other."""
        apart: Tensor = weight.unflatten(0, (len(self.sizes), -1))
        return apart


def check_experts(experts: nn.Module, num_experts: int, rows: int, where: str) -> None:
    """Raise ValueError unless every parameter has `rows` rows for each of the experts."""
    for name, parameter in experts.named_parameters():
        if len(parameter) != num_experts * rows:
            raise ValueError(
                f"{where}: {name} {list(parameter.shape)} is not stacked by the router's {num_experts} "
                "experts. Load the model whole, and let parallelize spread it"
            )


class Shares:
    """This rank's share of the experts in some modules: consecutive experts, and of each its shard.

    All experts are kept until it is certain that the others are given up. form: see `ModelExperts`; it has
    said that it can be cut.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        held: Sequence[int],
        num_experts: int,
        shard: ExpertShard = ONE_SHARD,
        form: ExpertForm = STACKED,
    ) -> None:
        cut, place, ranks = len(held) < num_experts, held[0] // len(held), num_experts // len(held)
        self._declared = [core_of(experts) for experts in modules] if shard.size > 1 else []
        cuts = [form.cut(core, shard) for core in self._declared]
        axes = {p: axis for experts in modules for p, axis in axes_of(experts).items()}
        self._whole = [(p, p.data, p.grad) for p in axes if cut or shard.size > 1]
        self._around = [each for experts in modules for each in wrappers(experts) if cut]
        self._num_experts = num_experts
        for parameter, whole, _ in self._whole:
            parameter.grad = None  # it has another shape
            parameter.data = axes[parameter].part(whole, place, ranks)  # an optimizer may hold the parameter
        for core, own in zip(self._declared, cuts, strict=True):
            core.shardings = own
            for name, each in own.items():
                parameter = core.get_parameter(name)
                stacked = StackedSharding.of(each, len(held), len(held))
                parameter.data = stacked.part(parameter.data)
        self._tell(len(held))

    def settle(self) -> None:
        """Give up the other experts: this rank's share gets memory of its own."""
        while self._whole:  # one by one, so that at most one parameter is in memory twice
            parameter = self._whole.pop()[0]
            parameter.data = parameter.data.clone()

    def undo(self) -> None:
        """Give the modules all experts and their gradients again."""
        for parameter, whole, grad in self._whole:
            parameter.data, parameter.grad = whole, grad
        for core in self._declared:
            del core.shardings
            unmark_share(core)
        self._whole, self._declared = [], []
        self._tell(self._num_experts)

    def _tell(self, num_experts: int) -> None:
        """Set the number of experts of peft's adapters."""
        for wrapper in self._around:
            wrapper.num_experts = num_experts


def keep_shares(modules: Sequence[nn.Module], held: Sequence[int], num_experts: int) -> None:
    """Keep in every module only the experts `held`, which are consecutive, in memory of their own."""
    Shares(modules, held, num_experts).settle()


def sharding_of_experts(shape: Sequence[int], each: Sharding | None, layout: Layout) -> Sharding | None:
    """Return which part of a parameter of all experts a rank has; None: all of it.

    shape: of this part. each: which part of every expert it has; None: all.
    """
    if each is not None:
        slots = shape[0]
        return StackedSharding.of(each, slots, slots * layout.ep_size, layout.ep_rank, Group.EXPERT_SHARDS)
    if layout.ep_size == 1:
        return None
    whole = (shape[0] * layout.ep_size, *shape[1:])
    return Sharding.along(0, whole, Group.EXPERT, layout.ep_rank, layout.ep_size)
