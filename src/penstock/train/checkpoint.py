"""Checkpoints by `torch.distributed.checkpoint`, under logical names: saved on one layout, loaded on another.

An expert is saved under its number in the whole model, with its optimiser state, by the rank that owns it.
A checkpoint appears under its final name only when all of it is on disk; the old ones go after that.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.config import ConfigError
from penstock.runtime import PipelinedStack

MOMENTS = ("exp_avg", "exp_avg_sq")
PREFIX, UNFINISHED = "step-", ".unfinished-"


class Checkpoints:
    """The checkpoints of one run, in `folder`. All methods must be called by all ranks."""

    def __init__(
        self, folder: Path, stack: PipelinedStack, optimizer: torch.optim.Optimizer, keep: int
    ) -> None:
        self.folder, self.stack, self.optimizer, self.keep = folder, stack, optimizer, keep
        self._control = stack.machinery.control

    def save(self, step: int) -> Path:
        """Write the state after `step` steps; returns its folder. An interrupted save leaves nothing."""
        final, work = self.folder / f"{PREFIX}{step:08d}", self.folder / f"{UNFINISHED}{step:08d}"
        if self._control.rank == 0:
            shutil.rmtree(work, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
        self._control.barrier(f"waiting to save step {step}")
        state = {**self._state(), "train.step": torch.tensor(step)}
        with self._control.naming(f"saving the checkpoint of step {step}"):
            save(state, checkpoint_id=work, no_dist=self._control.world_size == 1)
        if self._control.rank == 0:
            shutil.rmtree(final, ignore_errors=True)
            work.rename(final)
            self._remove_old()
        self._control.barrier(f"waiting for the checkpoint of step {step}")
        return final

    def newest(self) -> Path | None:
        """The last complete checkpoint, if there is one."""
        return max(self.folder.glob(f"{PREFIX}*"), default=None)

    def load(self, path: Path) -> int:
        """Read a checkpoint into model and optimiser; returns its number of finished steps."""
        state = {**self._state(), "train.step": torch.tensor(0)}
        saved = FileSystemReader(path).read_metadata().state_dict_metadata
        generator = _generator_name(self._control.rank)
        if generator not in saved:  # saved on fewer ranks: this rank's generator starts from the seed
            del state[generator]
        names = self._control.gather(list(state), "comparing the checkpoint with the model")
        _check_fits(path, state, saved, {name for rank in names for name in rank})
        with self._control.naming(f"loading {path.name}"):
            load(state, checkpoint_id=path, no_dist=self._control.world_size == 1)
        if generator in state:
            torch.set_rng_state(state[generator])
        return int(state["train.step"].item())

    def _state(self) -> dict[str, Tensor]:
        """Everything that belongs to the run, as views: loading writes through them."""
        state = {_generator_name(self._control.rank): torch.get_rng_state()}
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
        first = self._first_expert(name)
        return {f"{name}.{first + i}": part for i, part in enumerate(tensor.unbind())}

    def _first_expert(self, name: str) -> int:
        layer = int(name.split(".blocks.", 1)[1].split(".", 1)[0])
        moe = self.stack.parts.parts[layer].moe
        assert moe is not None, name
        return moe.first_expert

    def _remove_old(self) -> None:
        for old in sorted(self.folder.glob(f"{PREFIX}*"))[: -self.keep]:
            shutil.rmtree(old)
        for broken in self.folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(broken)


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
