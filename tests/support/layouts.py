"""Cases of ranks that share attention and experts: which layouts there are, and a step that fits all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import fields, replace
from itertools import product
from typing import Any

from penstock.decision import ScheduleConfig
from penstock.mesh import group_sizes
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.schedule import SCHEDULES
from penstock.step.shape import FORM_TOKENS, ExpertForm
from tests.support.parity import Case

FORMS = tuple(FORM_TOKENS)
TOKENS = ("split", "replicated")
SIZES = (1, 2, 4)
Layout = tuple[int, int, int, int]
"""World, tp, ep, etp."""
MODEL, MOE = ({field.name for field in fields(section)} for section in (ModelConfig, MoEConfig))
CUT = {"microbatches", "chunks", "backward_chunks", "all_reduce_chunk_bytes", "expert_form"}


def layouts(world_size: int) -> Iterator[Layout]:
    """All in which ranks share something."""
    sizes = group_sizes(world_size)
    for tp_size, ep_size, etp_size in product(sizes, repeat=3):
        layout = (world_size, tp_size, ep_size, etp_size)
        if fits(dict(zip(("world_size", "tp_size", "ep_size", "etp_size"), layout, strict=True))):
            yield layout


def engines() -> list[tuple[str, ExpertForm]]:
    """Schedules, and the forms of the MoE part that they can have."""
    return [pair for pair in product(SCHEDULES, FORMS) if _has(*pair)]


def _has(schedule: str, form: str) -> bool:
    system = SCHEDULES[schedule]
    return "expert_form" in system.reads or form == (system.expert_form or FORMS[0])


def fits(known: Mapping[str, Any]) -> bool:
    """Whether there is a layout with these numbers, and a schedule with this form; some may be missing."""
    world, tp, ep, etp = (known.get(name, 1) for name in ("world_size", "tp_size", "ep_size", "etp_size"))
    if "world_size" in known and (world % tp or world % (ep * etp)):
        return False
    if {"tp_size", "etp_size"} <= known.keys() and tp * etp == 1:
        return False
    return not {"schedule", "form"} <= known.keys() or _has(known["schedule"], known["form"])


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
        schedule=schedule_of(schedule, form),
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


def schedule_of(name: str, form: ExpertForm) -> ScheduleConfig:
    """Cut into everything that can be cut."""
    return ScheduleConfig(name=name, microbatches=2, chunks=3, all_reduce_chunk_bytes=2048, expert_form=form)


def _some(settings: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name in names}
