"""Finds settings of section [placement] without effect, or impossible ones, before any process starts."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from penstock.config import ConfigError
from penstock.decision import Decision, PlacementConfig, ScheduleConfig
from penstock.mesh import holders
from penstock.moe import MoEConfig
from penstock.plan.plan_config import AUTO, GIVEN
from penstock.step.shape import FORM_TOKENS
from penstock.topology import ParallelConfig

READ_WITH: Final = {"samples": ("solver", "prediction"), "experts": ("guest_slots", "split", "every")}
"""Settings that count only where samples move, and only where experts move."""

NONE: Final = "none"

UNBOUNDED: Final = "moe.bound_factor=none"
DROPLESS: Final = "dropless routing (moe.capacity_factor=none, moe.gate=softmax)"


def check_moves(placement: PlacementConfig, source: str, parallel: ParallelConfig, ranks: int) -> None:
    """Raise ConfigError for a move without effect, or a setting of a move that is not made.

    source: of the plan; a plan file itself determines what moves. ranks: total number.
    """
    if source not in (GIVEN, AUTO):
        return
    for what, settings in READ_WITH.items():
        asked = getattr(placement, what)
        if asked == NONE or (asked == AUTO and source == GIVEN):
            _check_unread(placement, what, settings, source)
        elif asked != AUTO:
            _check_effect(f"placement.{what}", asked, parallel, ranks)


def check_movable(
    placement: PlacementConfig, schedule: ScheduleConfig | None, moe: MoEConfig, parallel: ParallelConfig
) -> None:
    """Raise ConfigError for a move that a step of this schedule, routing and layout cannot make.

    schedule: None where a search chooses one with which samples and experts can move.
    """
    choice = (schedule or ScheduleConfig()).decision("flat", placement)
    if choice.samples != NONE and (found := _why_samples_stay(choice, moe, parallel)):
        raise ConfigError("placement.samples", choice.samples, *_or_none(found, "samples"))
    if choice.experts != NONE and (found := _why_experts_stay(choice, moe, parallel)):
        raise ConfigError("placement.experts", choice.experts, *_or_none(found, "experts"))


def _why_samples_stay(choice: Decision, moe: MoEConfig, parallel: ParallelConfig) -> tuple[str, str] | None:
    """Return why samples cannot move, and what to use instead; None if they can."""
    if moe.one_copy_per_rank or moe.joins_rows:
        said = "one_copy_per_rank = true" if moe.one_copy_per_rank else f"dispatch = {moe.dispatch}"
        use = "moe.one_copy_per_rank=false" if moe.one_copy_per_rank else "moe.dispatch=flat"
        return f"with moe.{said} one row serves several experts and cannot be told apart by sample", use
    if moe.bound_factor is not None:
        return f"with {_bounded(moe)}, and ranks would have other samples than then", UNBOUNDED
    if not moe.exchanges_counts:
        return f"with {_fixed(moe)}, and which tokens they are of depends on the samples of a rank", DROPLESS
    if moe.aux_loss_group == "microbatch":
        why = "moe.aux_loss_group = microbatch judges balance by the samples that share a rank"
        return why, "moe.aux_loss_group=global"
    shared = [f"parallel.{name}" for name in ("mp_size", "esp_size") if getattr(parallel, name) > 1]
    if shared and choice.form != "gather":
        form, other = _form(choice)
        return (
            f"with {form} ranks that share attention or experts ({', '.join(shared)}) send rows of each "
            "other's samples, or sums of them, and no rank alone has a sample's rows to move"
        ), other
    return None


def _why_experts_stay(choice: Decision, moe: MoEConfig, parallel: ParallelConfig) -> tuple[str, str] | None:
    """Return why experts cannot move, and what to use instead; None if they can."""
    if moe.bound_factor is not None:
        return f"with {_bounded(moe)}, whoever computes them, so a guest would spare nothing", UNBOUNDED
    if not moe.exchanges_counts:
        return f"with {_fixed(moe)}, whoever computes them, so a guest would spare nothing", DROPLESS
    if parallel.mp_size > 1 and FORM_TOKENS[choice.form] == "replicated":
        form, other = _form(choice)
        return (
            f"with {form} all ranks that share attention (parallel.mp_size = {parallel.mp_size}) have the "
            "same rows, and would each send them to another host of an expert"
        ), other
    return None


def _fixed(moe: MoEConfig) -> str:
    limited = moe.capacity_factor is not None
    said = f"capacity_factor = {moe.capacity_factor:g}" if limited else f"gate = {moe.gate}"
    return f"moe.{said} every expert has a fixed number of rows"


def _bounded(moe: MoEConfig) -> str:
    return (
        f"moe.bound_factor = {moe.bound_factor:g} every expert has the rows that earlier steps needed at most"
    )


def _form(choice: Decision) -> tuple[str, str]:
    """Return the setting from which the form of experts' shards comes, and what to use instead."""
    if choice.reads("expert_form"):
        return f"schedule.expert_form = {choice.form}", "schedule.expert_form=gather"
    return f"schedule.name = {choice.schedule}", "schedule.name=flowmoe"


def _or_none(found: tuple[str, str], what: str) -> tuple[str, str]:
    why, other = found
    return why, f"Use {other}, or set placement.{what}=none."


def _check_unread(placement: PlacementConfig, what: str, settings: tuple[str, ...], source: str) -> None:
    usual = {field.name: field.default for field in fields(placement)}
    for name in settings:
        if (value := getattr(placement, name)) != usual[name]:
            asked = getattr(placement, what)
            means = "" if asked == NONE else f', which means "none" with plan.source = {source}'
            why = f"changes nothing where {what} stay (placement.{what} = {asked}{means})"
            raise ConfigError(f"placement.{name}", value, why, f"Leave it out, or let {what} move.")


def _check_effect(key: str, asked: str, parallel: ParallelConfig, ranks: int) -> None:
    ep_size = holders(ranks, parallel.esp_size) if parallel.ep_size is None else parallel.ep_size
    if ep_size == 1:
        why = "moves between the ranks of experts, and with parallel.ep_size = 1 every rank has all of them"
        hint = (
            "Leave it out, or spread the experts over more ranks: parallel.processes=2 runs on any machine."
        )
        raise ConfigError(key, asked, why, hint)
