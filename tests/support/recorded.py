"""Steps on a recorded device, or on a card: what they compute and record, and what hosts wait for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from penstock.device import using
from penstock.train.assemble import build_optimizer
from penstock.train.optimizer import build_update
from tests.support.card import CardDevice, Wait, counted, install
from tests.support.parity import Case, own_samples, stack_of
from tests.support.recording.gpu import recorded
from tests.support.recording.hazards import Hazard, Issued, calls_of, find_hazards
from tests.support.recording.recorder import Entry, Launch
from tests.support.reference_moe import Weights
from tests.support.replicas import RandomReplicas, stack_with_replicas, turn_gates


@dataclass(frozen=True)
class Ran:
    """What a rank has computed, and what it has asked of its device.

    parameters: after all updates. streams: that were given tasks. waits: of the host, in every step. repeats:
    how often each step was run again, since a rank had too few rows.
    """

    losses: list[float]
    norms: list[float]
    parameters: Weights
    hazards: list[Hazard] = field(default_factory=list)
    calls: list[Issued] = field(default_factory=list)
    streams: frozenset[str] = frozenset()
    waits: list[dict[Wait, int]] = field(default_factory=list)
    repeats: list[int] = field(default_factory=list)


def plain_steps(rank: int, case: Case, hosts: RandomReplicas) -> Ran:
    """Steps as a training loop runs them, on the CPU as it is; rows are counted in each."""
    counted_rows = replace(case, transport="direct", bounds="", moe=replace(case.moe, bound_factor=None))
    return _train(rank, counted_rows, hosts)


def carded_steps(rank: int, case: Case, hosts: RandomReplicas, kernel: bool = False) -> Ran:
    """The same steps on this rank's stand-in for a GPU. kernel: whether it has grouped kernels."""
    install()
    with using(CardDevice(kernel=kernel, shared=case.transport == "staged")):
        return _train(rank, replace(case, card=True), hosts)


def recorded_steps(rank: int, case: Case, hosts: RandomReplicas) -> Ran:
    """The same steps on a recorded device."""
    with recorded() as recorder:
        ran = _train(rank, case, hosts)
    launches = (entry for entry in recorder.log if isinstance(entry, Launch))
    streams = {entry.actor.name for entry in launches if entry.actor.on_device}
    log = recorder.log
    return replace(ran, hazards=find_hazards(log), calls=calls_of(log), streams=frozenset(streams))


def log_of_steps(rank: int, case: Case, hosts: RandomReplicas) -> list[Entry]:
    """What the same steps ask of the device."""
    with recorded() as recorder:
        _train(rank, case, hosts)
    return recorder.log


def _train(rank: int, case: Case, hosts: RandomReplicas) -> Ran:
    stack = stack_with_replicas(rank, case, hosts) if hosts.slots else stack_of(rank, case)
    config = case.config.optimizer
    update = build_update(stack, build_optimizer(stack, config), config)
    losses, norms, waits = [], [], []
    repeats: list[int] = []
    batch, documents = own_samples(rank, case, stack.machinery.device)
    for step in range(hosts.steps):
        with counted() as waited:
            loss: Tensor = stack(*batch, documents_BL=documents)
            norm = update.backward(loss, step + 1)
            update.apply(accepted=True)
        waits.append(dict(waited))
        repeats.append(stack.bounds.repeats - sum(repeats))
        norms.append(float(norm))
        losses.append(float(loss.detach()))
        if hosts.fresh:
            turn_gates(dict(stack.model.named_parameters()))
    update.flush()
    parameters = {name: p.detach().cpu().clone() for name, p in stack.model.named_parameters()}
    stack.eval()
    with torch.no_grad():
        losses.append(float(stack(*batch, documents_BL=documents)))
    return Ran(losses, norms, parameters, waits=waits, repeats=repeats)
