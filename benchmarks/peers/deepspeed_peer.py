"""DeepSpeed-MoE: its MoE layer and its engine (ZeRO stage 0, or 1 where it updates) on the CPU accelerator.

Shapes: T tokens, M hidden size, E experts of this rank, R rows of one expert.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peers.frame import Frame, PeerLayer, Read
from benchmarks.peers.peer import Peer, Work, exact_factor
from benchmarks.peers.scoped import OwnGlobals, quiet, replaced
from penstock.config import ConfigError
from penstock.moe import MoEConfig, MoELayer
from penstock.moe.build import build_experts


class DeepSpeedPeer(Peer):
    """`deepspeed.moe.layer.MoE` in Penstock's decoder, stepped by a DeepSpeed engine."""

    name = "deepspeed"
    workarounds = (
        "DS_ACCELERATOR=cpu is set before the import, because DeepSpeed otherwise looks for a GPU.",
        "Its shared-memory operator is not built: DeepSpeed compiles it with a C++ compiler when it first "
        "meets a process group, and uses it for inference only.",
        "LOCAL_RANK is set while it is built, because it insists on it, whatever started the processes.",
        "Where nothing is updated, the engine gets an SGD optimiser that never steps, because without one it "
        "refuses to run backward.",
        "Its process groups are made with the run's timeout, because it gives them none and would notice a "
        "lost rank after half an hour.",
        "Its process groups are exchanged with each step, because it keeps them in variables of a module and "
        "two of it, one per transport, run in one process.",
        "Second experts are not sampled and tokens not dropped at random, because the comparison repeats "
        "the same step.",
    )
    differences = (
        "A token whose second choice is dropped gives its first choice the weight 1; Penstock keeps the "
        "router's weight. Of three or more choices the least probable tokens are dropped.",
        "The balance loss is computed, as DeepSpeed always does, and not added to the loss.",
        "Without a capacity factor DeepSpeed pads every expert to the busiest one; Penstock pads nothing.",
        "Gradients are reduced behind the backward pass, in buckets of 500 million elements (its default).",
    )

    def gradients(self) -> dict[str, Tensor]:
        return self.frame.as_penstock(_gradient)

    def close(self) -> None:
        with self._inside():
            self._engine.destroy()
            for group in _groups():
                dist.destroy_process_group(group)

    def _build(self, work: Work) -> Frame:
        _check(work.config.moe)
        with _prepared(work.layout.rank, work.config.parallel.timeout_s):
            self._state = OwnGlobals(import_module("deepspeed.utils.groups"))
            with self._inside():
                frame = Frame(work.model, work.config, work.layout, lambda: DeepSpeedLayer(work))
                self._engine = _engine(frame, work)
                self._updates = work.max_norm is not None
        return frame

    def _inside(self) -> AbstractContextManager[None]:
        return self._state.inside()

    def _run(self) -> Tensor:
        loss: Tensor = self._engine(*self.batch)
        self._engine.backward(loss)
        if self._updates:
            self._engine.step()  # clips, updates this rank's shares, gathers parameters
        return loss

    def _clear(self) -> None:
        if self._updates:
            return  # its step has
        for parameter in self.frame.parameters():
            parameter.grad = None


class DeepSpeedLayer(PeerLayer):
    """DeepSpeed's MoE around Penstock's own expert module, so that the matrix products are the same."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        moe, width = work.config.moe, work.config.model.hidden_size
        factor = 1.0 if work.slots is None else exact_factor(work.slots, work.tokens, moe)
        self.moe = MoE(
            width,
            _Expert(width, moe),
            num_experts=moe.num_experts,
            ep_size=work.layout.ep_size,
            k=moe.top_k,
            capacity_factor=factor,
            eval_capacity_factor=factor,
            min_capacity=0,
            drop_tokens=work.slots is not None,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )

    def forward(self, x_TM: Tensor) -> Tensor:
        out_TM: Tensor = self.moe(x_TM)[0]
        return out_TM

    def load(self, ours: MoELayer) -> None:
        with torch.no_grad():
            self.moe.deepspeed_moe.gate.wg.weight.copy_(ours.gate.weight)
            for name, weight_EMH in ours.experts.named_parameters():
                for expert, weight_MH in zip(self._experts(), weight_EMH, strict=True):
                    expert.experts.get_parameter(name).copy_(weight_MH.unsqueeze(0))

    def as_penstock(self, read: Read) -> dict[str, Tensor]:
        tensors = {"gate.weight": read(self.moe.deepspeed_moe.gate.wg.weight)}
        experts = self._experts()
        for name, _ in experts[0].experts.named_parameters():
            parts = [read(expert.experts.get_parameter(name)) for expert in experts]
            tensors[f"experts.{name}"] = torch.cat(parts)
        return tensors

    def _experts(self) -> list[Any]:
        return list(self.moe.deepspeed_moe.experts.deepspeed_experts)


class _Expert(nn.Module):
    """One expert, made of Penstock's module for several."""

    def __init__(self, width: int, moe: MoEConfig) -> None:
        super().__init__()
        self.experts = build_experts(width, moe, 1)

    def forward(self, rows: Tensor) -> Tensor:
        rows_RM = rows.flatten(0, -2)
        out: Tensor = self.experts(rows_RM, [len(rows_RM)]).view_as(rows)
        return out


def _check(moe: MoEConfig) -> None:
    if moe.renormalise != (moe.top_k > 1):
        why = "DeepSpeed scales the weights of several experts to sum to one, and never the weight of one"
        raise ConfigError("moe.norm_topk_prob", moe.norm_topk_prob, why, "Use none.")


@contextmanager
def _prepared(rank: int, timeout_s: float) -> Iterator[None]:
    """Run DeepSpeed on the CPU: without its operator and its output, with the run's timeout."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    make_group = partial(dist.new_group, timeout=timedelta(seconds=timeout_s))
    with quiet("DeepSpeed"), _local_rank(rank):
        # Not `import ... as`: DeepSpeed's package has another thing of this name.
        backend = import_module("deepspeed.comm.torch")
        with replaced(backend, "build_shm_op", _nothing), replaced(dist, "new_group", make_group):
            yield


@contextmanager
def _local_rank(rank: int) -> Iterator[None]:
    """Set the variable that DeepSpeed insists on, while it looks. On a CPU its value means nothing."""
    given = "LOCAL_RANK" in os.environ
    os.environ.setdefault("LOCAL_RANK", str(rank))
    try:
        yield
    finally:
        if not given:
            del os.environ["LOCAL_RANK"]


def _nothing() -> None:
    """Stand in for `build_shm_op`: there is none."""


def _engine(frame: Frame, work: Work) -> Any:
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    parameters = {"params": list(frame.parameters()), "name": "parameters"}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.config.compare.batch_per_device,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 0},
    }
    optimizer: torch.optim.Optimizer
    if work.max_norm is None:
        optimizer = torch.optim.SGD(split(parameters), lr=0.0)
    else:
        settings |= {"zero_optimization": {"stage": 1}, "gradient_clipping": work.max_norm}
        optimizer = torch.optim.AdamW(split(parameters), lr=0.0, fused=True)
    engine, *_ = deepspeed.initialize(model=frame, optimizer=optimizer, config=settings)
    return engine


def _groups() -> list[dist.ProcessGroup]:
    """Return the process groups that DeepSpeed has made in this process."""
    from deepspeed.utils import groups

    experts = (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP)
    process_groups = [group for table in experts for group in table.values()]
    return process_groups if groups._WORLD_GROUP is None else [*process_groups, groups._WORLD_GROUP]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "a parameter got no gradient"
    return parameter.grad
