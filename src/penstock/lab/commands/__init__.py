"""Commands and options of the lab; `penstock.cli.main` finds them here by name."""

from penstock.lab.commands.bench_arguments import add_bench
from penstock.lab.commands.emulate import add_emulate, add_emulation_options, emulation

__all__ = ["add_bench", "add_emulate", "add_emulation_options", "emulation"]
