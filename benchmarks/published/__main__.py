"""`python -m benchmarks.published`: prints the tables, or the result as JSON; see --help."""

from __future__ import annotations

import argparse

from benchmarks.command import parser_of, run_alone
from benchmarks.published import PublishedResult, render_published, run_published

JOINTLY_PLANNED = 60
"""Layers of each grid that the joint search plans, too; all would take most of an hour."""


def measure(options: argparse.Namespace) -> PublishedResult:
    return run_published(
        sample=options.sample,
        joint_sample=options.joint,
        effort=options.effort,
        workers=options.workers,
    )


if __name__ == "__main__":  # not in the processes that share the work
    parser = parser_of(
        "published", "Simulates the layers of the FSMoE, FlowMoE and Parm studies: some minutes."
    )
    parser.add_argument("--sample", type=int, metavar="N", help="simulate N layers of each grid (all)")
    parser.add_argument(
        "--joint",
        type=int,
        default=JOINTLY_PLANNED,
        metavar="N",
        help=f"plan N of them jointly, too ({JOINTLY_PLANNED})",
    )
    parser.add_argument("--effort", choices=("low", "usual"), default="low", help="of the joint search (low)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes (2)")
    run_alone(parser, measure, render_published)
