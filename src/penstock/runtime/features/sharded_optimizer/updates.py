"""The work of a sharded optimiser's tasks: sum in shares, take the norm, update, gather parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.features.sharded_optimizer.feature import of_optimizer
from penstock.graph import Graph, Lane, Name, Phase, Task
from penstock.mesh import Axes, Group
from penstock.ops import Op
from penstock.ops.core import GRADIENT_KINDS, KindName, kind_of_task
from penstock.runtime.buckets import Buckets, FlatGradients, ReleasedGradients
from penstock.runtime.features.sharded_optimizer.share import MASTER, MOMENTS, ReleasingShare, Share
from penstock.runtime.handlers import NOTHING, Inputs, Outputs, StepContext, handles
from penstock.runtime.machinery import FeatureStack, StackFeature, StepFeature
from penstock.runtime.transport import Transport, Transports
from penstock.sharding import sharding_of
from penstock.step import StepShape
from penstock.step.shape import Updating
from penstock.topology import Layout

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups as in `torch.optim`."""


def group_numbers(groups: Groups) -> dict[int, int]:
    """Return the number of every parameter's group, by the parameter's id."""
    return {id(p): number for number, group in enumerate(groups) for p in group["params"]}


def refuse_left_out(buckets: Buckets, groups: Groups, name_of: Callable[[nn.Parameter], str]) -> None:
    """Raise RuntimeError if a step would sum gradients of a parameter that is in no group."""
    known = group_numbers(groups)
    for parameter in (p for flat in buckets.all for p in flat.parameters):
        if id(parameter) not in known:
            raise RuntimeError(
                f"{name_of(parameter)} is trained and in no group of the ShardedAdamW, and no other "
                "optimizer can update it, since its gradient is summed in shares: give it to "
                "optimizer.add_param_group, freeze it (requires_grad_(False)) before the forward pass, "
                "or use optimizer.zero_stage=0"
            )


LOST_SUMS = (
    "a backward pass failed after it had begun to sum gradients: call optimizer.zero_grad() and "
    "compute again what was accumulated since the last update"
)
LOST_PARAMETERS = (
    "a backward pass failed that was to update parameters (optimizer.in_backward()), so some are updated and "
    "others are not: load the last checkpoint into a new stack and optimizer"
)


class Failed:
    """The damage that a failed backward pass has done to sums and parameters, until it is cleared."""

    def __init__(self) -> None:
        self._words = ""

    def note(self, *, updates: bool) -> str:
        """Note that a pass failed, and return what to do.

        Args:
            updates: Whether it was to update parameters.
        """
        self._words = LOST_PARAMETERS if updates else LOST_SUMS
        return self._words

    def forget_sums(self) -> None:
        """Clear damage to sums, which are no longer used; damage to parameters stays."""
        self._words = "" if self._words == LOST_SUMS else self._words

    def refuse(self) -> None:
        """Raise RuntimeError if sums or parameters are damaged."""
        if self._words:
            raise RuntimeError(self._words)

    def refuse_parameters(self) -> None:
        """Raise RuntimeError if parameters are damaged, before they or their state are handed on."""
        if self._words == LOST_PARAMETERS:
            raise RuntimeError(self._words)


TINY = 1e-6
Shares = dict[tuple[KindName, int], list[Share]]
"""By kind of gradients and layer."""


@dataclass(frozen=True)
class Judged:
    """What updates must know of all gradients.

    Attributes:
        norm: float64.
        factor: What gradients are scaled by.
        refused: float32, 1 where the step may change nothing, since a number in it is not finite.
    """

    norm: Tensor
    factor: Tensor
    refused: Tensor


class Updates:
    """The shares of one rank, and the state of the current step's sums and updates.

    Attributes:
        groups: As in `torch.optim`, read at every update.
        max_norm: Gradients are scaled to this norm; None = unscaled.
        in_backward: Whether the tasks of the running backward pass update, too; else they only sum.
    """

    def __init__(
        self, layout: Layout, transports: Transports, groups: Groups, max_norm: float | None
    ) -> None:
        self._layout, self._transports, self.groups, self.max_norm = layout, transports, groups, max_norm
        self._buckets: Buckets | None = None
        self._cut: tuple[object, ...] = ()
        self._shares: Shares = {}
        self._asleep: Shares = {}  # those of frozen parameters: they may be trained again
        self._stale: set[Name] = set()
        self._group_of: dict[int, int] = {}  # the number of every parameter's group, by its id
        self.steps: dict[nn.Parameter, Tensor] = {}
        self.waiting: dict[
            nn.Parameter, Mapping[str, Any]
        ] = {}  # loaded states of what was never trained here
        self.judged: Judged | None = None
        self.in_backward = False
        self.changes = 0  # how often parameters have been updated
        self._summed: Graph | None = None  # that of the step that has left sums
        self.failed = Failed()

    @property
    def has_sums(self) -> bool:
        """Whether there are sums that no update has used."""
        return self._summed is not None

    def forget(self) -> None:
        """Discard sums that no update has used."""
        self._summed = None
        self.failed.forget_sums()

    # ---- who owns what -------------------------------------------------------------------------------------

    def settle(self, buckets: Buckets, shape: StepShape) -> None:
        """Own shares of these buckets, as this shape cuts them; existing state is redistributed.

        All ranks must call it together; it costs an exchange where the cut or a parameter has changed.
        """
        self._group_of = group_numbers(self.groups)
        layers = range(shape.num_layers)
        cut = tuple(shape.parts_of(layer, kind) for kind in GRADIENT_KINDS for layer in layers)
        if buckets is self._buckets and cut == self._cut:
            return
        if self.has_sums or self._stale:
            raise RuntimeError(
                "the model or the plan has changed between a backward pass and the update that it is for: "
                "call optimizer.step(), optimizer.zero_grad() or optimizer.flush() on all ranks before it"
            )
        if cut == self._cut and self._follow(buckets):
            self._buckets = buckets
            return
        made: Shares = {
            (kind, layer): [self._share(kind, flat, shape.parts_of(layer, kind) or (1,)) for flat in bucket]
            for kind in GRADIENT_KINDS
            for layer, bucket in enumerate(buckets.by_kind[kind])
        }
        # A share for each parameter that the optimiser still has and no step trains now.
        trained = {id(p) for shares in made.values() for each in shares for p in each.flat.parameters}
        asleep: Shares = {}
        for (kind, layer), share in self._known:
            for parameter in share.flat.parameters:
                if id(parameter) in self._group_of and id(parameter) not in trained:
                    alone = self._share(kind, FlatGradients([parameter]), (1,))
                    asleep.setdefault((kind, layer), []).append(alone)
        # New shares are filled from the old ones, one kind of state after the other, to save memory.
        filled = [each for shares in (*made.values(), *asleep.values()) for each in shares]
        for name in (*MOMENTS, MASTER):
            loaded = {parameter: saved[name] for parameter, saved in self.waiting.items() if name in saved}
            whole = {**loaded, **self.whole(name)}
            for share in (each for each in filled if name in each.states):
                for piece, run in ((piece, run) for piece, runs in enumerate(share.runs) for run in runs):
                    known = whole.get(run.parameter)
                    source = run.values if known is None else known.reshape(-1)[run.first :][: run.length]
                    if known is not None or name == MASTER:
                        share.state(name, piece, run).copy_(source)
        self._buckets, self._cut, self._shares, self._asleep = buckets, cut, made, asleep
        for parameter in self._parameters():
            saved = self.waiting.pop(parameter, {"step": 0})
            if parameter not in self.steps:
                step = float(saved["step"])
                self.steps[parameter] = torch.full((), step, dtype=torch.float32, device=parameter.device)
        shared = {p for _, share in self._known for p in share.flat.parameters}
        self.steps = {p: step for p, step in self.steps.items() if p in shared}

    def _follow(self, buckets: Buckets) -> bool:
        """Use other buffers of the very same parameters; return False if they are of other parameters.

        Nothing is exchanged: a rank has new buffers where it alone has frozen something for an evaluation.
        """
        pairs: list[tuple[Share, FlatGradients]] = []
        for (kind, layer), shares in self._shares.items():
            flats = buckets.by_kind[kind][layer]
            if len(flats) != len(shares):
                return False
            pairs.extend(zip(shares, flats, strict=True))
        if not all(share.is_of(flat) for share, flat in pairs):
            return False
        for share, flat in pairs:
            share.flat = flat
        return True

    def _share(self, kind: KindName, flat: FlatGradients, parts: Sequence[int]) -> Share:
        axes, mesh = self._axes(kind), self._layout.mesh
        share = ReleasingShare if isinstance(flat, ReleasedGradients) else Share
        return share(flat, parts, mesh.size(axes), mesh.place(self._layout.rank, axes))

    def whole(self, name: str) -> dict[nn.Parameter, Tensor]:
        """Return a state of all parameters of this rank, gathered; all ranks must call it together."""
        found: dict[nn.Parameter, Tensor] = {}
        for (kind, _), share in self._known:
            if name not in share.states:
                continue
            for parameter in share.flat.parameters:
                found[parameter] = torch.empty(parameter.shape, dtype=share.wide, device=parameter.device)
            for number, piece in enumerate(share.pieces):
                begin = share.places[number]
                mine = share.states[name][begin : begin + piece.sizes[share.place]]
                axes = self._axes(kind)
                everyone = self._transports.of(Lane.INTER, axes).all_gather(mine, piece.sizes, axes)
                for run in share.spread[number]:
                    part = everyone[run.place - piece.start :][: run.length]
                    found[run.parameter].view(-1)[run.first :][: run.length].copy_(part)
        return found

    def share_of(self, parameter: nn.Parameter) -> tuple[Axes, Share] | None:
        """Return a parameter's share, and the axes along which its owners meet; None for a frozen one."""
        for (kind, _), share in self._known:
            if any(each is parameter for each in share.flat.parameters):
                return self._axes(kind), share
        return None

    @property
    def _known(self) -> Iterator[tuple[tuple[KindName, int], Share]]:
        """All shares, including those of frozen parameters."""
        for shares in (self._shares, self._asleep):
            for key, found in shares.items():
                yield from ((key, share) for share in found)

    # ---- in a step -----------------------------------------------------------------------------------------

    def begin(self, buckets: Buckets, shape: StepShape, changes: int) -> None:
        """Begin a backward pass. Sums that no update has used are kept, to be added to.

        Args:
            changes: The number of updates when the forward pass ran.

        Raises:
            RuntimeError: If there were more since.
        """
        if changes != self.changes:
            raise RuntimeError(
                "parameters were updated between a forward pass and its backward pass, whose gradients would "
                "be those of neither: run the backward passes of all losses before optimizer.step(), and "
                "inside optimizer.in_backward() that of one loss alone"
            )
        self.failed.refuse()
        self.settle(buckets, shape)
        self.judged = None
        for share in self._all:
            share.begin(adds=self.has_sums)

    def scatter(self, task: Task, transport: Transport) -> None:
        """Sum a piece of gradients over its ranks, in shares: only this rank's share of the piece is valid.

        Parts are added in the order of ranks, so that the sums do not depend on what arrives first.
        """
        assert task.piece is not None, task
        for share in self._of(task):
            rows, sizes = share.rows(task.piece), share.pieces[task.piece].sizes
            if share.owners > 1:
                each = sizes[share.place]
                came = transport.all_to_all(rows, sizes, [each] * share.owners, task.axes)
                rows = came.view(share.owners, each).sum(0, dtype=share.wide)
            share.take(task.piece, rows)

    def judge(self, task: Task, transport: Transport, loss: Tensor) -> None:
        """Take the norm of all gradients, each counted once, and decide by it what updates do.

        Args:
            loss: A step whose loss is not finite changes nothing either.
        """
        device = loss.device
        table = torch.zeros(transport.size(task.axes), dtype=torch.float64, device=device)
        # The squares of all gradients that count on this rank.
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for (kind, _), shares in self._shares.items():
            # Gradients that ranks sharing attention compute alike are owned once by each of these ranks.
            alone = self._axes(kind) != Group.DATA or self._layout.tp_rank == 0
            for share in shares:
                runs = ((piece, run) for piece, of_piece in enumerate(share.runs) for run in of_piece)
                counted = (each for each in runs if alone or sharding_of(each[1].parameter) is not None)
                found = [share.gradient(*each) for each in counted]
                if found:
                    norms = torch._foreach_norm(found, 2.0, dtype=share.wide)
                    total = total + torch.stack(list(norms)).double().square().sum()
        table[self._layout.mesh.place(self._layout.rank, task.axes)] = total
        transport.all_reduce(table, task.axes)  # the very same bits on all ranks
        norm = table.sum().sqrt()
        limit = float("inf") if self.max_norm is None else self.max_norm
        factor = (limit / (norm + TINY)).clamp(max=1.0)
        finite = norm.isfinite() & loss.isfinite()
        self.judged = Judged(norm, factor, 1 - finite.to(torch.float32))

    def update(self, task: Task, loss: Tensor | None = None) -> None:
        """Run AdamW on this rank's share of a piece.

        Args:
            loss: The step's, where this waits for no norm.
        """
        assert task.piece is not None, task
        judged = self.judged
        refused = 1 - loss.isfinite().to(torch.float32) if loss is not None else None
        if refused is None:
            assert judged is not None, "an update waits for the norm"
            refused = judged.refused
        for share in self._of(task):
            runs = share.runs[task.piece]
            if not runs:
                continue
            if self.max_norm is not None:
                assert judged is not None, "clipped updates wait for the norm"
                mine = share.owned(task.piece)
                mine.mul_(judged.factor.to(mine.dtype))
            known = share.weights(task.piece)  # first: each needs memory for a while
            sums = share.owned(task.piece).to(share.wide).split([run.length for run in runs])
            owned = list(zip(runs, known, sums, strict=True))
            for number, group in enumerate(self.groups):
                of_group = [each for each in owned if self._group_of.get(id(each[0].parameter)) == number]
                if not of_group:
                    continue
                chosen, weights, gradients = zip(*of_group, strict=True)
                torch._fused_adamw_(
                    weights,
                    gradients,
                    [share.state(MOMENTS[0], task.piece, run) for run in chosen],
                    [share.state(MOMENTS[1], task.piece, run) for run in chosen],
                    [],
                    torch._foreach_add([self.steps[run.parameter] for run in chosen], 1),
                    amsgrad=False,
                    lr=group["lr"],
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                    found_inf=refused,
                )
                if MASTER in share.states:
                    torch._foreach_copy_([run.values for run in chosen], weights)

    def end(self, graph: Graph, loss: Tensor) -> None:
        """End a backward pass: note its sums, or count its updates."""
        if not self.in_backward:
            self._summed = graph
            return
        assert self.judged is not None, "a step that updates takes the norm"
        unjudged = 1 - loss.isfinite().to(torch.float32)
        self._count(graph, unjudged if self.max_norm is None else self.judged.refused)
        self._stale = {name for name in self._stale if name.phase is Phase.FORWARD}  # the others have run

    def _count(self, graph: Graph, refused: Tensor) -> None:
        """Count the updates of a step, all of which have run; its parameters are then to be gathered."""
        if counted := [self.steps[parameter] for parameter in self._parameters()]:
            # Without alpha, torch reads the number on the host, and waits for the device.
            torch._foreach_add_(counted, 1 - refused, alpha=1)
        self.forget()
        self.changes += 1
        self._stale = {task.name for task in graph.tasks if of_optimizer(task) == "gather"}

    def waits(self, task: Task) -> bool:
        """Return whether the parameters that a task gathers have changed since they were last gathered."""
        return task.name in self._stale

    def gather(self, task: Task, transport: Transport) -> None:
        """Gather a piece of parameters from their owners."""
        assert task.piece is not None, task
        for share in self._of(task):
            piece = share.pieces[task.piece]
            kind, device = share.kind, share.flat.parameters[0].device
            mine = [torch.empty(0, dtype=kind, device=device), *(r.values for r in share.runs[task.piece])]
            everyone = transport.all_gather(torch.cat(mine), piece.sizes, task.axes)
            if spread := share.spread[task.piece]:
                parts = everyone.split([run.length for run in spread])
                torch._foreach_copy_([run.values for run in spread], parts)
        self._stale.discard(task.name)

    # ---- outside of a step ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Take the norm of the present sums, update, and gather parameters. All ranks must call it."""
        self.failed.refuse()
        if (graph := self._summed) is None:
            return
        self._group_of = group_numbers(self.groups)  # parameters may have changed groups after backward
        loss = torch.zeros((), device=self._device)
        for task in graph.tasks:
            if of_optimizer(task) == "norm":
                self.judge(task, self._transports.of(task.lane, task.axes), loss)
        for task in graph.tasks:
            if of_optimizer(task) == "update":
                self.update(task)
        assert self.judged is not None, "a step that updates takes the norm"
        self._count(graph, self.judged.refused)
        self.flush(graph)

    def flush(self, graph: Graph) -> None:
        """Gather all parameters that wait to be gathered; all ranks must call it together.

        Raises:
            RuntimeError: If a pass that failed has updated only a part of them.
        """
        self.failed.refuse_parameters()
        for task in graph.tasks:
            if self.waits(task):
                self.gather(task, self._transports.of(task.lane, task.axes))

    @property
    def state_bytes(self) -> int:
        """Bytes of AdamW's state that this rank keeps."""
        return sum(state.nbytes for _, share in self._known for state in share.states.values())

    @property
    def is_stale(self) -> bool:
        """Whether parameters wait to be gathered."""
        return bool(self._stale)

    # ---- parts ---------------------------------------------------------------------------------------------

    def _of(self, task: Task) -> Sequence[Share]:
        return self._shares[kind_of_task(task).name, task.layer]

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for share in self._all for parameter in share.flat.parameters)

    @property
    def _all(self) -> list[Share]:
        return [share for shares in self._shares.values() for share in shares]

    def _axes(self, kind: KindName) -> Axes:
        return GRADIENT_KINDS[kind].axes_of(sharing=self._layout.tp_size > 1)

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self._parameters()), torch.device("cpu"))


# ---- updates in a stack and in its steps -------------------------------------------------------------------


@dataclass(frozen=True)
class StepUpdates(StepFeature):
    """The updates of one step.

    Attributes:
        changes: How often parameters had been updated when it began.
    """

    updates: Updates
    shape: StepShape
    changes: int
    can_be_undone = False

    def prepare(self, context: StepContext) -> None:
        context.features[Updates] = self.updates

    def begin_backward(self, buckets: Buckets, name_of: Callable[[nn.Parameter], str]) -> None:
        refuse_left_out(buckets, self.updates.groups, name_of)
        self.updates.begin(buckets, self.shape, self.changes)

    def end(self, context: StepContext, graph: Graph) -> None:
        self.updates.end(graph, context.total.loss)

    def failed(self, *, begun: bool) -> str:
        if not begun and not self.updates.has_sums:  # `begin` clears buffers with sums
            return ""
        return self.updates.failed.note(updates=self.updates.in_backward and begun)


class ShardedUpdates(StackFeature):
    """The updates of a stack's steps, once there is an optimizer for them; a copy of the stack has none.

    Attributes:
        updating: Whether the steps sum gradients in shares, and how.
    """

    def __init__(self, updating: Updating | None) -> None:
        self._updating, self.active = updating, updating is not None
        self.updates: Updates | None = None

    def copy(self) -> ShardedUpdates:
        return ShardedUpdates(self._updating)

    def leave(self, stack: FeatureStack) -> None:
        if self.updates is not None:
            self.updates.flush(stack.plan.graph)

    def check_training(self) -> None:
        if self._updating is not None and self.updates is None:
            raise RuntimeError(
                "the steps of this stack sum gradients in shares, for a sharded optimizer, and it has none: "
                "build ShardedAdamW(stack, ...) before training, or the stack without `updating`"
            )

    def check_current(self) -> None:
        """Raise RuntimeError also if a pass that failed has updated only a part of the parameters."""
        if self.updates is None:
            return
        self.updates.failed.refuse_parameters()
        if self.updates.is_stale:
            raise RuntimeError(
                "parameters were updated during backward and are gathered in the next forward pass, so this "
                "rank has old values of what others own: call optimizer.flush() on all ranks first"
            )

    def settle(self, stack: FeatureStack) -> None:
        if self.updates is not None:
            self.updates.settle(stack.buckets, stack.plan.shape)

    def step(self, stack: FeatureStack) -> StepFeature | None:
        if self.updates is None:
            return None
        return StepUpdates(self.updates, stack.plan.shape, self.updates.changes)


# ---- handlers of an optimiser of which every rank owns a share --------------------------------------------


@handles([kind.scatter for kind in GRADIENT_KINDS.values()], Phase.BACKWARD)
def scatter(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Sum a piece of a layer's gradients; this rank has its share of the sum."""
    del inputs  # the gradients are in the bucket; the edges say that they are complete
    context.of(Updates).scatter(task, context.transport(task))
    return NOTHING


@handles(Op.NORM, Phase.BACKWARD)
def norm(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Take the norm of all gradients, in a backward pass after which parameters change."""
    del inputs
    if context.of(Updates).in_backward:
        context.of(Updates).judge(task, context.transport(task), context.total.loss)
    return NOTHING


@handles([kind.update for kind in GRADIENT_KINDS.values()], Phase.BACKWARD)
def update(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Run AdamW on this rank's share of a piece. Without a norm to wait for, only the loss may refuse it."""
    if context.of(Updates).in_backward:
        context.of(Updates).update(task, None if "scale" in inputs else context.total.loss)
    return NOTHING


@handles([kind.gather for kind in GRADIENT_KINDS.values()], Phase.FORWARD)
def gather(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Gather a piece of stale parameters. Returns parameters: None; the edge says they are current."""
    del inputs
    updates = context.maybe(Updates)
    if updates is not None and updates.waits(task):
        updates.gather(task, context.transport(task))
    return {"parameters": None}


@handles([kind.gather for kind in GRADIENT_KINDS.values()], Phase.BACKWARD)
def gather_at_once(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Gather a piece of parameters from their owners, in a backward pass after which parameters change."""
    del inputs
    if context.of(Updates).in_backward:
        context.of(Updates).gather(task, context.transport(task))
    return NOTHING
