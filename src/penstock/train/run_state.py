"""What a checkpoint of a run holds: its tensors, by logical name, and what else the next step needs.

An expert is saved under its number in the whole model, with its optimiser state. Everything here is a view:
loading writes through it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from penstock.apportion import Counts
from penstock.checkpoint.folder import DamagedError
from penstock.checkpoint.storage import Part, State
from penstock.device import device_of
from penstock.features.expert_replicas.encoding import plain_of, replication_of
from penstock.mesh import Group
from penstock.models.qwen3_moe import in_files
from penstock.moe.layer import LogicalNames
from penstock.placement import Replication
from penstock.runtime import PipelinedStack, ShardedAdamW
from penstock.runtime.bounds import STEPS_KEPT, Passes, RowBounds
from penstock.runtime.features.expert_replicas.manager import ExpertReplicas, Plans
from penstock.runtime.features.sample_placement import SamplePlacement
from penstock.sharding import Named, shardings_of

STEP: Final = "train.step"
OPTIMIZER: Final = "optimizer."
GENERATOR: Final = "generator.rank"
FOLLOWING: Final = "following.group"
BESIDE_MODEL: Final = (OPTIMIZER, GENERATOR, FOLLOWING, "train.")
"""Prefixes of the names of all tensors that are not the model's."""

OPTIONAL: Final = (GENERATOR, FOLLOWING)
"""Prefixes of names that a checkpoint may lack, or that a run may not need: those of other ranks."""

MOST_BYTES: Final = 1 << 26
MOST_ROWS: Final = 1 << 40

NONSENSE: Final = (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError)

Known = Mapping[Passes, Sequence[Counts]]
"""How many rows the last steps of each kind have wanted, the oldest first."""


# ---- tensors -----------------------------------------------------------------------------------------------


class Naming(Protocol):
    """How a rank's tensors of a model are named in checkpoints."""

    def split(self, name: str, tensor: Tensor, suffix: str = "") -> Iterable[Named]:
        """Return the parts of a parameter, or of a tensor of its shape such as a state of the optimiser.

        Args:
            name: Name of the parameter in the model.
            tensor: The parameter, or a tensor of its shape.
            suffix: What the names of the parts end in, for a state of the parameter.
        """
        ...

    def in_files(self) -> Iterator[Named]:
        """Yield the model's tensors, by the names and with the shapes that files of transformers have."""
        ...


class DecoderNaming:
    """The names of tensors of Penstock's own decoder: every expert has tensors of its own, by its number."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._shardings, self._names = model, shardings_of(model), LogicalNames(model)

    def in_files(self) -> Iterator[Named]:
        model, kept = self._model, self._model.state_dict().keys()
        buffers = [named for named in model.named_buffers() if named[0] in kept]  # others are not worth it
        for name, tensor in chain(buffers, model.named_parameters()):
            for part_name, part, sharding in self.split(name, tensor.detach()):
                there, transposed = in_files(part_name)
                if transposed:
                    yield there, part.t(), None if sharding is None else sharding.transposed
                else:
                    yield there, part, sharding

    def split(self, name: str, tensor: Tensor, suffix: str = "") -> Iterable[Named]:
        sharding = self._shardings.get(name)
        return [(each, part, sharding) for each, part in self._names.split(name, tensor, suffix)]


def state_of(stack: PipelinedStack, optimizer: torch.optim.Optimizer, naming: Naming) -> State:
    """Return all tensors of a run but its step. All ranks call it: a sharded optimiser gathers parameters."""
    place, device = stack.machinery.layout.dp_rank, stack.machinery.device
    if isinstance(optimizer, ShardedAdamW):
        optimizer.flush()
        stack.settle()
    state = {generator_name(place): Part.of(torch.get_rng_state())}
    there = device_of(device).random_state(device)
    if there is not None:
        state[generator_name(place, on_device=True)] = Part.of(there)
    state |= learnt(stack)
    state |= {name: Part.of(part, sharding) for name, part, sharding in naming.in_files()}
    return state | updated(optimizer, stack.model, naming)


def updated(optimizer: torch.optim.Optimizer, model: nn.Module, naming: Naming) -> State:
    """Return what this rank has of an optimiser's state; a frozen parameter has none."""
    state: State = {}
    for name, parameter in model.named_parameters():
        if not isinstance(optimizer, ShardedAdamW):
            for key, value in optimizer.state.get(parameter, {}).items():
                held = value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
                state |= state_part(name, key, held, naming)
            continue
        if (owned := optimizer.updates.share_of(parameter)) is None:
            continue
        share = owned[1]
        state[f"{OPTIMIZER}{name}.step"] = Part.of(optimizer.updates.steps[parameter])
        for key, numbers in share.states.items():
            for part_name, part, sharding in naming.split(name, parameter.data, f".{key}"):
                assert part.is_contiguous(), "experts are stacked"
                begin = int(part.storage_offset() - parameter.data.storage_offset())
                runs = [(0, numbers[:0])]  # of the type of the state, also where this rank has none of it
                for piece, run in share.runs_of(parameter):
                    first, last = max(run.first, begin), min(run.first + run.length, begin + part.numel())
                    if first < last:
                        values = share.state(key, piece, run)[first - run.first : last - run.first]
                        runs.append((first - begin, values))
                state[f"{OPTIMIZER}{part_name}"] = Part.of_runs(runs, part, sharding)
    return state


def state_part(name: str, key: str, tensor: Tensor, naming: Naming) -> State:
    """Return what this rank has of a tensor of an optimiser's state, which belongs to a parameter.

    Args:
        name: Name of the parameter in the model.
        key: Name of the state, as the optimiser calls it.
        naming: How tensors of the parameter's shape are named.
    """
    if not tensor.dim():
        return {f"{OPTIMIZER}{name}.{key}": Part.of(tensor)}
    named = naming.split(name, tensor, f".{key}")
    return {f"{OPTIMIZER}{each}": Part.of(part, sharding) for each, part, sharding in named}


def of_model(name: str) -> bool:
    """Return whether the tensor of a checkpoint belongs to the model, by its name."""
    return not name.startswith(BESIDE_MODEL)


def learnt(stack: PipelinedStack) -> State:
    """Return what ranks have learnt about samples that move: which experts follow which, by layer.

    Ranks that exchange counts have learnt the same, so it is saved once per group. Where there are other
    groups, or none was kept, what is missing is learnt again.
    """
    relocation, layout = stack.of(SamplePlacement).relocation, stack.machinery.layout
    if relocation is None or relocation.how.prediction != "conditional":
        return {}
    group = layout.mesh.group(layout.rank, Group.EXPERT_SHARDS)
    sizes = {n: moe.placement.num_experts for n, moe in enumerate(stack.moe_layers) if moe is not None}
    tables = {n: relocation.habits.table(n, experts).seen for n, experts in sizes.items()}
    return {f"{FOLLOWING}{group}.L{n}": Part.of(torch.from_numpy(seen)) for n, seen in tables.items()}


def generator_name(place: int, *, on_device: bool = False) -> str:
    """Return the name of a random generator of the ranks at a place.

    Args:
        place: Index among the ranks that have other samples: ranks that share attention draw alike.
        on_device: Whether the generator is that of a GPU; else it is the host's.
    """
    return f"{GENERATOR}{place}.device" if on_device else f"{GENERATOR}{place}"


def needed(state: State, saved: Container[str]) -> State:
    """Return a state without what a run can do without and the checkpoint lacks."""
    return {name: part for name, part in state.items() if name in saved or not name.startswith(OPTIONAL)}


def set_generators(state: State, stack: PipelinedStack) -> None:
    """Give this rank's generators the states that were loaded.

    Raises:
        DamagedError: If they are no states of generators.
    """
    place, device = stack.machinery.layout.dp_rank, stack.machinery.device
    host, on_device = generator_name(place), generator_name(place, on_device=True)
    try:
        if host in state:
            torch.set_rng_state(_whole(state[host]))
        if on_device in state:
            device_of(device).set_random_state(_whole(state[on_device]), device)
    except (RuntimeError, TypeError) as error:
        raise DamagedError(f"its {GENERATOR}{place} is no state of a generator") from error


def _whole(part: Part) -> Tensor:
    (tensor,) = part.boxes.values()
    return tensor


# ---- what is no tensor -------------------------------------------------------------------------------------


def steps_of(stack: PipelinedStack) -> dict[str, Any]:
    """Return, as JSON values, which replicas ranks hold and how rows are bounded. All ranks call it.

    Without them nothing but one step is lost, and the last bits: how many rows are padding decides how
    products round.
    """
    bounds: list[Mapping[str, Any]] = []  # what steps have wanted of rows; all ranks have the same
    if isinstance(stack.bounds, RowBounds):
        bounds = [
            {**kind._asdict(), "wanted": [wanted_X.tolist() for wanted_X in history.wanted_X]}
            for kind, history in stack.bounds.histories.items()
        ]
    values = {"replicas": _replicas(stack), "bounds": bounds}
    texts = {key: json.dumps(each, default=int, allow_nan=False) for key, each in values.items()}
    return {key: json.loads(text) for key, text in texts.items() if len(text) < MOST_BYTES}


def take_steps(stack: PipelinedStack, plans: Plans | None, known: Known | None) -> tuple[bool, bool]:
    """Host and bound as `read_steps` says, each if all ranks have read the same. All ranks call it.

    A rank that has read something else would wait for others in another exchange.

    Returns:
        Whether the replicas, and whether the bounds, are those that were read.
    """
    digest = hashlib.sha256()
    for kind, rows in (known or {}).items():
        digest.update(repr(kind).encode() + b"".join(row.tobytes() for row in rows))
    own = (plans is not None, f"{known is None} {digest.hexdigest()}")
    everyone = stack.machinery.control.gather(own, "agreeing what the next step knows")
    same = all(each for each, _ in everyone)
    bounds = known is not None and len({each for _, each in everyone}) == 1
    if same and plans is not None:
        stack.of(ExpertReplicas).follow(plans)
    if bounds and known is not None and isinstance(stack.bounds, RowBounds):
        stack.bounds.histories.clear()
        for kind, rows in known.items():
            for wanted_X in rows:
                stack.bounds.history(kind).add(wanted_X)
    return same, bounds


def read_steps(stack: PipelinedStack, steps: Mapping[str, Any] | None) -> tuple[Plans | None, Known | None]:
    """Return what `steps_of` has returned for this rank; None for what is missing or does not fit the run.

    Raises:
        DamagedError: If `steps_of` returns nothing of this kind.
    """
    try:
        return _read_replicas(stack, (steps or {}).get("replicas")), _read_bounds(
            stack, (steps or {}).get("bounds")
        )
    except NONSENSE as error:
        raise DamagedError(f"what it says of replicas and of rows is nonsense: {error}") from error


def _replicas(stack: PipelinedStack) -> list[Mapping[str, Any]]:
    """Return what every expert group holds next; [] if a fresh start does the same."""
    plans, layout = stack.of(ExpertReplicas).plans, stack.machinery.layout
    as_at_first = all(replication.is_empty for replication in plans.made) and not plans.age_steps
    layers = [
        {"owners": replication.placement.digest, **plain_of(replication), "in_use": in_use}
        for replication, in_use in zip(plans.made, plans.in_use, strict=True)
    ]
    own = {"age_steps": plans.age_steps, "layers": layers}
    everyone = stack.machinery.control.gather((as_at_first, own), "gathering which replicas ranks hold")
    if all(at_first for at_first, _ in everyone):
        return []
    return [everyone[ranks[0]][1] for ranks in layout.mesh.groups(Group.EXPERT_SHARDS)]


def _read_replicas(stack: PipelinedStack, groups: list[Any] | None) -> Plans | None:
    """Return what this rank's group held; None where groups, layers, owners or slots have changed."""
    now, layout = stack.of(ExpertReplicas).plans.made, stack.machinery.layout
    if not now or not groups or len(groups) != len(layout.mesh.groups(Group.EXPERT_SHARDS)):
        return None
    table = groups[layout.mesh.group(layout.rank, Group.EXPERT_SHARDS)]
    layers = table["layers"]
    if len(layers) != len(now):
        return None
    made: list[Replication] = []
    for layer, replication in zip(layers, now, strict=True):
        slots = {len(held) for held in layer["replicas"]}
        if layer["owners"] != replication.placement.digest or slots != {replication.replica_slots}:
            return None
        made.append(replication_of(layer, replication.placement))
    return Plans(tuple(made), tuple(bool(layer["in_use"]) for layer in layers), int(table["age_steps"]))


def _read_bounds(stack: PipelinedStack, passes: list[Any] | None) -> Known | None:
    """Return what steps have wanted; None where rows are not bounded, or experts are others."""
    if not isinstance(stack.bounds, RowBounds) or passes is None:
        return None
    positions = sum(order.num_experts for order in stack.bounds.orders)
    by_kind: dict[Passes, list[Counts]] = {}
    for entry in passes:
        kind, wanted = Passes(entry["microbatches"], entry["training"]), entry["wanted"][-STEPS_KEPT:]
        if type(kind.microbatches) is not int or type(kind.training) is not bool:
            raise TypeError(f"no steps are of {kind}")
        if not all(type(count) is int and 0 <= count < MOST_ROWS for row in wanted for count in row):
            raise TypeError("there are numbers of rows that no step has")
        by_kind[kind] = [np.array(row, dtype=np.int64) for row in wanted]
    return by_kind if all(len(row) == positions for rows in by_kind.values() for row in rows) else None
