"""Folders that are written as wholes: old files stay until all new ones are on disk."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.folder import INDEX, ONE
from penstock.families.described import FORMER, FORMER_CHECKPOINT
from penstock.writing import UNFINISHED, exchange, make_durable, remove_tree

UNFINISHED_MODEL = ".unfinished-model"
"""Subfolder for files that are being written."""

WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
ENTRANCES = (INDEX, ONE)
"""Files without which a folder holds no model: when they are there, so are the files that they name."""


@dataclass(frozen=True)
class InPlace:
    """Files of a model that are moved into its folder. Others in there stay, as does the folder itself.

    If a process ends meanwhile, the former files are in their place or in the hidden folder `FORMER`, from
    where the next save takes them back. close: writes what names the files of ranks, given their names.
    """

    path: Path
    close: Callable[[Path, Collection[str]], None]

    @property
    def work(self) -> Path:
        return self.path / UNFINISHED_MODEL

    @property
    def former(self) -> Path:
        return self.path / FORMER

    def begin(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.give_up()
        for each in (self.work, self.former):  # the latter, too, before everything has been written
            each.mkdir()

    def finish(self, digests: Mapping[str, str]) -> None:
        self.close(self.work, digests)
        files = list(self.work.iterdir())
        for each in (*files, self.work):
            make_durable(each)
        new = {path.name for path in files}
        _move(self.path, self.former, lambda name: name in new or bool(WEIGHTS.fullmatch(name)))
        for each in (self.former, self.path):
            make_durable(each)
        _move(self.work, self.path)
        make_durable(self.path)
        with suppress(OSError):  # all is in place; the next save removes the rest
            self.give_up()

    def give_up(self) -> None:
        cut_off = not any((self.path / name).exists() for name in ENTRANCES)
        if cut_off and self.former.is_dir() and not self.former.is_symlink():
            _move(self.former, self.path)
        for left in (self.work, self.former):
            remove_tree(left)


def _move(source: Path, target: Path, chosen: Callable[[str], bool] = lambda name: True) -> None:
    """Move files; those without which a folder holds no model leave first and arrive last."""
    files = [path for path in source.iterdir() if chosen(path.name)]
    out_of_use = target.name in (FORMER, UNFINISHED_MODEL)
    for path in sorted(files, key=lambda path: (path.name in ENTRANCES) != out_of_use):
        path.rename(target / path.name)


@dataclass(frozen=True)
class AsWhole:
    """A folder that takes the place of another one of its name, of which files stay that are not its `own`.

    At every moment there is one of the two folders; where the system cannot exchange names, both are without
    theirs for a moment, and `refuse_cut_off` says where the older one is. own: tells by the name of an older
    folder's file and those in the new one whether the former goes. close: see `InPlace`.
    """

    path: Path
    close: Callable[[Path, Collection[str]], None]
    own: Callable[[str, Collection[str]], bool]

    @property
    def work(self) -> Path:
        return self.path.with_name(f"{UNFINISHED}{self.path.name}")

    @property
    def former(self) -> Path:
        """The place of the older folder until the new one has its name."""
        return self.path.with_name(f"{FORMER_CHECKPOINT}{self.path.name}")

    def begin(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.path))
        self.give_up()
        self.work.mkdir(parents=True)

    def finish(self, digests: Mapping[str, str]) -> None:
        self.close(self.work, digests)
        for each in (*self.work.iterdir(), self.work):
            make_durable(each)
        if self.path.exists():
            with suppress(OSError):  # folders, and file systems without links: these files follow below
                for each in self._others(self.path, self.work):
                    (self.work / each.name).hardlink_to(each)
            self.work.rename(self.former)
            if not exchange(self.former, self.path):
                self.former.rename(self.work)
                self.path.rename(self.former)
                self.work.rename(self.path)
            self._take_others()
        else:
            self.work.rename(self.path)
        make_durable(self.path.parent)
        with suppress(OSError):  # the new one is in place; the next save removes the rest
            remove_tree(self.former)

    def give_up(self) -> None:
        if self.former.is_dir() and not self.former.is_symlink():
            if self.path.exists():
                self._take_others()
            else:
                self.former.rename(self.path)
        for left in (self.former, self.work):
            remove_tree(left)

    def _take_others(self) -> None:
        for each in self._others(self.former, self.path):
            each.rename(self.path / each.name)

    def _others(self, older: Path, newer: Path) -> list[Path]:
        """Return the files of the older folder that belong to no checkpoint and are not in the newer one."""
        new = {each.name for each in newer.iterdir()}
        left = (UNFINISHED_MODEL, FORMER)  # by a save that ended early
        names = [each.name for each in older.iterdir() if each.name not in new and each.name not in left]
        return [older / name for name in names if not self.own(name, new)]
