"""The command `penstock`, also as `python -m penstock`: it hears signals before it loads anything large."""

import sys

from penstock.stops import STOPS


def main() -> int:
    """Run the command that the words on the command line name; return its exit code."""
    STOPS.hear()
    from penstock.cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
