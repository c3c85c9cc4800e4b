"""Checkpoints by `torch.distributed.checkpoint`, under logical names: saved on one layout, loaded on another.

An expert is saved under its number in the whole model, with its optimiser state, by the rank that owns it.
A checkpoint appears under its final name only when all of it is on disk; the old ones go after that.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.config import ConfigError
from penstock.runtime import PipelinedStack
from penstock.topology.blame import explain, reason
from penstock.topology.rollcall import ACTIVITY

MOMENTS = ("exp_avg", "exp_avg_sq")
PREFIX, UNFINISHED = "step-", ".unfinished-"
IDENTITY = "data.json"
"""What the position in the data depends on: a run can only be continued with the same."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


def complete_checkpoints(folder: Path) -> list[Path]:
    """All finished checkpoints in `folder`, oldest first."""
    found = [p for p in folder.glob(f"{PREFIX}*") if re.fullmatch(rf"{PREFIX}\d{{8}}", p.name)]
    return sorted(path for path in found if (path / ".metadata").exists())


class Checkpoints:
    """The checkpoints of one run, in `folder`. All methods must be called by all ranks.

    identity: settings that must be the same for the run to be continued, by configuration key.
    """

    def __init__(
        self,
        folder: Path,
        stack: PipelinedStack,
        optimizer: torch.optim.Optimizer,
        *,
        keep: int,
        identity: Mapping[str, object],
    ) -> None:
        self.folder, self.stack, self.optimizer, self.keep = folder, stack, optimizer, keep
        self.identity = dict(identity)
        self._control = stack.machinery.control

    def save(self, step: int) -> Path:
        """Write the state after `step` steps; returns its folder. An interrupted save leaves nothing."""
        final, work = self.folder / f"{PREFIX}{step:08d}", self.folder / f"{UNFINISHED}{step:08d}"
        state = {**self._state(), "train.step": torch.tensor(step)}
        with _explained(f"saving the checkpoint of step {step}"):
            if self._control.rank == 0:
                shutil.rmtree(work, ignore_errors=True)
                self.folder.mkdir(parents=True, exist_ok=True)
            self._control.barrier(f"waiting to save step {step}")
            save(state, checkpoint_id=work, no_dist=not dist.is_initialized())
            if self._control.rank == 0:
                (work / IDENTITY).write_text(json.dumps(self.identity, indent=1))
                shutil.rmtree(final, ignore_errors=True)
                work.rename(final)
                self._remove_old()
            self._control.barrier(f"waiting for the checkpoint of step {step}")
        return final

    def newest(self) -> Path | None:
        """The last complete checkpoint, if there is one."""
        return max(complete_checkpoints(self.folder), default=None)

    def load(self, path: Path) -> int:
        """Read a checkpoint into model and optimiser; returns its number of finished steps."""
        state = {**self._state(), "train.step": torch.tensor(0)}
        generator = _generator_name(self._control.rank)
        way_out = f"reading {path} (remove it to continue from an older one)"
        with _explained(way_out):
            saved = _read_metadata(path)
            identity = json.loads((path / IDENTITY).read_text())
        if generator not in saved:  # saved on fewer ranks: this rank's generator starts from the seed
            del state[generator]
        self._check_identity(path, identity)
        names = self._control.gather(list(state), "comparing the checkpoint with the model")
        _check_fits(path, state, saved, {name for rank in names for name in rank})
        with _explained(way_out):
            load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
        if generator in state:
            torch.set_rng_state(state[generator])
        return int(state["train.step"].item())

    def _check_identity(self, path: Path, saved: Mapping[str, object]) -> None:
        for key, value in self.identity.items():
            if saved.get(key) != value:
                why = f"{path} was made with {saved.get(key)}, and samples would be repeated or left out"
                raise ConfigError(key, value, why, "Use the same value, or start anew in another output.dir.")

    def _state(self) -> dict[str, Tensor]:
        """Everything that belongs to the run, as views: loading writes through them."""
        state = {_generator_name(self._control.rank): torch.get_rng_state()}
        kept = self.stack.model.state_dict().keys()
        for name, buffer in self.stack.model.named_buffers():
            if name in kept:  # the others are not worth keeping
                state |= self._named(f"model.{name}", buffer)
        for name, parameter in self.stack.model.named_parameters():
            state |= self._named(f"model.{name}", parameter.data)
            moments = self.optimizer.state[parameter]
            state[f"optimizer.{name}.step"] = moments["step"]
            for moment in MOMENTS:
                state |= self._named(f"optimizer.{name}.{moment}", moments[moment])
        return state

    def _named(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if ".experts." not in name:
            return {name: tensor}
        layer = int(name.split(".blocks.", 1)[1].split(".", 1)[0])
        moe = self.stack.parts.parts[layer].moe
        assert moe is not None, name
        parts = moe.experts.split(name, tensor)
        return {f"{logical}.{moe.first_expert + number}": part for logical, number, part in parts}

    def _remove_old(self) -> None:
        for old in complete_checkpoints(self.folder)[: -self.keep]:
            shutil.rmtree(old)
        for broken in self.folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(broken)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Say what was being written or read when a file or a peer failed.

    CheckpointException is no Exception in torch, so an ordinary handler would never see it.
    """
    try:
        with ACTIVITY.exchanging(what):
            yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{what} failed: {type(first).__name__}: {explain(first)}") from error
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{what} failed: {type(error).__name__}: {explain(error)}") from error


def _read_metadata(path: Path) -> Mapping[str, object]:
    """What the checkpoint holds, by name. It is a pickle: damaged ones raise almost anything."""
    try:
        return FileSystemReader(path).read_metadata().state_dict_metadata
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f".metadata is damaged: {type(error).__name__}: {reason(error)}") from error


def _generator_name(rank: int) -> str:
    return f"generator.rank{rank}"


def _check_fits(
    path: Path, state: dict[str, Tensor], saved: Mapping[str, object], everyone: set[str]
) -> None:
    """Name the first tensor that the checkpoint lacks, has in another shape, or has and nobody wants."""
    for name, problem in _misfits(state, saved, everyone):
        why = f"checkpoint {path} was made by another model: {name} {problem}"
        hint = "Train with the configuration saved beside it (config.toml), or choose another output.dir."
        raise ConfigError("train.resume", True, why, hint)


def _misfits(
    state: dict[str, Tensor], saved: Mapping[str, object], everyone: set[str]
) -> Iterator[tuple[str, str]]:
    for name, tensor in state.items():
        entry = saved.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            yield name, "is missing in it"
        elif not name.startswith("generator") and entry.size != tensor.shape:
            yield name, f"has shape {list(entry.size)} there and {list(tensor.shape)} here"
    for name in saved.keys() - everyone:
        if not name.startswith("generator"):  # of a rank that this run does not have
            yield name, "exists there and not here"
