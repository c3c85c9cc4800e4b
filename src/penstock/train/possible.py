"""Finds settings that cannot be used together, or have no effect, before any process starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from penstock.config import ConfigError, IndivisibleError
from penstock.data import DataConfig
from penstock.decision import Decision, PlacementConfig, ScheduleConfig
from penstock.families.known import FAMILIES
from penstock.mesh import group_sizes, holders
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.plan.plan_config import AUTO, FIXED, REPLAY, Mode
from penstock.step.shape import FORM_TOKENS
from penstock.topology import ParallelConfig

FREE: Final = {
    "model": ("config", "seq_len"),
    "moe": ("dispatch", "comm_dtype", "bound_factor", "aux_loss_coeff"),
}
"""Settings of a model that its file does not decide."""

READ_WITH: Final = {"samples": ("solver", "prediction"), "experts": ("replica_slots", "split", "every")}
"""Settings that count only where samples move, and only where experts move."""

NONE: Final = "none"


# ---- what ranks share --------------------------------------------------------------------------------------


def check_shares(model: ModelConfig, moe: MoEConfig, parallel: ParallelConfig, ranks: int) -> None:
    """Raise IndivisibleError, with the nearest valid size, for a size that does not divide what it cuts.

    Args:
        ranks: Number of all ranks; sizes of groups that they cannot form are not proposed.

    Raises:
        ConfigError: If there are more ranks than a sample has tokens.
    """
    if model.of_transformers:
        family = FAMILIES[model.model_type]
        if parallel.etp_size > 1 and not family.form.narrows:
            why = f"a parameter of a {model.model_type} has several rows for every expert, which are not cut"
            raise ConfigError(
                "parallel.etp_size", parallel.etp_size, why, "Use 1, and spread them with ep_size."
            )
        if parallel.tp_size > 1 and family.attention is None:
            why = f"{family.uncut}, so ranks cannot share the attention of a {model.model_type}"
            raise ConfigError("parallel.tp_size", parallel.tp_size, why, "Use 1.")
    shared = {
        "model.num_heads": model.num_heads,
        "model.num_key_value_heads": model.key_value_heads,
        "model.vocab_size": model.vocab_size,
    }
    if not all(model.has_experts):
        shared["model.ffn_hidden_size"] = model.dense_hidden_size
    valid = [size for size in _common(shared, ranks) if size <= model.seq_len]
    _check("parallel.tp_size", parallel.tp_size, shared, valid, heads_of=model.hidden_size)
    if parallel.tp_size > model.seq_len:
        why = f"every rank needs a token of each sample, and samples have model.seq_len = {model.seq_len}"
        nearest = f"Nearest valid: {_nearest(valid, parallel.tp_size)}."
        raise ConfigError("parallel.tp_size", parallel.tp_size, why, nearest)
    experts = {"moe.moe_ffn_hidden_size": moe.moe_ffn_hidden_size}
    _check("parallel.etp_size", parallel.etp_size, experts, _common(experts, ranks))


def _check(key: str, parts: int, shared: Mapping[str, int], valid: list[int], *, heads_of: int = 0) -> None:
    """Raise IndivisibleError unless `parts` divides all of `shared`; heads must divide `heads_of`, too."""
    for name, number in shared.items():
        if number % parts:
            why = f"must divide {name} ({number}), which is cut into as many equal parts"
            multiples = list(range(parts, number + parts + 1, parts))
            if name == "model.num_heads":
                multiples = [heads for heads in multiples if heads_of % heads == 0]
            other = f"; or {name}={_nearest(multiples, number)}" if multiples else ""
            raise IndivisibleError(key, parts, why, f"Nearest valid: {_nearest(valid, parts)}{other}.")


def _common(shared: Mapping[str, int], ranks: int) -> list[int]:
    """Return the sizes of groups of ranks that divide all of these numbers."""
    return [size for size in group_sizes(ranks) if all(each % size == 0 for each in shared.values())]


def _nearest(valid: Iterable[int], to: int) -> int:
    return min(valid, key=lambda each: (abs(each - to), each))


# ---- models of transformers --------------------------------------------------------------------------------


def check_sections(
    path: Path, sections: Mapping[str, Mapping[str, Any]], model: ModelConfig, moe: MoEConfig
) -> None:
    """Raise ConfigError for a setting that is not the file's, or that the model does not have.

    Args:
        path: The model's `config.json` or its folder.
        sections: The settings that the file decides, by section.
        model: The user's section [model], laid over the file's settings.
        moe: The user's section [moe], laid over the file's settings.
    """
    for name, section in (("model", model), ("moe", moe)):
        for field in fields(section):
            value, decided = getattr(section, field.name), sections[name].get(field.name, field.default)
            if field.name not in FREE[name] and value != decided:
                why = f"the model is that of {path}, and there it is {decided}"
                hint = f"Leave it out, or make another {path.name}."
                raise ConfigError(f"{name}.{field.name}", value, why, hint)
    if moe.aux_loss_coeff and not sections["family"]["router_loss"]:
        why = f"the model of {path} has no router loss"
        raise ConfigError("moe.aux_loss_coeff", moe.aux_loss_coeff, why, "Leave it out.")
    positions = sections["family"]["positions"]
    if positions is not None and model.seq_len > positions:
        why = f"the model of {path} has {positions} positions"
        raise ConfigError("model.seq_len", model.seq_len, why, f"Use {positions} or fewer.")


def moving_in(model_type: str, placement: PlacementConfig, data: DataConfig) -> PlacementConfig:
    """Return the section for models of this family, where experts that cannot move stay.

    Raises:
        ConfigError: If a run uses a feature that they do not have.
    """
    family = FAMILIES[model_type]
    if data.separate_documents and not family.separates_documents:
        why = f"a {model_type} goes on where another document begins, in some layers at least"
        raise ConfigError("data.separate_documents", True, why, "Leave it out.")
    if family.form.moves:
        return placement
    if placement.experts not in ("auto", "none"):
        why = f"a parameter of a {model_type} has several rows for every expert, which are not moved"
        raise ConfigError("placement.experts", placement.experts, why, "Use none.")
    return replace(placement, experts="none")


# ---- what moves --------------------------------------------------------------------------------------------


def check_moves(placement: PlacementConfig, mode: Mode, parallel: ParallelConfig, ranks: int) -> None:
    """Raise ConfigError for a move without effect, or a setting of a move that is not made.

    Args:
        mode: How the plan is found; a plan file itself determines what moves.
        ranks: Number of all ranks.
    """
    if mode == REPLAY:
        return
    usual = {field.name: field.default for field in fields(placement)}
    for what, settings in READ_WITH.items():
        requested = getattr(placement, what)
        if requested == NONE or (requested == AUTO and mode == FIXED):
            means = "" if requested == NONE else f', which means "none" with plan.mode = {mode}'
            why = f"changes nothing where {what} stay (placement.{what} = {requested}{means})"
            for name in settings:
                if (value := getattr(placement, name)) != usual[name]:
                    raise ConfigError(f"placement.{name}", value, why, f"Leave it out, or let {what} move.")
        elif requested != AUTO and (parallel.ep_size or holders(ranks, parallel.etp_size)) == 1:
            why = (
                "moves between the ranks of experts, and with parallel.ep_size = 1 every rank has all of them"
            )
            hint = "Leave it out, or spread the experts over more ranks: parallel.processes=2 runs anywhere."
            raise ConfigError(f"placement.{what}", requested, why, hint)


def check_movable(
    placement: PlacementConfig, schedule: ScheduleConfig | None, moe: MoEConfig, parallel: ParallelConfig
) -> None:
    """Raise ConfigError for a move that a step of this schedule, routing and layout cannot make.

    Args:
        schedule: The given schedule; None where a search chooses one with which samples and experts can move.
    """
    choice = (schedule or ScheduleConfig()).decision("flat", placement)
    for what in READ_WITH:
        if (move := getattr(choice, what)) != NONE and (reason := _why_it_stays(what, choice, moe, parallel)):
            why, other = reason
            raise ConfigError(f"placement.{what}", move, why, f"Use {other}, or set placement.{what}=none.")


def _why_it_stays(
    what: str, choice: Decision, moe: MoEConfig, parallel: ParallelConfig
) -> tuple[str, str] | None:
    """Return why samples or experts cannot move, and what to use instead; None if they can."""
    samples, spared = what == "samples", "whoever computes them, so a replica would spare nothing"
    if samples and (moe.one_copy_per_rank or moe.joins_rows):
        said = "one_copy_per_rank = true" if moe.one_copy_per_rank else f"dispatch = {moe.dispatch}"
        use = "moe.one_copy_per_rank=false" if moe.one_copy_per_rank else "moe.dispatch=flat"
        return f"with moe.{said} one row serves several experts and cannot be told apart by sample", use
    if moe.bound_factor is not None:
        bound = f"moe.bound_factor = {moe.bound_factor:g} every expert has the rows that earlier steps needed"
        more = "and ranks would have other samples than then" if samples else spared
        return f"with {bound} at most, {more}", "moe.bound_factor=none"
    if not moe.exchanges_counts:
        limited = moe.capacity_factor is not None
        said = f"capacity_factor = {moe.capacity_factor:g}" if limited else f"gate = {moe.gate}"
        more = "and which tokens they are of depends on the samples of a rank" if samples else spared
        use = "dropless routing (moe.capacity_factor=none, moe.gate=softmax)"
        return f"with moe.{said} every expert has a fixed number of rows, {more}", use
    if samples and moe.aux_loss_group == "microbatch":
        why = "moe.aux_loss_group = microbatch judges balance by the samples that share a rank"
        return why, "moe.aux_loss_group=global"
    form, other = f"schedule.name = {choice.schedule}", "schedule.name=flowmoe"
    if choice.reads("expert_form"):
        form, other = f"schedule.expert_form = {choice.form}", "schedule.expert_form=gather"
    shared = [f"parallel.{name}" for name in ("tp_size", "etp_size") if getattr(parallel, name) > 1]
    if samples and shared and choice.form != "gather":
        why = (
            f"with {form} ranks that share attention or experts ({', '.join(shared)}) send rows of each "
            "other's samples, or sums of them, and no rank alone has a sample's rows to move"
        )
    elif not samples and parallel.tp_size > 1 and FORM_TOKENS[choice.form] == "replicated":
        why = (
            f"with {form} all ranks that share attention (parallel.tp_size = {parallel.tp_size}) have the "
            "same rows, and would each send them to another replica of an expert"
        )
    else:
        return None
    return why, other
