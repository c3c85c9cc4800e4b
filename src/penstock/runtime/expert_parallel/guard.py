"""A guard against silent errors in a layer's experts, noticed before its rows leave.

Experts differ by rank. Tools that take the parameters of all ranks for the same spread one rank's experts
over all, or average them: DDP, FSDP, tensor parallelism, DataParallel. And ranks whose layers differ would
misread each other's rows.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.nn.parallel import DistributedDataParallel

from penstock.device import is_dtensor
from penstock.mesh import Group
from penstock.moe.experts import Experts
from penstock.moe.layer import managed_groups
from penstock.runtime.clip import ExpertRanks, is_marked, mark_experts
from penstock.runtime.fingerprints import (
    MODULUS,
    Replicated,
    check_count,
    compare,
    fingerprint,
    is_due,
    weight_among,
)
from penstock.runtime.transport import HostCounts
from penstock.topology import Control

MOST_KNOWN = 16
"""Ways of calling a layer that are remembered: training, evaluation, under autocast."""
_ALIKE = "Build, cast, freeze and call the layer alike on all ranks"
_ANEW = "Build the model again: it has already lost experts"

DDP = (
    "DistributedDataParallel has given every rank the experts of rank 0, and would average their gradients. "
    f"{_ANEW}, and use DistributedDataParallel(penstock.ignore_experts(model))"
)
FSDP = (
    "FSDP takes it for a part of what all ranks share, so ranks would compute with each other's experts. "
    f"{_ANEW}; then penstock.ignore_experts(model) and fully_shard(model, "
    "ignored_params=penstock.expert_parameters(model)). If you have replaced the parameter yourself, call "
    "penstock.ignore_experts(model) after that"
)
OLD_FSDP = (
    "FullyShardedDataParallel, the older class, has shards whose norm only its own clip_grad_norm_ finds, "
    "and that counts each rank's experts as if all ranks had them: ranks would scale gradients differently. "
    "Build the model again; then penstock.ignore_experts(model) and fully_shard(model, "
    "ignored_params=penstock.expert_parameters(model))"
)
TENSOR_PARALLEL = (
    "it is a DTensor, spread over a mesh as if all ranks had the same experts. "
    f"{_ANEW}, and leave experts out: ignored_params=penstock.expert_parameters(model) of fully_shard, no "
    "entry in the plan of parallelize_module"
)
NOT_AVERAGED = (
    "Gradients were not averaged over the ranks that train together, or were scaled differently. Average "
    "those of what all ranks share (DistributedDataParallel(penstock.ignore_experts(model)), and call what "
    "it returns; or fully_shard), and clip with penstock.clip_grad_norm_(model, ...): "
    "torch.nn.utils.clip_grad_norm_ finds another norm on every rank. Trainer of Hugging Face calls that by "
    "default: set max_grad_norm=0 and clip in a callback, as docs/integrations.md shows. Scale losses by "
    "ShardedGradScaler: with torch.amp.GradScaler some ranks leave out steps that others take"
)
DATA_PARALLEL = (
    "torch.nn.DataParallel runs copies of the layer in threads of one process, and experts on several ranks "
    "need a process per device: use DistributedDataParallel(penstock.ignore_experts(model))"
)


@dataclass(frozen=True)
class _Layer:
    """The facts that ranks must have alike, in words, and as a number [1] that cancels in a sum over them."""

    words: tuple[str, ...]
    mark: Tensor


class ExpertGuard:
    """Watches the experts of one layer. `adopt` them first and whenever they may have been replaced.

    Attributes:
        unread: The sum of all ranks' `marks` of the last forward, until it is judged.
    """

    def __init__(self, experts: nn.Module, ranks: ExpertRanks, control: Control) -> None:
        self._ranks, self._control = ranks, control
        self.unread: HostCounts | None = None
        self._replicated: list[Replicated] = []
        self._steps = 0
        self._names: set[str] = set()
        plain = isinstance(experts, Experts) and not any(map(is_dtensor, experts.parameters()))
        self._stacked = not plain or bool(experts.stacked)
        self._cleared: weakref.ref[DistributedDataParallel] | None = None
        self._known: dict[object, _Layer] = {}
        self._now = self._agreed = _Layer((), torch.zeros(1, dtype=torch.float64, device="cpu"))

    def adopt(self, experts: nn.Module) -> None:
        """Take these parameters, of these names, as this rank's experts."""
        self._names = {name for name, _ in experts.named_parameters()}
        self._mark(p for p in experts.parameters() if not is_dtensor(p))

    def marks(self, experts: nn.Module, parameters: Mapping[str, Tensor], *, seldom: bool) -> Tensor:
        """Return what this rank adds to a sum: a one, the layer as it was checked last, values, float64 [3].

        The values are those of `parameters`, and at times those of experts that have replicas.

        Args:
            seldom: Of both at times only, since it takes time to launch what reads them.
        """
        layout, device = self._ranks.layout, self._ranks.device
        values = torch.zeros((), dtype=torch.float64, device=device)
        named = {f"experts.{name}": parameter for name, parameter in experts.named_parameters()}
        gate, edp = Replicated(Group.WORLD, parameters), Replicated(Group.EXPERT_DATA, named)
        self._replicated = [gate, edp] if layout.edp_size > 1 else [gate]
        if torch.is_grad_enabled():
            due = is_due(self._steps)
            self._steps += 1
            if due or not seldom:
                values = fingerprint(self._replicated if due else [gate], layout, device)
        return torch.cat([torch.ones_like(self._now.mark), self._now.mark, values.view(1)])

    def check(self, experts: nn.Module, x: Tensor, parts: str, *, first: bool) -> None:
        """Check the layer before a forward.

        The first time ranks also compare their layers, in an exchange of 8 bytes per rank: nothing else is
        sure to be of one size. Later a rank's layer may have changed alone, so no exchange may depend on what
        this rank sees: `judge` compares. It is called here for a forward that could not read its sums.

        Args:
            x: The tokens.
            parts: The layer's parts, in words separated by commas.

        Raises:
            ValueError: If something else manages the experts.
        """
        self.judge()
        self._refuse_owner(experts)
        for name, parameter in experts.named_parameters():
            if parameter.is_meta:
                raise ValueError(
                    f"experts.{name} is on the meta device and has no numbers: fill it first, with to_empty "
                    "and load_state_dict"
                )
            if parameter.device != x.device:
                raise ValueError(
                    f"experts.{name} is on {parameter.device} and x on {x.device}: move the layer and its "
                    "input to one device"
                )
            if parameter.device.type != self._ranks.device.type:
                raise ValueError(
                    f"experts.{name} is on {parameter.device}, but the ranks' process group moves tensors of "
                    f"{self._ranks.device.type} only: move the layer there, or join with another backend"
                )
        self._mark(experts.parameters())  # a copy of a parameter, and what replaced one, have no mark
        self._now = self._look(experts, x, parts)
        if first:
            with self._control.naming("comparing the parts of an MoE layer"):
                _require_equal(self._now.words, self._ranks, self._control)
            self._agreed = self._now

    def judge(self) -> None:
        """Judge the sum of all marks, once; every rank does, at the same point.

        Raises:
            ValueError: Unless all have the same layer.
            ParameterMismatchError: Unless they hold the same values.
            CommunicationError: If the sum is not of all ranks.
        """
        if self.unread is None:
            return
        sums, self.unread = self.unread.numbers.tolist(), None
        check_count(sums, self._ranks.layout)
        _, layer, values = sums
        if layer:
            _require_equal(self._now.words, self._ranks, self._control)
        self._agreed = self._now
        if values:
            compare(self._replicated, self._ranks.layout, self._control, self._steps, NOT_AVERAGED)

    def judge_change(self) -> None:
        """Raise ValueError if this rank's layer has changed since its last forward, and not all others'.

        For a forward in which the host waits for nothing, so that others read the sum in the next one. Only a
        rank whose layer has changed reads it now, alone, since its rows would be misread. A change is one
        against the forward before, so ranks that go back and forth (with and without gradients, as reentrant
        checkpointing does) wait in every forward: remembering all that was ever agreed on would miss a rank
        that goes back alone.
        """
        if self.unread is None or self._now.words == self._agreed.words:
            return
        if self.unread.numbers.tolist()[1]:
            changed = _only(self._now.words, self._agreed.words)
            raise ValueError(
                f"ranks have different MoE layers: rank {self._ranks.layout.rank} has {changed} since its "
                f"last forward, and not all others have. {_ALIKE}"
            )
        self._agreed = self._now

    def _mark(self, parameters: Iterable[Tensor]) -> None:
        mark_experts(parameters, self._ranks, stacked=self._stacked)

    def _refuse_owner(self, experts: nn.Module) -> None:
        if getattr(experts, "_is_replica", False):
            raise ValueError(f"experts: {DATA_PARALLEL}")
        # DDP lists what it manages when it is built; this asks the DDP around this forward.
        ddp = DistributedDataParallel._get_active_ddp_module()
        if ddp is not None and (self._cleared is None or self._cleared() is not ddp):
            managed = {id(parameter) for parameter in ddp._module_parameters}
            for name, parameter in experts.named_parameters():
                if id(parameter) in managed:
                    raise ValueError(f"experts.{name}: {DDP}")
            self._cleared = weakref.ref(ddp)
        for name, parameter in experts.named_parameters():
            if is_dtensor(parameter):
                raise ValueError(f"experts.{name}: {TENSOR_PARALLEL}")
        # Inside a forward FSDP shows whole parameters, not those adopted. It says for the compiler which
        # modules it manages; `replicate` does not, but has a list.
        unmarked = {id(p): name for name, p in experts.named_parameters() if not is_marked(p)}
        taken = [unmarked[i] for i in gathered_by_composables() if i in unmarked] if unmarked else []
        if any(getattr(module, "_is_fsdp_managed_module", False) for module in experts.modules()):
            gone = self._names - {name for name, _ in experts.named_parameters()}
            taken = [*sorted(gone), *unmarked.values(), *taken]
        if taken:
            raise ValueError(f"experts.{taken[0]}: {FSDP}")

    def _look(self, experts: nn.Module, x: Tensor, parts: str) -> _Layer:
        """Return the layer's facts: its kind, alike on all ranks; and what is trained, which replicas sum."""
        trained = self._ranks.layout.edp_size > 1
        sharded = getattr(experts, "_is_fsdp_managed_module", False)
        key = (
            sharded,
            torch.is_grad_enabled(),
            x.dtype,
            torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None,
            tuple((n, p.dtype, p.shape, trained and p.requires_grad) for n, p in experts.named_parameters()),
        )
        if key not in self._known:
            # Only the newer FSDP lists the modules that it was called with.
            if sharded and not any(
                experts is part for owner in list(_module_state_mapping) for part in owner.modules()
            ):
                raise ValueError(f"experts: {OLD_FSDP}")
            _, grads, dtype, autocast, parameters = key
            words = [*parts.split(", "), f"tokens {dtype}", f"autocast {autocast}"]
            words += [f"gradients {'on' if grads else 'off'}"]
            words += [
                f"{name} {kind} {' x '.join(map(str, shape))}{' trained' if grad else ''}"
                for name, kind, shape, grad in parameters
            ]
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = _Layer(tuple(words), _mark(words, self._ranks))
        return self._known[key]


def check_not_sharded(model: nn.Module) -> None:
    """Raise TypeError if FSDP or `replicate` around a module that holds the stack manages its parameters."""
    gathered = set(gathered_by_composables())
    taken = any(getattr(module, "_is_fsdp_managed_module", False) for module in model.modules())
    if taken or any(id(parameter) in gathered for parameter in model.parameters()):
        raise TypeError(
            "a scheduled model's steps place and reduce its parameters: FSDP or replicate around it would "
            "reduce gradients a second time. Wrap the other modules only, each by itself."
        )


def gathered_by_composables() -> Iterator[int]:
    """Yield the ids of the whole parameters that `fully_shard` and `replicate` show inside a forward."""
    for group in managed_groups():
        for parameter in group.fsdp_params:
            yield id(getattr(parameter, "_unsharded_param", None))


def _require_equal(words: Sequence[str], ranks: ExpertRanks, control: Control) -> None:
    """Raise ValueError on every rank, naming what differs, unless all ranks say the same."""
    text = ", ".join(words)
    digests = ranks.gather(torch.tensor([_digest(text)], device=ranks.device)).flatten().tolist()
    other = next((rank for rank, found in enumerate(digests) if found != digests[0]), None)
    if other is None:
        return
    everyone = control.gather(words, "comparing layers")
    first, second = everyone[0], everyone[other]
    raise ValueError(
        f"ranks have different MoE layers: rank 0 has {_only(first, second)}; rank {other} has "
        f"{_only(second, first)}. {_ALIKE}"
    )


def _mark(words: Sequence[str], ranks: ExpertRanks) -> Tensor:
    """Return the weighted hash of the words, [1], made once on the device where the sum is made."""
    mark = weight_among(Group.WORLD, ranks.layout) * (_digest(", ".join(words)) % MODULUS)
    return torch.tensor([mark], dtype=torch.float64, device=ranks.device)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _only(mine: Sequence[str], others: Sequence[str]) -> str:
    """Return the words that only the first side has."""
    return ", ".join(word for word in mine if word not in others) or "no more than that"
