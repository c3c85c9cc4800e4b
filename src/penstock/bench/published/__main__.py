"""`python -m penstock.bench.published`: prints the tables, or the result as JSON; see --help."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from penstock.bench.published import render_published, run_published, write


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m penstock.bench.published", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--sample", type=int, help="so many layers of each grid; all unless given")
    parser.add_argument("--joint", type=int, default=0, help="plan so many layers of each grid jointly")
    parser.add_argument("--effort", choices=("low", "usual"), default="usual", help="of the joint search")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="write the JSON there, too")
    given = parser.parse_args()
    result = run_published(
        sample=given.sample, joint_sample=given.joint, effort=given.effort, workers=given.workers
    )
    if given.out is not None:
        write(result, given.out)
    print(json.dumps(result.to_dict(), indent=1) if given.json else render_published(result))


main()
