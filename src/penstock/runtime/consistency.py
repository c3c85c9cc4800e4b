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
from dataclasses import asdict, replace
from functools import partial
from zlib import crc32

import torch
from torch import Tensor

from penstock.device import device_of
from penstock.mesh import Group
from penstock.runtime.batch import Batch
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
from penstock.runtime.gradients import Gradients
from penstock.runtime.machinery import Machinery
from penstock.runtime.transport import HostCounts
from penstock.schedule import StepPlan
from penstock.schedule.schedule import parse_orders
from penstock.topology import Control, Layout


class ScheduleMismatchError(RuntimeError):
    """Ranks hold different schedules; running them would deadlock."""


class Consistency:
    """What is known of the ranks' consistency from step to step.

    Attributes:
        late: Whether sums stay on the device until the next step reads them.
        sends: Whether transports send, so that sums are those of all ranks.
        steps: Training steps in which ranks were consistent.
        versions: How often parameters had been changed when the last of these steps began, see
            `Gradients.versions`.
        unread: The sums of the last step, and the cause that would explain other values; None: all have been
            read.
        doubt: The cause that would explain values that differed when they were last compared; None: they were
            equal.
        slope: The gradient of the loss in the last backward pass, until it is compared.
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

    def read_late(self) -> None:
        """Compare what the last step has summed on the device, where that was not read then.

        All ranks call it before a step. Values that differed are compared again until they are equal.

        Raises:
            CommunicationError: On all ranks, if the sum lacks a rank.
            ValueError: On all ranks, if samples differ.
            ParameterMismatchError: On all ranks, if values differ.
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

        Args:
            cause: What is known of the reason, in words; "" takes it for updates.
        """
        self.doubt = cause
        compare(self.gradients.replicated(), self.layout, self.control, self.steps, cause)
        self.doubt = None


class StepConsistency:
    """The comparison of one step: what the rank adds to the sums, and what the sums say.

    Attributes:
        marks: What this rank adds to the sum, float64 [FIELDS]; on the device where sums are read late.
        fingerprint: Makes the fingerprint of the values, once all of them have been gathered; None in a step
            that compares none.
    """

    def __init__(
        self, owner: Consistency, batch: Batch, *, terms: str, seed: int, replan_request: str, training: bool
    ) -> None:
        self._owner, self._wish, self._training = owner, replan_request, training
        layout, gradients = owner.layout, owner.gradients
        self._versions = owner.versions
        facts = [0.0] * FACTS
        world = weight_among(Group.WORLD, layout)
        # Ranks that share attention must have the seed of dropout in common; others may have their own.
        checksum = crc32(f"{terms} {seed if layout.tp_size > 1 else None}".encode())
        facts[RANKS], facts[REPLAN], facts[LOSS] = 1.0, float(bool(replan_request)), float(world * checksum)
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
            self.marks = torch.tensor([*facts, *[0.0] * (FIELDS - FACTS)], dtype=torch.float64, device="cpu")
        if layout.tp_size > 1:
            self.marks[SAMPLES] = mark_of_samples(batch, layout)
        if owner.slope is not None:  # compared in any next pass, so that no rank keeps one for later
            bits = owner.slope.detach().reshape(1).double().view(torch.int64)
            self.marks[SLOPE] = world * (bits % PRIME).double()[0]
            owner.slope = None

    def judge(self, total: HostCounts) -> None:
        """Raise an error, on all ranks, for what they do not have in common.

        Call it before any gradient is summed. Nothing is compared where a transport sums nothing.

        Args:
            total: The sum of all marks.

        Raises:
            CommunicationError: If the sum lacks a rank.
            ScheduleMismatchError: If only some ranks request another plan.
            ValueError: If passes, losses or samples differ.
            ParameterMismatchError: If parameters differ.
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
    """Raise ScheduleMismatchError, on every rank, if some request another plan and others do not.

    Only all ranks together can plan again, and a rank that has changed something does not know whether the
    others have. So it runs a forward pass of the present plan, as they would, and its request is one of the
    facts that ranks compare in it, without an exchange of its own.

    Args:
        facts: The sums of all ranks' facts.
        replan_request: Why this rank requests another plan; "" if it does not.
    """
    if facts[REPLAN] in (0, layout.world_size):
        return
    requests = enumerate(control.gather(replan_request, "comparing plans"))
    rank, why = next((rank, why) for rank, why in requests if why)
    raise ScheduleMismatchError(
        f"rank {rank} needs another plan, since {why}, and not all ranks do. Freeze, thaw and switch "
        "gradient checkpointing on all ranks before the same step"
    )


# ---- whether ranks that share attention work on the same samples, and all minimise the same loss ----------
#
# The mark of samples stands beside those of values in the sums of the statistics task, weighted so that it
# cancels where the ranks of every group agree.


PRIME, PERIOD, BASE = 2**31 - 1, 8191, 31


def mark_of_samples(batch: Batch, layout: Layout) -> Tensor:
    """Return what this rank adds to the sum of SAMPLES, where ranks share attention."""
    total: Tensor = batch.tokens[0].new_zeros(())
    metadata = batch.metadata
    labels, keys = [each.labels_BL for each in metadata], [each.keys.sample_ids_B for each in metadata]
    valid = [each.valid_BL for each in metadata if each.valid_BL is not None]
    documents = [each.keys.documents_BL for each in metadata if each.keys.documents_BL is not None]
    for pieces in (batch.tokens, labels, keys, valid, documents):
        mark = total
        if pieces:  # weighted by place, so that samples that have changed places are seen
            numbers = torch.cat([piece.flatten() for piece in pieces]).long()
            places = torch.arange(1, len(numbers) + 1, device=numbers.device) % PERIOD + 1
            mark = ((numbers + 1) % PRIME * places).sum() % PRIME
        total = (total * BASE + mark) % PRIME
    return weight_among(Group.TENSOR, layout) * total.double()


def check_losses(facts: Sequence[float]) -> None:
    """Raise ValueError, the same on all ranks, if these sums of facts say that passes or losses differ."""
    if facts[TRAINING]:
        raise ValueError(
            "some ranks train on a batch that others only evaluate, and would wait for them in backward: "
            "call train() or eval() of the model on all ranks alike, and use torch.no_grad() on all or none"
        )
    if facts[LOSS]:
        raise ValueError(
            "ranks were asked for different losses: coefficients of the balance and z terms, the number by "
            "which token losses are divided (num_items_in_batch), whether labels are given and, where ranks "
            "share attention, the seed of dropout must be alike on all"
        )


def check_samples(sums: Sequence[float], layout: Layout) -> None:
    """Raise ValueError, the same on all ranks, if the sums over ranks say that samples or slopes differ."""
    if sums[SLOPE]:
        raise ValueError(
            "ranks multiplied the loss of the last step by different numbers before backward, so its "
            "gradients are sums of parts that were scaled differently. The loss is that of the batch of all "
            "ranks: divide or scale it alike on all, and use no GradScaler, whose scale differs by rank"
        )
    if sums[SAMPLES]:
        raise ValueError(
            f"ranks that share attention (tp_size = {layout.tp_size}) were given different samples. Give all "
            "ranks of a group the same tokens, labels, sample_ids_B, valid_BL and documents_BL: those of "
            "layout.dp_rank"
        )


# ---- comparisons of all ranks before they act: layout and plan before first use, and turns of open steps
#
# Different orders or tasks would deadlock.


def check_agreement(plan: StepPlan, control: Control) -> None:
    """Raise ScheduleMismatchError, on every rank, naming the first task that differs from rank 0's plan.

    The order is compared, and what every task is: its lane, axes and inputs. Costs one exchange of 64 bytes
    when all agree.
    """
    digests = control.gather(plan.digest, "comparing schedules")
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if not different:
        return
    texts = control.gather((plan.schedule.text(), plan.graph.facts()), "comparing schedules")
    rank = different[0]
    raise ScheduleMismatchError(
        f"schedule {plan.schedule.name!r} differs between ranks: "
        f"{first_difference(texts[0], texts[rank], rank)}. "
        f"Ranks that differ from rank 0: {different}. Start all ranks with the same "
        "configuration and version."
    )


def check_layouts(layout: Layout, samples: int, control: Control) -> None:
    """Raise ScheduleMismatchError, on every rank, unless all have the same layout and samples per rank.

    Ranks with different groups would wait for each other. Costs one exchange of a few bytes.
    """
    own = asdict(replace(layout, rank=0)) | {"samples": samples}
    everyone = control.gather(own, "comparing layouts")
    for rank, other in enumerate(everyone):
        for name, value in other.items():
            if value != (first := everyone[0][name]):
                raise ScheduleMismatchError(
                    f"ranks have different layouts: {name} = {first} on rank 0, {value} on rank {rank}. "
                    "Start all ranks with the same configuration and version."
                )


def first_difference(ours: tuple[str, str], theirs: tuple[str, str], rank: int) -> str:
    """Return in words where two plans differ first.

    Args:
        ours: The schedule and the facts of the graph, as text, on rank 0.
        theirs: The same on `rank`.
    """
    (name, own), (other_name, other) = parse_orders(ours[0]), parse_orders(theirs[0])
    for lane in {**own, **other}:
        left, right = list(map(str, own.get(lane, ()))), list(map(str, other.get(lane, ())))
        for place in range(max(len(left), len(right))):
            here = left[place] if place < len(left) else "nothing"
            there = right[place] if place < len(right) else "nothing"
            if here != there:
                return f"lane {lane}, place {place}: rank 0 runs {here}, rank {rank} runs {there}"
    for here, there in zip(ours[1].splitlines(), theirs[1].splitlines(), strict=False):
        if here != there:
            plain = [line.partition(" | ")[0] for line in (here, there)]
            first, second = plain if plain[0] != plain[1] else (here, there)
            return f"rank 0 has the task `{first}`, rank {rank} has `{second}`"
    return f"names {name!r} and {other_name!r}"


# ---- whether all ranks do the same next while a step without labels waits for its backward pass -----------
#
# Such a step's backward half begins when the caller's loss asks for it. A rank that asks, and one that goes
# on to another pass instead, would wait for each other in different exchanges. So as long as a backward
# pass may come, ranks say what they begin: one small exchange of hosts, and none where backward follows
# forward.


FORWARD, LABELLED, UNTRAINED, BACKWARD = range(4)

WORDS = {
    FORWARD: "the forward pass of step {} of those without labels",
    LABELLED: "a step with labels",
    UNTRAINED: "a pass without gradients",
    BACKWARD: "the backward pass of step {} of those without labels",
}

MOST = 64
"""Of so many steps backward passes are expected at most; a program may have given up older ones."""


class Turns:
    """What this rank has begun, by the numbers of steps without labels.

    Attributes:
        last: The number of the step that has begun last.
    """

    def __init__(self, control: Control) -> None:
        self._control, self.last = control, 0
        self._open: list[int] = []  # steps whose backward pass may come

    @property
    def waits(self) -> bool:
        """Whether the backward half of a step without labels may come."""
        return bool(self._open)

    def forward(self) -> None:
        """Begin the forward pass of a step without labels. Raises as `begin` does."""
        self.begin(FORWARD, self.last + 1)
        self.last += 1
        self._open = [*self._open, self.last][-MOST:]

    def backward(self, number: int) -> None:
        """Begin the backward half of a step. Raises as `begin` does."""
        self.begin(BACKWARD, number)
        self._open = [each for each in self._open if each != number]

    def begin(self, what: int, number: int = 0) -> None:
        """Begin a pass.

        Args:
            what: A key of `WORDS`.
            number: That of a step without labels.

        Raises:
            ScheduleMismatchError: On all ranks, if they begin different passes.
        """
        if not self._open:
            return
        control, purpose = self._control, "agreeing on the next pass"
        most, least, *numbers = control.largest((what, -what, number, -number), purpose)
        if most == -least and numbers[0] == -numbers[1]:
            return
        passes = control.gather(WORDS[what].format(number), purpose)
        own = passes[control.rank]
        rank, other = next((rank, each) for rank, each in enumerate(passes) if each != own)
        raise ScheduleMismatchError(
            f"rank {control.rank} begins {own}, and rank {rank} {other}: call the model and backward of the "
            "same losses in the same order on all ranks"
        )
