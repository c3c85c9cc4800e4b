"""The command `penstock`. Exit codes: docs/training.md, "Errors and exit codes"."""

from penstock.cli.main import main

__all__ = ["main"]
