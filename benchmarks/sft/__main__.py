"""`python -m benchmarks.sft`: TRL's fine-tuning script by Penstock and by others, in turns."""

from __future__ import annotations

import argparse
from dataclasses import fields

from benchmarks.command import parser_of, run_alone
from benchmarks.sft.contenders import CONTENDERS
from benchmarks.sft.measure import Plan, measure
from benchmarks.sft.prepared import Size
from benchmarks.sft.result import SftResult
from penstock.config import check_name
from penstock.lab.commands.emulate import add_emulation_options, emulation


def main() -> None:
    """Measure and print."""
    parser = parser_of(
        "sft",
        "TRL's script for supervised fine-tuning with one line of Penstock, and beside it with the expert "
        "parallelism of transformers and AutoEP of DeepSpeed: whole steps, in turns.",
        "--emulate 2x2 --inter-rate 400mbit",
    )
    by_name = {contender.name: contender for contender in CONTENDERS}
    parser.add_argument(
        "--contenders", default=";".join(by_name), metavar="A;B;...", help="default: %(default)s"
    )
    sizes = {field.name: field.default for field in fields(Size)}
    numbers = {"ranks": 2, "rounds": 3, "steps": 8, "warmup": 3, **sizes}
    for name, default in numbers.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=default, metavar="N", help="default: %(default)s")
    add_emulation_options(parser)
    parser.add_argument("--more", nargs="...", default=[], help="further arguments of the script")

    def found(options: argparse.Namespace) -> SftResult:
        chosen, emulate = options.contenders.split(";"), emulation(options)
        for name in chosen:
            check_name("--contenders", name, by_name)
        plan = Plan(
            size=Size(**{name: getattr(options, name) for name in sizes}),
            contenders=[by_name[name] for name in chosen],
            emulate=emulate,
            ranks=options.ranks if emulate is None else emulate.shape.ranks,
            rounds=options.rounds,
            steps=options.steps,
            warmup=options.warmup,
            more=tuple(options.more),
        )
        return measure(plan)

    run_alone(parser, found, SftResult.render)


if __name__ == "__main__":
    main()
