"""The record of clusters: one small file each, so that any process can find, change and remove them.

The file exists before the first namespace and until after the last one, so no namespace is ever without it.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

from penstock.config import ConfigError, Items, Within, check_bounds, from_dict, read_json
from penstock.lab.emulate.config import EmulateConfig
from penstock.lab.emulate.system import EmulationError
from penstock.writing import write_whole

HINT: Final = "Remove the file, and its namespaces with `ip netns delete`."
MOST_BYTES: Final = 1 << 20
Number = Annotated[int, Within(0, 2**62, "the kernel counts no further")]

FOLDER: Final = Path("/run/penstock")  # emptied by a restart, which also ends clusters


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process with which a cluster ends. Its start time distinguishes it from later ones with its id."""

    pid: Number
    started_ticks: Number

    def __post_init__(self) -> None:
        check_bounds(self)

    @classmethod
    def current(cls) -> Owner:
        """Return this process as an owner."""
        started_ticks = _started_ticks(os.getpid())
        assert started_ticks is not None, "this process is running"
        return cls(pid=os.getpid(), started_ticks=started_ticks)

    @property
    def is_alive(self) -> bool:
        """Whether this very process still runs."""
        return _started_ticks(self.pid) == self.started_ticks


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """The record of a cluster; `owner` is None for a cluster that stays until it is removed."""

    name: str
    owner: Owner | None
    config: EmulateConfig
    namespaces: Annotated[tuple[str, ...], Items(4096, "one per rank and node")]

    @property
    def is_stale(self) -> bool:
        """Whether the owner ended without removing the cluster."""
        return self.owner is not None and not self.owner.is_alive

    def create(self) -> None:
        """Record a new cluster in one step; raise `EmulationError` if there is one of that name."""
        draft = folder() / f".{self.name}.{os.getpid()}"
        write_whole(draft, json.dumps(asdict(self), indent=1))
        try:
            self._path.hardlink_to(draft)
        except FileExistsError as error:
            raise EmulationError(f"there is an emulated cluster {self.name} already") from error
        finally:
            draft.unlink()

    def forget(self) -> None:
        """Remove the record, if it exists."""
        self._path.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return folder() / f"{self.name}.json"


def recorded() -> tuple[ClusterState, ...]:
    """Return all clusters on record, by name."""
    found = []
    for path in sorted(folder().glob("pen*.json")):
        try:
            found.append(from_dict(ClusterState, read_json(path, HINT, MOST_BYTES), str(path)))
        except ConfigError as error:
            if not path.exists():  # it was removed meanwhile
                continue
            raise EmulationError(f"{path} is not the record of an emulated cluster: {error}") from error
    return tuple(found)


def free_name() -> str:
    """Return a name that no recorded cluster has; only this process makes names with its id."""
    taken = {state.name for state in recorded()}
    return next(n for n in (f"pen{os.getpid()}-{i}" for i in itertools.count()) if n not in taken)


def folder() -> Path:
    """Return the folder of records: /run/penstock, or a temporary one where /run cannot be written."""
    place = FOLDER if os.access(FOLDER.parent, os.W_OK) else Path(tempfile.gettempdir()) / "penstock-emulate"
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()  # records name namespaces that we would remove
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise EmulationError(f"{place} is no folder of this user. Remove it, or run as its owner.")
    return place


def _started_ticks(pid: int) -> int | None:
    """Return a process's start, in clock ticks since boot; None if it does not run (a zombie does not)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name before the last parenthesis may hold anything; fields 3 (state) and 22 (start) follow it.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
