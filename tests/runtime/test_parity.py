"""The numerics contract: every schedule on P real ranks equals one plain process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.decision import ScheduleConfig
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from tests.steps import PLAIN
from tests.support.close import check_close, digest
from tests.support.draws import draws
from tests.support.parity import Case, check_parity, merge, run_step
from tests.support.ranks import Pools

NAMES = sorted(PLAIN)
CUTS = [name for name in NAMES if name not in ("dense_overlap", "lina")]
"""Every way to cut a step: those two order what others cut likewise."""


@st.composite
def cases(draw: st.DrawFn, world_size: int, schedule: str) -> Case:
    """Random shapes, routing and cuts; numbers that do not divide on purpose."""
    ep_size = draw(st.sampled_from([n for n in (1, 2, 4) if world_size % n == 0]))
    num_experts = ep_size * draw(st.integers(1, 3))
    heads = draw(st.sampled_from([1, 2, 4]))
    batch = draw(st.integers(1, 5))
    num_layers = draw(st.integers(1, 3))
    moe_layers = draw(st.none() | st.sets(st.integers(0, num_layers - 1), min_size=1).map(sorted).map(tuple))
    steer = draw(st.sampled_from(["no", "idle", "busy"])) if num_experts > 1 else "no"
    return Case(
        world_size=world_size,
        ep_size=ep_size,
        schedule=ScheduleConfig(
            name=schedule,
            microbatches=draw(st.integers(1, batch)),
            chunks=draw(st.integers(1, 7)),
            backward_chunks=draw(st.none() | st.integers(1, 4)),
            all_reduce_chunk_bytes=draw(st.sampled_from([512, 3000, 1 << 20])),
        ),
        model=ModelConfig(
            num_layers=num_layers,
            hidden_size=draw(st.integers(3, 18)),
            num_heads=heads,
            num_key_value_heads=draw(st.sampled_from([1, heads])),
            head_dim=2 * draw(st.integers(1, 4)),
            seq_len=draw(st.integers(1, 9)),
            vocab_size=13,
            moe_layers=moe_layers,
        ),
        moe=MoEConfig(
            num_experts=num_experts,
            top_k=draw(st.integers(1, min(4, num_experts))),
            moe_ffn_hidden_size=draw(st.integers(3, 20)),
            expert=draw(st.sampled_from(["gelu", "swiglu"])),
            capacity_factor=draw(st.none() | st.sampled_from([0.5, 1.0, 1.3])),
            min_capacity=draw(st.integers(1, 4)),
            aux_loss_coeff=0.1,
            z_loss_coeff=0.01,
            aux_loss_group=draw(st.sampled_from(["global", "microbatch"])),
        ),
        batch=batch,
        seed=draw(st.integers(0, 1000)),
        double=True,
        ignore_labels=draw(st.booleans()),
        packed=draw(st.booleans()),
        idle_expert=0 if steer == "idle" else None,
        busy_experts=tuple(range(num_experts // ep_size)) if steer == "busy" else (),
    )


def plain(world_size: int, schedule: str, **moe: object) -> Case:
    """A fixed case of a size at which float32 rounding is far below the tolerance."""
    sizes = {"num_experts": 4, "top_k": 2, "moe_ffn_hidden_size": 24, "aux_loss_coeff": 0.05} | moe
    return Case(
        world_size=world_size,
        ep_size=None,
        schedule=ScheduleConfig(name=schedule, microbatches=2, chunks=3, all_reduce_chunk_bytes=2048),
        model=ModelConfig(num_layers=2, hidden_size=16, num_heads=2, seq_len=7, vocab_size=11),
        moe=MoEConfig(**sizes),  # type: ignore[arg-type]  # a dict of settings is what a caller varies
        batch=3,
    )


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("world_size", [*(pytest.param(n, marks=pytest.mark.quick) for n in (1, 2)), 4])
@pytest.mark.slow
def test_any_case_in_float64(ranks: Pools, world_size: int, schedule: str) -> None:
    @draws(20 if world_size < 4 else 15)
    @given(case=cases(world_size, schedule))
    def check(case: Case) -> None:
        check_parity(ranks, case)

    check()


@pytest.mark.every_value
@pytest.mark.slow
@pytest.mark.parametrize("schedule", CUTS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_float32_within_rounding(
    ranks: Pools, world_size: int, schedule: str, capacity_factor: float | None
) -> None:
    check_parity(ranks, plain(world_size, schedule, capacity_factor=capacity_factor))


@pytest.mark.parametrize("schedule", CUTS)
def test_an_expert_without_tokens_has_a_zero_gradient(ranks: Pools, schedule: str) -> None:
    case = replace(plain(4, schedule, num_experts=8), idle_expert=3, double=True)
    result = check_parity(ranks, case)
    gradient = result.gradients["model.layers.0.mlp.experts.w_up.3"]
    assert gradient.abs().sum() == 0
    assert result.gradients["model.layers.0.mlp.experts.w_up.2"].abs().sum() > 0


@pytest.mark.every_value
@pytest.mark.slow
@pytest.mark.parametrize("schedule", CUTS)
@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_one_rank_gets_every_token(ranks: Pools, schedule: str, capacity_factor: float | None) -> None:
    moe = {"num_experts": 8, "capacity_factor": capacity_factor}
    case = replace(plain(4, schedule, **moe), busy_experts=(4, 5), double=True)
    result = check_parity(ranks, case)
    for expert in range(8):
        used = result.gradients[f"model.layers.1.mlp.experts.w_up.{expert}"].abs().sum() > 0
        assert bool(used) == (expert in (4, 5)), f"expert {expert}"


@pytest.mark.every_value
@pytest.mark.slow
@pytest.mark.parametrize("schedule", CUTS)
@pytest.mark.parametrize("ep_size", [1, 2])
def test_replicated_experts(ranks: Pools, schedule: str, ep_size: int) -> None:
    check_parity(ranks, replace(plain(4, schedule), ep_size=ep_size, double=True))


@pytest.mark.every_value
@pytest.mark.slow
@pytest.mark.parametrize("schedule", CUTS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_same_seed_same_bits(ranks: Pools, world_size: int, schedule: str) -> None:
    case = plain(world_size, schedule)
    first, second = (merge(ranks(world_size).run(run_step, case)) for _ in range(2))
    assert first.loss == second.loss
    assert digest(first.gradients) == digest(second.gradients)
    assert digest(first.parameters) == digest(second.parameters)
    other = merge(ranks(world_size).run(run_step, replace(case, seed=1)))
    assert digest(other.parameters) != digest(first.parameters)


@pytest.mark.parametrize("world_size", [1, 4])
def test_dropout_does_not_depend_on_schedule_or_layout(ranks: Pools, world_size: int) -> None:
    """Masks are keyed by sample and place: all schedules and two layouts draw the same ones."""
    results = []
    for schedule in CUTS:
        case = plain(world_size, schedule)
        model = replace(case.model, dropout=0.3)
        case = replace(case, model=model, double=True, batch=12 // world_size)
        results.append(merge(ranks(world_size).run(run_step, case)))
    base = merge(ranks(1).run(run_step, replace(case, world_size=1, batch=12)))
    undropped = merge(
        ranks(1).run(run_step, replace(case, world_size=1, batch=12, model=plain(1, "flowmoe").model))
    )
    assert abs(base.loss - undropped.loss) > 1e-6
    for result in results:
        assert abs(result.loss - base.loss) <= 1e-10 * base.loss
        for name, gradient in base.gradients.items():
            check_close(result.gradients[name], gradient, 1e-10, name)
