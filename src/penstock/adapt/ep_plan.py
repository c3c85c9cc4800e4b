"""Modules that a model's own plan of expert parallelism spreads: `ep_plan`, as transformers calls it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from torch import nn

from penstock.config import ConfigError

EpPlan = Mapping[str, str]
"""Paths in the decoder, with `*` for the number of a layer, and the style of the module at each."""

EXPERTS: Final = "ep_dispatch_experts"
"""The style of modules whose experts are spread over ranks."""

WEIGHTS: Final = "grouped_gemm"
"""The style of the stacked weights of such modules, which follow the modules."""


def check_ep_plan(ep_plan: EpPlan) -> None:
    """Raise ConfigError for a plan with modules that cannot be spread, or without experts."""
    for path, style in ep_plan.items():
        if style not in (EXPERTS, WEIGHTS):
            why = f"only modules of experts ({EXPERTS}) and their weights ({WEIGHTS}) are spread over ranks"
            raise ConfigError(
                "ep_plan", f"{path}: {style}", why, "Leave it out; the model's own code runs it."
            )
    if EXPERTS not in ep_plan.values():
        why = "names no module of experts"
        raise ConfigError("ep_plan", dict(ep_plan), why, f'Add "layers.*.mlp.experts": "{EXPERTS}".')


def brought_by(model: nn.Module) -> EpPlan | None:
    """Return the plan in a model's configuration; None if it has none that spreads experts."""
    config = getattr(model, "config", None)
    text = None if config is None else config.get_text_config()
    plan: EpPlan | None = getattr(text, "base_model_ep_plan", None)
    return plan if plan and EXPERTS in plan.values() else None


def modules_of(ep_plan: EpPlan, model: nn.Module) -> list[str]:
    """Return the paths of the modules that a plan spreads."""
    wanted = [re.escape(path).replace(r"\*", r"\d+") for path, style in ep_plan.items() if style == EXPERTS]
    pattern = re.compile(rf"(?:.+\.)?(?:{'|'.join(wanted)})")
    return [path for path, _ in model.named_modules() if pattern.fullmatch(path)]


def check_spread(ep_plan: EpPlan, model: nn.Module, experts: list[nn.Module]) -> None:
    """Raise ConfigError unless a plan spreads exactly the experts that a model is known to have."""
    named = modules_of(ep_plan, model)
    if {id(model.get_submodule(path)) for path in named} != {id(each) for each in experts}:
        there = [path for path, each in model.named_modules() if any(each is one for one in experts)]
        why = f"names {', '.join(named) or 'no module'}, and the experts are {', '.join(there)}"
        hint = "Leave it out: where this model has its experts is known."
        raise ConfigError("ep_plan", dict(ep_plan), why, hint)
