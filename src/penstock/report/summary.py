"""The text at the end of a training run, for readers who have never seen one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from penstock.config import Items, from_dict, read_json, to_dict
from penstock.config.bounds import MOST_RANKS
from penstock.cost.cluster_file import write_json
from penstock.report.timeline import duration_text
from penstock.trace.analysis import Straggler
from penstock.words import UNKNOWN, counted, folded

WARM_UP_STEPS: Final = 2
"""The first steps allocate buffers and open connections; medians leave them out."""

LABEL_WIDTH = 12
SUMMARY_FILE: Final = "summary.json"
OUTPUTS: Final = ("checkpoint", "metrics", "trace", "tensorboard", "plan", "cluster", "loads")
"""Fields that are paths of what a run has written."""
MOST_ROWS: Final = 10
"""Rows that are shown; in a run that was stopped, or had slow ranks, those give way that say least."""
REMOVE: Final = "Move the file away: the report then leaves out what it holds."


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The settings and results of a run.

    Losses and entropy are in nats per token. Files are paths; None = not written.

    Attributes:
        unit: What a token is, in the singular.
        first_step: The step that `first_loss` is of: the first since this start that was finite.
        eval_loss: Loss on held-out text; None if the run never evaluated.
        eval_noise: How much too small `eval_loss` may be (95 % of the time); None if unknown.
        unigram_entropy: The loss of guessing every token by its frequency in the corpus.
        iteration_s_median: Seconds of a step.
        communication_s: Seconds of communication in a typical step.
        exposed_communication_s: The part of `communication_s` under which nothing was computed.
        overlap_efficiency: The least time of any order of the same tasks over the measured step; 1.0 is
            perfect.
        simulated_iteration_s: The simulator's time for the last steps' tasks.
        skipped_steps: How many steps since this start were not finite and changed nothing.
        interrupted: Whether the run was stopped early and saved.
        parameters: How many the whole model has, every expert counted once.
        tp_size: How many processes share attention.
        etp_size: How many processes share every expert.
        rank_load_max_over_mean: Rows that the busiest process computes over the mean, in a typical step.
        rows_crossing_nodes: The share of rows that another node computes.
        loads_in_common: The share of rows that a step has in common with the one before; None if unknown.
        tokens_per_s: In steps alone.
        whole_tokens_per_s: Over all time from the first step to the last checkpoint, reading, evaluating and
            saving included.
        model_flops_utilisation: Model FLOPs as a share of the peak; None if no peak is known.
        peak_flops: The peak, and whose figure that is, as text.
        stragglers: Processes that computed slowly in the last steps.
        loads: The picture of loads.
    """

    schedule: str
    steps: int
    first_loss: float
    last_loss: float
    eval_loss: float | None
    unigram_entropy: float
    tokens_per_s: float
    iteration_s_median: float
    overlap_efficiency: float
    exposed_communication_s: float
    communication_s: float
    processes: int
    num_experts: int
    num_local_experts: int
    parameters: int
    corpus: str
    checkpoint: str | None
    metrics: str
    trace: str | None
    tensorboard: str | None
    dispatch: str = "flat"
    first_step: int = 1
    simulated_iteration_s: float | None = None
    interrupted: bool = False
    plan: str | None = None
    cluster: str | None = None
    skipped_steps: int = 0
    tp_size: int = 1
    etp_size: int = 1
    rank_load_max_over_mean: float | None = None
    rows_crossing_nodes: float | None = None
    loads_in_common: float | None = None
    loads: str | None = None
    eval_noise: float | None = None
    unit: str = "byte"
    whole_tokens_per_s: float | None = None
    model_flops_utilisation: float | None = None
    peak_flops: str | None = None
    stragglers: Annotated[tuple[Straggler, ...], Items(MOST_RANKS, "they are some of the ranks")] = ()

    @property
    def hidden_communication(self) -> float:
        """Share of the communication that ran under computation; 1 when there was none."""
        if self.communication_s <= 0:
            return 1.0
        return 1 - self.exposed_communication_s / self.communication_s

    def save(self, folder: Path) -> None:
        """Write the summary into the folder of the run."""
        write_json(folder / SUMMARY_FILE, to_dict(self))

    @staticmethod
    def read(path: Path) -> RunSummary:
        """Read a summary.

        Raises:
            ConfigError: If a key is wrong; names the file and the key.
        """
        return from_dict(RunSummary, read_json(path, REMOVE), str(path))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        plain = {
            name: value for name, value in to_dict(self).items() if name not in (*OUTPUTS, "unigram_entropy")
        }
        return {
            **plain,
            "corpus_unigram_entropy": self.unigram_entropy,
            "hidden_communication": self.hidden_communication,
            "stragglers": {str(each.rank): each.factor for each in self.stragglers},
            "outputs": {name: getattr(self, name) for name in OUTPUTS},
        }

    def to_text(self, width: int = UNKNOWN) -> str:
        """Return ten rows at most for a terminal of `width` columns."""
        rows = list(self._rows())
        for spare in ("balance", "again", "files"):
            rows = rows if len(rows) <= MOST_ROWS else [row for row in rows if row[0] != spare]
        return _table(rows, width)

    def details(self) -> str:
        """Return what the ten rows leave out, for a log."""
        return _table(list(self._more()), UNKNOWN)

    def _rows(self) -> Iterator[tuple[str, str]]:
        if self.interrupted:
            yield "stopped", "early, as requested; a checkpoint was saved. Continue with train.resume=true."
        yield "trained", self.subject
        began = "at the start" if self.first_step == 1 else f"in step {self.first_step:,}"
        change = f"{self.first_loss:.3f} nats per {self.unit} {began}, {self.last_loss:.3f} at the end"
        yield "loss", change
        if self.skipped_steps:
            steps = "1 step was" if self.skipped_steps == 1 else f"{self.skipped_steps} steps were"
            yield "skipped", f"{steps} not finite and had no effect (listed in metrics.jsonl)"
        yield "held out", self._held_out()
        speed = f"{self.tokens_per_s:,.0f} tokens/s; a step takes {duration_text(self.iteration_s_median)}"
        used = self.model_flops_utilisation
        if used is not None and used <= 1:  # what steps exceed is no peak: its measurement was disturbed
            speed += f"; model FLOPs: {100 * used:.0f} % of the peak"
        yield "speed", speed
        if self.communication_s > 0:
            total, exposed = duration_text(self.communication_s), duration_text(self.exposed_communication_s)
            hidden = f"{100 * self.hidden_communication:.0f} % hidden under computation"
            yield "network", f"{total} of communication per step: {hidden}, {exposed} exposed"
        if self.stragglers:
            yield "slow ranks", f"{'; '.join(each.words for each in self.stragglers)} in the last steps"
        if self.rank_load_max_over_mean is not None and self.processes > 1:
            ratio = self.rank_load_max_over_mean
            yield "balance", f"the busiest process computes {ratio:.2f} times the mean number of expert rows"
        if self.checkpoint:
            yield "checkpoint", self.checkpoint
        folder = Path(self.metrics).parent
        yield "report", f"penstock report {folder} (a page: timelines, what bound the step, loads)"
        if self.plan:
            yield "again", f"the same command with plan.mode=replay plan.file={self.plan}"
        paths = self.metrics, self.trace, self.tensorboard, self.cluster, self.loads
        yield "files", f"in that folder: {', '.join(Path(path).name for path in paths if path)}"

    @property
    def subject(self) -> str:
        """What was trained, for how long, and on how many processes."""
        processes = counted(self.processes, "process", "es")
        steps = "1 step" if self.steps == 1 else f"{self.steps:,} steps"
        shared = [(self.tp_size, "attention"), (self.etp_size, "each expert")]
        sharing = ", ".join(f"{size} share {what}" for size, what in shared if size > 1)
        return (
            f"{_millions(self.parameters)} parameters, {self.num_experts} experts per MoE layer, {steps} "
            f"on {processes}{f' ({sharing})' if sharing else ''}, {self.schedule}"
        )

    def _held_out(self) -> str:
        """Return whether the model has learned anything beyond frequencies."""
        guess = f"{self.unit} frequencies give {self.unigram_entropy:.3f}"
        if self.eval_loss is None:
            return f"not evaluated: no loss on unseen text is known; {guess}"
        noise = "" if self.eval_noise is None else f" (± {self.eval_noise:.3f})"
        loss = f"{self.eval_loss:.3f}{noise} on unseen text"
        if not math.isfinite(self.eval_loss):
            return f"{loss}: the training diverged; a lower learning rate may help"
        if self.eval_loss >= self.unigram_entropy:
            return f"{loss}; {guess}, and the model is no better yet: more steps may help"
        if self.eval_noise is None or self.eval_loss + self.eval_noise >= self.unigram_entropy:
            why = "one batch" if self.eval_noise is None else "the difference"
            return f"{loss}; {guess}: {why} is too little to tell whether it has learned from context"
        return f"{loss}; {guess}: it has learned from context"

    def _more(self) -> Iterator[tuple[str, str]]:
        yield "data", self.corpus
        yield "experts", f"{self.num_local_experts} on each process"
        if self.whole_tokens_per_s is not None:
            yield "speed", f"{self.whole_tokens_per_s:,.0f} tokens/s with reading, evaluation and saving"
        if self.peak_flops is not None:
            yield "peak", self.peak_flops
        if self.communication_s > 0:
            best = "1.00 = no order of the same tasks could be faster"
            yield "network", f"overlap efficiency {self.overlap_efficiency:.2f} ({best})"
        if (away := self.rows_crossing_nodes) is not None:
            yield "balance", f"{100 * away:.0f} % of rows go to another node"
        if (common := self.loads_in_common) is not None:
            yield "balance", f"expert loads overlap {100 * common:.0f} % with those of the step before"
        yield "metrics", f"{self.metrics} (one line of JSON per step)"
        if self.cluster:
            yield "cluster", f"{self.cluster} (the measurements; plan.cluster={self.cluster} reuses them)"
        if self.loads:
            yield "loads", f"{self.loads} (picture: how often each expert was chosen)"
        if self.tensorboard:
            yield "curves", f"tensorboard --logdir {self.tensorboard}"
        if self.trace:
            yield "trace", f"{self.trace} (open https://ui.perfetto.dev and drop the file there)"


def _table(rows: Sequence[tuple[str, str]], width: int) -> str:
    return "".join(folded(f"{label:<{LABEL_WIDTH}}{text}", width) + "\n" for label, text in rows)


def _millions(count: int) -> str:
    """Return a count in words: 12.3 million."""
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.1f} {word}"
    return f"{count:,}"
