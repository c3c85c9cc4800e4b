"""Checkpoints by `torch.distributed.checkpoint`, under logical names: saved on one layout, loaded on another.

An expert is saved under its number in the whole model, with its optimiser state. A tensor of which several
ranks have a part is saved as a whole, and every rank takes its part out of it again.
A checkpoint appears under its final name only when all of it is on disk, and the old ones go after that.
Nothing is saved of which a number is not finite, and nothing is loaded that has changed since it was written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.config import ConfigError
from penstock.device import device_of
from penstock.runtime import PipelinedStack, ShardedAdamW
from penstock.sharding import Sharding, shardings_of
from penstock.topology import CommunicationError, Control
from penstock.topology.blame import explain, reason
from penstock.topology.rollcall import ACTIVITY
from penstock.train.finite import first_not_finite
from penstock.train.storage.bounded import bound_again, read_bounds, write_bounds
from penstock.train.storage.files import DamagedError
from penstock.train.storage.finished import PREFIX, complete_checkpoints, step_of
from penstock.train.storage.held import Held
from penstock.train.storage.hosted import gather_hosted, host_again, read_hosted, write_hosted
from penstock.train.storage.joining import Joining
from penstock.train.storage.learnt import OPTIONAL, dispensable, generator_name, learnt
from penstock.train.storage.old_format import METADATA, OldShards
from penstock.train.storage.owned import AnyHeld, MomentsOf, ShareMoments, WholeMoments
from penstock.train.storage.record import RECORD, Record
from penstock.train.storage.shards import SUFFIX, Shards, ShardWriter
from penstock.train.storage.stored import Entry, Stored, StoredReader
from penstock.train.storage.sums import SUMS, compare, digest_of, read_sums, write_sums
from penstock.writing import UNFINISHED, make_durable, remove_tree

STEP = "train.step"
DAMAGED = "damaged-"

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not as it was written; an older one may be intact. Raised on all ranks alike."""


class NotFiniteError(CheckpointError):
    """The state holds a number that is not finite, so it was not saved. Raised on all ranks alike."""


class Checkpoints:
    """The checkpoints of one run, in `folder`. All ranks must call every method together.

    identity: settings that must be the same for the run to be continued, by configuration key. settings: all
    settings, kept in every checkpoint. tokenizer: sha256 of what made the run's tokens, or `bytes`.
    """

    def __init__(
        self,
        folder: Path,
        stack: PipelinedStack,
        optimizer: torch.optim.Optimizer,
        *,
        keep: int,
        identity: Mapping[str, object],
        settings: Mapping[str, object] | None = None,
        tokenizer: str | None = None,
    ) -> None:
        self.folder, self.stack, self.optimizer, self.keep = folder, stack, optimizer, keep
        self.identity, self.settings, self.tokenizer = dict(identity), settings, tokenizer
        self._control = stack.machinery.control
        self._moments: MomentsOf = WholeMoments(optimizer)
        if isinstance(optimizer, ShardedAdamW):
            self._moments = ShareMoments(stack, optimizer)

    # ---- saving --------------------------------------------------------------------------------------------

    def save(
        self, step: int, *, plan_settled: bool = False, papers: Callable[[Path], object] | None = None
    ) -> Path:
        """Write the state after `step` steps; return its folder. An interrupted save leaves nothing.

        papers: writes small files into the checkpoint, on rank 0. Raises NotFiniteError, and writes nothing,
        if a number of the state is not finite.
        """
        final, work = self.folder / f"{PREFIX}{step:08d}", self.folder / f"{UNFINISHED}{step:08d}"
        purpose = f"saving the checkpoint of step {step}"
        state = self._state() | {STEP: Held(torch.tensor(step))}
        self._check_finite(state, f"{purpose} refused")
        record = Record(
            step=step,
            processes=self._control.world_size,
            identity=self.identity,
            settings=self.settings,
            plan_settled=plan_settled,
            tokenizer=self.tokenizer,
        )
        try:
            self._together(purpose, lambda: self._clear(work), rank=0)
            digests = self._write(work, state, purpose)
            hosted = gather_hosted(self.stack)

            def finish() -> None:
                write_hosted(work, hosted)
                write_bounds(work, self.stack)
                self._finish(work, final, record, digests, papers)

            self._together(purpose, finish, rank=0)
        except (CheckpointError, CommunicationError):
            if self._control.rank == 0:
                with suppress(OSError):  # the save's failure matters more; the next start tries again
                    remove_tree(work)
            raise
        return final

    def clear_unfinished(self) -> None:
        """Remove, on rank 0, what saves that were killed have left: it may be what fills the disk."""
        if self._control.rank == 0:
            with suppress(OSError):  # what stays costs room and does no other harm
                for work in self.folder.glob(f"{UNFINISHED}[0-9]*"):
                    remove_tree(work)

    def _clear(self, work: Path) -> None:
        remove_tree(work)
        work.mkdir(parents=True)

    def _write(self, work: Path, state: Mapping[str, AnyHeld], purpose: str) -> dict[str, str]:
        """Write all shards, on all ranks; return the digest of each file."""
        joining = Joining(state, self.stack.machinery.layout.mesh, self._control)
        writer, tensors = ShardWriter(work, joining), _stand_ins(state)
        everyone = self._everyone()
        self._torch(purpose, lambda: save(tensors, storage_writer=writer, **everyone))
        digests: dict[str, str] = {}
        for each in self._control.gather(writer.digests, purpose):
            digests |= each
        return digests

    def _finish(
        self,
        work: Path,
        final: Path,
        record: Record,
        digests: Mapping[str, str],
        papers: Callable[[Path], object] | None,
    ) -> None:
        """Describe the written shards, give them their final name and remove old ones, on rank 0."""
        if papers is not None:
            papers(work)
        replace(record, files=sorted(path.name for path in work.iterdir())).write(work)
        others = {path.name: digest_of(path) for path in work.iterdir() if path.name not in digests}
        write_sums(work, {**digests, **others})
        make_durable(work)
        self._name(work, final)
        found = complete_checkpoints(self.folder)
        for old in found:
            superseded = old in found[: -self.keep] or step_of(old) == record.step
            if superseded and old != final:  # the only one that is known to be whole
                self._hide(old)
        for broken in self.folder.glob(f"{UNFINISHED}*"):
            remove_tree(broken)

    def _name(self, work: Path, final: Path) -> None:
        """Give a complete checkpoint its name; whatever happens, it or one that it replaces has such a name.

        One of the same step is replaced by way of a name with more zeros, which counts as well: no step is
        without any name, on every file system.
        """
        if os.path.lexists(final):
            longer = final
            while os.path.lexists(longer):
                longer = longer.with_name(f"{PREFIX}0{longer.name.removeprefix(PREFIX)}")
            work.rename(longer)
            make_durable(self.folder)
            self._hide(final)
            work = longer
        work.rename(final)
        make_durable(self.folder)

    def _hide(self, path: Path) -> None:
        """Take a checkpoint's name away before it is removed, so that no half of it is taken for a whole."""
        hidden = self.folder / f"{UNFINISHED}{path.name}"
        remove_tree(hidden)
        path.rename(hidden)

    # ---- loading -------------------------------------------------------------------------------------------

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint; None if there is none."""
        return next(reversed(complete_checkpoints(self.folder)), None)

    def load(self, path: Path, *, verified: bool = False) -> int:
        """Read a checkpoint into model and optimiser; return its number of finished steps.

        verified: `verify` has found it whole. Raises DamagedCheckpointError if it is not as it was written
        (model and optimiser may hold part of it by then), ConfigError if it is of another run or model.
        """
        record = read_record(path, self._control) if verified else verify(path, self._control)
        record.check_identity(path, self.identity)
        purpose = f"reading {path}"
        stored = self._together(purpose, lambda: open_stored(path))
        state = self._state() | {STEP: Held(torch.tensor(0))}
        # Saved on fewer ranks: generators of others start from the seed.
        state = {name: held for name, held in state.items() if not dispensable(name, stored.entries)}
        self._check_fits(path, state, stored.entries)
        reader, tensors = StoredReader(stored, state), _stand_ins(state)
        everyone = self._everyone()
        self._torch(purpose, lambda: load(tensors, storage_reader=reader, **everyone))
        self._together(purpose, lambda: self._accept(path, state))
        host_again(self.stack, self._together(purpose, lambda: read_hosted(path, self.stack)))
        bound_again(self.stack, self._together(purpose, lambda: read_bounds(path, self.stack)))
        return step_of(path)

    def _check_fits(self, path: Path, state: Mapping[str, AnyHeld], saved: Mapping[str, Entry]) -> None:
        """Raise ConfigError, on all ranks, for the first tensor that is missing, different or superfluous."""
        purpose = "comparing the checkpoint with the model"
        everyone = {name for names in self._control.gather(list(state), purpose) for name in names}
        mine = next(_misfits(state, saved, everyone), None)
        found = next(filter(None, self._control.gather(mine, purpose)), None)
        if found is not None:
            why = f"checkpoint {path} was made by another model: {found}"
            hint = "Train with the configuration saved beside it (config.toml), or choose another output.dir."
            raise ConfigError("train.resume", True, why, hint)

    def _accept(self, path: Path, state: Mapping[str, AnyHeld]) -> None:
        """Check what was read; restore the generator. Raises DamagedError for a wrong or non-finite state."""
        step, broken = int(state[STEP].tensor), first_not_finite(_tensors(state))
        if step != step_of(path):
            raise DamagedError(f"it holds step {step}")
        if broken is not None:
            raise DamagedError(f"{broken} in it is not finite")
        generator, device = generator_name(self._control.rank), self.stack.machinery.device
        on_device = generator_name(self._control.rank, on_device=True)
        try:
            if generator in state:
                torch.set_rng_state(state[generator].tensor)
            if on_device in state:
                generator = on_device
                device_of(device).set_random_state(state[on_device].tensor, device)
        except (RuntimeError, TypeError) as error:
            raise DamagedError(f"its {generator} is no state of a generator") from error

    def set_aside(self, path: Path) -> None:
        """Rename a damaged checkpoint, so that it is neither the newest nor counted; on rank 0."""
        self._together(f"renaming {path}", lambda: _rename_damaged(path), rank=0)

    # ---- the state -----------------------------------------------------------------------------------------

    def _state(self) -> dict[str, AnyHeld]:
        """Return everything that belongs to the run, as views: loading writes through them."""
        self._moments.settle()
        generator, device = generator_name(self._control.rank), self.stack.machinery.device
        state: dict[str, AnyHeld] = {generator: Held(torch.get_rng_state())}
        there = device_of(device).random_state(device)
        if there is not None:
            state[generator_name(self._control.rank, on_device=True)] = Held(there)
        state |= learnt(self.stack)
        model, shardings = self.stack.model, shardings_of(self.stack.model)
        kept = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in kept:  # the others are not worth keeping
                state |= self._named(f"model.{name}", buffer, None)
        for name, parameter in model.named_parameters():
            sharding = shardings.get(name)
            state |= self._named(f"model.{name}", parameter.data, sharding)
            state |= self._moments.held(name, parameter, sharding, self._split)
        return state

    def _named(self, name: str, tensor: Tensor, sharding: Sharding | None) -> dict[str, AnyHeld]:
        return {logical: Held(part, sharding) for logical, part in self._split(name, tensor)}

    def _split(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        if ".experts." not in name:
            return [(name, tensor)]
        layer = int(name.split(".layers.", 1)[1].split(".", 1)[0])
        moe = self.stack.parts.parts[layer].moe
        assert moe is not None, name
        return moe.by_number(name, tensor)

    def _check_finite(self, state: Mapping[str, AnyHeld], purpose: str) -> None:
        mine = first_not_finite(_tensors(state))
        found = self._control.gather(mine, "checking that all numbers are finite")
        for rank, name in enumerate(found):
            if name is not None:
                raise NotFiniteError(f"{purpose}: {name} on rank {rank} is not finite")

    # ---- failing together ----------------------------------------------------------------------------------

    def _together(self, purpose: str, work: Callable[[], T], rank: int | None = None) -> T:
        return together(self._control, purpose, work, rank)

    def _everyone(self) -> dict[str, Any]:
        """Return torch's words for the ranks of the run: its checkpoints exchange objects of hosts."""
        return {"process_group": self._control.group, "no_dist": not dist.is_initialized()}

    def _torch(self, purpose: str, work: Callable[[], None]) -> None:
        """Call into torch's checkpoints, which raise the same error on all ranks.

        torch's CheckpointException is no Exception, so an ordinary handler would never see it.
        """
        try:
            with ACTIVITY.exchanging(purpose):
                work()
        except CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            kind = DamagedCheckpointError if isinstance(first, DamagedError) else CheckpointError
            raise kind(_failed(purpose, first, explain)) from error
        except (OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(_failed(purpose, error, explain)) from error


# ---- one checkpoint ----------------------------------------------------------------------------------------


def together(control: Control, purpose: str, work: Callable[[], T], rank: int | None = None) -> T:
    """Return what `work` returns on this rank, after all ranks have run it, or `rank` alone.

    A failure on any rank raises CheckpointError on every rank, DamagedCheckpointError for a DamagedError. If
    only `rank` works, it alone gets a result.
    """
    result: T | None = None
    failure: tuple[bool, str] | None = None
    if rank in (None, control.rank):
        try:
            result = work()
        except Exception as error:  # of any kind: the others wait, and must be told
            failure = isinstance(error, DamagedError), _failed(purpose, error)
    for damaged, text in filter(None, control.gather(failure, purpose)):
        raise (DamagedCheckpointError if damaged else CheckpointError)(text)
    return result  # type: ignore[return-value]  # only the rank that has worked reads it


def verify(path: Path, control: Control) -> Record:
    """Compare every file with its checksum, each rank a share of the files; return the record of the state.

    An old checkpoint has no checksums. Raises DamagedCheckpointError, on all ranks.
    """
    purpose = f"reading {path}"

    def check() -> None:
        if (path / METADATA).exists() and not (path / SUMS).exists():
            return
        digests = read_sums(path)
        compare(path, digests, sorted(digests)[control.rank :: control.world_size])

    together(control, purpose, check)
    record = read_record(path, control)
    together(control, purpose, lambda: _check_files(path, record), rank=0)
    return record


def read_record(path: Path, control: Control) -> Record:
    """Return the record of a checkpoint, read by rank 0, on all ranks."""
    mine = together(control, f"reading {path}", lambda: Record.read(path), rank=0)
    return control.gather(mine, "sharing what the checkpoint says")[0]


def open_stored(path: Path) -> Stored:
    """Open the tensors of a checkpoint in the format in which it was written."""
    if not (path / SUMS).exists():
        return OldShards(path)
    return Shards(path, (name for name in read_sums(path) if name.endswith(SUFFIX)))


def _check_files(path: Path, record: Record) -> None:
    """Raise DamagedError unless the checksums name every file: a list that was cut short would omit some."""
    if (path / SUMS).exists() and read_sums(path).keys() != {RECORD, *record.files}:
        raise DamagedError(f"{SUMS} does not name the files that belong to it")


def _rename_damaged(path: Path) -> None:
    number, target = 1, path.with_name(f"{DAMAGED}{path.name}")
    while os.path.lexists(target):
        target = path.with_name(f"{DAMAGED}{path.name}.{number}")
        number += 1
    path.rename(target)


def _failed(purpose: str, error: BaseException, why: Callable[[BaseException], str] = reason) -> str:
    """Return what failed and why. why: describes the error; `explain` finds out which rank is silent."""
    kind = "" if isinstance(error, DamagedError) else f"{type(error).__name__}: "
    return f"{purpose} failed: {kind}{why(error)}"


def _tensors(state: Mapping[str, AnyHeld]) -> dict[str, Tensor]:
    return {name: held.tensor for name, held in state.items()}


def _stand_ins(state: Mapping[str, AnyHeld]) -> dict[str, Tensor]:
    return {name: held.stand_in for name, held in state.items()}


def _misfits(state: Mapping[str, AnyHeld], saved: Mapping[str, Entry], everyone: set[str]) -> Iterator[str]:
    for name, held in state.items():
        entry = saved.get(name)
        if entry is None:
            yield f"{name} is missing in it"
        elif entry.shape != held.shape:
            yield f"{name} has shape {list(entry.shape)} there and {list(held.shape)} here"
        elif entry.dtype != held.stand_in.dtype:
            yield f"{name} has numbers of type {entry.dtype} there and {held.stand_in.dtype} here"
    for name in saved.keys() - everyone:
        if not name.startswith(OPTIONAL):  # these belong to ranks that this run lacks
            yield f"{name} exists there and not here"
