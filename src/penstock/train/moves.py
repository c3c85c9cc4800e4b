"""Finds settings of section [placement] that would have no effect, before any process starts."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from penstock.config import ConfigError
from penstock.decision import PlacementConfig
from penstock.mesh import holders
from penstock.plan.plan_config import AUTO, GIVEN
from penstock.topology import ParallelConfig

READ_WITH: Final = {"samples": ("solver", "prediction"), "experts": ("guest_slots", "split", "every")}
"""Settings that count only where samples move, and only where experts move."""

NONE: Final = "none"


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
