"""The power of the tests: faults of the engine, planted one by one in a copy, and the test that finds each.

`python -m tests.planted` runs, for every fault, the tests that should find it, and prints what did; with
numbers it plants only these. It exits with 1 if a fault was not found. A fault whose text no longer stands
exactly once in its file must follow the code: `tests/test_planted.py` says so.
"""

# ruff: noqa: TID251 - how long tests take is printed, and what hangs is ended

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "penstock"
TESTS = ROOT / "tests"
LIMIT_S = 900
"""A fault after which tests take longer than this counts as found: they hang."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """A change of one line of the package.

    Attributes:
        file: Where, below `src/penstock`.
        old: What stands there exactly once.
        new: What is planted in its place.
        breaks: What is wrong then.
        tests: What should find it, below `tests`, separated by blanks.
    """

    file: str
    old: str
    new: str
    breaks: str
    tests: str


FAULTS = (
    # ---- gradients, norms and scales -----------------------------------------------------------------------
    Fault(
        "runtime/clip.py",
        "[p for p, home in experts if home.is_first_in_edp]",
        "[p for p, home in experts]",
        "an expert counts in the norm once per replica",
        "runtime/expert_parallel/test_exchange.py",
    ),
    Fault(
        "runtime/clip.py",
        "(max_norm / (norm + TINY)).clamp(max=1.0)",
        "max_norm / (norm + TINY)",
        "small gradients are scaled up",
        "runtime/test_clip.py",
    ),
    Fault(
        "runtime/endings.py",
        "LossGradients(loss=grads[0] / self.ranks, balance=balance)",
        "LossGradients(loss=grads[0], balance=balance)",
        "1/P is forgotten where every rank returns the loss of its own labels",
        "adapt/test_training.py adapt/test_trainer.py",
    ),
    Fault(
        "runtime/endings.py",
        "hidden_BLM / (self.averaged * self.tokens.place.size)",
        "hidden_BLM / self.averaged",
        "ranks that share tokens count a loss of one's own once each",
        "adapt/test_mesh.py adapt/test_own_loss.py adapt/test_engine.py",
    ),
    Fault(
        "runtime/buckets.py",
        "self.flat.mul_(self.share)",
        "self.flat.mul_(1.0)",
        "sums over copies of the same tokens are not divided by their number",
        "runtime/test_cases.py runtime/gradients",
    ),
    Fault(
        "runtime/buckets.py",
        "parameter.grad = before.add_(view)",
        "parameter.grad = before.copy_(view)",
        "the gradients of an earlier pass are lost",
        "runtime/gradients runtime/test_several_passes.py",
    ),
    Fault(
        "runtime/features/sharded_optimizer/updates.py",
        "or self._layout.tp_rank == 0",
        "or self._layout.tp_rank >= 0",
        "what ranks sharing attention own alike counts in the norm once for each of them",
        "runtime/features/sharded_optimizer",
    ),
    Fault(
        "runtime/features/sharded_optimizer/share.py",
        "total = total * self.flat.share",
        "total = total * 1.0",
        "the share of a sum is forgotten where gradients are released",
        "runtime/features/sharded_optimizer",
    ),
    Fault(
        "runtime/features/sharded_optimizer/share.py",
        "self.wide = torch.promote_types(self.kind, torch.float32)",
        "self.wide = self.kind",
        "moments of bfloat16 weights are bfloat16",
        "runtime/features/sharded_optimizer",
    ),
    Fault(
        "runtime/features/sharded_optimizer/share.py",
        "changed = master.to(self.kind) != values",
        "changed = master.to(self.kind) != master.to(self.kind)",
        "weights loaded from outside are overwritten by an old float32 copy",
        "runtime/features/sharded_optimizer",
    ),
    Fault(
        "runtime/features/sharded_optimizer/updates.py",
        'self._stale = {task.name for task in graph.tasks if of_optimizer(task) == "gather"}',
        "self._stale = set()",
        "parameters that other ranks have updated are never gathered",
        "runtime/features/sharded_optimizer",
    ),
    Fault(
        "runtime/features/expert_replicas/replicas.py",
        "(replicas, self.trip.coming), (own, self.trip.leaving), Tensor.add_",
        "(replicas, self.trip.coming), (own, self.trip.leaving), Tensor.copy_",
        "a replica's gradient replaces its owner's",
        "runtime/features/expert_replicas/test_replicas.py runtime/test_cases.py",
    ),
    # ---- ranks that share attention or experts -------------------------------------------------------------
    Fault(
        "runtime/features/tensor_parallel.py",
        "_moves(after, ways.reduce, reduce, unchanged)",
        "_moves(after, ways.reduce, unchanged, unchanged)",
        "an all-reduce of partial sums is missed where tokens are replicated",
        "runtime/test_cases.py",
    ),
    Fault(
        "runtime/batch.py",
        "first = sum(sizes[:rank])",
        "first = sizes[0] * rank",
        "uneven parts of samples begin at the wrong token",
        "runtime/test_cases.py",
    ),
    Fault(
        "runtime/features/tensor_parallel.py",
        "context.transport(task).all_reduce(total_BE, task.axes)",
        "context.transport(task)",
        "balance of a sample is judged on a rank's part of its tokens",
        "runtime/test_cases.py",
    ),
    Fault(
        "runtime/features/tensor_parallel.py",
        "if not context.counts_once(task):",
        "if context.counts_once(task) is None:",
        "the loss of shared tokens counts once per shard of the vocabulary",
        "runtime/test_cases.py",
    ),
    Fault(
        "features/expert_sharding/feature.py",
        "return _counts_known_to_all(_copied(fused, (*BETWEEN, Op.EXPERTS), self.shards))",
        "return _copied(fused, (*BETWEEN, Op.EXPERTS), self.shards)",
        "shards do not know what other shards receive",
        "step features runtime/test_cases.py",
    ),
    # ---- order, races and edges ----------------------------------------------------------------------------
    Fault(
        "runtime/executor.py",
        "for name, count in call.waits:",
        "for name, count in ():",
        "threads do not wait for each other",
        "runtime/test_lanes.py",
    ),
    Fault(
        "runtime/streams.py",
        "needed = [ends[wanted] for wanted in call.waits if wanted[0] is not Lane.HOST]",
        "needed = list[Event]()",
        "streams do not wait for each other",
        "runtime/test_stream_lanes.py runtime/recorded",
    ),
    Fault(
        "runtime/streams.py",
        "self._kind.record_stream(tensor, stream)",
        "del tensor",
        "memory is given away while another stream reads it",
        "runtime/test_stream_lanes.py runtime/recorded",
    ),
    Fault(
        "step/passes.py",
        "last.setdefault(state, []).append(task.name)",
        "last[state] = [task.name]",
        "gradients are reduced after one of the tasks that add to them",
        "step features",
    ),
    Fault(
        "features/recompute/feature.py",
        'out.append(task.reading({**task.inputs, "saved": (name,)}))',
        "out.append(task)",
        "backward reads what the first run has saved, which keeps nothing",
        "runtime/features/sharded_optimizer/test_steps.py runtime/test_cases.py",
    ),
    Fault(
        "features/sample_placement/feature.py",
        "reads=(*task.reads, *norms)",
        "reads=task.reads",
        "experts compute the norm of carried rows, and do not say that they read it",
        "features",
    ),
    Fault(
        "features/expert_replicas/feature.py",
        "writes=(parameters_of(replicas),) if there else ()",
        "writes=()",
        "bringing replicas writes no state, so their readers have no order",
        "features",
    ),
    Fault(
        "features/sharded_optimizer/feature.py",
        'inputs["scale"] = (norm.name,)',
        'inputs["scale"] = inputs["gradients"]',
        "updates do not wait for the norm by which they are clipped",
        "features",
    ),
    # ---- what ranks must agree about -----------------------------------------------------------------------
    Fault(
        "runtime/features/sample_placement.py",
        "if digest != everyone[0]]",
        "if digest != digest]",
        "ranks use new homes of samples that differ",
        "runtime/features/sample_placement/test_sample_moves.py",
    ),
    Fault(
        "runtime/features/sample_placement.py",
        "None if way is None else way.back",
        "way",
        "gradients of samples that moved take the way forward once more",
        "runtime/features/sample_placement/test_sample_moves.py runtime/test_cases.py",
    ),
    Fault(
        "runtime/features/sample_placement.py",
        "experts_Tk = experts_Tk.masked_fill(~valid_BL.reshape(-1, 1), -1)",
        "experts_Tk = experts_Tk.masked_fill(valid_BL.reshape(-1, 1) & False, -1)",
        "padding counts among the rows that the next layer expects",
        "runtime/features/sample_placement/test_sample_moves.py moe/test_sample_moves.py",
    ),
    Fault(
        "runtime/fingerprints.py",
        'f"{e.layer} {e.name} {e.trained} {e.dtype} {e.shape}"',
        'f"{e.layer} {e.name} {e.dtype} {e.shape}"',
        "a rank that has frozen a parameter is not noticed",
        "runtime/fingerprints runtime/checks",
    ),
    Fault(
        "runtime/statistics.py",
        "return crc32(repr(terms).encode())",
        "return crc32(repr(terms[:2]).encode())",
        "ranks may divide their losses by different numbers",
        "adapt/test_cut.py adapt/test_training.py",
    ),
    # ---- the MoE layer -------------------------------------------------------------------------------------
    Fault(
        "moe/experts.py",
        "weight_of_row_R % choice.weights.shape[1] == 0",
        "weight_of_row_R % choice.weights.shape[1] >= 0",
        "every choice of a token brings its residual",
        "moe",
    ),
    Fault(
        "moe/routers.py",
        "x_TM.to(torch.promote_types(x_TM.dtype, torch.float32))",
        "x_TM.to(x_TM.dtype)",
        "the router computes in bfloat16",
        "moe",
    ),
    Fault(
        "moe/routers.py",
        'PiecewiseBalance("sequence", _share)',
        'PiecewiseBalance("sequence", _share_of_all)',
        "balance by sample is judged by microbatch",
        "moe",
    ),
    Fault(
        "moe/products.py",
        "weight_EMH.grad, add=not first)",
        "weight_EMH.grad, add=False)",
        "a second slice's weight gradients replace the first one's",
        "moe",
    ),
    Fault(
        "moe/layer.py",
        "masked_TM = x_TM.masked_fill(~tokens.valid_T.unsqueeze(1), 0)",
        "masked_TM = x_TM",
        "a NaN in padding reaches sums",
        "moe",
    ),
    # ---- prices --------------------------------------------------------------------------------------------
    Fault(
        "features/routed.py",
        'Move("all_to_all", group, sizes, own * len(sizes), row_bytes)',
        'Move("all_to_all", group, sizes, sizes, row_bytes)',
        "a reduce-scatter is priced as receiving what it sends",
        "cost lab/virtual/test_stack.py",
    ),
    Fault(
        "cost/moves.py",
        "key = task.microbatch, task.cut.held, self.column(task), outwards",
        "key = task.microbatch, task.cut.held, outwards",
        "all layers have the joined rows of the first: a stale key",
        "cost runtime/test_node_once.py",
    ),
    Fault(
        "cost/step.py",
        "= self._kinds[layer], op, phase, samples, chunk, piece",
        "= self._kinds[layer], op, samples, chunk, piece",
        "backward costs what forward does: a stale key",
        "cost",
    ),
    Fault(
        "cost/step.py",
        "columns = self._row_columns if outward else 0",
        "columns = self._row_columns",
        "columns that only leave home are priced on the way back",
        "cost runtime/test_layout_bytes.py runtime/features/sample_placement/test_sample_moves.py",
    ),
    # ---- where samples and experts go ----------------------------------------------------------------------
    Fault(
        "features/sample_placement/assign.py",
        "kept_IN -= self.moved_rows[:, None] * away_IN",
        "kept_IN += self.moved_rows[:, None] * away_IN",
        "moving a sample to another node is a gain",
        "features/sample_placement",
    ),
    Fault(
        "features/expert_replicas/problem.py",
        "self.computed - self.traffic.diagonal()",
        "self.computed",
        "a rank receives its own rows",
        "features/expert_replicas",
    ),
    Fault(
        "routing/links.py",
        "np.maximum(sent.sum(axis=1), sent.sum(axis=0))",
        "sent.sum(axis=1)",
        "only what a link sends takes time",
        "features/expert_replicas",
    ),
    # ---- plans ---------------------------------------------------------------------------------------------
    Fault(
        "features/dispatch/feature.py",
        'd.comm_dtype,\n    affects=("cut", "cost", "memory"),',
        'd.comm_dtype,\n    affects=("cut", "memory"),',
        "prices of compressed rows are those of plain ones: a stale key",
        "plan/test_problem.py plan/test_prices.py plan/test_lossy.py plan/test_search.py",
    ),
    Fault(
        "cost/step.py",
        "if self.shape.more:",
        "if False:",
        "layers that a pass of one's own treats differently have one price",
        "plan/test_problem.py",
    ),
    Fault(
        "plan/memory.py",
        "return sum(-(-size // owners[kind]) for kind, size in trained.items())",
        "return sum(trained.values())",
        "a sharded optimiser saves no memory",
        "plan/test_memory.py",
    ),
    Fault(
        "plan/bound.py",
        "waits_s=first.first_s + last.last_s)",
        "waits_s=first.first_s + 2 * last.last_s)",
        "a bound is above what orders reach",
        "plan/test_bound.py",
    ),
    Fault(
        "plan/search.py",
        "if self._bounds.seconds(choice) >= screen.best_s:",
        "if self._bounds.seconds(choice) >= 0.8 * screen.best_s:",
        "a search leaves out plans that may be better",
        "plan/test_search.py",
    ),
    Fault(
        "plan/stages.py",
        "sizes[-1] -= away[1]",
        "sizes[-1] -= 0",
        "every stage that holds the last layer reduces the head's gradients",
        "plan/test_pipeline.py",
    ),
    # ---- decisions -----------------------------------------------------------------------------------------
    Fault(
        "decision/record.py",
        "forward = self.chunks or READERS[self.schedule].usual_chunks",
        "forward = self.chunks or 1",
        "a schedule's usual number of chunks is forgotten",
        "decision schedule/test_systems.py schedule/test_catalogue.py",
    ),
    Fault(
        "decision/record.py",
        'return 0 if self.experts == "none" else self.replica_slots',
        "return self.replica_slots",
        "ranks have replica slots where experts stay",
        "decision plan/test_moving.py",
    ),
    Fault(
        "decision/record.py",
        "if value != FIELDS[name].default:",
        "if value is not None:",
        "a registered decision's default makes another plan",
        "decision test_own_decision.py",
    ),
    Fault(
        "topology/faults.py",
        "if watcher is None or watcher.watches:",
        "if watcher is None or watcher.store:",
        "a vote waits until the timeout for a rank that has gone",
        "topology/test_faults.py",
    ),
)


@dataclass(frozen=True)
class Found:
    """What became of a planted fault. by: the first test that failed; "" = none."""

    fault: Fault
    by: str
    took_s: float


def plant(fault: Fault, sources: Path) -> None:
    """Put a fault into a copy of `src`."""
    file = sources / "penstock" / fault.file
    text = file.read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, f"{fault.file} has {fault.old!r} {text.count(fault.old)} times"
    file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def look(fault: Fault) -> Found:
    """Plant a fault in a copy and run the tests that should find it."""
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "src"
        shutil.copytree(PACKAGE.parent, sources, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        plant(fault, sources)
        command = [sys.executable, "-m", "pytest", "-x", "-rfE", "-p", "no:cacheprovider", "-m", "not soak"]
        command += [f"tests/{each}" for each in fault.tests.split()]
        environ = {**os.environ, "PYTHONPATH": str(sources)}
        try:
            run = subprocess.run(
                command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return Found(fault, "(they hang)", time.monotonic() - begun_s)
    failed = FAILED.search(run.stdout)
    by = failed[1] if failed else "" if run.returncode == 0 else f"(exit code {run.returncode})"
    return Found(fault, by, time.monotonic() - begun_s)


def main() -> int:
    """Plant the faults that are asked for, and say what finds them."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int, help="of faults, from 1; default: all")
    parser.add_argument("--at-once", type=int, default=1, help="faults that are tried at the same time")
    asked = parser.parse_args()
    numbers = asked.numbers or range(1, len(FAULTS) + 1)
    missed = 0
    with ThreadPoolExecutor(asked.at_once) as pool:
        tried = pool.map(look, [FAULTS[number - 1] for number in numbers])
        for number, found in zip(numbers, tried, strict=True):
            missed += not found.by
            fault = found.fault
            print(f"{number:3} {fault.file}: {fault.breaks}", flush=True)
            print(f"    {found.by or 'NOT FOUND'}  ({found.took_s:.0f} s)", flush=True)
    print(f"{len(numbers) - missed} of {len(numbers)} faults were found")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
