"""The published planners' grids as Markdown, so that a terminal and a document show the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.published.parm_study import PUBLISHED_RANGE, ParmResult, Spread
from benchmarks.published.result import PublishedResult
from benchmarks.published.study import Gain, GridResult
from penstock.words import markdown_table

NOTES: Final = (
    "simulated from rates that single tasks of the studies were fitted to; a number is how many times as "
    "fast, the mean over all layers",
    "one lane: traffic inside nodes and between nodes takes turns, as in what FSMoE compares with",
)
MISFIT: Final = (
    "fsmoe gains 7 to 11 % more than published: traffic inside nodes and between them takes about as long on "
    "these testbeds, and shares nothing in simulation, where real nodes share PCIe",
    "on one lane all-reduces under dense parts gain what is published, within 2 %, and fsmoe's partition no "
    "more than that; the paper has 4 and 7 % more",
    "the paper does not say on what else the figures depend: the layers in a stack (assumed: four; of fewer, "
    "a larger part of the gradients has no layer below), what attention takes, and whose gradients are "
    "reduced (assumed: those of one shard)",
)


def render_published(result: PublishedResult) -> str:
    """Return what was compared, one table per grid, and why it differs from what was published."""
    parts = ["\n".join(NOTES), *(_grid(grid) for grid in result.grids), "\n".join(MISFIT)]
    parts += [_parm(each) for each in result.parm]
    return "\n\n".join(parts)


def _grid(grid: GridResult) -> str:
    head = f"{grid.title} on {grid.cluster}: {grid.layers} layers, {grid.distinct} of them different"
    parts = [head, "\n".join(_table(f"over {grid.baseline}", grid.gains))]
    if grid.joint:
        parts += [
            f"the joint plan on {grid.sampled} of them",
            "\n".join(_table("joint plan over", grid.joint)),
        ]
    return "\n\n".join(parts)


def _table(title: str, gains: Sequence[Gain]) -> list[str]:
    published = any(gain.published is not None for gain in gains)
    head = (title, "mean", "least", "most", *(("published",) if published else ()))
    return markdown_table([head, *(_row(gain, published) for gain in gains)])


def _row(gain: Gain, published: bool) -> tuple[str, ...]:
    cells = (gain.contender, f"{gain.mean:.3f}", f"{gain.least:.3f}", f"{gain.most:.3f}")
    said = "-" if gain.published is None else f"{gain.published:.2f}"
    return (*cells, said) if published else cells


def _parm(result: ParmResult) -> str:
    least, most = PUBLISHED_RANGE
    return "\n\n".join(
        [
            f"Parm's layers on {result.cluster}: {result.layers} layers, each forward and backward",
            "\n".join(_spreads("over baseline_esp", result.spreads)),
            f"published for Parm on all layers of both testbeds: {least:.2f} to {most:.2f}",
            "\n".join(_spreads("parm by tp x etp", result.by_sharing)),
            "\n".join(
                [
                    f"fastest without overlap: {_shares(result.whole_wins)}",
                    f"fastest, fsmoe in pieces on three lanes: {_shares(result.wins)}",
                    f"Algorithm 1 takes the faster of S1 and S2 on {result.right:.1%} of them; elsewhere its "
                    f"choice takes up to {result.lost - 1:.1%} longer",
                ]
            ),
        ]
    )


def _spreads(title: str, spreads: Sequence[Spread]) -> list[str]:
    rows = [(x.system, *(f"{each:.2f}" for each in (x.mean, x.least, x.median, x.most))) for x in spreads]
    return markdown_table([(title, "mean", "least", "median", "most"), *rows])


def _shares(wins: Mapping[str, float]) -> str:
    return ", ".join(f"{name} on {share:.1%}" for name, share in wins.items())
