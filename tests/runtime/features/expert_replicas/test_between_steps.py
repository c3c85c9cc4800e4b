"""What may be done to a stack between steps while ranks hold replicas, and which experts cannot have any."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from penstock.checkpoint.folder import DamagedError
from penstock.decision import PlacementConfig
from penstock.mesh import Group
from penstock.moe import ModuleExperts
from penstock.placement import EMPTY, SPLIT, ExpertPlacement, Replication
from penstock.runtime import PipelinedStack
from penstock.runtime.features.expert_replicas.manager import ExpertReplicas, Plans
from penstock.train.assemble import first_plan
from penstock.train.checkpoint import Checkpoints
from penstock.train.optimizer import build_adamw, initialise_state
from penstock.train.run_state import DecoderNaming, read_steps, take_steps
from penstock.train.run_state import state_of as tensors_of
from tests.support.cases import ROUTINGS, hosting_case
from tests.support.checkpoints import CASE, IDENTITY, bare, check_equal, state_of, train
from tests.support.close import check_all_close
from tests.support.parity import Case, batch_of, gradients_of, stack_of
from tests.support.ranks import Pools
from tests.support.reference_moe import Weights
from tests.support.replicas import RandomReplicas, replicate_randomly, stack_with_replicas

REPLICAS_OF_ALL = RandomReplicas(slots=2, pieces=2)
STEP = replace(hosting_case(2, ROUTINGS[0], "penstock"), padding=False)


class Run:
    """A stack with replicas on one rank, and one without."""

    def __init__(self, rank: int) -> None:
        self.replicated, self.plain = stack_with_replicas(rank, STEP, REPLICAS_OF_ALL), stack_of(rank, STEP)
        tokens, labels = batch_of(STEP)
        mine = STEP.mine(rank)
        self.batch, self.turn = (tokens[mine], labels[mine], torch.arange(len(tokens))[mine]), 0

    def forward(self, stack: PipelinedStack) -> Tensor:
        """The loss, with other replicas than ever before."""
        if stack.of(ExpertReplicas).replications:
            self.turn += 1
            replicate_randomly(stack, REPLICAS_OF_ALL, self.turn)
        loss: Tensor = stack(*self.batch)
        return loss

    def gradients(self, stack: PipelinedStack) -> Weights:
        """What a step leaves."""
        stack.zero_grad()
        self.forward(stack).backward()
        return gradients_of(stack.model)

    def check(self, stack: PipelinedStack, what: str, times: int = 1) -> None:
        """The gradients in `stack` are those of the stack without replicas, `times` over."""
        found, wanted = gradients_of(stack.model), self.gradients(self.plain)
        check_all_close(found, wanted, 1e-10, what, times=times)


def judged(run: Run) -> None:
    """What `torch.inference_mode` has allocated, the first room for replicas, serves steps, too."""
    for _ in range(2):
        with torch.inference_mode():
            loss = run.forward(run.replicated)
        run.gradients(run.replicated)
        run.check(run.replicated, "after an evaluation")
        assert abs(float(loss) - float(run.plain(*run.batch))) <= 1e-10 * float(loss)


def accumulated(run: Run) -> None:
    run.gradients(run.replicated)
    run.forward(run.replicated).backward()
    run.check(run.replicated, "two steps", times=2)


def two_at_once(run: Run) -> None:
    """Each backward pass belongs to its own forward pass, whatever replicas there have been since."""
    run.replicated.zero_grad()
    first, second = run.forward(run.replicated), run.forward(run.replicated)
    with torch.no_grad():
        run.forward(run.replicated)
    first.backward()
    second.backward()
    run.check(run.replicated, "two at once", times=2)


def frozen(run: Run) -> None:
    for part in ("w_up", ".experts."):
        for stack in (run.replicated, run.plain):
            for name, parameter in stack.model.named_parameters():
                parameter.requires_grad_(part not in name)
        run.gradients(run.replicated)
        run.check(run.replicated, f"{part} frozen")
    for stack in (run.replicated, run.plain):
        stack.model.requires_grad_(True)
    run.gradients(run.replicated)
    run.check(run.replicated, "thawed")


def copied(run: Run) -> None:
    names = [name for name, _ in run.plain.named_parameters()]
    assert [name for name, _ in run.replicated.named_parameters()] == names
    assert list(run.replicated.state_dict()) == list(run.plain.state_dict())
    twin = copy.deepcopy(run.replicated)
    assert twin.of(ExpertReplicas).replications == run.replicated.of(ExpertReplicas).replications
    assert [name for name, _ in twin.named_parameters()] == names
    run.gradients(twin)
    run.check(twin, "copy")


def converted(run: Run) -> None:
    """Replicas have the type that the experts have now."""
    for stack in (run.replicated, run.plain):
        stack.model.float()
    check_all_close(run.gradients(run.replicated), run.gradients(run.plain), 1e-4, "float32")
    for stack in (run.replicated, run.plain):
        stack.model.double()


def planned_anew(run: Run) -> None:
    """A plan without replica slots has no replicas, one with others begins without."""
    plans = run.replicated.plan, run.plain.plan
    run.replicated.adopt(plans[1])
    assert run.replicated.of(ExpertReplicas).replications == ()
    run.gradients(run.replicated)
    run.check(run.replicated, "without slots")
    run.replicated.adopt(plans[0])
    found = run.replicated.of(ExpertReplicas).replications
    assert len(found) == 2 and all(replication is not None and replication.is_empty for replication in found)
    run.gradients(run.replicated)
    run.check(run.replicated, "with slots again")


LIVES: list[Callable[[Run], None]] = [
    judged,
    accumulated,
    two_at_once,
    frozen,
    copied,
    converted,
    planned_anew,
]


def live(rank: int) -> None:
    """All of it with one stack."""
    run = Run(rank)
    for part in LIVES:
        part(run)


def test_between_steps(ranks: Pools) -> None:
    ranks(2).run(live)


def hosted_again(rank: int, folder: Path) -> tuple[list[bool], list[bool]]:
    """Whether stacks with as many slots as there were, and with others, host after loading what was saved.

    What would not pay is remembered, and not used.
    """
    saved, fresh = (stack_with_replicas(rank, STEP, REPLICAS_OF_ALL) for _ in range(2))
    replicate_randomly(saved, REPLICAS_OF_ALL, 0)
    plans = replace(saved.of(ExpertReplicas).plans, in_use=(True, False), age_steps=3)
    saved.of(ExpertReplicas).follow(plans)
    path, others = (
        checkpoints(saved, folder).save(1),
        stack_with_replicas(rank, STEP, replace(REPLICAS_OF_ALL, slots=1)),
    )
    for stack in (fresh, others):
        checkpoints(stack, folder).load(path)
    assert (
        fresh.of(ExpertReplicas).plans == plans
        and fresh.of(ExpertReplicas).replications == saved.of(ExpertReplicas).replications
    )
    assert all(
        replication is not None and replication.is_empty
        for replication in others.of(ExpertReplicas).replications
    )
    return [h is not None and h.is_empty for h in fresh.of(ExpertReplicas).replications], [
        bool(h.limit) for h in fresh.of(ExpertReplicas).plans.made
    ]


def checkpoints(stack: PipelinedStack, folder: Path) -> Checkpoints:
    optimizer = build_adamw(stack.model.named_parameters(), STEP.config.optimizer)
    initialise_state(optimizer)
    return Checkpoints(folder, stack, optimizer, keep=2, identity=IDENTITY)


def test_a_run_that_goes_on_has_the_replicas_that_it_would_have_had(ranks: Pools, tmp_path: Path) -> None:
    for empty, limited in ranks(2).run(hosted_again, tmp_path):
        assert empty == [False, True]
        assert limited == [True, False]


def one_group_again(rank: int, folder: Path) -> bool:
    """Whether all ranks go on with what they were to host, of which half have nothing."""
    case = replace(CASE, world_size=4, ep_size=2)
    saved, fresh = (stack_with_replicas(rank, case, REPLICAS_OF_ALL) for _ in range(2))
    layout, plans = saved.machinery.layout, saved.of(ExpertReplicas).plans
    if layout.mesh.group(rank, Group.EXPERT_SHARDS) == 0:
        plans = replace(plans, made=tuple(some_replica(each.placement) for each in plans.made))
    saved.of(ExpertReplicas).follow(replace(plans, age_steps=1))
    checkpoints(fresh, folder).load(checkpoints(saved, folder).save(1))
    return fresh.of(ExpertReplicas).plans == saved.of(ExpertReplicas).plans


def some_replica(placement: ExpertPlacement) -> Replication:
    return Replication.local(placement, [[placement.held(1)[0], EMPTY], [EMPTY, EMPTY]])


def test_a_group_with_replicas_goes_on_though_another_has_none(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(4).run(one_group_again, tmp_path) == [True] * 4


@pytest.mark.parametrize("replicas", [{"a": 1}, [{"age_steps": 0}], [[]], 3, ["{}"]])
def test_nonsense_about_replicas_is_damage(replicas: object) -> None:
    stack = stack_with_replicas(0, CASE, REPLICAS_OF_ALL)
    with pytest.raises(DamagedError, match="replicas"):
        read_steps(stack, {"replicas": replicas})
    assert read_steps(stack, {})[0] is None


def half_read(rank: int) -> tuple[bool, bool]:
    """Whether rank 0's plans, which rank 1 has not read, are in use."""
    stack = stack_with_replicas(rank, STEP, REPLICAS_OF_ALL)
    before = stack.of(ExpertReplicas).plans
    plans = Plans(before.made, before.in_use, before.age_steps + 1) if rank == 0 else None
    return take_steps(stack, plans, None)[0], stack.of(ExpertReplicas).plans is before


def test_what_not_all_ranks_have_read_nobody_hosts(ranks: Pools) -> None:
    assert ranks(2).run(half_read) == [(False, True)] * 2


def saved_and_loaded(rank: int, case: Case, folder: Path) -> tuple[Weights, Weights, list[str]]:
    """A state as it was saved with replicas, as it is loaded without, and the names in the files."""
    stack = stack_with_replicas(rank, case, REPLICAS_OF_ALL)
    run = checkpoints(stack, folder)
    replicate_randomly(stack, REPLICAS_OF_ALL, 0)
    train(run, rank, case, 2)
    path = run.save(2)
    other = bare(rank, replace(case, seed=5), folder)
    other.load(path)
    return (
        state_of(run),
        state_of(other),
        list(tensors_of(run.stack, run.optimizer, DecoderNaming(run.stack.model))),
    )


def test_checkpoints_have_no_replicas(ranks: Pools, tmp_path: Path) -> None:
    case = replace(CASE, world_size=2, ep_size=2)
    names = set()
    for saved, loaded, held in ranks(2).run(saved_and_loaded, case, tmp_path):
        check_equal(loaded, saved)
        names |= {name.replace(".experts.", ".") for name in held}
    assert not any("replica" in name or "others" in name for name in names)


# ---- what is refused ---------------------------------------------------------------------------------------


def adopt(stack: PipelinedStack, case: Case) -> None:
    """A plan with replica slots."""
    config = replace(case.config, placement=PlacementConfig(experts="planned"))
    layout = stack.machinery.layout
    stack.adopt(first_plan(config, layout, stack.base_shape, stack.gradients.sizes_bytes))


def hook(stack: PipelinedStack) -> None:
    next(p for n, p in stack.model.named_parameters() if "w_up" in n).register_hook(lambda grad: 2 * grad)


def buffer(stack: PipelinedStack) -> None:
    (first, *_) = (layer.experts for layer in stack.moe_layers if layer is not None)
    first.register_buffer("scale", torch.ones(1))


def share(stack: PipelinedStack) -> None:
    first, last = (layer.experts for layer in stack.moe_layers if layer is not None)
    last.register_parameter("w_up", first.get_parameter("w_up"))


def with_modules(stack: PipelinedStack, *activations: type[nn.Module]) -> list[ModuleExperts]:
    """Give every layer experts that have these activations in turn, and dropout; return them."""
    size, kinds = CASE.model.hidden_size, cycle(activations)
    made = []
    for layer in (each for each in stack.moe_layers if each is not None):
        layer.experts = ModuleExperts(
            lambda: nn.Sequential(nn.Linear(size, size), next(kinds)(), nn.Dropout(0.5)),
            layer.experts.num_local_experts,
        )
        made.append(layer.experts)
    return made


def differ(stack: PipelinedStack) -> None:
    with_modules(stack, nn.GELU, nn.ReLU)


def watch(stack: PipelinedStack) -> None:
    with_modules(stack, nn.GELU)[0].expert_modules[1].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (differ, "the experts of ModuleExperts differ in code"),
        (watch, "an expert of ModuleExperts has hooks"),
        (hook, "experts.w_up has a gradient hook"),
        (buffer, "SwiGLUExperts has buffers"),
        (share, "experts of several layers share a parameter"),
    ],
)
def test_experts_that_cannot_be_hosted_are_refused(
    change: Callable[[PipelinedStack], None], words: str
) -> None:
    stack = stack_of(0, CASE)
    change(stack)
    with pytest.raises(ValueError, match=words):
        adopt(stack, CASE)


def test_a_hook_that_comes_later_is_refused_too() -> None:
    stack = stack_of(0, CASE)
    adopt(stack, CASE)
    hook(stack)
    with pytest.raises(ValueError, match=r"experts.w_up has a gradient hook, .* Remove it, or set placement"):
        stack(*batch_of(CASE))


def test_fixed_slots_are_refused() -> None:
    case = replace(CASE, moe=replace(CASE.moe, capacity_factor=1.5))
    with pytest.raises(ValueError, match="every expert has a fixed number of rows"):
        adopt(stack_of(0, case), case)


def test_a_room_that_comes_back_from_a_step_of_an_earlier_plan_is_not_lent_again() -> None:
    stack = stack_of(0, CASE)
    layers, host = stack.moe_layers, ExpertReplicas(stack.machinery.layout, stack.machinery.device)
    shape = replace(stack.base_shape, replica_slots=1)
    host.open(layers, shape)
    under_way = host.lend(layers)
    host.open(layers, replace(shape, replica_slots=2))
    host.take_back(under_way)
    slots = {each.room.replicas.num_local_experts for each in host.lend(layers).replicas if each is not None}
    assert slots == {2}


def test_replicas_are_in_the_mode_that_experts_are_in_now() -> None:
    stack = stack_of(0, CASE)
    (first, *_) = with_modules(stack, nn.GELU)
    layers, host = stack.moe_layers, ExpertReplicas(stack.machinery.layout, stack.machinery.device)
    host.open(layers, replace(stack.base_shape, replica_slots=1))
    for training in (True, False, True):
        first.train(training)
        lent = host.lend(layers)
        (room, *_) = (each.room for each in lent.replicas if each is not None)
        assert isinstance(room.replicas, ModuleExperts)
        assert {each.training for each in room.replicas.expert_modules[0].modules()} == {training}
        host.take_back(lent)


def test_replicas_whose_rows_nobody_splits_any_more_are_not_brought() -> None:
    """With a plan under which rows go before counts are known, they would do little until the next plan."""
    stack = stack_of(0, CASE)
    layers, host = stack.moe_layers, ExpertReplicas(stack.machinery.layout, stack.machinery.device)
    shape = replace(stack.base_shape, replica_slots=1)
    host.open(layers, shape)
    limited = tuple(None if h is None else replace(h, limit=SPLIT) for h in host.replications)
    host.use(limited)
    host.open(layers, shape)
    assert host.replications == limited
    host.open(layers, replace(shape, expert_form="s2"))
    assert [h.limit for h in host.replications if h is not None] == [None] * sum(
        h is not None for h in limited
    )
