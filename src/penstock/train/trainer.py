"""The training loop. What happens around a step is in its own files; here is the order of things."""

from __future__ import annotations

import hashlib
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from penstock.config import ConfigError, to_toml
from penstock.cost import StepCost
from penstock.report import RunSummary
from penstock.topology import Layout, ProcessInfo
from penstock.trace import TaskRecord, occupation
from penstock.train.assemble import build_machinery, build_stack, workload
from penstock.train.batches import BatchStream
from penstock.train.checkpoint import Checkpoints
from penstock.train.clip import clip_grad_norm
from penstock.train.config import RunConfig
from penstock.train.corpus import Corpus, load_corpus
from penstock.train.evaluate import batch_loss, evaluate
from penstock.train.metrics import MetricsWriter, Progress, StepMetrics
from penstock.train.optimizer import build_adamw, initialise_state, learning_rate, set_learning_rate
from penstock.train.output import OutputFolder
from penstock.train.refine import refine
from penstock.train.stopping import StopRequests
from penstock.train.summarise import WARM_UP_STEPS, summarise
from penstock.train.tracing import write_trace


class Trainer:
    """Trains what a configuration describes, on this rank of a group that has joined already."""

    def __init__(self, config: RunConfig, info: ProcessInfo, device: torch.device, *, quiet: bool) -> None:
        self.config = config = config.resolved(info.world_size)
        self.layout = Layout.build(config.parallel, info.world_size, info.rank, config.moe.num_experts)
        machinery = build_machinery(self.layout, device, config.parallel.timeout_s, config.train.precision)
        self.control, self.leader = machinery.control, info.rank == 0
        self.corpus = self._load_corpus()
        self.stream = self._open_stream()
        self.stack = build_stack(config, machinery)
        self.optimizer = build_adamw(self.stack.model.named_parameters(), config.optimizer)
        initialise_state(self.optimizer)
        folder = config.output.dir / "checkpoints"
        self.checkpoints = Checkpoints(folder, self.stack, self.optimizer, config.train.keep_checkpoints)
        self.progress = Progress(
            config.train.steps, every=max(1, config.train.log_every), quiet=quiet or not self.leader
        )
        self.history: list[StepMetrics] = []
        self.kept: list[list[TaskRecord]] = []
        self.saved: Path | None = None

    def run(self) -> RunSummary:
        """Train to the last step, or until asked to stop. Every way out but an error leaves a checkpoint."""
        with ExitStack() as closing:
            requests = closing.enter_context(StopRequests(self.control))
            self._open_output(closing)
            done = first = self._resume()
            closing.enter_context(self.progress)
            writer = self._open_metrics(closing, first)
            stopped = False
            while done < self.config.train.steps and not stopped:
                metrics = self._step(done)
                done += 1
                stopped = requests.agreed(done)
                metrics = self._after_step(metrics, last=stopped or done == self.config.train.steps)
                self.history.append(metrics)
                self.progress.update(metrics)
                if writer is not None:
                    writer.write(metrics)
                if done - first == self.config.schedule.refine_after:
                    self._refine()
            simulated_s = self._write_trace()
        self.stack.close()
        checkpoint = str(self.saved) if self.saved else None
        return summarise(
            self.config,
            self.stack,
            self.corpus,
            self.history,
            checkpoint=checkpoint,
            simulated_s=simulated_s,
        )

    def _step(self, step: int) -> StepMetrics:
        """One optimiser step; `step` counts from 0."""
        train, optimizer = self.config.train, self.config.optimizer
        rate = learning_rate(optimizer, step, train.steps)
        set_learning_rate(self.optimizer, rate)
        batch = self.stream.batch(step)
        traced = step >= train.steps - self.config.output.trace_steps
        if traced:  # ranks start a traced step together, so that their clocks agree
            self.control.barrier(f"starting step {step + 1}")
        start_s = time.perf_counter()
        loss = batch_loss(self.stack, batch)
        loss.backward()
        with self.control.naming(f"the gradient norm of step {step + 1}"):
            norm = clip_grad_norm(self.stack, optimizer.clip_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        norm_value, loss_value = float(norm), float(loss.detach())  # on a GPU the host waits here
        iteration_s = time.perf_counter() - start_s
        records = self.stack.records(step + 1)
        if traced or len(self.history) < self.config.schedule.refine_after:
            self.kept.append(records)
        return self._metrics(step + 1, loss_value, rate, norm_value, iteration_s, records)

    def _after_step(self, metrics: StepMetrics, *, last: bool) -> StepMetrics:
        """Evaluation and checkpoint, when due."""
        train = self.config.train
        if last or _due(metrics.step, train.eval_every):
            batches = self.stream.held_out_batches(train.eval_batches)
            metrics = replace(metrics, eval_loss=evaluate(self.stack, batches))
        if last or _due(metrics.step, train.checkpoint_every):
            self.saved = self.checkpoints.save(metrics.step)
        return metrics

    def _refine(self) -> None:
        """Durations are known now: freeze the order from them."""
        buckets, shape = self.stack.buckets, self.stack.plan.graph.shape
        sizes = workload(self.config, self.layout, *buckets.sizes_bytes)
        records = [record for step in self.kept[WARM_UP_STEPS:] or self.kept for record in step]
        refine(
            self.stack,
            self.config.schedule.system,
            records,
            StepCost(shape, sizes, self.config.cluster),
        )
        self.progress.say(f"order of {self.config.schedule.name} frozen again from {len(self.kept)} steps")
        self.kept.clear()

    def _write_trace(self) -> float | None:
        """The trace of the newest kept steps; None if none were wanted or kept."""
        wanted = self.config.output.trace_steps
        steps = self.kept[-wanted:] if wanted else []
        return write_trace(self.config.output.dir / "trace.json", self.stack, steps) if steps else None

    def _open_output(self, closing: ExitStack) -> None:
        """Rank 0 prepares the folder; the others look into it only behind the barrier."""
        problem: ConfigError | None = None
        if self.leader:
            folder = OutputFolder(self.config.output.dir, resume=self.config.train.resume)
            try:
                closing.enter_context(folder)
            except ConfigError as error:
                problem = error
            if folder.moved_to is not None:
                self.progress.say(f"{folder.path} held an earlier run; it is kept as {folder.moved_to}")
        problem = self.control.gather(problem, "preparing output.dir")[0]
        if problem is not None:
            raise problem

    def _open_metrics(self, closing: ExitStack, first: int) -> MetricsWriter | None:
        if not self.leader:
            return None
        output = self.config.output
        (output.dir / "config.toml").write_text(to_toml(self.config))
        return closing.enter_context(MetricsWriter(output.dir, output.tensorboard, first))

    def _resume(self) -> int:
        """Steps already done: those of the newest checkpoint, if the run is to be continued."""
        newest = self.checkpoints.newest()
        if not self.config.train.resume or newest is None:
            return 0
        done = self.checkpoints.load(newest)
        if done >= self.config.train.steps:
            why = f"{newest} has finished {done} steps already"
            raise ConfigError("train.steps", self.config.train.steps, why, f"Use more than {done}.")
        self.progress.say(f"continuing from {newest}")
        return done

    def _open_stream(self) -> BatchStream:
        try:
            return BatchStream(
                self.corpus,
                seq_len=self.config.model.seq_len,
                batch_per_device=self.config.data.batch_per_device,
                rank=self.layout.rank,
                world_size=self.layout.world_size,
                seed=self.config.train.seed,
                held_out_fraction=self.config.data.held_out_fraction,
            )
        except ConfigError as error:
            raise error.under({"seq_len": "model", "seed": "train"}.get(error.key, "data")) from None

    def _load_corpus(self) -> Corpus:
        """The training text; all ranks must read the same."""
        try:
            corpus = load_corpus(self.config.data)
        except ConfigError as error:
            raise error.under("data") from None
        mine = hashlib.sha256(corpus.text.tobytes()).hexdigest()
        digests = self.control.gather(mine, "comparing the training text")
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                why = f"rank {rank} reads another text than rank 0"
                hint = "Copy the same text to all machines and name it; Python versions differ in theirs."
                raise ConfigError("data.path", self.config.data.path, why, hint)
        return corpus

    def _metrics(
        self,
        step: int,
        loss: float,
        rate: float,
        norm: float,
        iteration_s: float,
        records: list[TaskRecord],
    ) -> StepMetrics:
        used, statistics = occupation(records), self.stack.statistics
        assert statistics is not None
        tokens = self.config.data.batch_per_device * self.layout.world_size * self.config.model.seq_len
        chosen_YE = statistics.chosen_YE
        return StepMetrics(
            step=step,
            loss=loss,
            learning_rate=rate,
            grad_norm=norm,
            iteration_s=iteration_s,
            tokens_per_s=tokens / iteration_s,
            exposed_communication_s=used.exposed_s,
            communication_s=used.communication_s,
            overlap_efficiency=used.overlap_efficiency,
            tokens_per_expert_max_over_mean=float((chosen_YE.amax(1) / chosen_YE.mean(1)).mean()),
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
