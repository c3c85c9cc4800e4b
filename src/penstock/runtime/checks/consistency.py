"""The consistency of the ranks of a stack, checked with every step: what they run, and the values they hold.

What is compared are sums over ranks, so that all ranks see a difference, at the same point, and none raises
alone. Two kinds of numbers are summed. Facts are known to the host (`fingerprints.Facts`); marks are made on
the device. On CPUs both travel in the sums of the statistics task and are read when the forward half has
ended. On GPUs reading those would make the host wait for the device. So marks are copied to the host
meanwhile and read in the step after, and facts are summed by the hosts, while the device runs the forward
half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.device import device_of
from penstock.mesh import Group
from penstock.runtime.checks.samples import (
    check_losses,
    check_samples,
    fact_of_loss,
    mark_of_samples,
    mark_of_slope,
)
from penstock.runtime.errors import ScheduleMismatchError
from penstock.runtime.fingerprints import (
    BEGAN,
    CHANGED,
    CHANGES,
    EXPERTS,
    FACTS,
    FIELDS,
    LOSS,
    NEW,
    PARAMETERS,
    RANKS,
    REPLAN,
    SAMPLES,
    SLOPE,
    TRAINING,
    VALUES,
    agree,
    check_count,
    check_distinct,
    compare,
    fingerprint,
    is_due,
    raise_mismatch,
    weight_among,
)
from penstock.runtime.gradients.model_gradients import Gradients
from penstock.runtime.handlers import Batch
from penstock.runtime.machinery import Machinery
from penstock.runtime.transport.legs import HostCounts
from penstock.topology import Control, Layout


class Consistency:
    """What is known of the ranks' consistency from step to step.

    late: whether the device's numbers are read in the next step. sends: whether sums are of all ranks. steps:
    training steps whose ranks were consistent. versions: of the parameters in the last of them, see
    `Gradients.versions`. unread: the last step's sums, and what would explain other values. doubt: the same
    where values differed when they were compared last. slope: the gradient of the loss in the last backward
    pass.
    """

    def __init__(self, gradients: Gradients, machinery: Machinery) -> None:
        self.gradients, self.layout, self.control = gradients, machinery.layout, machinery.control
        self.device, self.sends = machinery.device, machinery.transports.sends
        self.late = device_of(machinery.device).is_gpu
        self.steps = 0
        self.versions = 0
        self.unread: tuple[HostCounts, str] | None = None
        self.doubt: str | None = None
        self.slope: Tensor | None = None

    def of_step(
        self, batch: Batch, *, terms: str, seed: int, replan_request: str, training: bool
    ) -> StepConsistency:
        """Begin the comparison of a step. All ranks call it."""
        return StepConsistency(
            self, batch, terms=terms, seed=seed, replan_request=replan_request, training=training
        )

    def read_late(self) -> None:
        """Compare what the last step has summed on the device, where that was not read then.

        All ranks call it before a step. Values that differed are compared again until they are equal. Raises
        what `StepConsistency.judge` raises.
        """
        if self.unread is not None:
            (total, cause), self.unread = self.unread, None
            sums: list[float] = total.numbers.tolist()
            check_count(sums, self.layout)
            check_samples(sums, self.layout)
            if sums[VALUES]:
                self.compare(cause)
        if self.doubt is not None:
            self.compare(self.doubt)

    def compare(self, cause: str = "") -> None:
        """Raise ParameterMismatchError, on all ranks, if they hold different values; see `fingerprints`.

        All ranks call it.
        """
        self.doubt = cause
        compare(self.gradients.replicated(), self.layout, self.control, self.steps, cause)
        self.doubt = None


class StepConsistency:
    """The comparison of one step: what the rank adds to the sums, and what the sums say.

    marks: the sum's numbers of this rank [FIELDS], on the device. fingerprint: makes that of the values, when
    all of them have been gathered; None in a step that compares none.
    """

    def __init__(
        self, owner: Consistency, batch: Batch, *, terms: str, seed: int, replan_request: str, training: bool
    ) -> None:
        self._owner, self._wish, self._training = owner, replan_request, training
        layout, gradients = owner.layout, owner.gradients
        self._versions = owner.versions
        facts = [0.0] * FACTS
        facts[RANKS], facts[REPLAN], facts[LOSS] = (
            1.0,
            float(bool(replan_request)),
            fact_of_loss(terms, seed, layout),
        )
        world = weight_among(Group.WORLD, layout)
        self.fingerprint: Callable[[], Tensor] | None = None
        if training:
            self._versions = gradients.versions
            facts[PARAMETERS], facts[EXPERTS] = gradients.to_sum
            facts[TRAINING], facts[NEW] = float(world), float(bool(gradients.taken_up))
            facts[CHANGES] = float(world * (self._versions - owner.versions))
            if layout.world_size > 1 and (gradients.taken_up or is_due(owner.steps)):
                self.fingerprint = partial(fingerprint, gradients.replicated(), layout, owner.device)
        self._facts: Callable[[], list[float]] | None = None
        if owner.late:
            self.marks = torch.zeros(FIELDS, dtype=torch.float64, device=owner.device)
            self.marks[RANKS] = 1.0
            if owner.sends:
                self._facts = owner.control.sum_later(facts, "comparing what ranks run")
        else:
            self.marks = torch.tensor([*facts, *[0.0] * (FIELDS - FACTS)], dtype=torch.float64)
        if layout.tp_size > 1:
            self.marks[SAMPLES] = mark_of_samples(batch, layout)
        if owner.slope is not None:  # compared in any next pass, so that no rank keeps one for later
            self.marks[SLOPE] = mark_of_slope(owner.slope, layout)
            owner.slope = None

    def judge(self, total: HostCounts) -> None:
        """Raise an error, on all ranks, for what they do not have in common. total: the sum of all marks.

        These are CommunicationError for a sum that lacks a rank, ScheduleMismatchError for a replan_request
        that not all have, ValueError for other passes, losses or samples, and ParameterMismatchError for
        parameters. Call it before any gradient is summed. Nothing is compared where a transport sums nothing.
        """
        owner = self._owner
        layout, control, gradients = owner.layout, owner.control, owner.gradients
        if not owner.sends:
            return
        if self._facts is None:
            sums: list[float] = total.numbers.tolist()
        else:
            sums = [*self._facts(), *[0.0] * (FIELDS - FACTS)]
        check_count(sums, layout)
        check_replan_requests(sums, self._wish, layout, control)
        check_losses(sums)
        check_samples(sums, layout)
        if self._training and not agree(sums):
            assert gradients.marks is not None, "changes have been taken up"
            raise_mismatch(gradients.marks, layout, control)
        cause = BEGAN if sums[NEW] else CHANGED if sums[CHANGES] else ""
        if self._facts is not None:
            owner.unread = total, cause
        if not self._training:
            return
        if sums[VALUES] or sums[CHANGES] or 0 < sums[NEW] < layout.world_size:
            owner.compare(cause)
        if sums[NEW] and layout.ep_size > 1:
            check_distinct(gradients.experts_by_layer, layout, control)
        gradients.taken_up = ()
        owner.versions = self._versions
        owner.steps += 1


def check_replan_requests(
    facts: Sequence[float], replan_request: str, layout: Layout, control: Control
) -> None:
    """Raise ScheduleMismatchError, on every rank, if some replan_request for another plan and others do not.

    Only all ranks together can plan again, and a rank that has changed something does not know whether the
    others have. So it runs a forward pass of the present plan, as they would, and its replan_request is one
    of the facts that ranks compare in it, without an exchange of its own. facts: their sums. replan_request:
    why this rank requests for one, "" if it does not.
    """
    if facts[REPLAN] in (0, layout.world_size):
        return
    requests = enumerate(control.gather(replan_request, "comparing plans"))
    rank, why = next((rank, why) for rank, why in requests if why)
    raise ScheduleMismatchError(
        f"rank {rank} needs another plan, since {why}, and not all ranks do. Freeze, thaw and switch "
        "gradient checkpointing on all ranks before the same step"
    )
