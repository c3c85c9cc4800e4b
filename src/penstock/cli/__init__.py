"""The command `penstock`. Exit codes: 0, 1 (failed), 2 (bad usage or configuration), 130, 143 (stopped)."""

from penstock.cli.main import main

__all__ = ["main"]
