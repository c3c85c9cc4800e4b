"""`penstock doctor`: checks a cluster before a job, and says what has to be fixed."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.failing import FAILED, tell, tell_torchrun
from penstock.cli.ranks import Emulated, on_ranks, processes_of
from penstock.config import ConfigError, load
from penstock.cost import ClusterFile
from penstock.cost.clusters import find_cluster
from penstock.doctor import Check, Examination, Wanted, examine, judge
from penstock.doctor.findings import why_unreachable
from penstock.doctor.meeting import Meeting, MeetingError
from penstock.plan.plan_config import AUTO, given_schedule
from penstock.topology import Layout, ProcessInfo, detect
from penstock.topology.join import ALONE, meeting_place
from penstock.train.assemble import memory_of
from penstock.train.config import RunConfig
from penstock.train.output import CLUSTER_FILE
from penstock.words import terminal_width

CHECKPOINT_SHARE: Final = 3 / 4
"""The saved part of weights, gradients and AdamW's moments: gradients are not saved."""

END: Final = "end"
REPORT_S: Final = 180.0
"""Seconds for the rank that reports, which may still wait for ranks that have gone."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options. cluster: the one whose link rates are compared; wait_s: for ranks to come."""

    cluster: str | None
    wait_s: float
    json: bool

    def __post_init__(self) -> None:
        if not 0 < self.wait_s < math.inf:
            raise ConfigError("--wait", self.wait_s, "ranks take some time to come", "Use 60.")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The request. config: of the run for which there should be room; None if none was given."""

    config: RunConfig | None
    options: Options


def doctor(
    path: Path | None,
    overrides: Sequence[str],
    given: Sequence[str],
    options: Options,
    emulate: Emulated | None,
) -> int:
    """Examine the cluster and return the exit code; one rank prints the table, or one JSON object."""
    config = load(RunConfig, path, given_schedule(overrides))
    asked = Asked(config=config if path is not None or overrides else None, options=options)
    info = detect(os.environ)
    wanted = _wanted(asked, _ranks(config, info, emulate))
    ranks = 1 if info is not None else _ranks(config, info, emulate)

    def work(rank: ProcessInfo) -> int:
        return _be_rank(rank, asked, wanted)

    return on_ranks("penstock doctor", given, ranks, asked.options.wait_s, emulate, work, reports=True)


def _ranks(config: RunConfig, info: ProcessInfo | None, emulate: Emulated | None) -> int:
    if info is not None:
        return info.world_size
    return processes_of(config) if emulate is None else emulate.ranks


def _wanted(asked: Asked, ranks: int) -> Wanted:
    """Return the run's needs. Raises ConfigError for a file or a configuration that cannot be used."""
    name, cluster = _assumed(asked)
    if asked.config is None:
        return Wanted(assumed=cluster, cluster_name=name)
    config = asked.config.resolved(ranks)
    if config.plan.layout == AUTO:  # the estimate after which a run is refused
        from penstock.autotune.choose.layouts import least_memory

        need = least_memory(config, ranks)
    else:
        need = memory_of(config, Layout.build(config.parallel, ranks, 0, config.moe.num_experts))
    alone = Layout(world_size=1, ep_size=1, rank=0)
    whole = memory_of(config, alone)
    kept = config.train.keep_checkpoints + 1  # an old checkpoint is removed once the new one is complete
    return Wanted(
        assumed=cluster,
        cluster_name=name,
        rank_bytes=need.total_bytes,
        disk_bytes=int(kept * CHECKPOINT_SHARE * whole.state_bytes),
        disk=str(config.output.dir),
    )


def _assumed(asked: Asked) -> tuple[str, ClusterFile | None]:
    """Return the name and the file of the cluster for which a plan was made, or is to be made."""
    if asked.options.cluster is not None:
        return asked.options.cluster, find_cluster(asked.options.cluster)
    plan = None if asked.config is None else asked.config.plan
    if plan is not None and plan.cluster is not None:
        return plan.cluster, find_cluster(plan.cluster)
    beside = None if plan is None or plan.path is None else plan.path.parent / CLUSTER_FILE
    if beside is not None and beside.exists():
        return str(beside), ClusterFile.read(beside)
    return "", None


# ---- a rank ------------------------------------------------------------------------------------------------


def _be_rank(info: ProcessInfo, asked: Asked, wanted: Wanted) -> int:
    host, port = ("127.0.0.1", 0) if info == ALONE else meeting_place(info, os.environ)
    serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        meeting = Meeting(info, host, port, serves=serves, wait_s=asked.options.wait_s)
    except MeetingError as error:
        tell(why_unreachable(info, host, port, str(error)))
        return FAILED
    try:
        folder = Path() if asked.config is None else asked.config.output.dir
        found = examine(meeting, info, host, [folder], asked.options.wait_s)
        return _report(meeting, found, asked, wanted)
    except MeetingError as error:
        tell(f"rank {info.rank} gave up: {error}")
        return FAILED


def _report(meeting: Meeting, found: Examination | None, asked: Asked, wanted: Wanted) -> int:
    """Print the findings, on the rank that has them; return the exit code of all ranks."""
    if found is None:
        told = meeting.told(END, time.monotonic() + REPORT_S)
        meeting.close(())
        return FAILED if told is None else int(told["code"])
    checks = judge(found, wanted)
    code = 0 if all(check.passed for check in checks) else FAILED
    meeting.announce(END, {"code": code})
    if code:
        mended = (finding.text for check in checks for finding in check.findings if finding.mend)
        tell_torchrun(" ".join(["penstock doctor found something to fix:", *mended]))
    print(
        json.dumps(_plain(found, checks)) if asked.options.json else doctor_text(checks, terminal_width()),
        flush=True,
    )
    meeting.close([rank for rank in found.facts if rank not in found.gone])
    return code


def doctor_text(checks: Sequence[Check], width: int) -> str:
    """Return the table and what follows from it, for a terminal of `width` columns."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("check", "found", ""):
        table.add_column(name, no_wrap=name != "found", overflow="fold")
    for check in checks:
        verdict = Text("ok", style="green") if check.passed else Text("FIX", style="bold red")
        table.add_row(check.name, Text(check.found), verdict)
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(table)
        mended = [finding for check in checks for finding in check.findings if finding.mend]
        notes = [finding for check in checks for finding in check.findings if not finding.mend]
        for number, finding in enumerate(mended, 1):
            console.print(Text(f"{number}. {finding.text}"))
        for finding in notes:
            console.print(Text(f"Note: {finding.text}"))
        count = "Nothing" if not mended else "One thing" if len(mended) == 1 else f"{len(mended)} things"
        console.print(Text(f"{count} to fix."))
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def _plain(found: Examination, checks: Sequence[Check]) -> dict[str, Any]:
    return {
        "ok": all(check.passed for check in checks),
        "checks": [{**asdict(check), "passed": check.passed} for check in checks],
        "examination": {**asdict(found), "missing": found.missing, "nodes": found.nodes},
    }
