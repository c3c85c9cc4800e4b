"""The report of a run as one HTML file: its step, what bound the step, and the course of the run."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from statistics import median

from penstock.plan import PlanFile
from penstock.report.page.curves import (
    layer_loads_figure,
    layers_figure,
    loads_over_time_figure,
    loss_figure,
    network_figure,
    shown_layers,
    speed_figure,
)
from penstock.report.page.findings import binding_of, kinds_of, slow_ranks
from penstock.report.page.finished import Course, FinishedRun, Values
from penstock.report.page.style import COLOURS, PAUSE, Figure
from penstock.report.page.tables import kinds_table, plans_table, relative, signed_change
from penstock.report.page.template import choice, figure, legend, page, paragraph, section
from penstock.report.page.timelines import families_of, path_figure, timeline_figure
from penstock.trace.step_file import StepFile
from penstock.words import counted, gib, milliseconds, percent

WARM_UP_STEPS = 2
"""First steps, which allocate buffers and open connections; medians leave them out."""


def write_page(run: FinishedRun) -> str:
    """Return HTML with everything in it. Raises ConfigError if plotly is not installed."""
    figures: dict[str, Figure] = {}
    body = [
        f"<h1>{escape(run.name)}</h1>",
        paragraph(_what(run)),
        *(paragraph(failure, "said") for failure in run.failures),
        f'<div class="cards">{"".join(_cards(run))}</div>',
        *_step_sections(run, figures),
        *_course_sections(run, figures),
        *_load_sections(run, figures),
        *_ending(run),
    ]
    return page(f"{run.name}: report of a run", "\n".join(body), figures)


# ---- the head ----------------------------------------------------------------------------------------------


def _what(run: FinishedRun) -> str:
    if run.summary is not None:
        return f"{run.summary.subject}. Text: {run.summary.corpus}."
    steps = counted(len(run.course.steps), "step")
    return f"{steps} are recorded; the run has left no summary: it is still going on, was killed, or failed."


def _cards(run: FinishedRun) -> Iterator[str]:
    course, step = run.course, run.step
    if (iteration_s := _typical(course.iteration_s)) is not None:
        yield _card(milliseconds(iteration_s), "per step (median), update included")
    if step is not None:
        yield _card(milliseconds(step.measured_s), _forward_and_backward(step, course, iteration_s))
        reached = "unknown" if step.efficiency is None else f"{step.efficiency:.2f}"
        traced = f"{_last_steps(step, step.traced_steps)} (traced)"
        yield _card(reached, f"overlap efficiency of {traced}: 1.00 = no order of the same tasks is faster")
    if (tokens_per_s := _typical(course.tokens_per_s)) is not None:
        yield _card(f"{tokens_per_s:,.0f}", "tokens per second of steps (median)")
    if run.summary is not None and (whole := run.summary.whole_tokens_per_s) is not None:
        yield _card(f"{whole:,.0f}", "tokens per second, with reading, evaluation and saving")
    if (hidden := _hidden(course)) is not None:
        yield _card(percent(hidden), "of the communication hidden under computation")
    if (used := _typical(course.utilisation)) is not None:
        peak = run.summary and run.summary.peak_flops
        told = f"model FLOPs utilisation: of {peak or 'the peak of the devices'}"
        yield _card(f"{100 * used:.1f} %", told)
    if (memory := _largest(course.peak_memory_bytes)) is not None:
        yield _card(gib(memory), "held by rank 0 at most")
    yield from _loss_cards(course)


def _forward_and_backward(step: StepFile, course: Course, iteration_s: float | None) -> str:
    """Return what its card says. iteration_s: of a typical step, update included."""
    steps = None if step.traced_steps is None else step.typical_steps
    told = f"forward and backward of {_last_steps(step, steps)}"
    told += "" if steps == 1 else " (median)"
    if step.predicted_s > 0:
        ratio = relative(step.measured_s / step.predicted_s)
        against = "the" if ratio.endswith("times") else "against the"
        told += f"; {ratio} {against} predicted {milliseconds(step.predicted_s)}"
    if iteration_s is not None and step.measured_s > iteration_s:
        told += "; longer than a median step of the run: these steps were slower"
        at = range(step.step - (steps or 0) + 1, step.step + 1)
        of_these = [
            each for number, each in zip(course.steps, course.iteration_s, strict=True) if number in at
        ]
        if known := [each for each in of_these if each is not None]:
            told += f", {milliseconds(median(known))} with their updates"
    return told


def _last_steps(step: StepFile, count: int | None) -> str:
    """Name the last `count` steps up to that of the file; None = their number is not known."""
    if count is None:
        return "the last steps"
    first = step.step - count + 1
    if count == 1:
        return f"step {first}"
    return f"steps {first} {'and' if count == 2 else 'to'} {step.step}"


def _loss_cards(course: Course) -> Iterator[str]:
    losses = [loss for loss in course.loss if loss is not None]
    held = [loss for loss in course.eval_loss if loss is not None]
    if losses:
        yield _card(f"{losses[-1]:.3f}", f"loss of the last step; {losses[0]:.3f} at the start")
    if held:
        yield _card(f"{held[-1]:.3f}", "loss on held-out text")


def _card(number: str, words: str) -> str:
    return f'<div class="card"><b>{escape(number)}</b><span>{escape(words)}</span></div>'


def _typical(values: Values) -> float | None:
    known = [value for value in values[WARM_UP_STEPS:] or values if value is not None]
    return median(known) if known else None


def _largest(values: Values) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _hidden(course: Course) -> float | None:
    total, exposed = _typical(course.communication_s), _typical(course.exposed_s)
    return 1 - exposed / total if total and exposed is not None else None


# ---- the step ----------------------------------------------------------------------------------------------


def _step_sections(run: FinishedRun, figures: dict[str, Figure]) -> Iterator[str]:
    if run.step is not None:
        yield from _bound_section(run, run.step, figures)
        yield _timeline_section(run.step, figures)
        yield _kinds_section(run.step)
    if run.plan is not None:
        yield _plans_section(run)


def _bound_section(run: FinishedRun, step: StepFile, figures: dict[str, Figure]) -> Iterator[str]:
    binding = binding_of(step)
    if binding is None:
        return
    figures["path"] = path_figure(binding)
    said = [paragraph(sentence, "said") for sentence in (*binding.sentences(), *slow_ranks(step))]
    limits = [] if run.plan is None else [line for line in run.plan.why if line.startswith("Limit ")]
    planned = [paragraph(f"The plan expected: {line.removeprefix('Limit').strip()}.") for line in limits]
    label = f"the critical path: {binding.sentences()[0]}"
    known = {str(family): COLOURS[family] for family in binding.families} | {"pauses": PAUSE}
    title = f"What bound step {step.step}"
    yield section(title, *said, legend(known), figure("path", label), *planned)


def _timeline_section(step: StepFile, figures: dict[str, Figure]) -> str:
    names = {f"timeline-{rank}": f"{rank}" for rank in step.shown}
    for number, name in enumerate(names):
        figures[name] = timeline_figure(step, number)
    busiest = max(step.shown, key=lambda rank: sum(link.rank == rank for link in step.path))
    ordered = {f"timeline-{busiest}": names[f"timeline-{busiest}"], **names}
    some = "" if len(step.shown) == step.ranks else f" {len(step.shown)} of {step.ranks} ranks are kept."
    about = (
        f"Each bar is a task; point at it for its name. Dark edges mark the critical path. Predicted from "
        f"{step.source}. Drag to zoom, click twice to see everything.{some}"
    )
    label = "timelines of a step, predicted above measured, one row for each lane"
    first = next(iter(ordered))
    place = f'<div id="timeline" data-figure="{first}" role="img" aria-label="{label}"></div>'
    known = legend({str(family): COLOURS[family] for family in families_of(step)})
    menu = choice("timeline", "rank", ordered)
    return section("The step, predicted and measured", paragraph(about), menu, known, place)


def _kinds_section(step: StepFile) -> str:
    steps = "the last step" if step.typical_steps == 1 else f"the last {step.typical_steps} steps"
    about = (
        f"Sums over all tasks of a kind in a step, from median durations of {steps}. Of computation the mean "
        "over ranks; of a transfer the rank that waited least, since the others wait for the last one."
    )
    return section("Where the prediction was wrong", paragraph(about), kinds_table(kinds_of(step)))


def _plans_section(run: FinishedRun) -> str:
    assert run.plan is not None
    plan = run.plan
    if not plan.others:
        return section(
            "Plans",
            paragraph(f"The run went by {plan.choice.words}."),
            paragraph(_without_others(plan)),
        )
    best = min(plan.others, key=lambda other: other.predicted_s)
    by = f"{milliseconds(best.predicted_s)} per step, {signed_change(best.predicted_s, plan.predicted_s)}"
    said = f"The next best plan was {best.words}: {by}."
    if best.predicted_s < plan.predicted_s:
        said = (
            f"By prediction alone, {best.words} would be faster ({by}); what steps had really taken decided "
            "otherwise."
        )
    others = [line for line in plan.why if line.startswith(("What if", "Samples ", "Experts ", "Both "))]
    parted = (line.partition("  ") for line in others)
    more = "".join(f"<li><b>{escape(what)}:</b> {escape(said.strip())}</li>" for what, _, said in parted)
    return section("Plans", paragraph(said, "said"), plans_table(plan), f"<ul>{more}</ul>" if more else "")


def _without_others(plan: PlanFile) -> str:
    """Return why a plan stands beside no others."""
    if following := next((line for line in plan.why if line.startswith("Next ")), None):
        return (
            "Other plans were compared before it was known how rows are routed, so their times cannot stand "
            f"beside it. Then the next best was {following.removeprefix('Next ').strip()}."
        )
    return "No other plan is recorded: this one was given, or it was the only one possible."


# ---- the course of the run ---------------------------------------------------------------------------------


def _course_sections(run: FinishedRun, figures: dict[str, Figure]) -> Iterator[str]:
    if not run.course.steps:
        return
    changes = "Dotted lines: another plan, or another order of its tasks, began."
    figures["loss"], figures["speed"] = loss_figure(run.course), speed_figure(run.course)
    pairs = [
        section("Loss", paragraph(changes), figure("loss", "loss by step")),
        section("Speed", paragraph(changes), figure("speed", "tokens per second by step")),
    ]
    network = network_figure(run.course)
    if network is not None:
        figures["network"] = network
        about = "Rank 0's communication in forward and backward; exposed is what nothing was computed under."
        pairs.append(section("Network", paragraph(about), figure("network", "communication by step")))
    pairs += _layer_sections(run, figures)
    yield f'<div class="pair">{"".join(pairs)}</div>'


def _layer_sections(run: FinishedRun, figures: dict[str, Figure]) -> Iterator[str]:
    layers = () if run.loads is None else run.loads.layers
    course = run.course
    for name, title, about, unit, by_layer in (
        (
            "balance",
            "Balance loss by layer",
            "1 is perfect balance of experts; without its coefficient.",
            "balance loss",
            course.aux_loss,
        ),
        (
            "busiest",
            "Rows of the busiest rank by layer",
            "Rows that it computes over the mean of all ranks, those of its guests included; 1 is balance.",
            "times the mean",
            course.rank_rows,
        ),
        (
            "lasting",
            "Loads that last by layer",
            "The share of rows that a step and the one before have alike, by rank and expert.",
            "share",
            course.loads_in_common,
        ),
        (
            "dropped",
            "Choices dropped by layer",
            "The share of choices for which their expert had no room.",
            "share",
            course.rows_dropped,
        ),
    ):
        drawn = layers_figure(course, by_layer, layers, unit)
        if drawn is not None:
            figures[name] = drawn
            yield section(title, paragraph(about), figure(name, title))


def _load_sections(run: FinishedRun, figures: dict[str, Figure]) -> Iterator[str]:
    course = run.loads
    if course is None:
        return
    figures["loads"] = layer_loads_figure(course)
    shown = shown_layers(course)
    names = {f"loads-{course.layers[place]}": f"L{course.layers[place]}" for place in shown}
    for number, name in zip(shown, names, strict=True):
        figures[name] = loads_over_time_figure(course, number)
    span = f"steps {course.steps[0]} to {course.steps[-1]}"
    whole = (
        f"How often each expert was chosen, over the mean of its layer: blue is less, orange more; {span}."
    )
    first = next(iter(names))
    label = "loads of experts over time"
    place = f'<div id="loads-time" data-figure="{first}" role="img" aria-label="{label}"></div>'
    yield (
        '<div class="pair">'
        + section("Loads of experts", paragraph(whole), figure("loads", "loads by layer and expert"))
        + section(
            "Loads over time",
            paragraph("One MoE layer, step by step."),
            choice("loads-time", "layer", names),
            place,
        )
        + "</div>"
    )


def _ending(run: FinishedRun) -> Iterator[str]:
    if run.missing:
        items = "".join(f"<li>{escape(each)}</li>" for each in run.missing)
        yield section("Not in this report", f"<ul>{items}</ul>")
    if run.settings:
        text = f"<pre>{escape(run.settings)}</pre>"
        yield f"<section><details><summary>Settings (config.toml)</summary>{text}</details></section>"
