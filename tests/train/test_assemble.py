"""What a configuration comes to on a device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.config import ConfigError
from penstock.decision import PlacementConfig, ScheduleConfig
from penstock.device import Cpu, using
from penstock.models import ModelConfig
from penstock.models.meta import on_meta
from penstock.moe import MoEConfig
from penstock.runtime.checks import shape_of, sharing_of
from penstock.runtime.gradients import sizes_bytes
from penstock.runtime.recorded.gpu import recorded
from penstock.topology import Control, Layout, ParallelConfig
from penstock.train.assemble import (
    base_shape,
    build_machinery,
    build_stack,
    check_devices,
    first_plan,
    gradient_bytes,
    model_of,
    on_device,
    workload,
)
from penstock.train.config import Precision, RunConfig, TrainConfig
from penstock.train.memory_check import device_bytes
from tests.support.ranks import Pools

CONFIG = RunConfig(
    model=ModelConfig(num_layers=1, hidden_size=8, num_heads=2, seq_len=4, vocab_size=11),
    moe=MoEConfig(num_experts=2, moe_ffn_hidden_size=8),
    schedule=ScheduleConfig(name="moe_pipeline"),
    placement=PlacementConfig(samples="netmoe"),
)
ALONE = Layout(world_size=1, ep_size=1, rank=0)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("asked", "device", "element_bytes"),
    [("auto", CUDA, 2), ("auto", CPU, 4), ("float32", CUDA, 4), ("bfloat16", CPU, 2)],
)
def test_a_step_is_planned_in_the_precision_that_it_runs_in(
    asked: Precision, device: torch.device, element_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    config = on_device(replace(CONFIG, train=TrainConfig(precision=asked)), device)
    sizes = gradient_bytes(config.model, config.moe, ALONE)
    assert workload(config, ALONE, sizes).element_bytes == element_bytes
    assert base_shape(config, ALONE).carries_residual is (element_bytes == 4)


@pytest.mark.parametrize("moe_layers", [None, (1, 2, 3, 4, 5), (3, 4, 5), (0, 1), (0, 2, 4), (5,)])
@pytest.mark.parametrize(
    "layout",
    [ALONE, Layout(world_size=4, ep_size=2, rank=0, tp_size=2), Layout(world_size=4, ep_size=2, rank=0)],
)
def test_layers_that_are_alike_have_gradients_as_if_all_were_built(
    moe_layers: tuple[int, ...] | None, layout: Layout
) -> None:
    model = replace(CONFIG.model, num_layers=6, moe_layers=moe_layers, vocab_size=12)
    with on_meta():
        parts = model_of(model, CONFIG.moe, layout)
    shape = shape_of([part.moe for part in parts.parts], sharing_of(layout, CONFIG.moe.aux_loss_group))
    for sharded in (False, True):
        edp = sharded or layout.edp_size > 1
        wanted = sizes_bytes(parts, parts, shape, edp=edp)
        assert gradient_bytes(model, CONFIG.moe, layout, sharded=sharded) == wanted


def test_a_stack_that_rounds_refuses_rows_that_bring_the_residual_stream() -> None:
    config = replace(CONFIG, train=TrainConfig(precision="bfloat16"))
    machinery = build_machinery(ALONE, CPU, config.parallel, "bfloat16")
    stack = build_stack(config, machinery)
    assert not stack.plan.shape.packed_residual
    exact = replace(stack.base_shape, carries_residual=True)
    plan = first_plan(config, ALONE, exact, stack.gradients.sizes_bytes)
    with pytest.raises(ValueError, match=r"autocast in bfloat16, which would round it.*train\.precision"):
        stack.adopt(plan)
    stack.compute_in(None)
    stack.adopt(plan)
    with pytest.raises(ValueError, match="would round it"):
        stack.compute_in(torch.bfloat16)
    stack.close()


class OneForAll(Cpu):
    """A device that is the same for all ranks, as where there are more ranks than GPUs."""

    def identity(self, device: torch.device) -> str:
        return f"GPU of {device}"


def shared_by(rank: int) -> tuple[str, bool]:
    """Which setting is refused, and whether the error names the transport that allows it."""
    with using(OneForAll()), pytest.raises(ConfigError) as caught:
        check_devices(torch.device("cpu"), Control(rank, 2), "direct")
    with recorded():
        check_devices(torch.device("cpu"), Control(rank, 2), "staged")
    return caught.value.key, "parallel.transport=staged" in caught.value.hint


@pytest.mark.slow
def test_two_ranks_on_one_gpu_are_refused_on_both(ranks: Pools) -> None:
    assert ranks(2).run(shared_by) == [("parallel.processes", True)] * 2


def asked_by_the_last(rank: int) -> str:
    with recorded(), pytest.raises(ConfigError) as caught:
        check_devices(CPU, Control(rank, 2), "staged" if rank else "direct")
    return caught.value.key


@pytest.mark.slow
def test_all_ranks_must_ask_for_the_same_transport(ranks: Pools) -> None:
    assert ranks(2).run(asked_by_the_last) == ["parallel.transport"] * 2


def test_processors_have_nothing_to_stage() -> None:
    with pytest.raises(ConfigError) as caught:
        build_machinery(ALONE, CPU, ParallelConfig(transport="staged"), "float32")
    assert caught.value.key == "parallel.transport"


class HalfOfAll(OneForAll):
    """The same, with memory of its own."""

    def memory_bytes(self, device: torch.device, sharing: int = 1) -> int:
        del device
        return (1 << 30) // sharing


def memory_on_a_shared_gpu(rank: int) -> int:
    with using(HalfOfAll()):
        return device_bytes(CPU, Control(rank, 2))


@pytest.mark.slow
def test_ranks_on_one_gpu_share_its_memory(ranks: Pools) -> None:
    assert ranks(2).run(memory_on_a_shared_gpu) == [1 << 29] * 2
