"""Measures the cluster, chooses a plan, tries others, and corrects it during training.

The modules are in the order of a run::

    profile/   links, kernels, tasks, real steps
    choose/    the layout, the first plan (`start`), what moves
    trial      plans in turns, and what is remembered of those that lost
    refine     the order by measured durations; the size of all-reduce pieces
    watch      a step time that has changed, why, and another plan

`autotuner` takes them one after the other; `planned` is the one in use, `problem` the run as planners see it.
"""

from penstock.autotune.autotuner import Autotuner

__all__ = ["Autotuner"]
