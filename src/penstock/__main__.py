"""The command `penstock`, also as `python -m penstock`: it hears signals before it loads anything large."""

import os
import sys

from penstock.stops import STOPS, replace_closed


def main() -> int:
    """Run the command that the words on the command line name; return its exit code."""
    replace_closed()
    STOPS.hear()
    # torch would print C++ frames when the store goes with its rank, beside the line that says what happened.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from penstock.cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
