"""Which packages the peers are, and whether they are here."""

from __future__ import annotations

from importlib import metadata
from typing import Final

from penstock.config import ConfigError

PACKAGES: Final = {"deepspeed": ("deepspeed", "0.19.8"), "megatron": ("megatron-core", "0.16.1")}
"""Package and version of each peer. The adapters replace parts that only these versions have."""

INSTALL: Final = "pip install --editable '.[peers]'"


def require(peer: str) -> str:
    """Return the version of the peer's package.

    Raises:
        ConfigError: If it is not usable; says how to install it.
    """
    if peer not in PACKAGES:
        raise ConfigError("peer", peer, "no peer is called so", f"Use some of {', '.join(PACKAGES)}.")
    package, wanted = PACKAGES[peer]
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ConfigError("peer", peer, f"package {package} is not installed", f"Run {INSTALL}.") from None
    if installed != wanted:
        why = f"its adapter fits {package} {wanted}, and {installed} is installed"
        raise ConfigError("peer", peer, why, f"Run {INSTALL}.")
    return installed
