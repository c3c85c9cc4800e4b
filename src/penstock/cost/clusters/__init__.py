"""Cluster files that come with Penstock: the clusters of five papers, for planning without access to them."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from penstock.config import UNSET, ConfigError, expanded, is_missing
from penstock.cost.cluster_file import ClusterFile

FOLDER = Path(__file__).parent
WRITTEN_BY = (
    "`penstock profile` measures a cluster and writes such a file, and so does a run with plan.source=auto "
    "(runs/tiny/cluster.json); `penstock list clusters` names those that come with Penstock."
)

UNNAMED = "this cluster"
"""The name of a cluster that a run measures for itself."""


def names() -> tuple[str, ...]:
    """Return the names of the shipped clusters, in alphabetical order."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def find_cluster(name_or_path: str) -> ClusterFile:
    """Return a shipped cluster by its name, or the file at a path.

    Raises ConfigError for an unknown name, naming the nearest one, and for a file that cannot be used.
    """
    if name_or_path in names():
        return ClusterFile.read(FOLDER / f"{name_or_path}.json")
    path = expanded(name_or_path, "cluster")
    if path.suffix == ".json" and is_missing(path):
        raise ConfigError(name_or_path, UNSET, "there is no such file", WRITTEN_BY)
    if not is_missing(path) or path.suffix == ".json" or len(path.parts) > 1:
        return ClusterFile.read(path)
    near = get_close_matches(name_or_path, names(), n=1, cutoff=0.0)[0]
    why = "is neither the path of a cluster file nor the name of a cluster that comes with Penstock"
    hint = f"Nearest: {near}. All: {', '.join(names())}. Or measure one with `penstock profile`."
    raise ConfigError(name_or_path or "cluster", UNSET, why, hint)
