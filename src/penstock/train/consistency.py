"""Ensures that all ranks train by the same settings; otherwise each would silently train its own replica."""

from __future__ import annotations

import hashlib
import json
from typing import Final

from penstock.config import ConfigError, to_dict
from penstock.config.bounds import by_key
from penstock.config.error import shown
from penstock.topology import Control
from penstock.train.config import RunConfig

OF_A_RANK: Final = (
    "model.config",
    "data.path",
    "data.tokenizer",
    "data.cache",
    "output.dir",
    "parallel.processes",
    "parallel.send_buffer_bytes",
)
"""Settings that may differ between machines: locations, whose contents are compared instead, and two settings
that concern one machine alone."""

MIXTURE: Final = "data.mixture"
NOTHING: Final = "nothing of that name"
MOST_NAMED = 5
HINT = "Start all ranks with the same configuration file, overrides and version."


def resolved_for_all(config: RunConfig, control: Control) -> RunConfig:
    """Return the run with the sizes that follow from others and from files, the same on all ranks.

    Raises ConfigError, on all ranks, for settings that differ or that one cannot use.
    """
    check_same_settings(config, control)
    control.agreed(lambda: config.resolved(control.world_size), "reading the settings")
    found = config.resolved(control.world_size)
    if found.model.config is not None:  # files of the same name may differ between machines
        check_same_settings(found, control)
    return found


def check_same_settings(config: RunConfig, control: Control) -> None:
    """Raise ConfigError, the same on all ranks, naming a setting that differs between ranks.

    Costs one exchange of 64 bytes when all agree.
    """
    mine = {key: value for key, value in by_key(RunConfig, to_dict(config)).items() if key not in OF_A_RANK}
    if config.data.mixture:  # the paths of texts, too, may differ between machines
        mine[MIXTURE] = [weight for _, weight in config.data.mixture]
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    purpose = "comparing settings"
    if len(set(control.gather(digest, purpose))) == 1:
        return
    first, *others = control.gather(mine, purpose)
    for rank, other in enumerate(others, start=1):
        different = [key for key in first | other if first.get(key, NOTHING) != other.get(key, NOTHING)]
        if different:
            key, *more = different
            why = f"is so on rank 0, and on rank {rank} it is {shown(other.get(key, NOTHING))}"
            if more:
                named = ", ".join(more[:MOST_NAMED]) + (", ..." if len(more) > MOST_NAMED else "")
                why += f" (also different: {named})"
            raise ConfigError(key, first.get(key, NOTHING), why, HINT)
