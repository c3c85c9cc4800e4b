"""Checkpoints of a run: saved on one layout, beside the steps that follow, and loaded on another.

A checkpoint appears under its final name only when all of it is on disk, and the old ones go after that.
Nothing is saved of which a number is not finite, and nothing is loaded that has changed since it was written.
Training may begin with the weights in a folder of transformers, `model.config` of a run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import nn

from penstock.checkpoint.folder import (
    INDEX,
    ONE,
    PREFIX,
    RECORD,
    SUMS,
    DamagedError,
    Record,
    compare,
    complete,
    complete_checkpoints,
    is_complete,
    model_files,
    read_sums,
    set_aside,
    step_of,
    write_index,
)
from penstock.checkpoint.storage import (
    MODEL,
    NOT_FINITE,
    SHARD,
    SUFFIX,
    CheckpointError,
    Dealing,
    Part,
    Saving,
    Stored,
    first_not_finite,
    make_whole,
    misfits,
    of_rank,
    tensors_in,
    together,
)
from penstock.config import ConfigError
from penstock.models import MoEDecoder
from penstock.models.decoder import on_meta
from penstock.models.qwen3_moe import CONFIG
from penstock.runtime import PipelinedStack
from penstock.topology import Control
from penstock.train.run_state import (
    OPTIONAL,
    STEP,
    DecoderNaming,
    Naming,
    needed,
    of_model,
    read_steps,
    set_generators,
    state_of,
    steps_of,
    take_steps,
)
from penstock.writing import UNFINISHED, remove_tree, write_whole

MOST_SQUARED: Final = math.sqrt(torch.finfo(torch.float32).max)
"""The largest number whose square is one in float32: norms of larger ones are zero or infinite."""


class NotFiniteError(CheckpointError):
    """The state holds a number that is not finite, so it was not saved. Raised on all ranks alike."""


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A checkpoint that is being written: its folder, whose name it gets when it is complete.

    papers: writes small files into it. keep: see `complete`.
    """

    final: Path
    record: Record
    keep: int
    papers: Callable[[Path], object]

    @property
    def work(self) -> Path:
        return self.final.with_name(f"{UNFINISHED}{self.record.step:08d}")

    def begin(self) -> None:
        remove_tree(self.work)
        self.work.mkdir(parents=True)
        self.papers(self.work)

    def finish(self, digests: Mapping[str, str]) -> None:
        if (self.work / CONFIG).exists():  # a model of transformers
            write_index(self.work, (name for name in digests if name.startswith(MODEL)))
        complete(self.work, self.final, self.record, digests, self.keep)

    def give_up(self) -> None:
        remove_tree(self.work)


class Checkpoints:
    """The checkpoints of one run, in `folder`. All ranks must call every method together.

    Attributes:
        keep: How many of the newest checkpoints are kept.
        identity: Settings that must be the same for the run to be continued, by configuration key.
        settings: All settings, kept in every checkpoint.
        tokenizer: Sha256 of what made the run's tokens, or `bytes`.
        files: JSON files that make each checkpoint a folder of transformers, in which tensors that ranks
            share are joined; empty where transformers has no such model.
        naming: Returns how checkpoints name the tensors of a model.
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
        files: Mapping[str, Mapping[str, object]] | None = None,
        naming: Callable[[nn.Module], Naming] = DecoderNaming,
    ) -> None:
        self.folder, self.stack, self.optimizer, self.keep = folder, stack, optimizer, keep
        self.identity, self.settings, self.tokenizer = dict(identity), settings, tokenizer
        self.files, self._control = files or {}, stack.machinery.control
        self.naming = naming
        self._dealing, self._begun = Dealing(self._control), list[tuple[Saving, Path]]()

    # ---- saving --------------------------------------------------------------------------------------------

    def save(self, step: int, *, papers: Callable[[Path], object] | None = None) -> Path:
        """Write the state after `step` steps, as `begin` does, and wait for it; return its folder."""
        self.begin(step, papers=papers)
        path = self.finish()
        assert path is not None, "it has begun"
        return path

    def begin(
        self, step: int, *, plan_settled: bool = False, papers: Callable[[Path], object] | None = None
    ) -> None:
        """Copy the state after `step` steps; a thread writes the copy, and training may go on.

        The checkpoint has its name when `poll` or `finish` has returned its folder; until then it counts as
        interrupted, which leaves nothing.

        Args:
            plan_settled: Whether the plan in use is final.
            papers: Writes small files into the checkpoint, on rank 0.

        Raises:
            NotFiniteError: If a number of the state is not finite; nothing is written then.
        """
        assert not self._begun, "one is written at a time"
        final, purpose = self.folder / f"{PREFIX}{step:08d}", f"saving the checkpoint of step {step}"
        naming = self.naming(self.stack.model)
        state = state_of(self.stack, self.optimizer, naming) | {
            STEP: Part.of(torch.tensor(step, device="cpu"))
        }
        own = first_not_finite(tensors_in(state), lambda name: MOST_SQUARED if of_model(name) else math.inf)
        everyone = self._control.gather(own, "checking that all numbers are finite")
        for rank, name in enumerate(everyone):
            if name is not None:
                why = f"{name} on rank {rank} is not finite, or its square is not"
                raise NotFiniteError(f"{purpose} refused: {why}")
        if self.files:
            make_whole(state, naming.in_files(), self.stack.machinery.layout.mesh, self._control, purpose)
        record = Record(
            step=step,
            processes=self._control.world_size,
            identity=self.identity,
            settings=self.settings,
            plan_settled=plan_settled,
            tokenizer=self.tokenizer,
            steps=steps_of(self.stack),
        )

        def write_papers(work: Path) -> None:
            if papers is not None:
                papers(work)
            for name, content in self.files.items():
                write_whole(work / name, json.dumps(content, indent=2) + "\n", durable=True)

        files = _Step(final=final, record=record, keep=self.keep, papers=write_papers)
        saving = Saving(files, self._control, purpose, lambda _: state, self._dealing, _divide)
        self._begun.append((saving, final))

    def poll(self) -> Path | None:
        """Finish the checkpoint that is being written if all ranks have written it; return its folder.

        Raises:
            CheckpointError: On all ranks, if one could not write; the checkpoint is removed then.
        """
        if self._begun and self._begun[0][0].has_ended():
            return self.finish()
        return None

    def finish(self) -> Path | None:
        """Wait for the checkpoint that is being written, if any; return its folder.

        The folder is gone, and that is no error, if somebody has removed it meanwhile. Warns of older ones
        that cannot be removed.

        Raises:
            CheckpointError: As `poll` does.
        """
        if not self._begun:
            return None
        saving, final = self._begun.pop()
        saving.wait()
        if self._control.gather(saving.folder.exists(), "looking for the checkpoint")[0]:
            saving.finish()
        return final

    def drop(self) -> None:
        """Give up the checkpoint that is being written, if any, whatever has become of it."""
        while self._begun:
            self._begun.pop()[0].drop()

    def clear_unfinished(self) -> None:
        """Remove, on rank 0, what saves that were killed have left: it may be what fills the disk."""
        for work in self.folder.glob(f"{UNFINISHED}[0-9]*"):
            if self._control.rank == 0:
                with suppress(OSError):  # what stays costs room, and the next start tries again
                    remove_tree(work)

    # ---- loading -------------------------------------------------------------------------------------------

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint; None if there is none."""
        return next(reversed(complete_checkpoints(self.folder)), None)

    def load(self, path: Path, *, verified: bool = False) -> int:
        """Read a checkpoint into model and optimiser; return its number of finished steps.

        Args:
            verified: Whether `verify` has found it whole already.

        Raises:
            DamagedCheckpointError: If it is not as it was written; model and optimiser may hold part of it by
                then.
            ConfigError: If it is of another run or model.
        """
        record = read_record(path, self._control) if verified else verify(path, self._control)
        record.check_identity(path, self.identity)
        purpose = f"reading {path}"
        stored = together(self._control, purpose, lambda: open_stored(path))
        state = state_of(self.stack, self.optimizer, self.naming(self.stack.model))
        state |= {STEP: Part.of(torch.tensor(0, device="cpu"))}
        state = needed(state, stored.whole)  # saved on fewer ranks: generators of others start from the seed
        comparing = "comparing the checkpoint with the model"
        everyone = {name for names in self._control.gather(list(state), comparing) for name in names}
        others = {name for name in stored.whole if name.startswith(OPTIONAL)}  # of ranks that this run lacks
        own_misfit = misfits(state, stored.whole, everyone | others)
        misfit = next(filter(None, self._control.gather(own_misfit, comparing)), None)
        if misfit is not None:
            why = f"checkpoint {path} was made by another model: {misfit}"
            hint = "Train with the configuration saved beside it (config.toml), or choose another output.dir."
            raise ConfigError("train.resume", True, why, hint)
        together(self._control, purpose, lambda: stored.load(state))

        def accept() -> None:
            (step,) = state[STEP].boxes.values()
            if int(step) != step_of(path):
                raise DamagedError(f"it holds step {int(step)}")
            if (broken := first_not_finite(tensors_in(state))) is not None:
                raise DamagedError(f"{broken} in it is not finite")
            set_generators(state, self.stack)

        together(self._control, purpose, accept)
        steps = together(self._control, purpose, lambda: read_steps(self.stack, record.steps))
        take_steps(self.stack, *steps)
        return step_of(path)

    def set_aside(self, path: Path) -> None:
        """Rename a damaged checkpoint, so that it is neither the newest nor counted; on rank 0."""
        together(self._control, f"renaming {path}", lambda: set_aside(path), rank=0)


_divide = partial(of_rank, kind_of=lambda name: MODEL if of_model(name) else SHARD)


# ---- one checkpoint ----------------------------------------------------------------------------------------


def verify(path: Path, control: Control) -> Record:
    """Compare every file with its checksum, each rank a share of the files; return the record of the state.

    Raises:
        DamagedCheckpointError: On all ranks, if a file is not as it was written.
    """

    def check() -> None:
        digests = read_sums(path)
        compare(path, digests, sorted(digests)[control.rank :: control.world_size])

    def check_files() -> None:
        if read_sums(path).keys() != {RECORD, *record.files}:  # a list that was cut short omits some
            raise DamagedError(f"{SUMS} does not name the files that belong to it")

    purpose = f"reading {path}"
    together(control, purpose, check)
    record = read_record(path, control)
    together(control, purpose, check_files, rank=0)
    return record


def read_record(path: Path, control: Control) -> Record:
    """Return the record of a checkpoint, read by rank 0, on all ranks."""
    record = together(control, f"reading {path}", lambda: Record.read(path), rank=0)
    return control.gather(record, "sharing what the checkpoint says")[0]


def open_stored(path: Path) -> Stored:
    """Open the tensors of a checkpoint."""
    return Stored(path, [name for name in read_sums(path) if name.endswith(SUFFIX)])


TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HEAD = "lm_head.weight"
READING = "reading the weights in model.config"
COPY = "Copy the folder again, or begin with fresh weights: give the path of its config.json alone."


def files_of(path: Path) -> list[str]:
    """Return the files with the weights in `model.config`; [] for a `config.json` alone.

    Raises:
        ConfigError: If there are weights, but not in files that can be read.
    """
    if not path.is_dir():
        return []
    if files := model_files(path):
        return files
    if strange := sorted(each.name for each in path.iterdir() if each.suffix in (SUFFIX, ".bin", ".pth")):
        why = f"holds {strange[0]}, and neither {ONE} nor {INDEX}, by which weights are found"
        raise ConfigError("model.config", str(path), why, COPY)
    return []


def begin_with(decoder: MoEDecoder, path: Path | None, control: Control) -> None:
    """Give a decoder the weights in `model.config`, if it has any. All ranks call it.

    Raises:
        ConfigError: On all ranks, if one cannot read them, or has other files than rank 0.
    """
    if path is not None and same_files(path, control):
        control.agreed(lambda: read_weights(decoder, path), READING)


def same_files(path: Path, control: Control) -> list[str]:
    """Return the files with the weights in `model.config`, the same on all ranks, which call it together.

    Raises:
        ConfigError: On all ranks, if one cannot read them, has other files than rank 0, or finds one damaged
            (each compares a share of those that a run has written with their checksums).
    """
    own_files = control.agreed(lambda: files_of(path), READING)
    everyone = control.gather(own_files, READING)
    for rank, files in enumerate(everyone):
        if files != everyone[0]:
            why = f"holds {everyone[0] or 'no weights'} on rank 0, and on rank {rank} {files or 'no weights'}"
            raise ConfigError("model.config", str(path), why, "Give all machines the same folder.")
    control.agreed(lambda: _check_sums(path, own_files[control.rank :: control.world_size]), READING)
    return own_files


def _check_sums(path: Path, files: list[str]) -> None:
    """Raise ConfigError for a file that has changed since a run wrote it; others leave no checksums."""
    if is_complete(path):
        try:
            digests = read_sums(path)
            compare(path, digests, filter(digests.__contains__, files))
        except (DamagedError, OSError) as error:
            why = f"its weights are damaged, or cannot be read: {error}"
            raise ConfigError("model.config", str(path), why, COPY) from error


def read_weights(decoder: MoEDecoder, folder: Path) -> None:
    """Give this rank's part of a decoder the weights in a folder; of the files it reads that part alone.

    Where `folder` is a `config.json`, or holds nothing else, the decoder stays as it is.

    Args:
        decoder: This rank's part, in any layout.
        folder: A Qwen3-MoE as `save_pretrained` or a run writes it.

    Raises:
        ConfigError: About `model.config`, if the folder holds the weights of another model, or damaged ones.
    """
    if not (files := files_of(folder)):
        return
    with on_meta():
        of_all = DecoderNaming(MoEDecoder(decoder.config, decoder.moe)).in_files()
        whole = {name: Part.of(part) for name, part, _ in of_all}
    state = {name: Part.of(part, sharding) for name, part, sharding in DecoderNaming(decoder).in_files()}
    try:
        stored = Stored(folder, files, others=True)
        held = {name: each for name, each in stored.whole.items() if of_model(name)}
        if decoder.config.tie_word_embeddings:
            held.pop(HEAD, None)
        if (misfit := misfits(whole, held, whole, TYPES)) is not None:
            why = f"is the folder of another model: {misfit}"
            hint = f"Leave out sizes that are set in [model] and [moe]. {COPY}"
            raise ConfigError("model.config", str(folder), why, hint)
        stored.load(state)
        if (broken := first_not_finite(tensors_in(state))) is not None:
            raise DamagedError(f"{broken} {NOT_FINITE}")
    except (DamagedError, OSError) as error:
        why = f"its weights cannot be read: {error}"
        raise ConfigError("model.config", str(folder), why, COPY) from error
