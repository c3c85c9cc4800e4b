"""Expert parallelism for a layer that runs by itself, in any training loop: transfers under autograd."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from penstock.copies import Shared
from penstock.device import device_of, device_of_backend
from penstock.features.dispatch import Dispatch
from penstock.mesh import Group
from penstock.moe.exchange import route_maker
from penstock.moe.layer import MoELayer
from penstock.moe.permute.sort import Permutation, PermutationPlan
from penstock.partial_state import refuse_pickle
from penstock.routing.routes import ChunkRoute, RouteMaker, Routes
from penstock.runtime.clip import ExpertRanks, mark_all, ranks_of
from penstock.runtime.expert_parallel.guard import ExpertGuard
from penstock.runtime.expert_parallel.optimizers import watch_optimizers
from penstock.runtime.groups import build_transport
from penstock.runtime.parts import living_stacks
from penstock.runtime.transport import HostCounts, Later, Transport, exchange_counts, send_home, send_out
from penstock.topology import INTER_GROUPS, Control, Layout, ParallelConfig
from penstock.topology.control import host_group
from penstock.topology.groups import TransportName
from penstock.topology.local import staging_device

COUNTS = "exchanging counts of rows of an MoE layer"


class ExpertParallel(Shared):
    """Ranks of the default process group share experts: `ep_size` consecutive ranks hold each expert once.

    Gradients follow the convention of data-parallel loops (`DistributedDataParallel`): the loss of a rank is
    a mean over its own tokens, and the mean over ranks is trained. An expert's gradient is divided by the
    number of ranks here, and summed over the replicas if there are any, so `backward` leaves finished
    gradients, zeros where an expert had no token. Expert parameters must be left out of the loop's own
    averaging: `DistributedDataParallel(ignore_experts(model))`. They also carry `allreduce = False`. A layer
    whose experts DDP, FSDP or another tool manages as if all ranks shared them refuses to run.

    What a loop has to know: ranks draw their experts by their own random numbers, so seed them differently
    before the layer is built, or expert 0 of every rank begins with the same values; the norm of the
    gradients that a rank holds differs between ranks, so clip with `penstock.clip_grad_norm_`; experts must
    not use `torch.utils.checkpoint` with use_reentrant=True inside (around the layer it may be either).

    One instance serves all layers. Every rank must build it at the same point.

    Args:
        num_experts: Of a layer, in total.
        ep_size: None = all ranks.
        ranks_per_node: For a hierarchical dispatch.
        transport: "staged" = layers are on GPUs that ranks may share, see ParallelConfig, whatever the
            default process group is for.

    Raises:
        ConfigError: For sizes that do not fit.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        ep_size: int | None = None,
        ranks_per_node: int | None = None,
        timeout_s: float = 60.0,
        transport: TransportName = "direct",
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "ExpertParallel needs a process group: call torch.distributed.init_process_group before, or "
                "build the layer without an exchange to hold all experts here"
            )
        parallel = ParallelConfig(
            ep_size=ep_size, ranks_per_node=ranks_per_node, timeout_s=timeout_s, transport=transport
        )
        self.layout = Layout.build(parallel, dist.get_world_size(), dist.get_rank(), num_experts)
        self._device = device_of_backend(dist.get_backend_config())
        if transport == "staged":
            self._device = staging_device()
        device_of(self._device).set_environment(os.environ)  # and none is refused: a layer has no lanes
        inside = (Group.NODE, Group.RAIL) if self.layout.ep_nodes > 1 else ()
        self._transport: Transport = build_transport(
            self.layout, self._device, parallel, (*INTER_GROUPS, *inside)
        )
        self._ranks = ExpertRanks(self.layout, self._transport, self._device)
        watch_optimizers()
        if self.layout.world_size > 1:
            host_group(timeout_s)
        self._control = Control(self.layout.rank, self.layout.world_size)
        self._guards: weakref.WeakKeyDictionary[nn.Module, ExpertGuard] = weakref.WeakKeyDictionary()

    def close(self) -> None:
        """End the connections to the other ranks and the threads that wait for these.

        Its layers cannot run afterwards. The process group with which it was built goes on.
        """
        self._transport.close()

    @property
    def ep_size(self) -> int:
        return self.layout.ep_size

    @property
    def ep_rank(self) -> int:
        return self.layout.ep_rank

    @property
    def data_parallel_size(self) -> int:
        return self.layout.world_size

    def maker(self, dispatch: Dispatch, order: Permutation) -> RouteMaker:
        if dispatch.needs_table:
            self.layout.require_nodes("dispatch", dispatch.name)
        return route_maker(dispatch, self.layout.place, order)

    def routes(
        self, plan: PermutationPlan, num_local_experts: int, maker: RouteMaker, experts: nn.Module
    ) -> Routes:
        guard = self._guard_of(experts)
        if plan.slots is not None:
            slots = plan.slots[0]
            # Fixed sizes would differ where ranks have not equally many tokens, which Gloo does not always
            # notice. Checked where no device has to be waited for.
            if not device_of(self._device).is_gpu:
                sums = torch.tensor([slots, slots**2], device="cpu")
                with self._control.naming(COUNTS):
                    self._transport.all_reduce(sums, Group.EXPERT)
                total, squares = sums.tolist()
                if total**2 != squares * self.ep_size:
                    raise ValueError(
                        f"ranks have different numbers of tokens: {slots} slots per expert here, "
                        f"{total / self.ep_size:g} on average. With a capacity all need equally many: fill "
                        "up with padding and say so with `valid`"
                    )
            guard.judge_change()
            return maker.even(plan.slots, num_local_experts)
        assert plan.counts_CN is not None
        with self._control.naming(COUNTS):
            routes = Later.of(exchange_counts(plan.counts_CN, maker, self._transport))
        guard.judge()  # what was summed before the counts has arrived with them
        return routes

    def to_experts(self, rows: Tensor, route: ChunkRoute) -> Tensor:
        moved: Tensor = _Travel.apply(rows, route, self, True)
        return moved

    def to_home(self, rows: Tensor, route: ChunkRoute) -> Tensor:
        moved: Tensor = _Travel.apply(rows, route, self, False)
        return moved

    def travel(self, rows: Tensor, route: ChunkRoute, what: str, *, outward: bool) -> Tensor:
        """Move `what`, in words, along all legs."""
        with self._control.naming(f"exchanging {what} of an MoE layer"):
            for leg in route.legs if outward else reversed(route.legs):
                move = send_out if outward else send_home
                rows = move(rows, leg, self._transport)
        return rows if route.legs else rows.view_as(rows)

    def adopt(self, experts: nn.Module) -> None:
        self._guard_of(experts).adopt(experts)

    def check(self, experts: nn.Module, x: Tensor, parts: str, *, first: bool) -> None:
        self._guard_of(experts).check(experts, x, parts, first=first)

    def run(self, experts: nn.Module, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return function(rows)
        trained = {n: p for n, p in experts.named_parameters() if p.requires_grad}
        rows, *shared = _Finish.apply(self, rows, *trained.values())
        swapped = {f"experts.{name}": tensor for name, tensor in zip(trained, shared, strict=True)}
        out: Tensor = functional_call(_Call(experts, function), swapped, (rows,))
        return out

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().clone()
        with self._control.naming("comparing and summing what ranks know of an MoE layer"):
            self._transport.all_reduce(total, Group.WORLD)
        return total

    def sum_of_alike(
        self, tensor: Tensor, experts: nn.Module, parameters: Mapping[str, Tensor], rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of `tensor` over ranks, and the rows to send; compare layers and values in the same
        exchange.

        On a GPU what is compared is read later, with the counts of rows, or in the next forward. Whether
        other ranks need gradients is read at once, by a rank that needs none itself.
        """
        guard, size, late = self._guard_of(experts), len(tensor), device_of(self._device).is_gpu
        needs = rows.requires_grad or any(parameter.requires_grad for parameter in experts.parameters())
        marks = guard.marks(experts, parameters, seldom=late)
        total = self.sum_over_ranks(torch.cat([tensor, tensor.new_full((1,), needs), marks.to(tensor)]))
        guard.unread = HostCounts(total[size + 1 :])
        if not late:
            guard.judge()
        if not rows.requires_grad and self.ep_size > 1 and torch.is_grad_enabled():
            rows = rows.detach().requires_grad_(needs or bool(total[size]))
        return total[:size], rows

    def finish_gradient(self, gradient: Tensor) -> Tensor:
        """Return an expert's gradient, summed over its replicas and divided by the number of ranks."""
        finished = (gradient / self.layout.world_size).contiguous()
        with self._control.naming("summing gradients of replicas of experts of an MoE layer"):
            self._transport.all_reduce(finished, Group.EXPERT_DATA)
        return finished

    @torch.no_grad()
    def make_edp_equal(self, experts: nn.Module) -> None:
        """Copy parameters and buffers of every expert's first replica to all replicas. All ranks call it."""
        if self.layout.edp_size == 1:
            return
        for tensor in _state(experts).values():
            # Copied by a sum with zeros: the transport has no broadcast, and this happens once.
            held = tensor.detach().to(torch.uint8 if tensor.dtype == torch.bool else tensor.dtype, copy=True)
            held = held.contiguous()
            if not self._ranks.is_first_in_edp:
                held.zero_()
            self._transport.all_reduce(held, Group.EXPERT_DATA)
            tensor.copy_(held)

    def _guard_of(self, experts: nn.Module) -> ExpertGuard:
        if experts not in self._guards:
            self._guards[experts] = ExpertGuard(experts, self._ranks, self._control)
        return self._guards[experts]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return refuse_pickle("an MoELayer with ExpertParallel")


def ignore_experts(model: nn.Module) -> nn.Module:
    """Make `model` ready for `DistributedDataParallel(ignore_experts(model))`, and return it.

    DDP averages gradients over all ranks and gives every rank rank 0's values at the start. Experts behind an
    `ExpertParallel` finish their gradients themselves and differ by rank: all their parameters and buffers
    are put on DDP's list of what to ignore, and their replicas, if any, get equal values here. The list also
    gets the choices that a gate's bias has counted, which are each rank's own. Every rank must call it at the
    same point, right before DDP.

    FSDP keeps no list at the model: call this for the replicas, and give FSDP `expert_parameters(model)`.
    """
    _mark(model)
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    for name, module in model.named_modules():
        if isinstance(module, MoELayer) and isinstance(module.exchange, ExpertParallel):
            module.exchange.make_edp_equal(module.experts)
            own = [f"experts.{part}" for part in _state(module.experts)]
            own += [] if module.gate.bias is None else ["gate.bias.counted_E"]
            ignored.update(f"{name}.{part}" if name else part for part in own)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(ignored))
    return model


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of which every rank has its own: what `fully_shard(ignored_params=...)` must
    leave alone.

    They also serve as an optimiser's group.
    """
    _mark(model)
    return {parameter for parameter in model.parameters() if ranks_of(parameter) is not None}


def _mark(model: nn.Module) -> None:
    """Mark the experts of all layers; a stack marks its own again only before a step."""
    mark_all(model)
    inside = set(model.modules())
    for stack in living_stacks():
        if stack.model in inside:
            stack.mark_experts()


class _Finish(torch.autograd.Function):
    """Passes rows and expert parameters unchanged; finishes gradients of the parameters, zeros if missing.

    One node for all: its place in backward is after the experts and before the rows' way back, on every rank,
    whichever experts had rows there. So collectives meet in the same order everywhere.
    """

    @staticmethod
    def forward(ctx: Any, exchange: ExpertParallel, rows: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return rows.view_as(rows), *(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        finished = (ctx.exchange.finish_gradient(grad.detach()) for grad in grads[1:])
        return None, *_once(grads[0].detach(), *finished)


class _Call(nn.Module):
    """A module that has `experts` and calls a function that uses them."""

    def __init__(self, experts: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.experts, self.function = experts, function

    def forward(self, rows: Tensor) -> Tensor:
        return self.function(rows)


class _Travel(torch.autograd.Function):
    """Moves rows along all legs, outward or home; gradients travel the opposite way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: ChunkRoute, exchange: ExpertParallel, outward: bool) -> Tensor:
        ctx.route, ctx.exchange, ctx.outward = route, exchange, outward
        return exchange.travel(rows, route, "rows", outward=outward)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        came = grads[0].detach().contiguous()
        (back,) = _once(ctx.exchange.travel(came, ctx.route, "gradients of rows", outward=not ctx.outward))
        return back, None, None, None


class _Once(torch.autograd.Function):
    """Passes gradients unchanged, and says why they cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        del ctx
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        del ctx, grads
        raise RuntimeError(
            "the gradients of an MoELayer with ExpertParallel have crossed ranks and cannot be "
            "differentiated again (create_graph=True, a penalty on gradients): take second derivatives of a "
            "layer without an exchange, which holds all experts"
        )


def _once(*gradients: Tensor) -> tuple[Tensor, ...]:
    """Return gradients for which a second derivative, where one is to be possible, is an error."""
    if not torch.is_grad_enabled():
        return gradients
    passed: tuple[Tensor, ...] = _Once.apply(*(gradient.requires_grad_() for gradient in gradients))
    return passed


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
