"""Parm's S1 (INFOCOM 2024): tokens are split before the gate, and rows meet all shards at once."""

from __future__ import annotations

from typing import ClassVar

from penstock.schedule.sequential import Sequential


class ParmS1(Sequential):
    """Ranks that share attention route their part of the tokens each; a row goes to all shards of its expert.

    The partial sums of the shards come home in the same all-to-all and are added there. Tokens are gathered
    after unpermute, or where the next block wants them. Nothing overlaps.

    parm_s1: one column = one slot, · = idle
    forward
    layer    L0                                         L1
    compute  EM0 ·   ·   TA0 ·   GT0 ·  ·  X0 ·  U0 ·   TA0 ·   GT0 ·  ·  X0 ·  U0 ·   HV0 ·   HL0 ·
    intra    ·   ES0 TG0 ·   TS0 ·   ·  ·  ·  ·  ·  TG0 ·   TS0 ·   ·  ·  ·  ·  ·  HG0 ·   HX0 ·   ·
    inter    ·   ·   ·   ·   ·   ·   N0 D0 ·  C0 ·  ·   ·   ·   ·   N0 D0 ·  C0 ·  ·   ·   ·   ·   ST
    backward
    layer    L1                                      L0
    compute  HL0 HV0 ·   U0 ·  X0 ·  GT0 ·   TA0 ·   U0 ·  X0 ·  GT0 ·   TA0 ·   ·   EM0 ·     ·     ·
    intra    ·   ·   HG0 ·  ·  ·  ·  ·   TS0 ·   TG0 ·  ·  ·  ·  ·   TS0 ·   TG0 ES0 ·   ·     ·     ·
    inter    ·   ·   ·   ·  C0 ·  D0 ·   ·   ·   ·   ·  C0 ·  D0 ·   ·   ·   ·   ·   ·   AR0.0 PR0.0 AR1.0

    layer
    compute  ·
    intra    ·
    inter    PR1.0
    """

    name = "parm_s1"
    reads: ClassVar[tuple[str, ...]] = ()
    expert_form = "s1"
