"""The report of a run as one HTML file: its step, what bound the step, and the course of the run.

Here are the values and figures; `run.html.j2` says them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from penstock.ops.base import family_of
from penstock.plan import PlanFile
from penstock.report.loads import LoadCourse
from penstock.report.page.figures import (
    TURNS,
    families_of,
    layer_loads_figure,
    layers_figure,
    loads_over_time_figure,
    loss_figure,
    network_figure,
    path_figure,
    shown_layers,
    speed_figure,
    timeline_figure,
    turns_of,
)
from penstock.report.page.findings import (
    Course,
    FinishedRun,
    KindOfTask,
    Values,
    binding_of,
    kinds_of,
    slow_ranks,
)
from penstock.report.page.render import COLOURS, PAUSES, Figure, Row, render
from penstock.report.summary import WARM_UP_STEPS
from penstock.trace.step_file import StepFile
from penstock.words import change, gib, lane_words, milliseconds, percent

MOST_KINDS = 40
MANY_TIMES = 10
MINUS = "\N{MINUS SIGN}"


def kind_rows(kinds: Sequence[KindOfTask], *, nodes: bool) -> Iterator[Row]:
    """Yield measured times by kind, beside predicted ones if there are any, and by lane.

    Args:
        nodes: Whether there are several nodes.
    """
    widest = max([abs(kind.difference_s) for kind in kinds], default=0.0) or 1.0
    lanes = dict.fromkeys(kind.lane for kind in kinds)
    names = {lane: lane_words(lane, nodes=nodes) for lane in lanes}
    for kind in kinds[:MOST_KINDS]:
        yield Row(
            title=kind.title,
            note=kind.op,
            colour=COLOURS[family_of(kind.op)],
            cells=_times(
                names[kind.lane].removeprefix("network "), kind.count, kind.predicted_s, kind.measured_s
            ),
            bar=kind.difference_s / widest,
        )
    for lane, words in names.items():
        own = [kind for kind in kinds if kind.lane == lane]
        predicted_s = [kind.predicted_s for kind in own if kind.predicted_s is not None]
        count, measured_s = sum(kind.count for kind in own), sum(kind.measured_s for kind in own)
        cells = _times("", count, sum(predicted_s) if predicted_s else None, measured_s)
        yield Row(title=f"all of {words}", cells=cells, bar=0.0, total=True)


def plan_rows(plan: PlanFile, *, tried: bool) -> Iterator[Row]:
    """Yield the plan that ran and the next best ones; with the times of trials, if any plan was tried."""
    trial = [_trial(plan.trial_s)] if tried else []
    cells = [milliseconds(plan.predicted_s), "", *trial]
    yield Row(title=plan.choice.words, note="chosen", strong=True, cells=cells)
    for other in plan.others:
        cells = [milliseconds(other.predicted_s), signed_change(other.predicted_s, plan.predicted_s)]
        yield Row(title=other.words, cells=[*cells, *([_trial(other.measured_s)] if tried else [])])


def _trial(seconds: float | None) -> str:
    return "not tried" if seconds is None else milliseconds(seconds)


def _times(lane: str, count: int, predicted_s: float | None, measured_s: float) -> Sequence[str]:
    if predicted_s is None:
        return lane, str(count), milliseconds(measured_s)
    return (
        lane,
        str(count),
        milliseconds(predicted_s),
        milliseconds(measured_s),
        f"{'+' if measured_s >= predicted_s else MINUS}{milliseconds(abs(measured_s - predicted_s))}",
        relative(measured_s / predicted_s) if predicted_s > 0 else "",
    )


def relative(ratio: float) -> str:
    """Return measured over predicted as text: `+3.2 %`, and from ten times on `12 times`."""
    return signed_change(ratio, 1.0) if ratio < MANY_TIMES else f"{ratio:,.0f} times"


def signed_change(seconds: float, base_s: float) -> str:
    """Return `change` with a typographic minus."""
    return change(seconds, base_s).replace("-", MINUS)


def write_page(run: FinishedRun) -> str:
    """Return HTML with everything in it.

    Raises:
        ConfigError: If plotly is not installed.
    """
    figures = {name: figure for name, figure in _charts(run) if figure is not None}
    step, kinds = run.step, [] if run.step is None else kinds_of(run.step)
    return render(
        "run.html.j2",
        figures,
        run=run,
        cards=tuple(_cards(run)),
        bound=_bound(run, figures),
        timelines={} if step is None else _timelines(step, figures),
        families={} if step is None else {str(each): COLOURS[each] for each in families_of(step)},
        lines={} if step is None else _lines(step),
        turns={kind: TURNS[kind] for kind in turns_of(run.course)},
        since=run.course.last_start.step if any(run.course.resumed) else (),
        kinds=tuple(kind_rows(kinds, nodes=step is not None and step.nodes > 1)),
        more_kinds=max(0, len(kinds) - MOST_KINDS),
        plans=None if run.plan is None else _plans(run.plan),
        loads={} if run.loads is None else _loads(run.loads, figures),
    )


# ---- the head ----------------------------------------------------------------------------------------------


def _cards(run: FinishedRun) -> Iterator[tuple[str, str]]:
    """Yield numbers, and what each is of: of a resumed run those since the last start."""
    course, step = run.course.last_start, run.step
    if (iteration_s := _typical(course.iteration_s)) is not None:
        yield (milliseconds(iteration_s), "per step (median), update included")
    if step is not None:
        yield (milliseconds(step.measured_s), _forward_and_backward(step, course, iteration_s))
        reached = "unknown" if step.efficiency is None else f"{step.efficiency:.2f}"
        traced = f"{_last_steps(step, step.traced_steps)} (traced)"
        yield (reached, f"overlap efficiency of {traced}: 1.00 = no order of the same tasks is faster")
    if (tokens_per_s := _typical(course.tokens_per_s)) is not None:
        yield (f"{tokens_per_s:,.0f}", "tokens per second of steps (median)")
    if run.summary is not None and (whole := run.summary.whole_tokens_per_s) is not None:
        yield (f"{whole:,.0f}", "tokens per second, with reading, evaluation and saving")
    total, exposed = _typical(course.communication_s), _typical(course.exposed_communication_s)
    if total and exposed is not None:
        yield (percent(1 - exposed / total), "of the communication hidden under computation")
    used = _typical(course.model_flops_utilisation)
    if used is not None and used <= 1:  # what steps exceed is no peak: its measurement was disturbed
        peak = run.summary and run.summary.peak_flops
        of = f"model FLOPs utilisation: of {peak or 'the peak of the devices'}"
        yield (f"{100 * used:.1f} %", of)
    if memory := [value for value in course.peak_memory_bytes if value is not None]:
        yield (gib(max(memory)), "held by rank 0 at most")
    if losses := [loss for loss in run.course.loss if loss is not None]:
        yield (f"{losses[-1]:.3f}", f"loss of the last step; {losses[0]:.3f} at the start")
    if held := [loss for loss in run.course.eval_loss if loss is not None]:
        yield (f"{held[-1]:.3f}", "loss on held-out text")


def _forward_and_backward(step: StepFile, course: Course, iteration_s: float | None) -> str:
    """Return what its card says. iteration_s: of a typical step, update included."""
    steps = None if step.traced_steps is None else step.typical_steps
    text = f"forward and backward of {_last_steps(step, steps)}"
    text += "" if steps == 1 else " (median)"
    if step.predicted_s:
        ratio = relative(step.measured_s / step.predicted_s)
        against = "the" if ratio.endswith("times") else "against the"
        text += f"; {ratio} {against} predicted {milliseconds(step.predicted_s)}"
    if iteration_s is not None and step.measured_s > iteration_s:
        text += "; longer than a median step of the run: these steps were slower"
        known = 0 if step.apart else steps or 0
        at = range(step.step - known + 1, step.step + 1)
        of_these = [
            seconds for number, seconds in zip(course.step, course.iteration_s, strict=True) if number in at
        ]
        # Of rank 0, so that it may be less than the part, which is that of the slowest rank.
        whole_s = median([seconds for seconds in of_these if seconds is not None] or [0.0])
        text += f", {milliseconds(whole_s)} with their updates" if whole_s > step.measured_s else ""
    return text


def _last_steps(step: StepFile, count: int | None) -> str:
    """Name the last `count` steps up to that of the file; None = their number is not known."""
    if count is None:
        return "the last steps"
    first = step.step - count + 1
    if step.apart and count > 1:
        return f"the last {count} timed steps, up to step {step.step}"
    if count == 1:
        return f"step {first}"
    return f"steps {first} {'and' if count == 2 else 'to'} {step.step}"


def _typical(values: Values) -> float | None:
    numbers = [value for value in values[WARM_UP_STEPS:] or values if value is not None]
    return median(numbers) if numbers else None


# ---- the step ----------------------------------------------------------------------------------------------


def _bound(run: FinishedRun, figures: dict[str, Figure]) -> dict[str, object] | None:
    """Return what bound the step, in sentences, with the colours of its parts, and what the plan expected."""
    binding = None if run.step is None else binding_of(run.step)
    if run.step is None or binding is None:
        return None
    figures["path"] = path_figure(binding)
    limits = [] if run.plan is None else [line for line in run.plan.why if line.startswith("Limit ")]
    return {
        "sentences": (*binding.sentences(), *slow_ranks(run.step)),
        "colours": {str(each): COLOURS[each] for each in (*binding.families, PAUSES)},
        "expected": tuple(line.removeprefix("Limit").strip() for line in limits),
    }


def _timelines(step: StepFile, figures: dict[str, Figure]) -> dict[str, str]:
    """Draw every rank that is kept, the one with most of the critical path first; return their menu."""
    busiest = max(step.shown, key=lambda rank: sum(link.rank == rank for link in step.path))
    menu = {f"timeline-{rank}": str(rank) for rank in sorted(step.shown, key=lambda rank: rank != busiest)}
    figures |= {name: timeline_figure(step, step.shown.index(int(rank))) for name, rank in menu.items()}
    return menu


def _lines(step: StepFile) -> dict[str, str]:
    """Return what lines in the timeline mean, by how they are drawn."""
    lines = {"strip": "critical path"} if step.path else {}
    return lines if step.predicted is None else lines | {"dotted": "end of the predicted step"}


def _plans(plan: PlanFile) -> dict[str, object]:
    """Return what is said of the plan that ran, with rows of others beside it and why, line by line."""
    if not plan.others:
        said = "No other plan is recorded: this one was given, or it was the only one possible."
        if following := next((line for line in plan.why if line.startswith("Next ")), None):
            said = (
                "Other plans were compared before it was known how rows are routed, so their times cannot "
                f"stand beside it. Then the next best was {following.removeprefix('Next ').strip()}."
            )
        alone = f"The run went by {plan.choice.words}."
        return {"said": (alone, said), "rows": (), "tried": False, "why": ()}
    best = min(plan.others, key=lambda other: other.predicted_s)
    by = f"{milliseconds(best.predicted_s)} per step, {signed_change(best.predicted_s, plan.predicted_s)}"
    said = f"The next best plan was {best.words}: {by}."
    if best.predicted_s < plan.predicted_s:
        said = (
            f"By prediction alone, {best.words} would be faster ({by}); what steps had really taken decided "
            "otherwise."
        )
    others = [line for line in plan.why if line.startswith(("What if", "Samples ", "Experts ", "Both "))]
    lines = (line.replace("`", "").partition("  ") for line in others)
    why = tuple((what, reason.strip()) for what, _, reason in lines)
    tried = any(each is not None for each in (plan.trial_s, *(other.measured_s for other in plan.others)))
    return {"said": (said,), "rows": tuple(plan_rows(plan, tried=tried)), "tried": tried, "why": why}


# ---- the course of the run ---------------------------------------------------------------------------------


def _charts(run: FinishedRun) -> Iterator[tuple[str, Figure | None]]:
    course, layers = run.course, () if run.loads is None else run.loads.layers
    if course.step:
        yield "loss", loss_figure(course)
        yield "speed", speed_figure(course)
        yield "network", network_figure(course)
        yield "balance", layers_figure(course, course.aux_loss_by_layer, layers, "balance loss")
        yield "busiest", layers_figure(course, course.rank_rows_max_over_mean, layers, "times the mean")
        yield "lasting", layers_figure(course, course.loads_in_common, layers, "share")
        yield "dropped", layers_figure(course, course.rows_dropped, layers, "share")


def _loads(course: LoadCourse, figures: dict[str, Figure]) -> dict[str, str]:
    """Draw loads over all, and layer by layer over time; return the menu of layers."""
    figures["loads"] = layer_loads_figure(course)
    shown = shown_layers(course)
    menu = {f"loads-{course.layers[place]}": f"L{course.layers[place]}" for place in shown}
    for name, place in zip(menu, shown, strict=True):
        figures[name] = loads_over_time_figure(course, place)
    return menu
