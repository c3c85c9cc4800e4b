"""Cluster files that come with Penstock: the clusters of five papers, for planning without access to them."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from penstock.config import UNSET, ConfigError, expanded, in_any_case, is_missing
from penstock.cost.cluster_file import ClusterFile
from penstock.cost.clusters.line import EXAMPLE, in_line

FOLDER = Path(__file__).parent
WRITTEN_BY = (
    "`penstock profile` measures a cluster and writes such a file, and so does a run with plan.mode=auto "
    "(runs/tiny/cluster.json); `penstock list clusters` names those that come with Penstock."
)

NEAR = 0.5
"""A name that has so much in common with what was asked for may be meant: `fsmoe` is half of one."""

UNNAMED = "this cluster"
"""The name of a cluster that a run measures for itself."""


def names() -> tuple[str, ...]:
    """Return the names of the shipped clusters, in alphabetical order."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def find_cluster(name_or_path: str, key: str = "") -> ClusterFile:
    """Return a shipped cluster by its name, one that a line describes, or the file at a path.

    Case does not matter.

    Args:
        key: The setting that names it, for errors; "" = the name itself is shown.

    Raises:
        ConfigError: For an unknown name, together with one that is near, and for a file that cannot be used.
    """
    subject: tuple[str, object] = (key, name_or_path) if key else (name_or_path or "cluster", UNSET)
    if (name := in_any_case(name_or_path, names())) in names():
        return ClusterFile.read(FOLDER / f"{name}.json")
    if (described := in_line(name_or_path)) is not None:
        return described
    if not name_or_path.strip():
        raise ConfigError(*subject, "names no cluster", WRITTEN_BY)
    path = expanded(name_or_path, "cluster")
    if path.suffix == ".json" and is_missing(path):
        raise ConfigError(*subject, "there is no such file", WRITTEN_BY)
    if not is_missing(path) or path.suffix == ".json" or len(path.parts) > 1:
        return ClusterFile.read(path)
    near = get_close_matches(name_or_path, names(), n=1, cutoff=NEAR)
    why = "is neither the path of a cluster file nor the name of a cluster that comes with Penstock"
    nearest = f"Nearest: {near[0]}. " if near else ""
    others = f"Or describe one, such as {EXAMPLE}, or measure one with `penstock profile`."
    hint = f"{nearest}All: {', '.join(names())}. {others}"
    raise ConfigError(*subject, why, hint)
