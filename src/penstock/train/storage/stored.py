"""Tensors by name on disk, as `torch.distributed.checkpoint` loads them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from penstock.train.storage.files import DamagedError
from penstock.train.storage.owned import AnyHeld


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Shape and type of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def writing_order(name: str, dtype: torch.dtype) -> tuple[int, str]:
    """Return a tensor's sorting key in a file: wide numbers first, so that each is aligned to its width."""
    return -dtype.itemsize, name


class Stored(ABC):
    """All tensors of a checkpoint. entries: shape and type of each, by name."""

    entries: Mapping[str, Entry]

    @abstractmethod
    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of these names, on the CPU, in the cheapest order. Raises DamagedError."""


class StoredReader(StorageReader):
    """Gives `torch.distributed.checkpoint.load` what a `Stored` holds; every tensor is stored as a whole.

    held: the state into which tensors are read. Torch sees stand-ins for tensors of which this rank has a
    part.
    """

    def __init__(self, stored: Stored, held: Mapping[str, AnyHeld]) -> None:
        self._stored, self._held = stored, held

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the checkpoint holds. All ranks have read it already, so nothing is read here."""
        del args, kwargs
        tensors: dict[str, Any] = {name: _described(entry) for name, entry in self._stored.entries.items()}
        return Metadata(state_dict_metadata=tensors, storage_meta=StorageMeta())

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill this rank's part of every tensor for which the plan asks."""
        del planner
        for name, tensor in self._stored.read({item.storage_index.fqn for item in plan.items}):
            target = self._held[name]
            if (target.shape, target.stand_in.dtype) != (tuple(tensor.shape), tensor.dtype):
                raise DamagedError(f"{name} is not of the shape and type that were announced")
            target.fill(tensor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: there is no state to reset."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: there is nothing to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any name: the reader knows its checkpoint."""
        del checkpoint_id
        return True


def _described(entry: Entry) -> TensorStorageMetadata:
    shape = torch.Size(entry.shape)
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)
    return TensorStorageMetadata(properties=TensorProperties(dtype=entry.dtype), size=shape, chunks=[whole])
