"""A folder that all ranks write together: threads write, and the folder has its name when all is on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from penstock.checkpoint.storage import SHARD, SUFFIX, Dealing, Files, Outgoing, State, together, write_shard
from penstock.topology import Control


class Replacement(Protocol):
    """New files for a folder, which are written in the folder `work`; rank 0 alone calls the methods.

    begin: makes that folder; what a killed save has left is given up first. finish: puts the complete
    files in the place of older ones, given the digests of those that ranks have written. give_up: undoes what
    was not completed, and removes the files, which may be what fills the disk.
    """

    @property
    def work(self) -> Path: ...
    def begin(self) -> None: ...
    def finish(self, digests: Mapping[str, str]) -> None: ...
    def give_up(self) -> None: ...


def of_rank(
    tensors: Iterable[Outgoing], control: Control, kind_of: Callable[[str], str] = lambda _: SHARD
) -> Files:
    """Return the files of a rank, named after it: one of each kind, and more for several boxes of a tensor.

    kind_of: how the name of a tensor's file begins.
    """
    files: Files = {}
    met = Counter[str]()
    for each in tensors:
        before = met[each.name]
        met[each.name] += 1
        name = f"{kind_of(each.name)}-{control.rank + 1:05d}{f'-{before + 1}' if before else ''}{SUFFIX}"
        files.setdefault(name, []).append(each)
    return files


class Saving:
    """What all ranks write of a state, on its way to the disk: a thread of each writes, and meets no other.

    All ranks construct it, and call its methods, together.

    Args:
        files: What becomes of the files.
        control: Of all ranks.
        purpose: What is said of a failure.
        state_in: Returns what this rank has of the state, and may write into the folder before.
        dealing: Deals boxes to ranks.
        divide: Into files; all ranks call it.
        copies: Whether the state may change as soon as this is constructed, and not only after `finish`.

    Raises:
        CheckpointError: On all ranks, if one could not begin. What was there before is there then.
    """

    def __init__(
        self,
        files: Replacement,
        control: Control,
        purpose: str,
        state_in: Callable[[Path], State],
        dealing: Dealing | None = None,
        divide: Callable[[list[Outgoing], Control], Files] = of_rank,
        *,
        copies: bool = True,
    ) -> None:
        self.folder, self._files, self._control, self._purpose = files.work, files, control, purpose
        self._written: Future[dict[str, str]] | None = None
        with self._giving_up():
            together(control, purpose, files.begin, rank=0)
            state = state_in(self.folder)
            dealt = (dealing or Dealing(control)).deal(state, purpose)
            boxes = [Outgoing(name, at, state[name].boxes[at].detach()) for name, at in dealt]
            if copies:
                boxes = [each._replace(box=each.box.to("cpu", copy=True)) for each in boxes]
            writer = ThreadPoolExecutor(1, "penstock-checkpoint")
            self._written = writer.submit(self._write, divide(boxes, control))
            writer.shutdown(wait=False)

    def _write(self, files: Files) -> dict[str, str]:
        """Write this rank's files, on the thread; return the digest of each."""
        digests = {}
        for name, tensors in files.items():
            digests[name] = write_shard(self.folder / name, tensors)
            tensors.clear()  # the memory is free before the next one
        return digests

    def has_ended(self) -> bool:
        """Return whether all ranks have written, or one has failed."""
        assert self._written is not None, "it has begun"
        done = self._written.done()
        failed = done and self._written.exception() is not None
        missing, failures = self._control.largest((float(not done), float(failed)), self._purpose)
        return bool(failures) or not missing

    def finish(self) -> None:
        """Wait until all ranks have written, and let the files take their place; once.

        Raises CheckpointError, on all ranks, where that has failed: what was there before is there then.
        """
        if self._written is None:
            return
        with self._giving_up():
            mine = together(self._control, self._purpose, self._written.result)
            digests = {n: d for one in self._control.gather(mine, self._purpose) for n, d in one.items()}
            together(self._control, self._purpose, lambda: self._complete(digests), rank=0)
        self._written = None

    def _complete(self, digests: Mapping[str, str]) -> None:
        if unseen := [name for name in digests if not (self.folder / name).exists()]:
            why = f"rank 0 does not see {unseen[0]}, which another rank has written: use a shared folder"
            raise OSError(why)
        self._files.finish(digests)

    def wait(self) -> None:
        """Wait until this rank's thread has ended, whatever has become of it."""
        if self._written is not None:
            self._written.exception()

    def drop(self) -> None:
        """Give up what is being written, whatever has become of it."""
        self.wait()
        self._written = None
        if self._control.rank == 0:
            with suppress(OSError):  # what stays costs room, and the next save removes it
                self._files.give_up()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.drop()
            raise
