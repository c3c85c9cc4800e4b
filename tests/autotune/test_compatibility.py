"""What settings alone can tell is told before ranks start, and is what building a stack would find."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.autotune.planned import Planned, with_choice
from penstock.autotune.problem import (
    assumed_problem,
    check_compatible,
    dispatches_of,
    given_choice,
    open_runs,
)
from penstock.config import ConfigError, load
from penstock.graph import RefusalError
from penstock.runtime import Machinery
from penstock.runtime.executor import ThreadLanes
from penstock.runtime.groups import SilentTransport
from penstock.runtime.transport import Transports
from penstock.schedule import SCHEDULES
from penstock.topology import Control, Layout
from penstock.train.assemble import build_optimizer, build_stack
from penstock.train.config import RunConfig
from tests.support.cli import Cli
from tests.support.draws import draws
from tests.support.runs import write_config
from tests.support.searching import short_search

pytestmark = pytest.mark.slow

T = TypeVar("T")

SIZES = (
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_heads=4",
    "model.seq_len=8",
    "model.vocab_size=16",
    "model.ffn_hidden_size=32",
    "moe.num_experts=8",
    "moe.moe_ffn_hidden_size=8",
    "moe.gate_proj_size=8",
    "data.batch_per_device=2",
)

VALUES: dict[str, tuple[Any, ...]] = {
    "moe.gate": ("softmax", "noisy", "sigmoid", "cosine", "expert_choice", "soft"),
    "moe.permutation": ("auto", "sort", "index", "einsum"),
    "moe.capacity_factor": ("none", 1.0),
    "moe.dispatch": ("auto", "flat", "hierarchical_1d", "hierarchical_2d", "node_once"),
    "moe.one_copy_per_rank": ("false", "true"),
    "moe.comm_dtype": ("none", "bfloat16", "int8"),
    "moe.aux_loss_group": ("global", "sequence", "microbatch"),
    "moe.shared_ffn_hidden_size": (0, 8),
    "moe.expert_bias_rate": (0, 0.01),
    "moe.top_k": (1, 2, 3),
    "model.moe_layers": ("none", "[0]", "[]"),
    "model.dropout": (0, 0.1),
    "parallel.ep_size": ("none", 1, 2),
    "parallel.tokens": ("split", "replicated"),
    "parallel.ranks_per_node": ("none", 1, 2),
    "schedule.name": tuple(SCHEDULES),
    "schedule.microbatches": (1, 2),
    "schedule.chunks": ("none", 1, 2),
    "schedule.backward_chunks": ("none", 1, 3),
    "schedule.expert_form": ("none", "gather", "s1", "s2", "baseline"),
    "placement.samples": ("auto", "none", "netmoe"),
    "placement.experts": ("auto", "none", "pro_prophet", "shadowing", "planned"),
    "placement.split": ("auto", "exact", "last_step"),
    "plan.recompute": ("none", "experts", "blocks"),
    "optimizer.zero_stage": ("0", "1", "2", "auto"),
    "train.precision": ("float32", "bfloat16"),
}

# Few at a time: with many, nearly every example has a pair that a section refuses by itself.
few_settings = st.lists(
    st.sampled_from([f"{key}={value}" for key, several in VALUES.items() for value in several]), max_size=4
)
sharing = st.tuples(
    st.sampled_from([f"parallel.tp_size={size}" for size in (1, 2, 4)]),
    st.sampled_from([f"parallel.etp_size={size}" for size in (1, 2, 4)]),
)
"""What ranks share decides most of what goes together."""


class Agreeing(Control):
    """Stands for ranks that all say the same."""

    def __init__(self, ranks: int) -> None:
        super().__init__(0, 1)
        self.ranks = ranks

    def gather(self, mine: T, purpose: str) -> list[T]:
        del purpose
        return [mine] * self.ranks


def build(config: RunConfig, layout: Layout) -> None:
    """What a rank builds before its first step, with every dispatch that may be chosen."""
    transport = SilentTransport(layout.mesh, layout.rank)
    machinery = Machinery(
        lanes=ThreadLanes(transport.abort),
        transports=Transports(transport, transport),
        layout=layout,
        control=Agreeing(layout.world_size),
        device=torch.device("cpu"),
        autocast_dtype=torch.bfloat16 if config.train.precision == "bfloat16" else None,
    )
    for run in open_runs(config):
        problem = assumed_problem(run, layout)
        asked = given_choice(run, problem)
        for name in dispatches_of(problem, asked):
            choice = replace(asked, dispatch=name)
            planned = Planned(problem=problem, choice=choice, plan=problem.plan(choice))
            built = with_choice(run, choice)
            moving = planned.moving(run.placement)
            stack = build_stack(built, machinery, plan=planned.plan, moving=moving)
            build_optimizer(stack, built.optimizer)
            stack.close()


@draws(800)
@given(st.sampled_from([2, 4, 8]), sharing, few_settings)
def test_the_early_check_finds_what_building_finds(
    ranks: int, shared: tuple[str, str], settings: list[str]
) -> None:
    try:
        config = load(RunConfig, None, [*SIZES, *shared, *settings]).resolved(ranks)
        layout = Layout.build(config.parallel, ranks, 0, config.moe.num_experts, ranks)
    except ConfigError:
        return  # told earlier still
    early = None
    try:
        check_compatible(config, layout)
    except (ConfigError, RefusalError) as error:
        early = error
    if early is None:
        with short_search():
            build(config, layout)
        return
    with pytest.raises((ConfigError, RefusalError)), short_search():
        build(config, layout)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (("parallel.tp_size=2", "moe.gate=soft"), "moe.gate"),
        (("parallel.etp_size=2", "moe.comm_dtype=int8"), "parallel.etp_size"),
        (("parallel.etp_size=2", "moe.one_copy_per_rank=true"), "moe.one_copy_per_rank"),
        (("moe.dispatch=node_once",), "moe.dispatch"),
        (("moe.dispatch=hierarchical_2d", "plan.mode=auto"), "moe.dispatch"),
        (("plan.mode=auto", "plan.layout=auto", "moe.dispatch=hierarchical_2d"), "moe.dispatch"),
        (("placement.experts=shadowing", "placement.split=exact"), "placement.split"),
        (("moe.num_experts=1024", "moe.one_copy_per_rank=true"), "moe.one_copy_per_rank"),
        (
            ("schedule.expert_form=s2", "moe.dispatch=hierarchical_2d", "parallel.tp_size=2"),
            "moe.dispatch",
        ),
    ],
)
def test_the_command_says_it_before_ranks_start(
    tmp_path: Path, cli: Cli, settings: tuple[str, ...], key: str
) -> None:
    assert cli.refuses(["train", write_config(tmp_path), *settings]).startswith(f"penstock: {key} = ")


@pytest.mark.parametrize(
    ("command", "settings", "key"),
    [
        ("profile", ("parallel.tp_size=2", "moe.gate=soft", "moe.capacity_factor=none"), "moe.gate"),
        ("profile", ("moe.dispatch=hierarchical_1d",), "moe.dispatch"),
        ("bench", ("parallel.etp_size=2", "moe.comm_dtype=int8"), "parallel.etp_size"),
        ("bench", ("--plan", "parallel.etp_size=2", "moe.comm_dtype=int8"), "moe.comm_dtype"),
        ("bench", ("--virtual", "--schedules", "sequential,flowmoe+hierarchical_2d"), "moe.dispatch"),
    ],
)
def test_commands_that_measure_say_it_too(
    cli: Cli, command: str, settings: tuple[str, ...], key: str
) -> None:
    assert cli.refuses([command, *settings]).startswith(f"penstock: {key} = ")
