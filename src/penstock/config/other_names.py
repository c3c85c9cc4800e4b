"""Settings under the names that other programs give them: accepted, with a hint.

A section declares these names itself::

    ALSO_CALLED: ClassVar[Mapping[str, str]] = {"tensor_parallel_size": "tp_size"}
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Final

from penstock.config.error import ConfigError, dotted

_NO_PIPELINE = ("Penstock has no pipeline parallelism", "Leave it out.")
_NO_CONTEXT = ("Penstock has no context parallelism", "Leave it out.")

NOT_HERE: Final[Mapping[str, tuple[str, str]]] = {
    "pipeline_model_parallel_size": _NO_PIPELINE,
    "pp_size": _NO_PIPELINE,
    "context_parallel_size": _NO_CONTEXT,
    "cp_size": _NO_CONTEXT,
}
"""Names of Megatron and DeepSpeed for what no setting of ours is: why not, and what to do."""


class HintWarning(UserWarning):
    """A hint that a command prints for its user on a line of its own, once."""


class OtherNameWarning(HintWarning):
    """A setting was given under another program's name for it."""


def own_name(cls: type, name: str) -> str:
    """Return a setting's own name, if it was given under another program's."""
    own: str = getattr(cls, "ALSO_CALLED", {}).get(name, name)
    return own


def rename(cls: type, table: dict[str, Any], section: str) -> dict[str, Any]:
    """Rename the settings in `table` to their own names, with a hint for each, and return `table`.

    Raises ConfigError for a setting that occurs in it under two names.
    """
    for name in [name for name in table if own_name(cls, name) != name]:
        own = own_name(cls, name)
        key, own_key = dotted(section, name), dotted(section, own)
        if own in table:
            why = f"the same as {own_key}, which is set as well"
            raise ConfigError(key, table[name], why, f"Keep {own_key} alone.")
        warnings.warn(f"{key}: taken as {own_key}", OtherNameWarning, stacklevel=2)
        table[own] = table.pop(name)
    return table
