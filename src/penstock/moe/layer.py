"""The MoE layer: gate, permutation, experts, unpermute. In a stack the engine runs its parts as tasks.

Shapes: T tokens, M hidden size, E experts (total), R rows in expert order.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed._composable_state import _module_state_mapping
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from penstock.features.dispatch import Dispatch, find_dispatch
from penstock.moe.config import REFUSED, BalanceGroup
from penstock.moe.exchange import Alone, Exchange, check_dispatch
from penstock.moe.experts import TOKENS, Experts, OwnSlots, OwnTokens, SlotsWithReplicas
from penstock.moe.hooks import Hook, Moment
from penstock.moe.permute.slots import BoundedPermutation
from penstock.moe.permute.sort import Permutation, PermutationPlan, SortPermutation
from penstock.moe.products import Product, autocast, grouped_product
from penstock.moe.routers import BALANCES, Router, RouterSums, TokenChoice, Tokens, chunk_tokens, made_for
from penstock.partial_state import mark_share
from penstock.placement import ExpertPlacement, PlacementError
from penstock.routing.routes import ChunkRoute


@dataclass(frozen=True)
class RoutedTokens:
    """The output of the first half of the layer.

    Attributes:
        rows_RM: The rows of all chunks, sorted by chunk, rank, expert.
        weights: The weights of the rows, for `unpermute`.
        x_TM: The tokens, for shared experts.
        positions_Tk: The positions of every token's experts, -1 for padding; None where tokens do not choose.
    """

    rows_RM: Tensor
    weights: Tensor
    x_TM: Tensor
    sums: RouterSums
    plan: PermutationPlan
    positions_Tk: Tensor | None = None


@dataclass(frozen=True)
class LayerLosses:
    """Losses of one forward pass alone: differentiable scalars without coefficients, means over tokens.

    Their average over ranks is the loss of all ranks' tokens, as data-parallel training expects.
    """

    balance: Tensor
    z: Tensor

    def detach(self) -> LayerLosses:
        """Return the values without their graph."""
        return LayerLosses(self.balance.detach(), self.z.detach())


class MoELayer(nn.Module):
    """Routed experts, of which this rank holds `num_experts / ep_size`.

    `route` and `unpermute` are the halves around the transfer; `expert_rows` runs the experts.

    Args:
        gate, permutation, expert, dispatch, hooks: The parts of the layer; see their base classes.
        shared: A module that every token passes, added to the output, computed while rows are in transit.
        exchange: The ranks that share the experts, when the layer runs by itself (`penstock.ExpertParallel`).
        ep_size, ep_rank: The number of these ranks and the place of this one, for a layer inside a stack,
            which has no exchange (default 1 and 0).
        balance: The tokens over which `losses.balance` judges the balance of experts.
        placement: Which rank holds which expert in which slot, the same on all ranks; without it experts are
            shared out evenly, in the order of their numbers.

    Raises:
        ValueError: If parts do not fit together, or if a layer with shards of experts has an exchange.
    """

    def __init__(
        self,
        *,
        gate: Router,
        permutation: Permutation,
        expert: Experts,
        dispatch: Dispatch | str = "flat",
        hooks: Sequence[Hook] = (),
        shared: nn.Module | None = None,
        exchange: Exchange | None = None,
        ep_size: int | None = None,
        ep_rank: int | None = None,
        balance: BalanceGroup = "global",
        placement: ExpertPlacement | None = None,
    ) -> None:
        super().__init__()
        count_updates()
        if exchange is not None:
            _require_whole(expert)
            if isinstance(permutation, BoundedPermutation):
                raise ValueError(
                    "moe.bound_factor bounds the rows of experts by those of earlier steps. A layer with an "
                    "exchange of its own has no steps that could be run again: use moe.bound_factor=none "
                    "(SortPermutation), or run the layer in a stack"
                )
        if ep_size is None:
            ep_size = 1 if exchange is None else exchange.ep_size
        if ep_rank is None:
            ep_rank = 0 if exchange is None else exchange.ep_rank
        if not 0 <= ep_rank < ep_size:
            raise ValueError(f"ep_rank = {ep_rank}: must be between 0 and ep_size - 1 ({ep_size - 1})")
        if exchange is not None:
            _require_place(exchange, ep_size, ep_rank)
        if placement is not None:
            check_placement(placement, gate.num_experts, ep_size, expert.num_local_experts)
        check_parts(gate, permutation, expert, find_dispatch(dispatch), tuple(hooks), ep_size)
        self.gate, self.permutation, self.experts, self.shared = gate, permutation, expert, shared
        self.dispatch = find_dispatch(dispatch)
        self.hooks = cast(Sequence[Hook], nn.ModuleList(hooks))
        self.ep_size, self.ep_rank, self.num_local_experts = ep_size, ep_rank, expert.num_local_experts
        self.placement = placement or ExpertPlacement.even(gate.num_experts, ep_size)
        self.balance = BALANCES[balance]
        self.exchange: Exchange | None = exchange if exchange is not None or ep_size > 1 else Alone()
        self._maker = None
        if self.exchange is not None:
            self._maker = self.exchange.maker(self.dispatch, permutation)
            self.exchange.adopt(expert)
        if ep_size > 1:
            mark_share(self, self.placement.in_words(ep_rank), ("experts.",))
        # The parts of the layer in words, for ranks to compare.
        top_k = getattr(gate, "top_k", None)
        parts = [f"{type(gate).__name__} over {gate.num_experts} experts, top_k {top_k}"]
        parts += [type(permutation).__name__, type(expert).__name__, f"dispatch {self.dispatch.name}"]
        parts += [*(type(hook).__name__ for hook in hooks), f"balance {balance}"]
        self._words = ", ".join([*parts, f"placement {self.placement.digest[:8]}"])
        self._has_met = False  # whether other ranks' layers have been compared with this one
        self._losses: LayerLosses | None = None
        self._recomputed: weakref.ref[LayerLosses] | None = None
        self._trained_unsummed = 1  # ranks that trained in the last pass, and whose choices nothing sums
        self._replica_slots: SlotsWithReplicas | None = None

    @property
    def num_experts(self) -> int:
        """The number of experts over all ranks."""
        return self.gate.num_experts

    @property
    def _rows_travel(self) -> bool:
        return not isinstance(self.exchange, Alone)

    @property
    def losses(self) -> LayerLosses | None:
        """Balance and z-losses of the last `forward`; None before the first."""
        alive = None if self._recomputed is None else self._recomputed()
        return self._losses if alive is None else alive

    @property
    def expert_slots(self) -> OwnSlots | SlotsWithReplicas:
        """Where rows go, and which experts compute them here."""
        return self._replica_slots or OwnSlots(self.permutation, self.experts, self.placement)

    def use_replicas(self, slots: SlotsWithReplicas | None) -> None:
        """Route to the replicas of all ranks, and compute those of this rank; None: there are no replicas.

        For the steps of a stack, which bring the replicas.
        """
        self._replica_slots = slots

    def send_by(self, dispatch: Dispatch, permutation: Permutation) -> None:
        """Let rows travel in another way from the next step of a stack on."""
        assert self.exchange is None, "such a layer has compared its parts with those of other ranks"
        check_parts(self.gate, permutation, self.experts, dispatch, tuple(self.hooks), self.ep_size)
        self.dispatch, self.permutation = dispatch, permutation

    def by_number(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Cut a tensor of the local experts by expert: a name that ends in its number, and a view."""
        held = self.placement.held(self.ep_rank)
        for logical, slot, part in self.experts.split(name, tensor):
            yield f"{logical}.{held[slot]}", part

    def route(self, x_TM: Tensor, tokens: Tokens, chunks: int = 1, what: OwnTokens = TOKENS) -> RoutedTokens:
        """Choose experts and bring the tokens, or what rows carry in their place, into expert order.

        Args:
            chunks: The number of chunks of the tokens.
            what: What rows carry.
        """
        x_TM = hooked(self.hooks, "before_moe_start", x_TM)
        masked_TM = x_TM
        if tokens.valid_T is not None:  # whatever stands in padding, a NaN too, reaches no sum
            masked_TM = x_TM.masked_fill(~tokens.valid_T.unsqueeze(1), 0)
        choice = made_for(self.gate(masked_TM, tokens), tokens)
        expert_slots = self.expert_slots
        choice = what.chosen(
            expert_slots.placed(choice), tokens, self.ep_rank * expert_slots.experts.num_local_experts
        )
        permutation = expert_slots.permutation
        plan = permutation.plan(choice, chunks)
        sent_TM = autocast(masked_TM) if self._rows_travel else masked_TM
        rows_RM = what.rows(permutation, sent_TM, choice, plan)
        rows_RM = hooked(self.hooks, "before_dispatch", rows_RM, permutation.beside)
        positions_Tk = choice.experts_Tk if isinstance(choice, TokenChoice) else None
        return RoutedTokens(rows_RM, permutation.weights(choice), x_TM, choice.sums, plan, positions_Tk)

    def expected(self, x_TM: Tensor, tokens: Tokens) -> Tensor:
        """Return what the gate would choose for tokens that are still in transit, [T, k]; no gradient."""
        with torch.no_grad():
            choice = self.gate(x_TM, replace(tokens, clean=True))
        assert isinstance(choice, TokenChoice), "samples move where tokens choose"
        return choice.experts_Tk

    def arrange(self, positions_Tk: Tensor, tokens: Tokens, chunks: int) -> PermutationPlan:
        """Return the permutation of the rows of tokens that have chosen on another rank."""
        permutation, count = self.expert_slots.permutation, len(positions_Tk)
        assert isinstance(permutation, SortPermutation), "samples move where no row is dropped or shared"
        sizes = chunk_tokens(count, chunks, tokens.inseparable(count))
        return permutation.arrange(positions_Tk, sizes, masked=tokens.valid_T is not None)

    def expert_rows(self, rows_RM: Tensor, route: ChunkRoute, product: Product = grouped_product) -> Tensor:
        """Return this rank's experts' outputs for rows sorted by (source rank, expert), in the same order.

        Where rows travel, outputs have their type, as those of a rank without rows: every rank expects it.

        Args:
            product: How rows and weights are multiplied; it decides when weight gradients are computed.
        """
        expert_slots = self.expert_slots
        rows_RM = hooked(self.hooks, "after_dispatch", rows_RM, expert_slots.permutation.beside)
        out_RM = expert_slots.permutation.run_experts(rows_RM, route, expert_slots.experts, product)
        if self._rows_travel:
            out_RM = out_RM.to(rows_RM.dtype)
        return hooked(self.hooks, "before_combine", out_RM)

    def unpermute(
        self, rows_RM: Tensor, weights: Tensor | None, plan: PermutationPlan, shared_TM: Tensor | None = None
    ) -> Tensor:
        """Return weighted sums of the expert outputs, back in token order, [T, M].

        Args:
            weights: The weights that `route` returned; None where rows are weighted already.
        """
        came_RM = hooked(self.hooks, "after_combine", rows_RM)
        if weights is None:
            assert isinstance(self.permutation, SortPermutation), (
                "samples move where no row is dropped or shared"
            )
            out_TM = self.permutation.unpermute(came_RM, None, plan)
        else:
            out_TM = self.permutation.unpermute(came_RM, weights, plan)
        if shared_TM is not None:
            out_TM = out_TM + shared_TM
        return hooked(self.hooks, "before_moe_end", out_TM)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Run the layer.

        Afterwards `losses` holds the balance and z-losses of this pass. With an exchange all ranks must call
        this method, in evaluation too. A checkpoint with use_reentrant=True gives gradients only to what its
        function returns: let it return the losses, too.

        Inside `torch.compile` the layer itself is not compiled, only the code around it: row counts differ in
        every pass, and all ranks must exchange in one order. Its experts may be compiled:
        `layer.experts.compile(dynamic=True)`.

        Args:
            x: The tokens, [T, M] or [B, L, M].
            valid: bool [T] or [B, L], False for padding; None: all tokens are valid.

        Returns:
            The output, of the shape of `x`.

        Raises:
            ValueError: If shapes do not fit, or for shards of experts.
        """
        if torch.compiler.is_compiling():
            return _uncompiled(self, x, valid)
        return self._forward(x, valid)

    def _forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        if self.exchange is None or self._maker is None:
            raise RuntimeError(
                f"experts are spread over {self.ep_size} ranks: give the layer an exchange "
                "(penstock.ExpertParallel), or run it inside a penstock stack"
            )
        _require_whole(self.experts)
        tokens = _tokens_of(x, valid)
        _require_place(self.exchange, self.ep_size, self.ep_rank)
        self.exchange.check(self.experts, x, self._words, first=not self._has_met)
        self._has_met = True
        try:
            routed = self.route(x.flatten(0, -2), tokens)
        except RuntimeError as error:
            # In every gate of Penstock the first matrix meets the tokens. In other gates it need not, so it
            # explains a failure and does not find one.
            matrix = next((p for p in self.gate.parameters() if p.dim() == 2), None)
            if matrix is None or matrix.shape[1] == x.shape[-1]:
                raise
            raise ValueError(
                f"x has hidden size {x.shape[-1]}, and {type(self.gate).__name__} was built for "
                f"{matrix.shape[1]}"
            ) from error
        counts, rows_RM = self._known(routed, tokens, x.shape[:-1].numel())
        route = self.exchange.routes(routed.plan, self.num_local_experts, self._maker, self.experts).slices[0]
        rows_RM = self.exchange.to_experts(rows_RM, route)
        shared_TM = None if self.shared is None else self.shared(routed.x_TM)
        rows_RM = self.exchange.run(self.experts, partial(self.expert_rows, route=route), rows_RM)
        rows_RM = self.exchange.to_home(rows_RM, route)
        chosen_E, total = counts
        total = total.clamp(min=1) / self.exchange.data_parallel_size
        slope_BE = self.balance.slope(routed.sums.chosen_BE, chosen_E.unsqueeze(0), 0, total)
        losses = LayerLosses((slope_BE * routed.sums.probability_BE).sum(), routed.sums.z / total)
        weights, bias = routed.weights, self.gate.bias
        if bias is not None and self.training:  # it counts in backward what has been trained on
            if weights.requires_grad:
                weights = bias.when_trained(weights, routed.sums.chosen_E)
            else:  # the gate is frozen; the experts may be trained
                rows_RM = bias.when_trained(rows_RM, routed.sums.chosen_E)
        out_TM = self.unpermute(rows_RM, weights, routed.plan, shared_TM)
        if torch._C._current_graph_task_id() == -1:  # else a checkpoint recomputes: autograd runs this call
            self._losses, self._recomputed = losses, None
            if self.training:
                self._trained_unsummed = _unsummed_ranks(self)
            return out_TM.view_as(x)
        # A checkpoint's recomputation must not be kept alive by its losses: they would hold all activations
        # before them to the end of backward. So its output holds the losses, and the layer only their values.
        self._losses, self._recomputed = losses.detach(), weakref.ref(losses)
        held: Tensor = _Hold.apply(out_TM.view_as(x), losses)
        return held

    def update_expert_bias(self) -> None:
        """Move the bias of a loss-free balanced gate, once after an optimiser step; all ranks take part.

        Raises:
            ValueError: If DDP or FSDP trains the layer on several ranks, and no exchange sums their choices.
        """
        bias = self.gate.bias
        if bias is None:
            return
        if self._trained_unsummed > 1 and bias.rate and bias.counted_E.any():
            raise ValueError(
                f"{self._trained_unsummed} ranks train this layer, and without an exchange its bias would "
                "follow the choices of one, or differ by rank: build it with exchange="
                f"penstock.ExpertParallel(num_experts={self.num_experts}, ep_size=1), and wrap the model as "
                "docs/moe-layer.md shows. "
                "Or sum the choices yourself, with gate.bias.update(sum_over_ranks) in place of this call; "
                "DistributedDataParallel then needs broadcast_buffers=False"
            )
        bias.update(None if self.exchange is None else self.exchange.sum_over_ranks)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without losses: they hold the graph of a pass."""
        return {**self.__dict__, "_losses": None, "_recomputed": None, "_replica_slots": None}

    def _known(
        self, routed: RoutedTokens, tokens: Tokens, count: int
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return how often all ranks chose every expert and how many tokens they have, and the rows to send.

        Exchanged before any row leaves: ranks whose layers differ would misread each other's rows.
        """
        assert self.exchange is not None
        z, chosen_E, rows_RM = routed.sums.z, routed.sums.chosen_E.double(), routed.rows_RM
        here = (
            z.new_full((), count, dtype=torch.float64)
            if tokens.valid_T is None
            else tokens.valid_T.sum().double()
        )
        if self.exchange.data_parallel_size == 1:
            return (chosen_E, here), rows_RM
        own_counts = torch.cat([chosen_E, here.view(1)])
        gate = {f"gate.{name}": parameter for name, parameter in self.gate.named_parameters()}
        counts, rows_RM = self.exchange.sum_of_alike(own_counts, self.experts, gate, rows_RM)
        return (counts[:-1], counts[-1]), rows_RM


def hooked(hooks: Sequence[Hook], moment: Moment, tensor: Tensor, beside: int = 0) -> Tensor:
    """Return `tensor` after all hooks of a moment; those called `after_` run in reverse, so that hooks nest.

    Args:
        beside: Columns at the end that no hook sees.
    """
    if beside and hooks:
        return torch.cat([hooked(hooks, moment, tensor[:, :-beside]), tensor[:, -beside:]], dim=1)
    for hook in reversed(hooks) if moment.startswith("after") else hooks:
        tensor = getattr(hook, moment)(tensor)
    return tensor


@_disable_dynamo
def _uncompiled(layer: MoELayer, x: Tensor, valid: Tensor | None) -> Tensor:
    """Run the layer uncompiled, by a marker that does not load the compiler, which takes seconds."""
    return layer._forward(x, valid)


class _Hold(torch.autograd.Function):
    """Returns the output unchanged; its graph holds the losses."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, losses: LayerLosses) -> Tensor:
        ctx.losses = losses
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grads[0], None


def _require_place(exchange: Exchange, ep_size: int, ep_rank: int) -> None:
    for name, own, theirs in (
        ("ep_size", ep_size, exchange.ep_size),
        ("ep_rank", ep_rank, exchange.ep_rank),
    ):
        if own != theirs:
            raise ValueError(
                f"the layer has {name} = {own}, its exchange {name} = {theirs}: rows would meet the wrong "
                "experts. Build the layer with this exchange, and leave ep_size and ep_rank to it"
            )


def _require_whole(experts: Experts) -> None:
    """Raise ValueError for a shard of experts: only the tasks of a stack add up its partial sums."""
    if experts.shard.size > 1:
        raise ValueError(
            f"the experts are shard {experts.shard.rank} of {experts.shard.size}, whose outputs are partial "
            "sums: shards of experts run inside a penstock stack only (parallel.etp_size). Build the layer "
            "with whole experts to run it by itself"
        )


def managed_groups() -> Iterator[Any]:
    """Yield the groups of parameters that `fully_shard` and `replicate` manage."""
    for reference in list(_module_state_mapping.values()):
        yield from getattr(reference(), "_fsdp_param_groups", ())


def _unsummed_ranks(layer: MoELayer) -> int:
    """Return how many ranks train this layer, by what runs around it, without summing what its gate chose."""
    bias = layer.gate.bias
    if bias is None or not bias.rate or not isinstance(layer.exchange, Alone):
        return 1
    own, parts = {*map(id, layer.parameters())}, {*layer.modules()}
    sizes = [
        group.mesh_info.mesh.size()
        for group in managed_groups()
        if any(each._module_info.module in parts for each in group.fsdp_params)
    ]
    # `replicate` by DDP leaves this behind a forward that fails, so it is asked whether it has this layer.
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is not None and any(id(parameter) in own for parameter in ddp._module_parameters):
        sizes.append(ddp.process_group.size())
    if not sizes and getattr(layer, "_is_fsdp_managed_module", False) and dist.is_initialized():
        sizes.append(dist.get_world_size())  # the older FSDP does not show its modules their group
    return max(sizes, default=1)


def _tokens_of(x: Tensor, valid: Tensor | None) -> Tokens:
    if x.dim() not in (2, 3):
        raise ValueError(f"x must be [tokens, hidden] or [samples, tokens, hidden], not {list(x.shape)}")
    if valid is not None and (valid.dtype != torch.bool or valid.shape != x.shape[:-1]):
        raise ValueError(
            f"valid must be bool {list(x.shape[:-1])} for x {list(x.shape)}, not {valid.dtype} "
            f"{list(valid.shape)}"
        )
    samples = max(1, x.shape[0]) if x.dim() == 3 else 1  # a rank may have none, and still takes part
    return Tokens(samples=samples, valid_T=None if valid is None else valid.flatten())


def update_expert_biases(model: nn.Module) -> None:
    """Call `update_expert_bias` of every MoE layer in `model`, to be done after `optimizer.step()`."""
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.update_expert_bias()


class LogicalNames:
    """The names that one process has for the parameters of a model, whose layers hold this rank's experts."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = {
            f"{prefix}.experts.": module
            for prefix, module in model.named_modules()
            if isinstance(module, MoELayer)
        }

    def split(self, name: str, tensor: Tensor, suffix: str = "") -> Iterable[tuple[str, Tensor]]:
        """Return what belongs to a parameter by its name; for experts a view of each one, by its number.

        Args:
            name: The name of the parameter in the model.
            tensor: The parameter, or a tensor of its shape.
            suffix: What is added to names, for a state of the parameter.
        """
        for prefix, layer in self._layers.items():
            if name.startswith(prefix):
                return layer.by_number(f"{name}{suffix}", tensor)
        return [(f"{name}{suffix}", tensor)]


# ---- versions of parameters that rise with every update, so that autograd and a step notice one in between


@cache
def count_updates() -> None:
    """Let every optimiser in this process raise the versions of its parameters when it steps, from now on.

    Autograd refuses a backward pass if a tensor that it saved has another version than it had. The fused
    kernels of torch (AdamW, SGD, Adagrad), and those of several other packages, leave the version as it is:
    an update between forward and backward would give gradients of neither, without an error. Optimisers that
    raise versions themselves raise them twice. It costs about 0.2 us per parameter and update.
    """

    def raise_versions(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        torch.autograd.graph.increment_version(p for p in parameters if not p.is_inference())

    register_optimizer_step_post_hook(raise_versions)


# ---- checks that the parts of a layer fit together --------------------------------------------------------


def check_parts(
    gate: Router,
    permutation: Permutation,
    expert: Experts,
    dispatch: Dispatch,
    hooks: tuple[Hook, ...],
    ep_size: int,
) -> None:
    """Raise ValueError that says which parts do not fit, why, and what would."""
    check_dispatch(permutation, dispatch)
    if gate.kind not in permutation.kinds:
        takes = f"it takes choices of kind {' or '.join(permutation.kinds)}, not {gate.kind}"
        why = REFUSED.get((gate.kind, permutation.name), takes)
        raise ValueError(f"{type(gate).__name__} with {type(permutation).__name__}: {why}")
    held = expert.num_local_experts * ep_size
    if gate.num_experts != held:
        raise ValueError(
            f"the gate chooses among num_experts = {gate.num_experts}, but {ep_size} rank(s) with "
            f"{expert.num_local_experts} experts each hold {held}; build {type(expert).__name__} with "
            f"num_local_experts = num_experts / ep_size"
        )
    encoding = next((hook for hook in hooks if hook.encodes_rows), None)
    if encoding is not None and permutation.row_counts:
        raise ValueError(
            f"{type(encoding).__name__} with one copy per rank or node: numbers that travel with the rows "
            "would be rounded; use only one of the two"
        )
    for name, number in (("num_experts", gate.num_experts), ("ranks", ep_size)):
        built_for = getattr(permutation, name, number)
        if built_for != number:
            raise ValueError(
                f"{type(permutation).__name__} was built for {name} = {built_for}, but the layer has {name} "
                f"= {number}: num_experts of {type(gate).__name__}, ranks that share the experts"
            )


def check_placement(placement: ExpertPlacement, num_experts: int, ep_size: int, slots: int) -> None:
    """Raise PlacementError unless a layer of these sizes can run under `placement`."""
    for name, actual, wanted in (
        ("experts", placement.num_experts, num_experts),
        ("ranks", placement.ranks, ep_size),
        ("slots per rank", placement.slots, slots),
    ):
        if actual != wanted:
            raise PlacementError(
                f"the placement has {actual} {name}, and the layer has {wanted}: make one for this layer"
            )
