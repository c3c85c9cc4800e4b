"""Megatron-Core: its MoE layer with the all-to-all dispatcher, and its DistributedDataParallel.

Shapes: T tokens, M hidden size, H expert hidden size, E experts of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.frame import Frame, PeerLayer, Read
from benchmarks.peers.megatron_cpu import on_cpu
from benchmarks.peers.peer import Peer, Work, exact_factor
from benchmarks.peers.scoped import OwnGlobals, quiet
from penstock.moe import MoELayer


class MegatronPeer(Peer):
    """Megatron-Core's MoE layer in Penstock's decoder, and its data parallelism."""

    name = "megatron"
    workarounds = (
        "Functions of torch.cuda (current_device, Stream, current_stream, stream) get stand-ins that do "
        "nothing while Megatron-Core runs, because it calls them without asking whether there is a GPU.",
        "The dispatcher's counts become lists where it expects arrays, because it makes arrays only of what "
        "comes from a GPU.",
        "The router is told that there is no product of Transformer Engine, because it asks for it by a name "
        "that is not defined without that package.",
        "Experts run one after the other (SequentialMLP), because the grouped ones need a GPU.",
        "Its process groups are exchanged with each step, because it keeps them in variables of a module and "
        "two of it, one per transport, run in one process.",
        "Where an expert has more slots than a rank has tokens, blank tokens are added up to the number of "
        "slots, because Megatron-Core never sends more rows than tokens: so all systems move the same bytes.",
    )
    differences = (
        "With a capacity factor the least probable tokens are dropped (its default); Penstock drops second "
        "choices and later tokens first.",
        "The router's weight travels with every row, in an all-to-all of its own: 4 bytes per row more.",
        "No balance loss and no z loss are computed.",
        "Gradients are reduced while the backward pass runs (overlap_grad_reduce), in buckets of 40 million "
        "elements (its default), so a smaller model has one bucket and nothing to overlap.",
    )

    def gradients(self) -> dict[str, Tensor]:
        return self.frame.as_penstock(_gradient)

    def close(self) -> None:
        with self._inside():
            for group in _groups():
                dist.destroy_process_group(group)
        # Hooks of the backward pass keep it, in a circle through C++ that nothing collects: without this, all
        # groups would keep their threads.
        vars(self._parallel).clear()

    def _build(self, work: Work) -> Frame:
        with quiet("megatron"):
            self._state = OwnGlobals(import_module("megatron.core.parallel_state"))
            with self._inside():
                _make_groups(work)
                settings = _settings(work)
                frame = Frame(
                    work.model, work.config, work.layout, lambda: MegatronLayer(settings, work.slots or 0)
                )
                self._parallel = _data_parallel(settings, frame)
        return frame

    @contextmanager
    def _inside(self) -> Iterator[None]:
        with self._state.inside(), on_cpu():
            yield

    def _run(self) -> Tensor:
        loss: Tensor = self._parallel(*self.batch)
        loss.backward()
        self._parallel.finish_grad_sync()
        return loss

    def _clear(self) -> None:
        self._parallel.zero_grad_buffer()


class MegatronLayer(PeerLayer):
    """Megatron-Core's MoE layer.

    Attributes:
        rows: How many tokens go in at least, blank ones behind the real ones.
    """

    def __init__(self, settings: Any, rows: int) -> None:
        super().__init__()
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
        from megatron.core.transformer.spec_utils import build_module

        self.rows, self.gated = rows, settings.gated_linear_unit
        self.moe = build_module(
            get_moe_module_spec(use_te=False, num_experts=settings.num_moe_experts), config=settings
        )
        self.moe.set_layer_number(1)

    def forward(self, x_TM: Tensor) -> Tensor:
        tokens = len(x_TM)
        filled_TM = F.pad(x_TM, (0, 0, 0, max(0, self.rows - tokens)))
        out_TM: Tensor = self.moe(filled_TM.unsqueeze(1))[0].squeeze(1)
        return out_TM[:tokens]

    def load(self, ours: MoELayer) -> None:
        weights = dict(ours.experts.named_parameters())
        with torch.no_grad():
            self.moe.router.weight.copy_(ours.gate.weight)
            for number, expert in enumerate(self.moe.experts.local_experts):
                into = [weights[name][number].t() for name in self._into()]
                expert.linear_fc1.weight.copy_(torch.cat(into))
                expert.linear_fc2.weight.copy_(weights["w_down"][number].t())

    def as_penstock(self, read: Read) -> dict[str, Tensor]:
        experts = self.moe.experts.local_experts
        tensors = {
            "gate.weight": read(self.moe.router.weight),
            "experts.w_down": torch.stack([read(e.linear_fc2.weight).t() for e in experts]),
        }
        into_EMH = torch.stack([read(e.linear_fc1.weight).t() for e in experts])
        parts = into_EMH.chunk(len(self._into()), dim=2)
        return tensors | {f"experts.{name}": part for name, part in zip(self._into(), parts, strict=True)}

    def _into(self) -> tuple[str, ...]:
        """Return Penstock's names of the matrices that Megatron-Core keeps in one, in its order."""
        return ("w_gate", "w_up") if self.gated else ("w_up",)


def _settings(work: Work) -> Any:
    """Return a TransformerConfig that describes Penstock's layer."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    config, moe = work.config, work.config.moe
    gated = moe.expert == "swiglu"
    return TransformerConfig(
        num_layers=config.model.num_layers,
        hidden_size=config.model.hidden_size,
        num_attention_heads=config.model.num_heads,
        ffn_hidden_size=moe.moe_ffn_hidden_size,
        moe_ffn_hidden_size=moe.moe_ffn_hidden_size,
        num_moe_experts=moe.num_experts,
        expert_model_parallel_size=work.layout.ep_size,
        add_bias_linear=False,
        activation_func=F.silu if gated else F.gelu,
        gated_linear_unit=gated,
        moe_router_topk=moe.top_k,
        moe_router_pre_softmax=not moe.renormalise,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_expert_capacity_factor=_factor(work),
        moe_pad_expert_input_to_capacity=work.slots is not None,
        perform_initialization=False,
        use_cpu_initialization=True,
    )


def _factor(work: Work) -> float | None:
    """Return the factor that gives the same slots: blank tokens count, so it is smaller with them."""
    if work.slots is None:
        return None
    return exact_factor(work.slots, max(work.tokens, work.slots), work.config.moe)


def _make_groups(work: Work) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=work.layout.ep_size,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,  # all of its groups are on Gloo here; these would be second ones
        distributed_timeout_minutes=work.config.parallel.timeout_s / 60,
    )


def _data_parallel(settings: Any, frame: Frame) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(settings, DistributedDataParallelConfig(overlap_grad_reduce=True), frame)


def _groups() -> list[dist.ProcessGroup]:
    """Return the process groups that Megatron-Core has made; the first stands for the default group."""
    from megatron.core import parallel_state

    return list(parallel_state._global_process_group_list or [])[1:]


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return gradient
