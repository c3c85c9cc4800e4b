"""`penstock doctor --gpu`: runs the stages on all ranks; one rank prints and saves what they found."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from penstock.cli.failing import FAILED, tell
from penstock.cli.out import check_out, save_out
from penstock.cli.ranks import Emulated, on_ranks, processes_of
from penstock.config import ConfigError, load
from penstock.cost.cluster_file import write_json
from penstock.device import best_kind, count_gpus, device_of
from penstock.doctor.findings import why_unreachable
from penstock.doctor.gpu.outcome import Verdict
from penstock.doctor.gpu.report import last_line, report_of, result_text, worst_of
from penstock.doctor.gpu.run import Crew, Met, OneRank, Result, run_stages
from penstock.doctor.gpu.stages import STAGES, Stage
from penstock.doctor.meeting import Meeting, MeetingError
from penstock.topology import ProcessInfo, detect
from penstock.topology.join import ALONE, meeting_place
from penstock.train.config import RunConfig
from penstock.words import terminal_width

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


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options. on_cpu: although there may be GPUs. stages: as given; None = all. timeout_s: of
    every stage; None = its own. wait_s: for ranks to come."""

    on_cpu: bool
    stages: str | None
    timeout_s: float | None
    wait_s: float
    out: Path
    json: bool

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise ConfigError("--timeout", self.timeout_s, "a stage takes some time", "Leave it out.")
        if not 0 < self.wait_s < math.inf:
            raise ConfigError("--wait", self.wait_s, "ranks take some time to come", "Use 60.")

    @property
    def wanted(self) -> tuple[Stage, ...]:
        """The stages that are asked for, and those that they need, in their order. Raises ConfigError."""
        if self.stages is None:
            return tuple(STAGES.values())
        names = [name.strip() for name in self.stages.split(",")]
        for name in names:
            if name not in STAGES:
                near = get_close_matches(name, STAGES, n=1)
                hint = f"Did you mean {near[0]}?" if near else f"Stages: {', '.join(STAGES)}."
                raise ConfigError("--stage", name, "there is no stage of that name", hint)
        needed = {each for name in names for each in (name, *STAGES[name].needs)}
        return tuple(stage for name, stage in STAGES.items() if name in needed)


def gpu_doctor(
    path: Path | None,
    overrides: Sequence[str],
    given: Sequence[str],
    options: Options,
    emulate: Emulated | None,
) -> int:
    """Run the stages and return the exit code: 1 if one has failed."""
    stages = options.wanted
    if options.on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also for all processes that are started from here
    elif not count_gpus():
        why = "this process sees no GPU"
        hint = "Let it see one (CUDA_VISIBLE_DEVICES), or try the command itself with --device cpu."
        raise ConfigError("--gpu", True, why, hint)
    usual = () if path is not None else ON_CPU if options.on_cpu else ON_GPUS
    config = load(RunConfig, path, [*usual, *overrides])
    info = detect(os.environ)
    if info is not None:
        ranks = info.world_size
    else:
        ranks = processes_of(config) if emulate is None else emulate.ranks
        check_out(options.out, EXAMPLE)
    if path is None:
        config = load(RunConfig, None, [*usual, f"moe.num_experts={max(2, ranks)}", *overrides])
    config.resolved(ranks)

    def work(rank: ProcessInfo) -> int:
        return _be_rank(rank, config, options, stages)

    return on_ranks("penstock doctor", given, ranks, START_S, emulate, work, reports=True)


def _be_rank(info: ProcessInfo, config: RunConfig, options: Options, stages: Sequence[Stage]) -> int:
    if info == ALONE:
        return _report(info, config, options, stages, OneRank())
    host, port = meeting_place(info, os.environ)
    serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        meeting = Meeting(info, host, port, serves=serves, wait_s=options.wait_s)
    except MeetingError as error:
        tell(why_unreachable(info, host, port, str(error)))
        return FAILED
    try:
        code = _report(info, config, options, stages, Met(meeting))
        meeting.close(range(info.world_size))
        return code
    except MeetingError as error:
        tell(f"rank {info.rank} gave up: {error}")
        return FAILED


def _report(
    info: ProcessInfo, config: RunConfig, options: Options, stages: Sequence[Stage], crew: Crew
) -> int:
    """Run the stages; the first rank prints each when it ends, and saves all. Return the exit code."""
    results: list[Result] = []
    names, device = crew.names(), device_of(best_kind()).kind
    for result in run_stages(stages, config, crew, options.timeout_s):
        results.append(result)
        if info.rank == 0 and not options.json:
            report = report_of([result], names, info.world_size, device)
            print(result_text(report["doctor"]["stages"][0], terminal_width()), flush=True)
    code = FAILED if worst_of(results) is Verdict.FAIL else 0
    if info.rank > 0:
        return code
    report = report_of(results, names, info.world_size, device)
    saved = save_out(lambda path: write_json(path, report), options.out)
    print(json.dumps(report) if options.json else f"\n{last_line(report)}; saved as {options.out}")
    return code if saved else FAILED
