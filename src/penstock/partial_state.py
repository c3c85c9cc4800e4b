"""State dicts of a rank that holds a share of a model: they say which share, and are checked when loaded.

A share has the names of the whole, and the shapes of every other share: nothing else tells whose experts a
state dict has. So every module that holds a share adds an entry `penstock_share` to its state dict, which
says in words what the rank holds, as bytes in a tensor: a mark. It survives copies, prefixes, `torch.save`
and casts.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

KEY = "penstock_share"
"""Last part of the name of a mark in a state dict; also the attribute of a marked module with the words."""

REMEDY = (
    "Save state_dict() by torch.save on every rank, each in a file of its own, and load it on a rank that "
    "holds the same share. A model of transformers is saved by torch.distributed.checkpoint, too, or whole "
    "by model.save_pretrained(folder) or penstock.save_checkpoint on all ranks, for any number of ranks"
)

SOLE_WRITERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers")
"""Packages that pickle a state dict on one rank, for all ranks."""


class ShareError(RuntimeError):
    """A share of a model was taken for another share, or for the whole model."""


class ShareMark(Tensor):
    """A mark in a state dict: the words for a share, as bytes.

    What `torch.save` writes is an ordinary tensor. Tools that write a state dict of one rank as that of the
    whole model look at every tensor, and get a ShareError from this one: safetensors asks for its address,
    `torch.distributed.checkpoint`, which keeps one of several equal names, for what to write, and a pickle
    for its parts, where one of `SOLE_WRITERS` makes it.
    """

    warned = False  # in this process

    @staticmethod
    def of(share: str) -> ShareMark:
        """Return the mark of a share, given in words."""
        return torch.tensor(list(share.encode()), dtype=torch.uint8).as_subclass(ShareMark)

    def data_ptr(self) -> int:
        for name in torch_callers():
            if name.startswith(("safetensors.", "torch.distributed.checkpoint.")):
                self._refuse(f"a file of {name}")
        return super().data_ptr()

    def __create_write_items__(self, fqn: str, written: object) -> list[object]:
        """Refuse to be planned, in the protocol of `torch.distributed.checkpoint`."""
        del fqn, written
        self._refuse("a file of torch.distributed.checkpoint")

    def __deepcopy__(self, memo: dict[int, Any]) -> ShareMark:
        del memo
        return self.clone().as_subclass(ShareMark)

    def __reduce_ex__(self, protocol: Any) -> Any:
        writer = list(torch_callers())[-1].partition(".")[0]
        if writer in SOLE_WRITERS:
            self._refuse(f"a file of {writer}")
        if not ShareMark.warned and dist.is_initialized() and dist.get_rank() == 0:
            ShareMark.warned = True
            warnings.warn(
                f"rank 0 saves its share of a model, {share_of(self)}: what it alone writes lacks the rest. "
                f"{REMEDY}",
                stacklevel=2,
            )
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def _refuse(self, file: str) -> NoReturn:
        raise ShareError(
            f"this state dict has a rank's share of a model, {share_of(self)}, and would be written as "
            f"{file} as if it were the whole model. {REMEDY}"
        )


def torch_callers() -> Iterator[str]:
    """Yield the modules that have called the caller, through torch, up to the first that is not torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "?")
        yield name
        if name.partition(".")[0] not in ("penstock", "torch", "pickle"):
            return
        frame = frame.f_back


def share_of(mark: Tensor) -> str:
    """Return the words of a mark, which may have been cast to another type or damaged."""
    return bytes(mark.detach().cpu().double().round().clamp(0, 255).byte().tolist()).decode(errors="replace")


def mark_share(module: nn.Module, share: str, inside: Sequence[str] = ("",)) -> None:
    """Mark state dicts of `module` as those of a share, and load no others into it.

    share: what this rank holds, in words that differ between shares. inside: beginnings of the names, in the
    module, of what belongs to the share; a state dict without any of them is not checked. Marking again
    changes the words alone.
    """
    is_marked = hasattr(module, KEY)
    setattr(module, KEY, share)  # torch looks up the entries of a state dict as attributes
    if not is_marked:
        module.register_state_dict_post_hook(_Write(inside))
        module.register_load_state_dict_pre_hook(_Check(inside))


def unmark_share(module: nn.Module) -> None:
    """Let `module`, if it was marked, have the state dicts of a whole module again."""
    if hasattr(module, KEY):
        setattr(module, KEY, "")


def without_marks(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a state dict that are the model's own."""
    return {name: each for name, each in state.items() if name.rpartition(".")[2] != KEY}


def check_marks(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ShareError if a mark in a state dict is not that of this rank, in its own one."""
    for name, mark in own.items():
        if name.rpartition(".")[2] == KEY and name in state:
            check_share(share_of(state[name]), share_of(mark))


def refuse_pickle(what: str) -> NoReturn:
    """Raise TypeError: `what` belongs to this process, with its threads and process groups."""
    raise TypeError(
        f"{what} cannot be pickled (torch.save(model)): it runs on threads and process groups of this "
        f"process. copy.deepcopy copies it here. {REMEDY}"
    )


class _Hook:
    """A hook on a module's state dicts; a class, as torch marks hooks, and hooks are copied with a module."""

    def __init__(self, inside: Sequence[str]) -> None:
        self.inside = tuple(inside)


class _Write(_Hook):
    """Adds the mark to a state dict."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        del metadata
        if share := getattr(module, KEY):
            state[prefix + KEY] = ShareMark.of(share)


class _Check(_Hook):
    """Takes the mark out of a state dict that is loaded; raises ShareError if it is of another share."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        del others
        here, mark = getattr(module, KEY), state.pop(prefix + KEY, None)
        if not any(name.startswith(tuple(prefix + each for each in self.inside)) for name in state):
            return
        if mark is None and here:
            raise ShareError(
                f"this rank holds a share of a model, {here}, and the state dict that is loaded does "
                f"not say of which share it is: it is that of a whole model, or {prefix + KEY} was left "
                f"out. {REMEDY}"
            )
        check_share("" if mark is None else share_of(mark), here)


def check_share(found: str, here: str) -> None:
    """Raise ShareError unless a state of the share `found` is loaded into the share `here`."""
    if found != here:
        raise ShareError(
            f"this state has the share of another rank or layout, {found}, and this rank "
            f"holds {here or 'the whole model'}. {REMEDY}"
        )
