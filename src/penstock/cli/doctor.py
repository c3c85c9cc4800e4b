"""`penstock doctor`: checks a cluster before a job, and says what has to be fixed.

With `--gpu` it runs real steps in stages instead.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.out import check_out, config_and_settings, save_out
from penstock.cli.ranks import Emulated, measured_run, on_ranks, ranks_of
from penstock.cli.run import FAILED, put, tell, tell_torchrun
from penstock.config import ConfigError, asked, check_name, load
from penstock.cost import ClusterFile
from penstock.cost.cluster_file import write_json
from penstock.cost.clusters import find_cluster
from penstock.device import best_kind, count_gpus, device_of
from penstock.doctor import Check, Wanted, examine, judge
from penstock.doctor.gpu.outcome import Verdict
from penstock.doctor.gpu.run import (
    Crew,
    Result,
    last_line,
    report_of,
    result_text,
    run_stages,
    worst_of,
)
from penstock.doctor.gpu.stages import STAGES, Stage
from penstock.doctor.meeting import Meeting, MeetingError
from penstock.plan.plan_config import AUTO, given_schedule
from penstock.topology import Layout, ProcessInfo, detect
from penstock.topology.join import ALONE, is_kept_by_launcher, meeting_place, not_joined
from penstock.topology.meeting_point import why_unreachable
from penstock.train.assemble import memory_of
from penstock.train.config import RunConfig
from penstock.train.output import CLUSTER_FILE
from penstock.words import counted, terminal_width

CHECKPOINT_SHARE: Final = 3 / 4
"""The saved part of weights, gradients and AdamW's moments: gradients are not saved."""

END: Final = "end"
REPORT_S: Final = 180.0
"""Seconds for the rank that reports, which may still wait for ranks that have gone."""


def doctor(options: argparse.Namespace, given: Sequence[str], emulate: Emulated | None) -> int:
    """Examine the cluster and return the exit code; one rank prints the table, or one JSON object."""
    if not 0 < options.wait < math.inf:
        raise ConfigError("--wait", options.wait, "ranks take some time to come", "Use 60.")
    of_gpus = ("device", "stage", "timeout", "out")
    others, half = (("cluster",), "without") if options.gpu else (of_gpus, "with")
    for name in others:
        if (value := getattr(options, name)) is not None:
            hint = "Ask for those, or leave it out."
            raise ConfigError(f"--{name}", str(value), f"is for checks {half} --gpu", hint)
    path, overrides = config_and_settings(options)
    if options.gpu:
        return _gpu_doctor(path, overrides, options, given, emulate)
    config = load(RunConfig, path, given_schedule(overrides))
    ranks = ranks_of(config, detect(os.environ), emulate)
    wanted = _wanted(config if path is not None or overrides else None, options.cluster, ranks)

    def report(info: ProcessInfo, host: str, meeting: Meeting) -> int:
        """Examine, print what was found on the rank that has it, and return the exit code of all ranks."""
        examination = examine(meeting, info, host, [Path(wanted.disk)], options.wait)
        if examination is None:
            return _code_after_report(meeting)
        checks = judge(examination, wanted)
        code = 0 if all(check.passed for check in checks) else FAILED
        if code:
            mended = (finding.text for check in checks for finding in check.findings if finding.mend)
            tell_torchrun(" ".join(["penstock doctor found something to fix:", *mended]))
        plain = {
            "ok": not code,
            "checks": [{**asdict(check), "passed": check.passed} for check in checks],
            "examination": {
                **asdict(examination),
                "missing": examination.missing,
                "nodes": examination.nodes,
            },
        }
        text = json.dumps(plain) if options.json else doctor_text(checks, terminal_width())
        here = [rank for rank in examination.facts if rank not in examination.gone]
        return _reported(meeting, text, code, here)

    def work(info: ProcessInfo) -> int:
        return _met(info, options.wait, partial(report, info))

    return on_ranks("penstock doctor", given, ranks, options.wait, emulate, work, reports=True)


def _met(info: ProcessInfo, wait_s: float, work: Callable[[str, Meeting], int]) -> int:
    """Meet the other ranks and work with them; return the exit code, also where they cannot be reached.

    work: takes the host at which ranks meet, and the meeting.
    """
    host, port = ("127.0.0.1", 0) if info == ALONE else meeting_place(info, os.environ)
    serves = info.rank == 0 and not is_kept_by_launcher()
    try:
        meeting = Meeting(info, host, port, serves=serves, wait_s=wait_s)
    except MeetingError as error:
        tell(not_joined(info, wait_s, host, port, why_unreachable(host, port, str(error), serves=serves)))
        return FAILED
    try:
        if not meeting.first(f"came/{info.rank}"):  # torchrun keeps its store when it restarts ranks
            why = "its store has what an earlier start, or another doctor of this job, found"
            raise MeetingError(f"{why}: see that; use --max-restarts 0, and one doctor in a job")
        return work(host, meeting)
    except MeetingError as error:
        tell(f"rank {info.rank} gave up: {error}")
        return FAILED


def _reported(meeting: Meeting, text: str, code: int, ranks: Sequence[int]) -> int:
    """Print the report and return all ranks' exit code, which they hear even if nothing can be printed."""
    try:
        put(text)
    finally:
        meeting.announce(END, {"code": code})
        meeting.close(ranks)
    return code


def _code_after_report(meeting: Meeting) -> int:
    """Return the exit code of all ranks once one has reported: torchrun ends that rank when another fails."""
    end = meeting.announced(END, time.monotonic() + REPORT_S)
    meeting.close(())
    return FAILED if end is None else int(end["code"])


def _wanted(config: RunConfig | None, cluster: str | None, ranks: int) -> Wanted:
    """Return the needs of the run for which there should be room, and the cluster of its plan.

    cluster: as an option names it. Raises ConfigError for a file or a configuration that cannot be used.
    """
    name, plan, assumed = cluster or "", None if config is None else config.plan, None
    if cluster is not None:
        assumed = find_cluster(cluster)
    elif plan is not None and plan.cluster is not None:
        name, assumed = plan.cluster, find_cluster(plan.cluster)
    elif plan is not None and plan.path is not None:
        file = plan.path.parent / CLUSTER_FILE
        if asked(file.exists):
            name, assumed = str(file), ClusterFile.read(file)
    if config is None:
        return Wanted(assumed=assumed, cluster_name=name)
    config = config.resolved(ranks)
    if config.plan.layout == AUTO:  # the estimate after which a run is refused
        from penstock.autotune.choose.layouts import least_memory

        need = least_memory(config, ranks)
    else:
        need = memory_of(config, Layout.build(config.parallel, ranks, 0, config.moe.num_experts))
    whole = memory_of(config, Layout(world_size=1, ep_size=1, rank=0))
    kept = config.train.keep_checkpoints + 1  # an old checkpoint is removed once the new one is complete
    return Wanted(
        assumed=assumed,
        cluster_name=name,
        rank_bytes=need.total_bytes,
        disk_bytes=int(kept * CHECKPOINT_SHARE * whole.state_bytes),
        disk=str(config.output.dir),
        staged=config.parallel.transport == "staged",
    )


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


# ---- by real steps on GPUs ---------------------------------------------------------------------------------


ON_CPU: Final = (
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.seq_len=64",
    "moe.moe_ffn_hidden_size=128",
    "moe.capacity_factor=1.25",
    "data.batch_per_device=4",
    "parallel.processes=2",
)
"""The run for which curves and predictions are, where none is given: small on processors."""

ON_GPUS: Final = (
    "model.num_layers=4",
    "model.hidden_size=2048",
    "model.num_heads=16",
    "model.seq_len=2048",
    "moe.moe_ffn_hidden_size=4096",
    "data.batch_per_device=4",
)
EXAMPLE: Final = "gpu.json"
START_S: Final = 60.0
"""Seconds for which ranks may go on after one has failed: a stage's children end by their own limits."""


def _gpu_doctor(
    path: Path | None,
    overrides: Sequence[str],
    options: argparse.Namespace,
    given: Sequence[str],
    emulate: Emulated | None,
) -> int:
    """Run the stages on all ranks and return the exit code: 1 if one has failed."""
    if options.timeout is not None and not 0 < options.timeout < math.inf:
        raise ConfigError("--timeout", options.timeout, "a stage takes some time", "Leave it out.")
    stages, on_cpu = stages_of(options.stage), options.device == "cpu"
    out = options.out or Path(EXAMPLE)
    if on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also for all processes that are started from here
    elif not count_gpus():
        why = "this process sees no GPU"
        hint = "Let it see one (CUDA_VISIBLE_DEVICES), or try the command itself with --device cpu."
        raise ConfigError("--gpu", True, why, hint)
    info = detect(os.environ)
    config, ranks = measured_run(path, overrides, ON_CPU if on_cpu else ON_GPUS, info, emulate)
    if info is None or info.rank == 0:
        check_out(out, EXAMPLE)

    def report(info: ProcessInfo, meeting: Meeting) -> int:
        """Run the stages; the first rank prints each when it ends, and saves all. Return the exit code."""
        results: list[Result] = []
        crew = Crew(meeting)
        names, device = crew.names(), device_of(best_kind()).kind
        if info.rank == 0 and not options.json:
            print(_beginning(stages, on_cpu=on_cpu), file=sys.stderr, flush=True)
        for result in run_stages(stages, config, crew, options.timeout):
            results.append(result)
            if info.rank == 0 and not options.json:
                of_stage = report_of([result], names, info.world_size, device)["doctor"]["stages"][0]
                with suppress(OSError):  # as of a full disk: the last line is refused, too, and says so
                    put(result_text(of_stage, terminal_width()))
        if info.rank != 0:
            return _code_after_report(meeting)
        whole = report_of(results, crew.names(), info.world_size, device)  # of ranks that came late, too
        saved = save_out(lambda path: write_json(path, whole), out)
        code = 0 if saved and worst_of(results) is not Verdict.FAIL else FAILED
        where = f"; saved as {out}" if saved else ""
        text = json.dumps(whole) if options.json else f"\n{last_line(whole)}{where}"
        return _reported(meeting, text, code, range(info.world_size))

    def work(info: ProcessInfo) -> int:
        return _met(info, options.wait, lambda host, meeting: report(info, meeting))

    return on_ranks("penstock doctor", given, ranks, START_S, emulate, work, reports=True)


def _beginning(stages: Sequence[Stage], *, on_cpu: bool) -> str:
    """Return what is said before the first stage, since the longest shows nothing for minutes."""
    takes = "" if STAGES["numerics"] not in stages else ", minutes in all, most of them in numerics"
    unlike = "; on processors, times count for nothing" if on_cpu else ""
    return f"{counted(len(stages), 'stage')}, each printed when it has ended{takes}{unlike}"


def stages_of(listed: str | None) -> tuple[Stage, ...]:
    """Return the stages of a list such as `lanes,curves`, and those that they need, in order.

    Args:
        listed: Names of stages, separated by commas; None = all.

    Raises:
        ConfigError: If no stage has one of the names.
    """
    if listed is None:
        return tuple(STAGES.values())
    names = [name.strip() for name in listed.split(",")]
    for name in names:
        check_name("--stage", name, STAGES, "stage")
    needed = {each for name in names for each in (name, *STAGES[name].needs)}
    return tuple(stage for name, stage in STAGES.items() if name in needed)
