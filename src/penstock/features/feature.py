"""`Feature`: what one feature brings to a step, in one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.features.field import Field
from penstock.features.routed import Routed
from penstock.ops.base import OpSpec
from penstock.step.rewrite import Pass
from penstock.step.shape import StepShape


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A way to train that a step may use or not: what it means, before anything runs.

    How it runs on ranks stands in the folder of the same name in `runtime/features/`.

    Attributes:
        name: Its name and that of its folder.
        title: What it does, in a sentence without a stop.
        source: Where it comes from: the paper or system, and its section.
        ops: The ops of its tasks.
        passes: Returns the passes that a step of this shape needs, in the order in which those of one stage
            run.
        why_not: Returns why a step of this shape cannot have the feature, with what to do; "" = it can, or
            does not use it.
        fields: What a plan decides about it, by the name in `Decision`.
        routed: What its tasks do rank by rank, by op, once it is known how a step is routed.
        row_columns: Returns the numbers that a row brings to experts beside its hidden state.
    """

    name: str
    title: str
    source: str
    ops: tuple[OpSpec, ...] = ()
    passes: Callable[[StepShape], Sequence[Pass]] = lambda shape: ()
    why_not: Callable[[StepShape], str] = lambda shape: ""
    fields: Mapping[str, Field] = field(default_factory=dict)
    routed: Mapping[str, Routed] = field(default_factory=dict)
    row_columns: Callable[[StepShape], int] = lambda shape: 0
