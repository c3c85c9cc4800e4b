"""Parm's S2 (INFOCOM 2024): rows are dealt after the gate, and gathered while others cross nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from penstock.decision import Decision, GradientBytes
from penstock.schedule.sequential import Sequential
from penstock.step import StepShape


class ParmS2(Sequential):
    """All tokens are routed alike on ranks that share attention, and their rows are dealt to these in turn.

    A row goes to every shard of its expert. Combine and the gather after it run at the same time (SAA):
    while a slice is gathered inside the node, the next one crosses nodes. `chunks` is the number of
    slices; where no ranks share attention nothing is gathered, and `chunks` has no effect.

    parm_s2: one column = one slot, · = idle
    forward
    layer    L0                                                        L1
    compute  EM0 ·   ·   TA0 ·   GT0 ·  ·   ·  X0 ·  ·    ·     U0 ·   TA0 ·   GT0 ·  ·   ·  X0 ·  ·    ·
    intra    ·   ER0 TC0 ·   TR0 ·   ·  SD0 ·  ·  ·  SG0  SG0.1 ·  TC0 ·   TR0 ·   ·  SD0 ·  ·  ·  SG0  SG0.1
    inter    ·   ·   ·   ·   ·   ·   N0 ·   D0 ·  C0 C0.1 ·     ·  ·   ·   ·   ·   N0 ·   D0 ·  C0 C0.1 ·

    layer
    compute  U0 ·   HV0 ·   HL0 ·
    intra    ·  HC0 ·   HX0 ·   ·
    inter    ·  ·   ·   ·   ·   ST
    backward
    layer    L1                                                     L0
    compute  HL0 HV0 ·   U0 ·   ·  X0 ·  ·    ·     GT0 ·   TA0 ·   U0 ·   ·  X0 ·  ·    ·     GT0 ·   TA0 ·
    intra    ·   ·   HC0 ·  SG0 ·  ·  ·  SD0  SD0.1 ·   TR0 ·   TC0 ·  SG0 ·  ·  ·  SD0  SD0.1 ·   TR0 ·   TC0
    inter    ·   ·   ·   ·  ·   C0 ·  D0 D0.1 ·     ·   ·   ·   ·   ·  ·   C0 ·  D0 D0.1 ·     ·   ·   ·   ·

    layer
    compute  ·   EM0 ·     ·     ·     ·
    intra    ER0 ·   ·     ·     ·     ·
    inter    ·   ·   AR0.0 PR0.0 AR1.0 PR1.0
    """

    name = "parm_s2"
    reads: ClassVar[tuple[str, ...]] = ("chunks",)
    usual_chunks = 2
    expert_form = "s2"

    def shape(self, shape: StepShape, choice: Decision, gradients: GradientBytes) -> StepShape:
        whole = super().shape(shape, choice, gradients)
        gathers = shape.sharing.tp_size > 1
        return replace(whole, pair_slices=choice.degrees[0] if gathers else 1)
