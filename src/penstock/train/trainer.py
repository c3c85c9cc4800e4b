"""The training loop: the order of operations. What happens around a step is in its own files."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from penstock.checkpoint.storage import CheckpointError
from penstock.config import to_dict, to_toml
from penstock.device import device_of
from penstock.extras import install, is_there, needs
from penstock.moe import MoELayer, update_expert_biases
from penstock.report import RunSummary
from penstock.report.loads import draw_loads
from penstock.report.summary import SUMMARY_FILE, WARM_UP_STEPS
from penstock.runtime.consistency import check_layouts
from penstock.runtime.statistics import StepStatistics
from penstock.topology import Control, Layout, ProcessInfo, find_node_size
from penstock.topology.faults import ACTIVITY
from penstock.trace import TaskRecord
from penstock.train.assemble import build_machinery, build_optimizer, check_run, device_bytes, on_device
from penstock.train.batches import ReadAhead, open_source
from penstock.train.checkpoint import Checkpoints, NotFiniteError
from penstock.train.config import RunConfig, resolved_for_all
from penstock.train.history import History, LoadBook, StepAnalysis, analyse, summarise
from penstock.train.logs import RankLog, show
from penstock.train.measuring import RoutingFile, batch_loss, evaluate, measured
from penstock.train.metrics import (
    METRICS_FILE,
    MetricsWriter,
    StepMetrics,
    check_wandb,
    open_logs,
)
from penstock.train.model import MakeModel, decoder_of
from penstock.train.optimizer import ADVICE, DivergedError, build_update, learning_rate, set_learning_rate
from penstock.train.output import OutputFolder, check_output, config_of, keep_config, written
from penstock.train.pilot import MakePilot, Ranks
from penstock.train.progress import Progress
from penstock.train.resume import changes, checkpoints_folder, find_resumption, restore
from penstock.train.stopping import StopRequests
from penstock.writing import LineFile

logger = logging.getLogger(__name__)

ANALYSED_STEPS, TYPICAL_STEPS = 2, 10
"""Last steps that are traced at least, and last steps over which median durations of tasks are taken."""

TIMED_EVERY = 10
"""On a GPU one of so many steps measures its tasks, for metrics, where nothing else needs that."""

OnStep = Callable[[int, StepStatistics], None]
"""Receives the number of each finished step, counted from 1, and the statistics of its batch."""


class Trainer:
    """Trains what a configuration describes, on this rank of a group that has joined already.

    Args:
        make_pilot: Makes the pilot, which decides by which plan steps run.
        quiet: Whether to show no progress.
        make_model: Builds the model.
        on_step: Called before a step's checkpoint is written; the output folder exists by then.
        log: Gets its file in the output folder, when that is there.
    """

    began = False
    first = 0  # steps that were done before this start
    skipped_in_a_row = 0
    summary: RunSummary | None = None
    saved: Path | None = None
    analysis: StepAnalysis | None = None
    writer: MetricsWriter | None = None
    routing: RoutingFile | None = None

    def __init__(
        self,
        config: RunConfig,
        info: ProcessInfo,
        device: torch.device,
        make_pilot: MakePilot,
        *,
        quiet: bool,
        make_model: MakeModel = decoder_of,
        on_step: OnStep | None = None,
        log: RankLog | None = None,
    ) -> None:
        self.control = control = Control(info.rank, info.world_size)
        self._asked = config = resolved_for_all(config, control)
        control.agreed(lambda: check_wandb(config.metrics), "looking for wandb")
        self.leader, self.on_step, self.log = info.rank == 0, on_step, log
        every, quiet = config.train.log_every, quiet or not self.leader
        self.progress = Progress(config.train.steps, every=every, quiet=quiet)
        show(self.progress.say)
        node_size = find_node_size(control, info.local_rank)
        with self._waiting_for_a_checkpoint():
            self.resumption = find_resumption(config, control)  # before anything is measured
        folder, begins = config.output.dir, self.resumption is None
        control.agreed(lambda: check_output(folder, keep=not begins), "trying output.dir", by=0)
        self.output = OutputFolder(folder, keep=not begins)
        ranks = Ranks(control=control, device=device, node_size=node_size)
        config = make_pilot.layout(on_device(config, device), ranks, self.resumption)
        self.layout = self._checked_layout(config, ranks)
        machinery = build_machinery(self.layout, device, config.parallel, config.train.precision)
        scans = self.leader or info.local_rank == 0  # a launcher may number a node's ranks in another order
        self.source = open_source(config, self.layout, control, scans=scans)
        self.batches = ReadAhead(self.source.stream, device)
        self.pilot = pilot = make_pilot(config, machinery, self.resumption)
        config = pilot.config
        model = make_model(config, machinery, plan=pilot.plan, moving=pilot.moving, begins=begins)
        self.stack = model.stack
        # This loop reads no loss before backward.
        self.stack.bounds.late = device_of(device).is_gpu and model.repeats_late
        pilot.take_over(self.stack)
        self.optimizer = build_optimizer(self.stack, config.optimizer)
        self.update = build_update(self.stack, self.optimizer, config.optimizer)
        self.checkpoints = Checkpoints(
            checkpoints_folder(config),
            self.stack,
            self.optimizer,
            keep=config.train.keep_checkpoints,
            identity=self.source.identity,
            settings=to_dict(self._asked),
            tokenizer=self.source.tokenizer,
            files=model.files(self.source.tokenizer),
            naming=model.naming,
        )
        self.history, self.loads = History(), LoadBook()
        self.recent: deque[list[TaskRecord]] = deque(maxlen=max(TYPICAL_STEPS, config.output.trace_steps))
        self.records: list[TaskRecord] = []

    def _checked_layout(self, config: RunConfig, ranks: Ranks) -> Layout:
        """Return this rank's place. Raises ConfigError where ranks differ or memory does not suffice."""
        control, parallel = self.control, config.parallel
        layout = Layout.build(
            parallel, control.world_size, control.rank, config.moe.num_experts, ranks.node_size
        )
        check_layouts(layout, config.data.batch_per_device, control)
        there_bytes = device_bytes(ranks.device, control)
        fits = partial(check_run, config, layout, there_bytes=there_bytes)
        control.agreed(fits, "comparing memory with the model")
        return layout

    def run(self) -> RunSummary:
        """Train to the last step or until a stop is requested, and leave a checkpoint and a summary."""
        with StopRequests(self.control) as requests:
            self._train(requests)
            self.stack.close()
            assert self.analysis is not None, "the last step is saved"
            course, picture, folder = self.loads.course(self.moe_layers), None, self.config.output.dir
            if course is not None and is_there("matplotlib"):
                with self._spare():
                    picture = draw_loads(course, folder)
            self.summary = summary = summarise(
                self.config,
                self.stack,
                self.source,
                self.history,
                checkpoint=self.saved,
                analysis=self.analysis,
                loads=picture,
                whole_s=self.trained_s,
                peak=self.pilot.flops.peak_words,
            )
            if self.leader:
                with written(folder / SUMMARY_FILE):
                    summary.save(folder)
        return summary

    def _train(self, requests: StopRequests) -> None:
        """Run the steps and save the last one."""
        with ExitStack() as closing:
            # Rank 0 prepares the folder; the others look into it only after the exchange.
            self.control.agreed(lambda: closing.enter_context(self.output), "preparing output.dir", by=0)
            if self.log is not None:
                self.log.open(self.output.path)
            self._say_moved()
            self.began = True
            done = 0
            if self.resumption is not None:
                # The folder is locked by this run, so no other save is running.
                self.checkpoints.clear_unfinished()
                with self._waiting_for_a_checkpoint():
                    done = restore(self._asked, self.control, self.checkpoints, self.resumption)
            closing.enter_context(self.progress)
            if self.config.moe.warning is not None:
                logger.info(self.config.moe.warning)
            self._open_records(closing, done)
            last, self.first, started_s = False, done, time.perf_counter()
            while not last:
                metrics = self._step(done)
                if done == self.first > 0:
                    metrics = replace(metrics, resumed=True)
                done += 1
                # Ranks leave this vote together: the next step starts after it, on one clock.
                vote = requests.agreed(done, metrics.iteration_s, lost=self.output.is_lost)
                last = vote.stop or done == self.config.train.steps
                if vote.stop:
                    logger.info(f"stopping after step {done}, as requested")
                if vote.lost:
                    self._renew_output(done)
                self._after_step(metrics, last=last, saves=vote.lost)
                if not last and self.pilot.after_step(vote.slowest_s, self.records):
                    self.recent.clear()  # these steps ran under another plan
                    assert self.history.last is not None, "a step has ended"
                    self._save_settings(self.history.last.step)
            self.trained_s = time.perf_counter() - started_s

    def _check_peers(self) -> None:
        """Raise CommunicationError if what the device has done is anything, as another rank is gone."""
        if device_of(self.stack.machinery.device).is_gpu:
            with self.control.naming("waiting for the device"):
                ACTIVITY.check()

    def _step(self, step: int) -> StepMetrics:
        """Run one optimiser step and return its metrics; `step` counts from 0."""
        rate = learning_rate(self.config.optimizer, step, self.config.train.steps)
        set_learning_rate(self.optimizer, rate)
        batch = self.batches.take(step)
        left = self.config.train.steps - step  # the last steps are analysed
        # For metrics, and not while a start warms up, which would be taken for the steps after it.
        now_and_then = (step - self.first) % TIMED_EVERY == WARM_UP_STEPS or not self.recent
        self.stack.timed = self.pilot.reads_records or now_and_then or left <= (self.recent.maxlen or 0)
        start_s = time.perf_counter()
        loss = batch_loss(self.stack, batch)
        norm = self.update.backward(loss, step + 1)
        if step + 1 < self.config.train.steps:
            self.batches.prepare(step + 1)
        assert self.stack.statistics is not None, "half a step has run"
        # On a GPU the host waits here, once, and once more before the clock is read.
        self.stack.statistics, (norm_value, loss_value) = self.stack.statistics.on_host(norm, loss)
        self._check_peers()
        # On all ranks together, so that none updates alone and differs from the others ever after.
        broken = not (math.isfinite(loss_value) and math.isfinite(norm_value))
        accepted = not self.control.any(broken, f"agreeing whether step {step + 1} is finite")
        self.update.apply(accepted=accepted)
        if accepted:
            update_expert_biases(self.stack)
            self.skipped_in_a_row = 0
        else:
            self._skip(step + 1, loss_value, norm_value)
        device_of(self.stack.machinery.device).synchronize(self.stack.machinery.device)
        self._check_peers()
        iteration_s = time.perf_counter() - start_s
        self.records = self.stack.records(step + 1)
        if self.records:
            self.recent.append(self.records)
        if self.on_step is not None:
            self.update.flush()  # on_step may look at the model
            assert self.stack.statistics is not None, "a step has ended"
            self.on_step(step + 1, self.stack.statistics)
        if self.routing is not None:
            self.routing.record(step + 1, self.stack)
        return measured(
            self.stack,
            self.pilot,
            self.recent[-1],
            step=step + 1,
            loss=loss_value,
            rate=rate,
            norm=norm_value,
            iteration_s=iteration_s,
            accepted=accepted,
        )

    def _after_step(self, metrics: StepMetrics, *, last: bool, saves: bool) -> None:
        """Evaluate, write metrics, save if due or `saves`: a checkpoint never knows more than the metrics."""
        train = self.config.train
        if last or _due(metrics.step, train.eval_every):
            batches = self.source.stream.held_out_batches(train.eval_batches)
            evaluation = evaluate(self.stack, batches)
            self._check_peers()
            metrics = replace(metrics, eval_loss=evaluation.loss, eval_noise=evaluation.noise)
        self.history.add(metrics)
        self.progress.update(metrics)
        if self.writer is not None:
            with written(self.output.path / METRICS_FILE):
                self.writer.write(metrics)
            if (loads_PYE := self.stack.loads.last) is not None:
                loads_YE = loads_PYE.sum(axis=0, dtype=np.int64)
                self.loads.add(metrics.step, loads_YE)
                self.writer.draw(metrics.step, loads_YE)
        if last and self.history.first is None:
            raise self._diverged(f"none of the steps up to the last one ({metrics.step}) was finite")
        with self._waiting_for_a_checkpoint():
            self.saved = self.checkpoints.poll() or self.saved
        if last or saves or _due(metrics.step, train.checkpoint_every):
            self._save(metrics, last=last)
            if last or saves:
                self._finish_saving()

    def _save(self, metrics: StepMetrics, *, last: bool) -> None:
        """Begin a checkpoint if it is worth returning to: its numbers and its held-out loss are finite."""
        step, loss = metrics.step, metrics.eval_loss
        if loss is None:
            loss = evaluate(self.stack, self.source.stream.held_out_batches(1)).loss
            self._check_peers()
        if self.control.any(not math.isfinite(loss), f"judging the model after step {step}"):
            problem = f"after step {step} the loss on held-out text is {loss}"
            if last:
                raise self._diverged(problem)
            logger.info(f"{problem}: no checkpoint is saved")
            self._describe()
            return
        self._finish_saving()
        try:
            with self._waiting_for_a_checkpoint():
                self.checkpoints.begin(step, plan_settled=self.pilot.settled, papers=self.pilot.save)
        except NotFiniteError as error:  # no further step repairs that
            raise self._diverged(str(error)) from error
        self._check_peers()  # a sharded optimiser has gathered what was copied
        self._describe()
        with self._waiting_for_a_checkpoint():
            self.saved = self.checkpoints.poll() or self.saved

    def _skip(self, step: int, loss: float, norm: float) -> None:
        """Undo the step; end the run if too many steps in a row were skipped."""
        for module in self.stack.modules():  # what loss-free balancing has counted moves no bias
            if isinstance(module, MoELayer) and module.gate.bias is not None:
                module.gate.bias.forget()
        self.skipped_in_a_row += 1
        numbers, most = f"loss {loss}, gradient norm {norm}", self.config.train.max_skipped_steps
        if self.skipped_in_a_row > most:
            raise self._diverged(f"step {step} has {numbers}")
        count = f"{self.skipped_in_a_row} in a row, train.max_skipped_steps = {most}"
        logger.info(f"step {step} skipped: {numbers}; nothing was updated ({count})")

    @property
    def config(self) -> RunConfig:
        """The run as it is now: sections [schedule] and [moe] say what the plan has chosen."""
        return self.pilot.config

    def _save_settings(self, done: int) -> None:
        """Write, on rank 0, the settings as requested, those chosen as comments, and the plan in use."""
        if not self.leader:
            return
        requested, runs = (
            replace(config, parallel=replace(config.parallel, processes=self.layout.world_size))
            for config in (self._asked, self.config)
        )
        text = to_toml(requested)
        if chosen := "".join(f"# {change}\n" for change in changes(runs, to_dict(requested))):
            text = f"# Chosen by this run, where the settings below say otherwise:\n{chosen}\n{text}"
        with written(self.config.output.dir):
            keep_config(self.config.output.dir, text, done)
            if self._asked.plan.is_saved:
                self.pilot.save(self.config.output.dir)

    def _describe(self) -> None:
        """Write the analysis of the last steps, after the checkpoint: no run ends because this fails."""
        wanted, folder = self.config.output.trace_steps, self.config.output.dir
        self.analysis = analyse(
            self.stack,
            list(self.recent),
            max(wanted, ANALYSED_STEPS),
            self.pilot.forecast,
            folder,
            traces=wanted > 0,
            writing=self._spare,
        )
        course = self.loads.course(self.moe_layers)  # only rank 0 has one
        if course is not None:
            with self._spare():
                course.save(folder)

    @contextmanager
    def _spare(self) -> Iterator[None]:
        """Let rank 0 write what a run can do without, while others wait; report if it cannot."""
        try:
            yield
        except OSError as error:
            logger.info(f"what the last steps were like was not written: {error}")

    def _say_moved(self) -> None:
        path, moved_to = self.output.path, self.output.moved_to
        if moved_to is not None:
            logger.info(f"{path} contained an earlier run, which was moved to {moved_to}")

    def _renew_output(self, done: int) -> None:
        """Make the folder and its records again; the checkpoint that follows is the only one by then."""

        def renew() -> None:
            with written(self.output.path):
                self.output.renew()

        with self._waiting_for_a_checkpoint():
            self.checkpoints.drop()  # its folder may be gone
            self.control.agreed(renew, "making output.dir again", by=0)
        self._save_settings(done)
        self._say_moved()
        self.saved = None  # gone, as the line says, or not the newest for long
        logger.info(
            f"{self.output.path}, or a record in it, was removed or moved away: it is made again, with the "
            "metrics of all steps, and a checkpoint is saved now"
        )

    def _open_records(self, closing: ExitStack, first: int) -> None:
        """Open what metrics and routing are written to; if that fails, all ranks raise the reason."""
        output = self.config.output

        def prepare() -> None:
            # What cannot be read is refused first: opening cuts records off where this run goes on.
            config_of(output.dir)
            experts = self.config.moe.num_experts
            self.loads = LoadBook.resumed(output.dir, first, self.moe_layers, experts)
            self.writer = closing.enter_context(MetricsWriter())
            for log in open_logs(self.config, self.moe_layers, first):
                self.writer.logs.append(log)
                if isinstance(log, LineFile):
                    self.output.records.append(log)
            self._save_settings(first)

        def prepare_routing() -> None:
            self.routing = RoutingFile(self.config, self.control, self.layout, first)
            self.output.records += closing.enter_context(self.routing).records

        self.control.agreed(prepare, "opening what metrics go to", by=0)
        for setting, module in (("tensorboard", "tensorboard"), ("loads", "matplotlib")):
            if getattr(output, setting) and not is_there(module):
                logger.info(f"output.{setting} {needs(module)} and is left out. {install(module)}")
        if output.routing:
            self.control.agreed(prepare_routing, "opening the record of routing")
        if self.leader:  # nothing refuses this start any more
            with written(summary := output.dir / SUMMARY_FILE):
                summary.unlink(missing_ok=True)  # of an earlier start, which was stopped

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that have experts."""
        return tuple(number for number, is_moe in enumerate(self.stack.base_shape.moe_layers) if is_moe)

    def _finish_saving(self) -> None:
        """Wait for the checkpoint that is being written. Say, once, if the newest is where it was no more."""
        with self._waiting_for_a_checkpoint():
            self.saved = self.checkpoints.finish() or self.saved
        if self.saved is not None and not self.saved.exists():
            logger.info(f"{self.saved}, the newest checkpoint, was removed or moved away")
            self.saved = None

    def _waiting_for_a_checkpoint(self) -> AbstractContextManager[None]:
        return self.control.waiting(*self._asked.parallel.at_checkpoints)

    def _diverged(self, problem: str) -> DivergedError:
        try:
            self._finish_saving()
        except CheckpointError as error:
            problem = f"{problem}; {error}"
        newest = self.checkpoints.newest()
        good = f"the last good checkpoint is {newest}" if newest else "no checkpoint has been written yet"
        return DivergedError(f"rank {self.layout.rank}: training diverged: {problem}; {good}. {ADVICE}")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
