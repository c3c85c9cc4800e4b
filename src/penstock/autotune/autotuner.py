"""Makes the plan of a run and keeps it right between steps: profile, choose, trial, refine, watch::

    first plan ─► try others ─┐
                              ▼
    plan adopted ─► settle: re-order by measured durations ─► weigh moving ─► tune ─► watch ─► plan again ─┐
                      ▲                                                                                    │
                      └────────────────────────────────────────────────────────────────────────────────────┘

A plan that moves samples or experts is settled, too, and then tried against the plan before it.

All ranks call `after_step` after every step with the same time, so all take the same turns after the same
steps; rank 0 makes the decisions.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from pathlib import Path

from penstock.autotune.choose.layouts import settled_layout
from penstock.autotune.choose.moves import Weighing, is_open
from penstock.autotune.choose.start import continued_plan, remembering, start
from penstock.autotune.planned import Planned, with_choice
from penstock.autotune.problem import settled as of_optimizer
from penstock.autotune.refine import Tuning, refine
from penstock.autotune.trial import Records, Trial, Trials, TriedMoves, worth_trying, worth_while
from penstock.autotune.watch import Drift, Watch, diagnose, replan
from penstock.cost.devices import Computing
from penstock.cost.measured import Kind
from penstock.cost.model_flops import ModelFlops
from penstock.device import device_of
from penstock.plan.plan_config import AUTO, DROPPED_STEPS
from penstock.runtime import Machinery, PipelinedStack
from penstock.runtime.features.expert_replicas.manager import ExpertMoving, ExpertReplicas
from penstock.schedule import StepPlan
from penstock.trace.analysis import stragglers, typical_seconds
from penstock.train.config import RunConfig
from penstock.train.pilot import Forecast, Ranks, Resumption
from penstock.words import milliseconds

logger = logging.getLogger(__name__)

CALIBRATION_STEPS = 8
COMPARED_STEPS = 4
"""Number of steps whose durations are compared when the time of a step has changed."""


class Autotuner:
    """Makes the first plan of a resolved configuration, and keeps it right; a `penstock.train.pilot.Pilot`.

    All ranks make their autotuners together, which may measure the cluster.

    Args:
        resumption: A checkpoint whose plan is continued if that fits; None for a run that starts afresh.

    Attributes:
        planned: The plan in use.
    """

    _stack: PipelinedStack

    def __init__(self, config: RunConfig, machinery: Machinery, resumption: Resumption | None) -> None:
        self._device = device_of(machinery.device).name(machinery.device)
        self._precision: Computing = "float32" if config.train.precision != "bfloat16" else "bfloat16"
        continued = continued_plan(config, machinery, resumption) if resumption is not None else None
        settled = continued is not None  # an earlier start has tried, ordered and tuned it already
        self.planned = continued or start(config, machinery)
        if resumption is not None and continued is None:
            self.planned = remembering(self.planned, machinery, resumption)
        self._config = of_optimizer(config, sharded=self.planned.problem.shape.updating is not None)
        self._steps = 0
        self._tuned = settled or config.plan.tuner is None
        self._tuning: Tuning | None = None
        self._slow: tuple[int, ...] = ()  # the stragglers that were named last
        self._kinds: dict[Kind, float] = {}  # a continued run may never order again
        plan = config.plan
        self._watch = Watch(plan.drift_threshold, plan.drift_steps)
        long = worth_while(self.planned, config.train.steps)
        self._trials: Trial | None = Trials(self.planned) if long else None
        self._weighs = not settled and is_open(config, self.planned)
        self._untried: Planned | None = None  # the plan before one that moves, which has not been tried yet
        self._weighing: Weighing | None = None
        self._begin(settle=self._refines and self._trials is None and not settled)

    @staticmethod
    def layout(config: RunConfig, ranks: Ranks, resumption: Resumption | None, /) -> RunConfig:
        """Return the run with the layout that it gets."""
        return settled_layout(config, ranks, resumption)

    def take_over(self, stack: PipelinedStack) -> None:
        """Steer this stack, which was built with `plan`, from now on."""
        self._stack = stack

    @property
    def plan(self) -> StepPlan:
        """The plan in use."""
        return self.planned.plan

    @property
    def moving(self) -> ExpertMoving | None:
        """How the replicas of the next step are planned; None where experts stay."""
        return self.planned.moving(self._config.placement)

    @property
    def all_reduce_chunk_bytes(self) -> int | None:
        """The size of all-reduce chunks; None for a schedule without chunks."""
        choice = self.planned.choice
        return choice.all_reduce_chunk_bytes if choice.reads("all_reduce_chunk_bytes") else None

    @property
    def flops(self) -> ModelFlops:
        """Floating-point operations that the model requires, and the peak of the devices."""
        return self.planned.flops(self._device, self._precision)

    def forecast(self) -> Forecast | None:
        """Return the prediction of a step under the plan in use; None if the cluster's rates are unknown."""
        return self.planned.forecast()

    def save(self, folder: Path) -> None:
        """Write the plan, and the cluster for which it was made, into a folder, on one rank."""
        self.planned.save(folder, self._config.model.preset or "the run's own")

    @property
    def settled(self) -> bool:
        """Whether the plan is final, until something changes: no trial, order or size is still to come."""
        underway = self._trials is not None or self._settling or self._weighs or self._tuning is not None
        return self._tuned and not underway

    @property
    def reads_records(self) -> bool:
        """Whether `after_step` of the next step needs records.

        What is not final is decided by them, and the watch compares tasks before and after a change.
        """
        learning = self._watch.learning and len(self._before) < COMPARED_STEPS
        return not self.settled or (self._config.plan.watch and (learning or self._watch.suspects))

    @property
    def config(self) -> RunConfig:
        """The run as it is now."""
        return with_choice(self._config, self.planned.choice)

    def after_step(self, slowest_s: float, records: Records) -> bool:
        """Adopt another plan if it is better; return whether the next step runs by another plan.

        Not to be called after the last step: nothing would run by its decision.

        Args:
            slowest_s: Seconds of the step on the slowest rank.
            records: This rank's records of the step.
        """
        self._steps += 1
        if self._trials is not None:
            return self._try(self._trials, slowest_s, records)
        if self._settling:
            return self._settle(records)
        if self._tuning is not None:
            return self._tune(self._tuning, slowest_s)
        if self._weighs:
            return self._weigh()
        if not self._tuned:
            return self._begin_tuning()
        return self._look(slowest_s, records)

    # ---- trials --------------------------------------------------------------------------------------------

    def _try(self, trials: Trial, slowest_s: float, records: Records) -> bool:
        if not trials.note(slowest_s, records):
            return False
        planned = trials.turn
        if trials.done:
            self._trials = None
            planned = trials.learned(planned, self._stack.machinery.control).noting(*trials.lines)
            logger.info(trials.said)
        self._adopt(planned, settle=trials.done and trials.settles and self._refines)
        return True

    # ---- a plan is new -------------------------------------------------------------------------------------

    @property
    def _refines(self) -> bool:
        """Whether schedules are re-ordered by measured durations; a plan file is run as it is."""
        return self._config.schedule.refine_after > 0 and self._config.plan.file is None

    def _begin(self, *, settle: bool) -> None:
        self._settling, self._steps = settle, 0
        self._kept: list[Records] = []
        self._watch.reset()
        self._before: list[Records] = []
        self._recent: deque[Records] = deque(maxlen=COMPARED_STEPS)

    def _adopt(self, planned: Planned, *, settle: bool) -> None:
        self._stack.adopt(planned.plan)
        self._go_by(planned, settle=settle)

    def _go_by(self, planned: Planned, *, settle: bool) -> None:
        """Use a plan that the stack runs already; replicas are planned by what that plan hides."""
        self.planned = planned
        self._stack.of(ExpertReplicas).moving = self.moving
        self._begin(settle=settle)

    def _settle(self, records: Records) -> bool:
        """Collect the durations of the first steps; re-order the schedule by them when there are enough."""
        if len(self._kept) < DROPPED_STEPS + CALIBRATION_STEPS:
            self._kept.append(records)
        if self._steps < self._config.schedule.refine_after:
            return False
        steady = self._kept[DROPPED_STEPS:] or self._kept
        planned, self._kinds = refine(self._stack, self.planned, [r for step in steady for r in step])
        line = f"{planned.name} re-ordered using measured task durations{planned.predicted_words}"
        logger.debug(line)
        self._go_by(planned.noting(line), settle=False)
        self._try_moves()
        return True

    # ---- what moves ----------------------------------------------------------------------------------------

    def _weigh(self) -> bool:
        """Observe some steps, then report what moving would bring; adopt it if it pays and plans are open."""
        if self._weighing is None:
            self._weighing = Weighing(self._stack, self._config)
            return False
        if not self._weighing.end_step():
            return False
        before, adopts = self.planned, self._config.plan.mode == AUTO
        planned = self._weighing.decide(before, adopts=adopts)
        self._weighs, self._weighing = False, None
        new = [line for line in planned.lines if line not in before.lines]
        if new:
            logger.log(logging.DEBUG if adopts else logging.INFO, "\n".join(new))
        if planned.choice == before.choice:
            self.planned = planned
            return bool(new)  # so that the plan's file explains the choice
        logger.info(f"changing to {planned.name}: {planned.choice.words}, by the loads of experts so far")
        self._untried = before if worth_trying(self._config) else None
        self._adopt(planned, settle=self._refines)
        self._try_moves()
        return True

    def _try_moves(self) -> None:
        """Compare a plan that moves with the plan before it, once both are ordered by measured durations."""
        if self._untried is not None and not self._settling:
            self._trials = TriedMoves(self._untried, self.planned)
            self._untried = None

    # ---- the tuner -----------------------------------------------------------------------------------------

    def _begin_tuning(self) -> bool:
        self._tuned = True
        if self.all_reduce_chunk_bytes is None:
            schedule = self.planned.choice.schedule
            logger.info(f"plan.tuner has no effect: schedule {schedule} does not split its all-reduces")
            return False
        control, seed = self._stack.machinery.control, self._config.train.seed
        self._tuning = Tuning(self._config.plan, self.planned, self._kinds, control, seed)
        self._adopt(self._tuning.turn(), settle=False)
        return True

    def _tune(self, tuning: Tuning, slowest_s: float) -> bool:
        if not tuning.note(slowest_s):
            return False
        planned = tuning.turn()
        done = tuning.best is not None
        if done:
            planned = planned.noting(tuning.line)
            logger.info(tuning.line)
            self._tuning = None
        self._adopt(planned, settle=done and self._refines)
        return True

    # ---- the watch -----------------------------------------------------------------------------------------

    def _look(self, slowest_s: float, records: Records) -> bool:
        if not self._config.plan.watch:
            return False
        if records and self._watch.learning and len(self._before) < COMPARED_STEPS:
            self._before.append(records)
        if records:
            self._recent.append(records)
        drift = self._watch.note(slowest_s)
        if self._watch.learnt:
            # The steps with which later ones are compared are known: name the ranks that compute slowly.
            own = typical_seconds(record for step in self._before for record in step)
            everyone = self._stack.machinery.control.gather(own, "comparing how fast ranks compute")
            lagging = stragglers(everyone)
            slow = tuple(each.rank for each in lagging)
            if slow != self._slow and lagging:
                logger.info("; ".join(each.words for each in lagging))
            self._slow = slow
        return drift is not None and self._answer(drift)

    def _answer(self, drift: Drift) -> bool:
        """Find out what has changed, and react as section [plan] allows."""
        before, now = milliseconds(drift.before_s), milliseconds(drift.now_s)
        logger.info(f"the step time has changed from {before} to {now}")
        control, layout = self._stack.machinery.control, self._stack.machinery.layout
        own = [r for step in self._before for r in step], [r for step in self._recent for r in step]
        everyone = control.gather(own, "collecting durations")
        steps_before, steps_now = ([rank[i] for rank in everyone] for i in (0, 1))
        plan = self._config.plan
        seen, nodes = (steps_before, steps_now), layout.nodes > 1
        find = partial(diagnose, *seen, plan.drift_threshold, layout.mesh, nodes=nodes)
        diagnosis = control.decided(find, "finding what has changed")
        self._tuned = plan.tuner is None  # else a later step begins the search for a size
        if diagnosis.text and plan.mode == AUTO:
            # Moving is weighed after that, by what is measured then.
            planned = replan(self._config, self._stack.machinery, self.planned, diagnosis)
            self._weighs = is_open(self._config, planned)
            if planned.choice == self.planned.choice:
                self._calm_down()
            else:
                self._watch = Watch(plan.drift_threshold, plan.drift_steps)
            self._adopt(planned, settle=self._refines)
            return True
        keeping = f": keeping {self.planned.name}" if plan.mode == AUTO else ""
        logger.info(diagnosis.text or f"measured task durations show no change{keeping}")
        if not diagnosis.text:
            self._calm_down()
        self._begin(settle=False)
        return False

    def _calm_down(self) -> None:
        """Require the next alarm to last twice as long: this one was false, and noise would halt training."""
        lasting = 2 * self._watch.lasting_steps
        self._watch = Watch(self._watch.threshold, lasting)
