"""Settings under the names that other programs give them: accepted, with a hint.

A section declares these names itself::

    ALSO_CALLED: ClassVar[Mapping[str, str]] = {"tensor_parallel_size": "mp_size"}
"""

from __future__ import annotations

import warnings
from typing import Any

from penstock.config.error import ConfigError, dotted


class HintWarning(UserWarning):
    """A hint that a command prints for its user on a line of its own, once."""


class OtherNameWarning(HintWarning):
    """A setting was given under another program's name for it."""


def own_name(cls: type, name: str, section: str) -> str:
    """Return a setting's own name in section `section`; warn if it was given under another program's name."""
    own: str = getattr(cls, "ALSO_CALLED", {}).get(name, name)
    if own != name:
        key = dotted(section, name)
        warnings.warn(f"{key}: taken as {dotted(section, own)}", OtherNameWarning, stacklevel=2)
    return own


def rename(cls: type, table: dict[str, Any], section: str) -> dict[str, Any]:
    """Rename the settings in `table` to their own names, and return `table`.

    Raises ConfigError for a setting that occurs in it under two names.
    """
    for name in [name for name in table if name in getattr(cls, "ALSO_CALLED", {})]:
        own = own_name(cls, name, section)
        if own in table:
            key = dotted(section, name)
            why = f"the same as {dotted(section, own)}, which is set as well"
            raise ConfigError(key, table[name], why, f"Keep {dotted(section, own)} alone.")
        table[own] = table.pop(name)
    return table
