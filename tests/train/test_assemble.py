"""What a configuration comes to on a device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.config import ConfigError
from penstock.data import DataConfig
from penstock.decision import PlacementConfig, ScheduleConfig
from penstock.device import Cpu, using
from penstock.models import ModelConfig
from penstock.models.decoder import Attention, Rotary, on_meta
from penstock.moe import MoEConfig
from penstock.runtime.gradients import sizes_bytes
from penstock.runtime.parts import shape_of, sharing_of
from penstock.topology import Control, Layout, ParallelConfig
from penstock.train.assemble import (
    COPIES,
    RANK_BYTES,
    base_shape,
    build_machinery,
    build_stack,
    check_devices,
    check_processes,
    check_run,
    device_bytes,
    first_plan,
    gradient_bytes,
    host_bytes,
    memory_of,
    model_of,
    on_device,
    workload,
)
from penstock.train.config import Precision, RunConfig, TrainConfig
from penstock.train.optimizer import OptimizerConfig
from tests.support.ranks import Pools
from tests.support.recording.gpu import recorded

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

    def memory_bytes(self, device: torch.device, sharing: int = 1) -> int:
        del device
        return (1 << 30) // sharing


def shared_by(rank: int) -> tuple[str, bool, str, int]:
    """Which setting is refused, and whether the error names the transport that allows it; which where ranks
    ask for different ones; and the bytes of a rank's share."""
    with using(OneForAll()):
        with pytest.raises(ConfigError) as caught:
            check_devices(CPU, Control(rank, 2), "direct")
        share_bytes = device_bytes(CPU, Control(rank, 2))
    with recorded():
        check_devices(CPU, Control(rank, 2), "staged")
        with pytest.raises(ConfigError) as other:
            check_devices(CPU, Control(rank, 2), "staged" if rank else "direct")
    hint = "parallel.transport=staged" in caught.value.hint
    return caught.value.key, hint, other.value.key, share_bytes


def test_two_ranks_on_one_gpu_are_refused_on_both_or_share_its_memory(ranks: Pools) -> None:
    wanted = "parallel.processes", True, "parallel.transport", 1 << 29
    assert ranks(2).run(shared_by) == [wanted] * 2


def test_processors_have_nothing_to_stage() -> None:
    with pytest.raises(ConfigError) as caught:
        build_machinery(ALONE, CPU, ParallelConfig(transport="staged"), "float32")
    assert caught.value.key == "parallel.transport"


# ---- what a run needs of memory ----------------------------------------------------------------------------


TWO = Layout(world_size=2, ep_size=2, rank=0)

MODELS = [
    (ModelConfig(num_layers=3), MoEConfig()),
    (ModelConfig(num_layers=5, moe_layers=(1, 4), ffn_hidden_size=96), MoEConfig(expert="gelu")),
    (ModelConfig(num_layers=1, hidden_size=64, vocab_size=500), MoEConfig(gate="cosine", gate_proj_size=32)),
    (ModelConfig(num_layers=2, moe_layers=(1,)), MoEConfig(shared_ffn_hidden_size=48, expert_bias_rate=0.1)),
]


def run_of(
    model: ModelConfig,
    moe: MoEConfig,
    batch: int = 4,
    *,
    separate_documents: bool = False,
    optimizer: OptimizerConfig | None = None,
) -> RunConfig:
    return RunConfig(
        model=model,
        moe=moe,
        schedule=ScheduleConfig(microbatches=1),
        data=DataConfig(batch_per_device=batch, separate_documents=separate_documents),
        optimizer=optimizer or OptimizerConfig(),
    )


@pytest.mark.parametrize(("model", "moe"), MODELS)
@pytest.mark.parametrize(("tp_size", "ep_size", "etp_size"), [(1, 1, 1), (1, 2, 1), (2, 1, 2), (4, 2, 2)])
def test_the_state_is_that_of_the_real_model(
    model: ModelConfig, moe: MoEConfig, tp_size: int, ep_size: int, etp_size: int
) -> None:
    layout = Layout(world_size=4, ep_size=ep_size, rank=0, tp_size=tp_size, etp_size=etp_size)
    real = model_of(model, moe, layout)
    state_bytes = COPIES * sum(parameter.nbytes for parameter in real.parameters())
    assert memory_of(run_of(model, moe), layout).state_bytes == state_bytes
    experts = sum(p.nbytes for layer in range(model.num_layers) for p in real.expert_parameters(layer))
    whole = state_bytes // COPIES
    share = (whole - experts) / layout.dp_size + experts / layout.edp_size
    for shared in (2, 3):  # moments; gradients, too
        config = OptimizerConfig(zero_stage=2 if shared == 3 else 1)
        found = memory_of(run_of(model, moe, optimizer=config), layout).state_bytes
        assert found == pytest.approx((COPIES - shared) * whole + shared * share, abs=8)


@pytest.mark.parametrize(
    ("model", "moe", "batch", "key"),
    [
        (ModelConfig(hidden_size=65536, num_heads=64, num_layers=1024), MoEConfig(), 1, "model.hidden_size"),
        (ModelConfig(vocab_size=1 << 24, hidden_size=8192), MoEConfig(), 1, "model.vocab_size"),
        (ModelConfig(), MoEConfig(num_experts=1 << 16, moe_ffn_hidden_size=1 << 20), 1, "moe.num_experts"),
        (ModelConfig(seq_len=1 << 20), MoEConfig(), 1 << 20, "data.batch_per_device"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(
    model: ModelConfig, moe: MoEConfig, batch: int, key: str
) -> None:
    with pytest.raises(
        ConfigError, match=r"each of 2 ranks needs .* GiB at the least .* 8\.00 GiB in all"
    ) as caught:
        check_run(run_of(model, moe, batch), TWO, there_bytes=8 << 30, sharing=2)
    assert caught.value.key == key


def test_what_fits_is_accepted_to_the_byte() -> None:
    config = run_of(ModelConfig(), MoEConfig())
    need = memory_of(config, TWO).total_bytes
    check_run(config, TWO, there_bytes=2 * need, sharing=2)
    with pytest.raises(ConfigError):
        check_run(config, TWO, there_bytes=2 * need - 1, sharing=2)


def test_masks_of_separate_documents_count() -> None:
    """What attention keeps for its backward, as torch's hooks see it: in every block a number per pair."""
    model, moe = ModelConfig(num_layers=2, seq_len=256), MoEConfig()
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == (256, 256):
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    documents_BL = torch.zeros(3, 256, dtype=torch.int64)
    x_BLM = torch.randn(3, 256, model.hidden_size, dtype=torch.bfloat16)
    attention = Attention(model, Rotary(model)).bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept_alive = [attention(x_BLM, documents_BL) for _ in range(model.num_layers)]
    need = memory_of(run_of(model, moe, 3, separate_documents=True), TWO)
    assert need.masks_bytes == sum(kept.values()) and len(kept_alive) == model.num_layers
    assert need.total_bytes - need.masks_bytes == memory_of(run_of(model, moe, 3), TWO).total_bytes


def test_masks_that_do_not_fit_are_named() -> None:
    model, moe = ModelConfig(seq_len=1 << 16), MoEConfig()
    check_run(run_of(model, moe), TWO, there_bytes=64 << 30)
    with pytest.raises(
        ConfigError, match=r"masks of documents \d+\.\d GiB.* square of model\.seq_len"
    ) as caught:
        check_run(run_of(model, moe, separate_documents=True), TWO, there_bytes=64 << 30)
    assert caught.value.key == "data.separate_documents"


def test_more_processes_than_memory_are_refused() -> None:
    most = host_bytes() // RANK_BYTES
    check_processes(most)
    with pytest.raises(ConfigError, match=f"Use {most} or fewer"):
        check_processes(most + 1)


def test_the_estimate_allocates_nothing() -> None:
    """Weights of a terabyte are counted on a machine that has none of it."""
    model = ModelConfig(hidden_size=1 << 17, num_heads=1, num_layers=4)
    need = memory_of(run_of(model, MoEConfig(), 1), Layout(world_size=1, ep_size=1, rank=0))
    assert need.total_bytes > 1 << 40
    assert torch.get_default_device().type == "cpu"
