"""A schedule is data: for every lane, the ordered list of tasks. One file per system."""

from penstock.schedule.catalogue import StepPlan, cut, plan_step
from penstock.schedule.schedule import Schedule, freeze, unit_cost
from penstock.schedule.system import SCHEDULES, System, register_schedule

__all__ = [
    "SCHEDULES",
    "Schedule",
    "StepPlan",
    "System",
    "cut",
    "freeze",
    "plan_step",
    "register_schedule",
    "unit_cost",
]
