"""What a training run that does not end by itself leaves: the checkpoint from which it can be continued."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from penstock.train.config import RunConfig

NONE_YET = "no checkpoint has been written yet"


class Left:
    """The checkpoints of one run, which an earlier run in the same folder has no part in.

    It is made before the run begins; a run that continues has the checkpoints that are there then, too.
    """

    def __init__(self, config: RunConfig) -> None:
        self._folder, self._steps = config.output.dir / "checkpoints", config.train.steps
        self._earlier: frozenset[tuple[int, int]] = frozenset()
        if config.train.resume is False:
            self._earlier = frozenset(map(_identity, self._found()))

    def way_out(self) -> str:
        """Return, for after a failure, from where the run can be continued."""
        newest = self._newest()
        return NONE_YET if newest is None else f"continue from {newest.name} with train.resume=true"

    def by_a_stop(self) -> str:
        """Return the same for after a stop, which may find that the last step has been saved."""
        from penstock.checkpoint.folder import step_of

        newest = self._newest()
        if newest is not None and step_of(newest) >= self._steps:
            return f"stopped after the last step; {newest.name} is saved"
        return f"stopped; {self.way_out()}"

    def _newest(self) -> Path | None:
        own = [path for path in self._found() if _identity(path) not in self._earlier]
        return own[-1] if own else None

    def _found(self) -> list[Path]:
        from penstock.checkpoint.folder import complete_checkpoints

        with suppress(OSError):  # this error must not hide why the run has ended
            return complete_checkpoints(self._folder)
        return []


def _identity(path: Path) -> tuple[int, int]:
    """Return what a folder keeps when it is moved aside."""
    try:
        found = path.stat()
    except OSError:  # it has just been removed, as an old checkpoint
        return (0, 0)
    return (found.st_dev, found.st_ino)
