"""Exit codes of the command, the same for every subcommand. Success is 0."""

FAILED = 1
BAD_USAGE = 2
"""Wrong arguments or a setting that cannot be used."""

INTERRUPTED = 130
"""Ctrl-C before the work was done; the number is the one that shells use: 128 and that of the signal."""
