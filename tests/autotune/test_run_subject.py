"""Every setting of a run either has an effect on what is planned, has none by this list, or is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.autotune.choose.layouts import run_subject
from penstock.config import ConfigError
from penstock.cost import ClusterFile
from penstock.train.config import RunConfig

FILE = ClusterFile(name="by hand", nodes=2, ranks_per_node=2, device="H100")

COUNTS: dict[str, str] = {
    "model.preset": "flowmoe/gpt2-tiny",
    "model.num_layers": "8",
    "model.hidden_size": "256",
    "model.num_heads": "8",
    "model.num_key_value_heads": "2",
    "model.head_dim": "8",
    "model.seq_len": "64",
    "model.vocab_size": "512",
    "model.moe_layers": "[0]",
    "model.ffn_hidden_size": "64",
    "model.tie_word_embeddings": "true",
    "moe.num_experts": "16",
    "moe.top_k": "4",
    "moe.moe_ffn_hidden_size": "512",
    "moe.expert": "gelu",
    "moe.shared_ffn_hidden_size": "64",
    "moe.gate": "expert_choice moe.capacity_factor=1.0",
    "moe.capacity_factor": "1.5",
    "moe.bound_factor": "1.5",
    "moe.min_capacity": "8",
    "moe.slots_per_expert": "8 moe.gate=soft",
    "moe.dispatch": "hierarchical_1d",
    "moe.one_copy_per_rank": "true",
    "moe.comm_dtype": "int8",
    "moe.aux_loss_group": "microbatch",
    "moe.num_groups": "4 moe.num_groups=2 moe.group_top_k=2",
    "moe.group_top_k": "1 moe.num_groups=4 moe.group_top_k=2",
    "schedule.microbatches": "4",
    "schedule.chunks": "2",
    "schedule.backward_chunks": "2",
    "schedule.all_reduce_chunk_bytes": "12345",
    "schedule.expert_form": "s1 parallel.etp_size=2",
    "schedule.priority": "critical_path",
    "schedule.name": "fsmoe",
    "placement.samples": "netmoe",
    "placement.experts": "planned",
    "placement.replica_slots": "2 placement.experts=planned",
    "placement.split": "last_step placement.experts=planned",
    "placement.solver": "kuhn_munkres placement.samples=netmoe",
    "placement.every": "2 placement.experts=planned",
    "placement.prediction": "none placement.samples=netmoe",
    "plan.layout": "auto",
    "plan.comm_dtype": "auto",
    "plan.recompute": "blocks",
    "plan.budget": "0.5",
    "parallel.ep_size": "2",
    "parallel.tp_size": "2",
    "parallel.etp_size": "2",
    "parallel.tokens": "replicated parallel.tp_size=2",
    "data.batch_per_device": "4",
    "optimizer.zero_stage": "1",
    "train.precision": "float32",
    "output.loads": "false",
}
"""Another value than the default, and settings without which it would mean nothing."""

REFUSED = {
    "plan.mode": "fixed",
    "plan.file": "plan.json plan.mode=replay",
    "plan.cluster": "fsmoe-testbed-a",
    "plan.profile_s": "3.0",
    "plan.trials": "1",
    "plan.tuner": "grid",
    "plan.samples": "4",
    "plan.sample_steps": "5",
    "parallel.processes": "3",
    "parallel.ranks_per_node": "4",
    **{
        f"cluster.{each}": "0.5"
        for each in (
            *("flops_per_s", "memory_bytes_per_s", "link_latency_s", "link_bytes_per_s"),
            *("intra_latency_s", "intra_bytes_per_s", "task_overhead_s"),
        )
    },
    "cluster.link_rate_of": "node",
    "cluster.issue_task_s": "1e-5",
    "cluster.issue_kernel_s": "1e-6",
}

NO_MATTER = {
    # No time and no bytes of a step depend on these, as far as steps are priced.
    "model.rope_theta": "1e6",
    "model.rms_norm_eps": "1e-5",
    "model.dropout": "0.1",
    "moe.gate_proj_size": "64",
    "moe.norm_topk_prob": "true",
    "moe.routed_scaling_factor": "2.0",
    "moe.expert_bias_rate": "0.1",
    "moe.permutation": "sort",
    "moe.aux_loss_coeff": "0.1",
    "moe.z_loss_coeff": "0.1",
    # How a run watches its plan and orders it again, and what it does beside steps.
    "schedule.refine_after": "2",
    "plan.watch": "false",
    "plan.drift_threshold": "0.3",
    "plan.drift_steps": "16",
    "parallel.timeout_s": "30.0",
    "parallel.start_timeout_s": "30.0",
    "parallel.checkpoint_timeout_s": "30.0",
    "parallel.send_buffer_bytes": "1024",
    "parallel.reduce_scatter": "in_order",  # the same sums, in an order of their own
    "parallel.transport": "staged",  # the file's link times are those of the transport they were taken with
    "data.path": "elsewhere",
    "data.mixture": "{a=1}",
    "data.tokenizer": "elsewhere",
    "data.end_of_document": "x data.tokenizer=elsewhere",
    "data.field": "body",
    "data.separate_documents": "true",
    "data.cache": "elsewhere",
    "data.held_out_fraction": "0.1",
    "data.suffixes": '[".md"]',
    "optimizer.lr": "0.1",
    "optimizer.min_lr_ratio": "0.2",
    "optimizer.warmup_steps": "3",
    "optimizer.weight_decay": "0.2",
    "optimizer.beta1": "0.5",
    "optimizer.beta2": "0.5",
    "optimizer.eps": "1e-7",
    "optimizer.clip_grad_norm": "0.5 optimizer.zero_stage=1",
    **{f"train.{each}": "3" for each in ("steps", "seed", "eval_every", "eval_batches", "checkpoint_every")},
    **{f"train.{each}": "3" for each in ("keep_checkpoints", "log_every", "max_skipped_steps")},
    "train.resume": "true",
    "output.dir": "elsewhere",
    "output.tensorboard": "false",
    "output.trace_steps": "1",
    "output.routing": "true",
    "output.routing_samples": "true output.routing=true",
    "metrics.wandb": "true",
    "metrics.wandb_project": "x",
    "metrics.wandb_entity": "x",
    "metrics.wandb_name": "x",
    "metrics.wandb_tags": '["x"]',
}

ELSEWHERE = {
    "schedule.more": "decisions of one's own: tests/plan/test_forced.py",
    "model.config": "a file with sizes: tests/models/test_qwen3_moe.py, tests/adapt/test_run_command.py",
    "model.model_type": "what that file says",
    "model.config_sha256": "what that file says",
}


def settings(section: Any, before: str = "") -> Iterator[str]:
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from settings(value, f"{before}{field.name}.")
        elif field.init and field.compare:
            yield before + field.name


def planned(path: Path, overrides: Mapping[str, str]) -> tuple[object, ...]:
    subject = run_subject(path, [f"{key}={value}" for key, value in overrides.items()], FILE)
    return subject.problem, subject.sharded, subject.movable, subject.precision, subject.budget, subject.notes


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planned") / "run.toml"
    path.write_text("[model]\nnum_layers = 2\n")
    return path


def test_every_setting_is_in_one_of_the_lists() -> None:
    listed = [*COUNTS, *REFUSED, *NO_MATTER, *ELSEWHERE]
    assert sorted(listed) == sorted(settings(RunConfig()))


@pytest.mark.parametrize("key", [*COUNTS, *NO_MATTER])
def test_a_setting_has_an_effect_or_none(key: str, config: Path) -> None:
    value, *others = {**COUNTS, **NO_MATTER}[key].split(" ")
    usual = dict(other.split("=", 1) for other in others)
    assert (planned(config, {**usual, key: value}) != planned(config, usual)) is (key in COUNTS)


@pytest.mark.parametrize("key", REFUSED)
def test_a_setting_that_contradicts_the_command_is_refused_by_name(key: str, config: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(config, {key: REFUSED[key]})
    assert caught.value.key == key


def test_what_the_file_says_of_a_run_without_a_search_is_left_to_that_run(config: Path) -> None:
    path = config.with_name("given.toml")
    of_a_run = 'mode = "fixed"\ntuner = "grid"\ntrials = 1\n'
    path.write_text(f'{config.read_text()}[schedule]\nname = "lina"\n[plan]\n{of_a_run}')
    assert planned(path, {}) == planned(config, {})
    assert dict(run_subject(path, ["schedule.chunks=2"], FILE).problem.forced) == {"chunks": 2}
