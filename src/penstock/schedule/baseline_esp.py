"""DeepSpeed-MoE with sharded experts: gathered rows cross nodes once for every rank that has them."""

from __future__ import annotations

from typing import ClassVar

from penstock.schedule.sequential import Sequential


class BaselineESP(Sequential):
    """Rows are gathered by all shards of their experts (BG), cross nodes, and come home to all of them.

    Ranks that share attention have the same tokens, and each sends and computes all of their rows, so experts
    do the same work several times. Nothing overlaps. It serves for comparison.

    baseline_esp: one column = one slot, · = idle
    forward
    layer    L0                                                     L1
    compute  EM0 ·   ·   TA0 ·   GT0 ·  ·   ·  X0 ·   ·  ·   U0 ·   TA0 ·   GT0 ·  ·   ·  X0 ·   ·  ·   U0 ·
    intra    ·   ER0 TC0 ·   TR0 ·   ·  BG0 ·  ·  BR0 ·  BS0 ·  TC0 ·   TR0 ·   ·  BG0 ·  ·  BR0 ·  BS0 ·  HC0
    inter    ·   ·   ·   ·   ·   ·   N0 ·   D0 ·  ·   C0 ·   ·  ·   ·   ·   ·   N0 ·   D0 ·  ·   C0 ·   ·  ·

    layer
    compute  HV0 ·   HL0 ·
    intra    ·   HX0 ·   ·
    inter    ·   ·   ·   ST
    backward
    layer    L1                                                  L0
    compute  HL0 HV0 ·   U0 ·   ·  ·   X0 ·  ·   GT0 ·   TA0 ·   U0 ·   ·  ·   X0 ·  ·   GT0 ·   TA0 ·   ·
    intra    ·   ·   HC0 ·  BS0 ·  BR0 ·  ·  BG0 ·   TR0 ·   TC0 ·  BS0 ·  BR0 ·  ·  BG0 ·   TR0 ·   TC0 ER0
    inter    ·   ·   ·   ·  ·   C0 ·   ·  D0 ·   ·   ·   ·   ·   ·  ·   C0 ·   ·  D0 ·   ·   ·   ·   ·   ·

    layer
    compute  EM0 ·     ·     ·     ·
    intra    ·   ·     ·     ·     ·
    inter    ·   AR0.0 PR0.0 AR1.0 PR1.0
    """

    name = "baseline_esp"
    reads: ClassVar[tuple[str, ...]] = ()
    expert_form = "baseline"
