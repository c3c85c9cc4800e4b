"""Steps that others have measured on GPUs, and what is predicted of them by data sheets alone."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.autotune.choose.layouts import run_subject
from penstock.cost import StateTypes
from penstock.cost.clusters import find_cluster
from penstock.decision import Decision
from penstock.plan.models import open_models
from penstock.plan.predict import adding_s, predict_s
from penstock.step.shape import Recompute


@dataclass(frozen=True, kw_only=True)
class Measured:
    """An update of another system. changes: of the open model; passes: whose gradients add up."""

    model: str
    cluster: str
    batch: int
    seq_len: int
    ep_size: int
    passes: int
    seconds: float
    changes: dict[str, Any]
    recompute: Recompute = "none"


MEASURED = {
    "AutoModel": Measured(
        model="qwen3-30b-a3b",
        cluster="8xH100",
        batch=4,
        seq_len=4096,
        ep_size=8,
        passes=16,
        seconds=21.773,
        changes={},
        recompute="blocks",
    ),
    "Megatron": Measured(  # 0.14, as SimuMax has measured it
        model="deepseek-v2",
        cluster="8xB200",
        batch=1,
        seq_len=4096,
        ep_size=8,
        passes=4,
        seconds=0.3666,
        changes={"num_hidden_layers": 4},
    ),
    "MLPerf 6.0": Measured(  # with MXFP8, and the tokenizer of Llama 3.1
        model="gpt-oss-20b",
        cluster="2x4xGB300,nvlink=8,products=float8",
        batch=3,
        seq_len=8192,
        ep_size=1,
        passes=1,
        seconds=0.4929,
        changes={"vocab_size": 128256},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_a_measured_step_is_predicted_within_15_percent(name: str, tmp_path: Path) -> None:
    each, path = MEASURED[name], tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(open_models()[each.model].read_text()) | each.changes))
    sizes = f"data.batch_per_device={each.batch}", f"model.seq_len={each.seq_len}"
    run = [*sizes, f"parallel.ep_size={each.ep_size}", "optimizer.zero_stage=1"]
    problem = run_subject(path, run, find_cluster(each.cluster)).problem
    work = replace(problem.workload, state=StateTypes(parameter_bytes=2))
    problem = replace(problem, passes=each.passes, workload=work)
    choice = Decision(schedule="flowmoe", microbatches=min(2, each.batch), recompute=each.recompute)
    choice = replace(choice, all_reduce_chunk_bytes=1 << 28)
    plan = problem.plan(choice)
    predicted_s = predict_s(problem, choice, plan) + (each.passes - 1) * adding_s(problem, choice, plan)
    assert predicted_s == pytest.approx(each.seconds, rel=0.15)
