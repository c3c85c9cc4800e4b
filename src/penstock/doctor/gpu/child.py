"""The process of one stage on one rank: `python -m penstock.doctor.gpu.child STAGE FOLDER`.

FOLDER has what it is given, and gets what it has found. Whoever started it ends it when its time is over.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.config import from_dict, to_dict
from penstock.cost import ClusterFile
from penstock.device import pick_device
from penstock.doctor.gpu.here import Here, Scale
from penstock.doctor.gpu.outcome import Outcome
from penstock.doctor.gpu.stages import STAGES, Stage
from penstock.topology import detect, join
from penstock.topology.faults import give_up
from penstock.topology.join import ALONE
from penstock.train.assemble import on_device
from penstock.train.config import RunConfig
from penstock.writing import write_whole

MODULE = "penstock.doctor.gpu.child"
GIVEN, FOUND = "given.json", "found.json"
BEFORE = 0.9
"""When its time is nearly over, a process writes where it stands."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a stage needs to know.

    Attributes:
        config: The settings, resolved.
        kind: The kind of device on which the stages run.
        timeout_s: Seconds after which the stage is ended.
        cluster: What the curves have found; None if they have not been measured.
    """

    config: RunConfig
    kind: str
    timeout_s: float
    cluster: ClusterFile | None = None

    def save(self, folder: Path) -> None:
        write_whole(folder / GIVEN, json.dumps(to_dict(self)))

    @staticmethod
    def read(folder: Path) -> Given:
        return from_dict(Given, json.loads((folder / GIVEN).read_text(encoding="utf-8")), GIVEN)


def main(stage_name: str, folder: Path) -> None:
    """Run a stage as this rank, write what it has found, and end at once.

    Leaving in order could wait for ranks that are gone, or for kernels that never end.
    """
    given = Given.read(folder)
    faulthandler.dump_traceback_later(BEFORE * given.timeout_s)
    outcome = run_here(STAGES[stage_name], given)
    write_whole(folder / FOUND, json.dumps(asdict(outcome)))
    sys.stderr.flush()
    os._exit(0)


def run_here(stage: Stage, given: Given) -> Outcome:
    """Return what a stage has found on this rank; an error is a finding."""
    try:
        info = detect(os.environ) or ALONE
        device = pick_device(info.local_rank)
        if device.type != given.kind:
            return Outcome.failed(f"this process no longer sees a device of kind {given.kind}")
        config = on_device(given.config, device)
        if stage.joins:
            waits = config.parallel
            join(info, waits.timeout_s, device, waits.transport, start_s=waits.start_s)
        here = Here(info=info, device=device, config=config, scale=Scale.of(device), cluster=given.cluster)
        outcome = stage.run(here)
        if stage.joins and not stage.breaks:
            here.control.barrier(f"ending the stage {stage.name}")
        return outcome
    except Exception as error:
        # The first paragraph: errors of tasks go on with the grid of their schedule.
        said = f"{type(error).__name__}: {str(error).partition(chr(10) * 2)[0].replace(chr(10), ' ')}"
        give_up(said)
        return Outcome.failed(said)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
