"""What serves which family of models: the table in docs/features.md, from the register of families."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from penstock.adapt.planning import UNKNOWN
from penstock.families.known import Family

YES, NO = "yes", "no"
SEVERAL_ROWS = "parameters have several rows for each expert"
Serves = Callable[[Family], str | None]
"""Maps a family to the reason why a feature does not serve it; None: it does."""


EVERY = (
    "experts spread over ranks (`ep_size`)",
    'every schedule, `plan="auto"`',
    "every dispatch, compressed rows (`moe.comm_dtype`)",
    "`plan.recompute`",
    "`ShardedAdamW`",
    "loading a share, saving",
    "`penstock train`: trials, checkpoints beside the steps, any layout into any other",
    "samples that move (`placement.samples`, in runs)",
)
"""Features that serve every family."""

FEATURES: Mapping[str, Serves] = {
    "attention shared by ranks (`tp_size`)": lambda family: None if family.attention else family.uncut,
    "every expert shared by ranks (`etp_size`)": lambda family: None if family.form.narrows else SEVERAL_ROWS,
    "experts that move (`placement.experts`)": lambda family: None if family.form.moves else SEVERAL_ROWS,
    "packed documents kept apart (`data.separate_documents`, `position_ids`)": lambda family: (
        None if family.separates_documents else "some of its layers carry state across documents"
    ),
}
"""Other features by what the table calls them."""


def table(families: Mapping[str, Family]) -> str:
    """Return what serves every family, and the table of other features, in Markdown, with reasons below."""
    every = ["Every family has", "", *(f"- {feature}" for feature in EVERY), ""]
    rows = [_row(("", *FEATURES)), _row(["---"] * (len(FEATURES) + 1))]
    reasons: dict[str, int] = {}
    for name, family in sorted(families.items()):
        whys = (serves(family) for serves in FEATURES.values())
        cells = [
            YES if why is None else f"{NO} ({reasons.setdefault(why, len(reasons) + 1)})" for why in whys
        ]
        rows.append(_row((f"`{name}`", *cells)))
    numbered = (f"{number}. {why}" for why, number in reasons.items())
    nobody = [f"- `Decision({name}=...)` of `parallelize` other than `none`: {why}" for name, why in UNKNOWN]
    return "\n".join(chain(every, rows, [""], numbered, ["", "No family has", ""], nobody))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
