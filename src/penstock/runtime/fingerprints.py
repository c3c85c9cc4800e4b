"""Comparison of the values that several ranks hold: parameters, replicas of experts, and buffers.

Ranks drift apart silently where gradients are scaled, updates left out, or values loaded, by one rank alone:
losses look plausible for long. Every rank adds a fingerprint of its values to a sum that is made anyway,
weighted so that the sum is 0 where all bits are equal. Where it is not 0, ranks exchange sketches, which say
what differs, where and by how much. Machines of different kinds may round updates differently: every update
then adds about a unit in the last place, in any direction, and the sum grows as the root of the number of
updates.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.device import is_dtensor
from penstock.mesh import Axes, Group
from penstock.moe import SampleKeys
from penstock.moe.experts import Experts
from penstock.moe.routers import uniform_bits
from penstock.topology import CommunicationError, Control, Layout

EVERY = 64
"""Steps from one comparison to the next; the first comparisons come sooner."""

MODULUS = 67_108_859
"""A prime below 2^26: weighted sums of remainders stay exact in float64 on up to 2^13 ranks."""

BLOCKS = 64
"""Parts of a tensor whose sums have different weights in its hash, so that their order counts."""

PIECE = 1 << 20
"""Numbers that are summed at once in a sketch: the sum needs a copy of twice their size."""

ROUNDING = 8
"""Relative difference that rounding explains after one update, in units of a type's precision."""

MOST_ROUNDING = 0.05
"""Largest relative difference that is taken for rounding, however few digits a type has."""

SKETCHES = 8
"""Sums with random signs that stand for a tensor: they differ by about the norm of the difference."""

SAMPLED = 1024
"""Numbers of a parameter of each expert by which experts of ranks are told apart."""

HUGE = 1e30
"""The number that stands for an infinite one: its square is far from the largest float64."""

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

STATISTICS = ("torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm", "torch.nn.utils.")
"""Python modules of torch whose classes, and classes made from them, keep statistics of a rank's own forward
passes in buffers."""

EXPLAINED = (
    "{what} differs between ranks that hold the same: on {whom} by {found:.1e} of its size, where rounding "
    "explains {limit:.1e} (steps: {updates}, tensors that differ: {number}). {cause}. Begin again from a "
    "checkpoint, or from the same values on all ranks"
)
UPDATED = (
    "Ranks have scaled their gradients differently, updated differently, or left updates out. Clip with "
    "penstock.clip_grad_norm_(model, ...): torch.nn.utils.clip_grad_norm_, get_total_norm and accelerate's "
    "clip_grad_norm_ find another norm on every rank, since experts differ. Give all ranks one learning rate "
    "and the same optimiser state, average what is averaged over all ranks, and scale losses by "
    "ShardedGradScaler: a GradScaler skips steps by rank"
)
CHANGED = (
    "Since the step before, values were changed in place on some ranks alone, or more often there "
    "(load_state_dict, copy_, an optimiser's step). Load checkpoints and update on all ranks alike"
)
BEGAN = (
    "Freeze, thaw, replace and add parameters on all ranks before the same step, and give new ones equal "
    "values (the same seed on all ranks, or rank 0's values by torch.distributed.broadcast)"
)
OF_BUFFER = (
    "The buffer was updated on some ranks alone, or by what one rank has seen. Sum what it is computed from "
    "over all ranks (torch.distributed.all_reduce; of routers, the tokens per expert) and update it on all "
    "ranks alike, or register it with persistent=False if it is meant to be each rank's own"
)
ROUNDED = (
    "{what} differs between ranks that hold the same, by {found:.0e} of its size: machines of different "
    "kinds round differently (up to {limit:.0e} is taken for that; steps: {updates}). If all are of one "
    "kind, look at how gradients are scaled: clip with penstock.clip_grad_norm_(model, ...)"
)


class ParameterMismatchError(RuntimeError):
    """Ranks would train different parameters, so sums of their gradients would be meaningless."""


def is_due(steps: int) -> bool:
    """Return whether to compare after this number of steps: in the 2nd, 3rd, 5th and so on, then rarely."""
    return steps > 0 and (steps % EVERY == 0 or (steps < EVERY and steps & (steps - 1) == 0))


@dataclass(frozen=True)
class Replicated:
    """Tensors by name that the ranks along `axes` hold alike.

    Only plain tensors are compared: no DTensors, and no classes with a layout of their own.

    Attributes:
        axes: The axes along which the ranks lie.
        parameters: The parameters among them.
        buffers: The tensors among them that are no parameters.
    """

    axes: Axes
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, and after them buffers."""
        for name, tensor in (*self.parameters.items(), *self.buffers.items()):
            plain = tensor.detach()
            if type(plain) is Tensor and plain.layout == torch.strided and not is_dtensor(tensor):
                yield name, torch.view_as_real(plain) if plain.is_complex() else plain


@cache
def weight_among(axes: Axes, layout: Layout) -> int:
    """Return this rank's weight among the ranks along `axes`.

    Equal numbers of a group then add up to 0, and those of two groups do not make up for each other.
    """
    mesh, rank = layout.mesh, layout.rank
    one = 1 - mesh.size(axes) if mesh.place(rank, axes) == 0 else 1
    return one * (2 * mesh.group(rank, axes) + 1)


@torch.no_grad()
def fingerprint(kinds: Sequence[Replicated], layout: Layout, device: torch.device) -> Tensor:
    """Return what this rank adds to a sum that is 0 where ranks hold the same bits, float64 scalar.

    It reads every number once, and the host does not wait.

    Args:
        kinds: The tensors that ranks hold alike.
        device: The device of these tensors.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for kind in kinds:
        total += weight_among(kind.axes, layout) * _hash((tensor for _, tensor in kind.named), device)
    return total


def _hash(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a hash of all bits below `MODULUS`, int64 scalar; exact, in whatever order is added."""
    hashes = []
    for tensor in tensors:
        # A sum of words of 64 bits reads numbers as fast as memory gives them. Of smaller numbers a sum in
        # another type would cast each, for five times as long on a CPU. What fills no word is added alone.
        bits = tensor.contiguous().view(-1).view(BITS[tensor.element_size()])
        in_word = torch.int64.itemsize // bits.element_size()
        whole = bits[: len(bits) // in_word * in_word]
        if whole.storage_offset() % in_word:  # a word begins at a multiple of its size
            whole = whole.clone()
        words, rest = whole.view(torch.int64), bits[len(whole) :].to(torch.int64)
        width = len(words) // BLOCKS
        sums = words[: BLOCKS * width].view(BLOCKS, width).sum(1)  # they wrap around, in any order
        hashes.append(_combined(torch.cat([sums, words[BLOCKS * width :], rest])))
    return _combined(torch.stack(hashes)) if hashes else torch.zeros((), dtype=torch.int64, device=device)


def _combined(numbers: Tensor) -> Tensor:
    """Return one number below `MODULUS`, in which every one of `numbers` has another weight."""
    weights = torch.arange(1, len(numbers) + 1, device=numbers.device) * 40_503 % MODULUS
    return (numbers.remainder(MODULUS) * weights % MODULUS).sum() % MODULUS


def buffers_of(model: nn.Module, besides: Iterable[nn.Module], device: torch.device) -> dict[str, Tensor]:
    """Return by name the buffers that are saved with the model and that all ranks have alike.

    Torch's own statistics of a rank's samples are left out, too.

    Args:
        besides: Modules that differ between ranks (experts), whose buffers are left out.
        device: The device to which the buffers are brought.
    """
    own = {id(module) for each in besides for module in each.modules()}
    buffers: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if id(module) in own or any(kind.__module__.startswith(STATISTICS) for kind in type(module).__mro__):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers[f"{path}.{name}".lstrip(".")] = buffer.to(device)
    return buffers


def check_distinct(layers: Sequence[Experts], layout: Layout, control: Control) -> None:
    """Raise ParameterMismatchError, on all ranks, if a rank holds the very experts of another one.

    So it is where code that takes all parameters for those of every rank has copied rank 0's. Not raised
    where all experts of a rank have the same values, as those that were made from one feed-forward part, and
    a single one does.

    All ranks call it; it reads the first `SAMPLED` numbers of each expert's parameters, and exchanges a few
    bytes.

    Args:
        layers: The experts of every MoE layer here.
    """
    # A hash of a sample of the experts here; None where those of every layer are equal.
    samples: list[Tensor] = []
    vary: list[Tensor] = []
    for experts in layers:
        by_name: dict[str, Tensor] = {}
        for name, parameter in experts.named_parameters():
            for logical, _, part in () if is_dtensor(parameter) else experts.split(name, parameter.detach()):
                samples.append(part.flatten()[:SAMPLED].double())
                vary.append((by_name.setdefault(logical, samples[-1]) != samples[-1]).any())
    own_digest = None
    if samples and torch.stack(vary).any():  # waits for the device once
        own_digest = hashlib.sha256(torch.cat(samples).cpu().numpy().tobytes()).hexdigest()
    digests = control.gather(own_digest, "comparing experts")
    for ranks in layout.mesh.groups(Group.EXPERT):
        first: dict[str, int] = {}
        for rank in ranks:
            digest = digests[rank]
            if digest is not None and first.setdefault(digest, rank) != rank:
                raise ParameterMismatchError(
                    f"rank {rank} holds the same values in its experts as rank {first[digest]}, and should "
                    "hold other experts of the model: code that takes all parameters for those of every rank "
                    "has copied one rank's (torch.distributed.broadcast of all parameters, a vector of "
                    "parameters_to_vector, a state of rank 0), or ranks have drawn them with one seed. Copy "
                    "parameters without `allreduce = False` alone, draw experts by their number in the "
                    "model, or load a checkpoint"
                )


# ---- what differs, and by how much -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sketched:
    """What a rank tells of one kind of tensors. sketches: [tensors, SKETCHES + 1]."""

    names: list[str]
    parameters: int
    units: list[float]
    sketches: Tensor


@dataclass(frozen=True)
class _Difference:
    """A tensor that some ranks of a group hold differently. limit: what rounding would explain of `found`.

    sketches: of every rank of the group, [ranks, SKETCHES + 1].
    """

    name: str
    buffer: bool
    found: float
    limit: float
    ranks: Sequence[int]
    sketches: Tensor

    @property
    def whom(self) -> str:
        """The ranks that differ, in words, and one of those that most others are like."""
        apart = (self.sketches.unsqueeze(0) - self.sketches.unsqueeze(1))[..., :-1].square().mean(-1).sqrt()
        like = apart <= self.limit * self.sketches[:, -1].amax()
        most = int(like.sum(1).argmax())  # the first of those that the most are like
        others = [rank for rank, same in zip(self.ranks, like[most].tolist(), strict=True) if not same]
        others = others or [self.ranks[int(apart[most].argmax())]]
        named = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
        return f"{named} against rank {self.ranks[most]}"


def compare(
    kinds: Sequence[Replicated], layout: Layout, control: Control, updates: int, cause: str = ""
) -> None:
    """Raise ParameterMismatchError, on all ranks, if they hold different values of what they have in common.

    That is, by more than rounding explains after `updates` updates; rank 0 is warned of any difference.

    All ranks call this function. It exchanges a few bytes, or where they differ some 100 for every tensor.

    Args:
        kinds: The tensors that ranks hold alike.
        updates: The number of updates that may have added rounding errors.
        cause: What is known of the reason, in words; "" takes it for updates.
    """
    if control.world_size == 1:
        return
    differences = list(_all_differences(kinds, layout, control, updates))
    if not differences:
        return
    worst = max(differences, key=lambda each: each.found / each.limit)
    what = f"the buffer {worst.name}" if worst.buffer else worst.name
    if worst.found > worst.limit:
        raise ParameterMismatchError(
            EXPLAINED.format(
                what=what,
                whom=worst.whom,
                found=worst.found,
                limit=worst.limit,
                updates=updates,
                number=len({each.name for each in differences}),
                cause=OF_BUFFER if worst.buffer else cause or UPDATED,
            )
        )
    if control.rank == 0:
        said = ROUNDED.format(what=what, found=worst.found, limit=worst.limit, updates=updates)
        warnings.warn(said, stacklevel=2)


def _all_differences(
    kinds: Sequence[Replicated], layout: Layout, control: Control, updates: int
) -> Iterator[_Difference]:
    groups = [(kind, ranks) for kind, each in enumerate(kinds) for ranks in layout.mesh.groups(each.axes)]
    cpu, purpose = torch.device("cpu"), "comparing parameters"
    own_hashes = [int(_hash((tensor for _, tensor in each.named), cpu)) for each in kinds]
    hashes = control.gather(own_hashes, purpose)
    if all(len({hashes[rank][kind] for rank in ranks}) == 1 for kind, ranks in groups):
        return
    sketched = []
    for replicated in kinds:
        named = list(replicated.named)
        sketches = [_sketch(tensor) for _, tensor in named]
        sketched.append(
            _Sketched(
                names=[name for name, _ in named],
                parameters=sum(name in replicated.parameters for name, _ in named),
                units=[
                    torch.finfo(tensor.dtype if tensor.dtype.is_floating_point else torch.float64).eps
                    for _, tensor in named
                ],
                sketches=torch.stack(sketches) if sketches else torch.zeros(0, SKETCHES + 1, device="cpu"),
            )
        )
    everyone = control.gather(sketched, purpose)
    for kind, ranks in groups:
        members = [everyone[rank][kind] for rank in ranks]
        for rank, each in zip(ranks, members, strict=True):
            if different := sorted(set(each.names) ^ set(members[0].names)):
                raise ParameterMismatchError(
                    f"ranks have different parameters or buffers: {different[0]} is on one of ranks "
                    f"{ranks[0]} and {rank} alone. Build and change the model on all ranks alike"
                )
        first = members[0]
        table = torch.stack([each.sketches for each in members])  # [ranks, tensors, SKETCHES + 1]
        spread = (table.amax(0) - table.amin(0))[:, :-1].square().mean(-1).sqrt()
        spread = spread / table[..., -1].amax(0).clamp(min=1e-30)
        for number in spread.nonzero().flatten().tolist():
            limit = min(ROUNDING * first.units[number] * math.sqrt(max(1, updates)), MOST_ROUNDING)
            yield _Difference(
                name=first.names[number],
                buffer=number >= first.parameters,
                found=float(spread[number]),
                limit=limit,
                ranks=ranks,
                sketches=table[:, number],
            )


@torch.no_grad()
def _sketch(tensor: Tensor) -> Tensor:
    """Return sums of a tensor's numbers with random signs, and then its norm: float64 [SKETCHES + 1].

    The signs depend on the places of the numbers, and are equal on every machine. What is not finite, as in a
    mask, counts as huge: where ranks have it alike, it makes no difference.
    """
    keys = SampleKeys(0, torch.zeros(1, dtype=torch.int64, device=tensor.device))
    total = torch.zeros(SKETCHES + 1, dtype=torch.float64, device=tensor.device)
    for place, piece in enumerate(tensor.reshape(-1).split(PIECE)):
        bits = uniform_bits(torch.Size([1, len(piece)]), place, keys)[0]
        precise = piece.double().nan_to_num(nan=2 * HUGE, posinf=HUGE, neginf=-HUGE)
        for number in range(SKETCHES):
            total[number] += (precise * (2 * (bits >> number & 1) - 1)).sum()
        total[SKETCHES] += precise.square().sum()
    total[SKETCHES].sqrt_()
    return total.cpu()


# ---- the check that all ranks run the same step on the same parameters, without an exchange of its own ---
#
# Every rank adds some numbers to the sums of the statistics task, weighted so that they cancel where ranks
# agree. A rank that froze, replaced or added something by itself is seen before any gradient is reduced.
#
# All ranks must have parameters of the same names and shapes, and replicas of an expert must be trained
# alike. What values they have is compared above.


RANKS, PARAMETERS, EXPERTS, REPLAN, TRAINING, LOSS, NEW, CHANGES = range(8)
"""Places of the facts that the host knows: a one (to count ranks); names and shapes of parameters outside
experts, then of experts that have replicas; whether the rank requests another plan; whether it trains; the
terms of its loss; whether it has taken up new parameters; how often values were changed in place since the
last step."""
FACTS = 8
SAMPLES, SLOPE, VALUES = range(FACTS, FACTS + 3)
"""Places of what the device knows: the step's samples, and the gradient with which the last backward pass
began, see `consistency`; values, see above."""
FIELDS = FACTS + 3


@dataclass(frozen=True)
class Entry:
    """The facts of one parameter that all ranks must have alike."""

    name: str
    layer: int
    trained: bool
    dtype: str
    shape: tuple[int, ...]

    def differs(self, other: Entry) -> str | None:
        """Return what is different, in words about self and other; None if nothing is."""
        if self.trained != other.trained:
            there, here = ("trained", "frozen") if self.trained else ("frozen", "trained")
            return f"is {there} there and {here} here"
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return f"is {self.dtype} {list(self.shape)} there and {other.dtype} {list(other.shape)} here"
        if self.layer != other.layer:
            return f"is used by layer {self.layer} there and by layer {other.layer} here"
        return None


@dataclass(frozen=True)
class Marks:
    """The entries of one rank: those of parameters outside experts, and of experts that have replicas."""

    replicated: tuple[Entry, ...]
    experts: tuple[Entry, ...]

    def numbers(self, layout: Layout) -> tuple[float, float]:
        """Return what this rank adds to the sums of PARAMETERS and EXPERTS, whole and below 2**53."""
        world, edp = weight_among(Group.WORLD, layout), weight_among(Group.EXPERT_DATA, layout)
        return float(world * _digest_of_entries(self.replicated)), float(
            edp * _digest_of_entries(self.experts)
        )


COMPARED: Mapping[str, Axes] = {"replicated": Group.WORLD, "experts": Group.EXPERT_DATA}
"""By property of `Marks`, the axes along which its entries must be alike."""


def check_count(facts: Sequence[float], layout: Layout) -> None:
    """Raise CommunicationError, on all ranks, unless every rank is in the sums once."""
    if facts[RANKS] != layout.world_size:
        raise CommunicationError(
            f"a sum over {layout.world_size} ranks counts {facts[RANKS]:g}: what a rank sent was lost or "
            "counted twice, so losses and comparisons are wrong. Look for a fault of the transport; begin "
            "again from the last checkpoint"
        )


def agree(facts: Sequence[float]) -> bool:
    """Return whether the sums over ranks say that all have the same parameters."""
    return facts[PARAMETERS] == facts[EXPERTS] == 0


def raise_mismatch(mine: Marks, layout: Layout, control: Control) -> None:
    """Raise ParameterMismatchError that names a parameter. Every rank must call it."""
    everyone = control.gather(mine, "comparing parameters")
    for rank, theirs in enumerate(everyone):
        for kind, axes in COMPARED.items():
            first = layout.mesh.members(rank, axes)[0]
            there: dict[str, Entry] = {entry.name: entry for entry in getattr(theirs, kind)}
            here: dict[str, Entry] = {entry.name: entry for entry in getattr(everyone[first], kind)}
            for name in (*here, *there):
                if name not in there:
                    problem: str | None = "does not exist there"
                else:
                    problem = there[name].differs(here[name]) if name in here else "exists there only"
                if problem is not None:
                    raise _mismatch(f"on rank {rank} against rank {first}: {name} {problem}")
    raise _mismatch("they differ in more ways than one message can say")


def _mismatch(what: str) -> ParameterMismatchError:
    return ParameterMismatchError(f"ranks train different parameters: {what}. {BEGAN}.")


def _digest_of_entries(entries: Iterable[Entry]) -> int:
    lines = "\n".join(f"{e.layer} {e.name} {e.trained} {e.dtype} {e.shape}" for e in entries)
    return int.from_bytes(hashlib.blake2b(lines.encode(), digest_size=4).digest(), "big")


# ---- the check, before every step, that a model is unchanged ----------------------------------------------


T = TypeVar("T")
Kind = tuple[bool, torch.dtype, torch.dtype | None, torch.Size, torch.device]


class Snapshot:
    """The modules and parameters of models, by identity, and each parameter's type, shape and device.

    Values are not looked at. Taking or comparing one costs about a microsecond per module and parameter.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._tree = _tree(models)
        self.modules = _each_once(self._tree, nn.Module)
        self.parameters = _each_once(self._tree, nn.Parameter)
        self._kinds = _kinds(self.parameters)

    def holds(self) -> bool:
        """Return whether nothing was added, removed, replaced, moved, frozen, thawed or converted since."""
        return self.has_same_modules() and _kinds(self.parameters) == self._kinds

    def has_same_modules(self) -> bool:
        """Return whether no module or parameter was added, removed or replaced since."""
        tree = _tree(self._models)
        return len(tree) == len(self._tree) and all(map(is_, tree, self._tree))

    def buffers(self) -> list[Tensor]:
        """Return the present buffers of all modules."""
        return [b for module in self.modules for b in module._buffers.values() if b is not None]

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return a parameter's first name in the models."""
        named = (pair for model in self._models for pair in model.named_parameters())
        return next((name for name, each in named if each is parameter), "a parameter that was replaced")


def _each_once(tree: list[Any], kind: type[T]) -> list[T]:
    return list({id(each): each for each in tree if isinstance(each, kind)}.values())


def _tree(models: Sequence[nn.Module]) -> list[Any]:
    """Return modules and parameters in order; None after the last child of a module, so that levels show."""
    tree: list[Any] = []
    seen: set[int] = set()

    def visit(module: nn.Module) -> None:
        tree.append(module)
        if id(module) in seen:
            return
        seen.add(id(module))
        tree.extend(module._parameters.values())
        for child in module._modules.values():
            if child is not None:
                visit(child)
        tree.append(None)

    for model in models:
        visit(model)
    return tree


def _kinds(parameters: Sequence[nn.Parameter]) -> list[Kind]:
    return [(p.requires_grad, p.dtype, p.grad_dtype, p.shape, p.device) for p in parameters]
