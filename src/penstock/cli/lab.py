"""What the command line has from the lab, found by name: nothing outside of the lab imports it."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from penstock.cli.ranks import Emulated

Commands = argparse._SubParsersAction  # argparse has no public name for it


class LabCommands(Protocol):
    """The module `penstock.lab.commands`."""

    def add_bench(self, commands: Commands[argparse.ArgumentParser]) -> None:
        """Add the command `bench`."""

    def add_emulate(self, commands: Commands[argparse.ArgumentParser]) -> None:
        """Add the command `emulate`."""

    def add_emulation_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options with which a command runs its ranks in a cluster of its own."""

    def emulation(self, options: argparse.Namespace) -> Emulated | None:
        """Return the cluster that these options ask for; None if they ask for none."""


def lab() -> LabCommands:
    """Return the lab's commands, without torch."""
    return cast(LabCommands, import_module("penstock.lab.commands"))
