"""Cases of ranks that share attention and experts: which layouts there are, and a step that fits all."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import fields, replace
from typing import Any

from penstock.decision import ScheduleConfig
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.step.shape import FORM_TOKENS, ExpertForm
from tests.support.parity import Case

FORMS = tuple(FORM_TOKENS)
TOKENS = ("split", "replicated")
Layout = tuple[int, int, int, int]
"""World, tp, ep, etp."""
MODEL, MOE = ({field.name for field in fields(section)} for section in (ModelConfig, MoEConfig))
CUT = {"microbatches", "chunks", "backward_chunks", "all_reduce_chunk_bytes", "expert_form"}


def layout_case(layout: Layout, schedule: str, form: ExpertForm, **settings: Any) -> Case:
    """A step on a layout. settings: fields of the case, of its model or of its MoE layer.

    Widths are such that parts of different tensors have different sizes; a sample's 5 tokens do not divide.
    """
    world_size, tp_size, ep_size, etp_size = layout
    length = 5 if tp_size < 8 else 9
    model: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_heads": 8, "seq_len": length}
    model |= {"num_key_value_heads": max(4, tp_size), "head_dim": 4, "vocab_size": 24, "ffn_hidden_size": 40}
    moe: dict[str, Any] = {"num_experts": 8, "top_k": 2, "moe_ffn_hidden_size": 24, "expert": "swiglu"}
    moe |= {"aux_loss_coeff": 0.1, "z_loss_coeff": 0.01, "min_capacity": 1}
    case = Case(
        world_size=world_size,
        ep_size=ep_size,
        tp_size=tp_size,
        etp_size=etp_size,
        schedule=ScheduleConfig(  # cut into everything that can be cut
            name=schedule, microbatches=2, chunks=3, all_reduce_chunk_bytes=2048, expert_form=form
        ),
        model=ModelConfig(**model | _some(settings, MODEL)),
        moe=MoEConfig(**moe | _some(settings, MOE)),
        batch=3,
        double=True,
    )
    return replace(case, **_some(settings, settings.keys() - MODEL - MOE))


def tiny_case(world_size: int = 1, schedule: str = "flowmoe", **settings: Any) -> Case:
    """The least step in which everything happens, of experts that are spread over all ranks.

    settings: fields of the case, of its schedule, of its model or of its MoE layer.
    """
    model = {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "seq_len": 5, "vocab_size": 11}
    moe = {"num_experts": 4, "moe_ffn_hidden_size": 8}
    return Case(
        schedule=ScheduleConfig(name=schedule, **{"microbatches": 2} | _some(settings, CUT)),
        model=ModelConfig(**model | _some(settings, MODEL)),
        moe=MoEConfig(**moe | _some(settings, MOE)),
        **{"world_size": world_size, "ep_size": world_size, "batch": 2}
        | _some(settings, settings.keys() - CUT - MODEL - MOE),
    )


def _some(settings: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name in names}
