"""What `parallelize` makes of every family with routed experts in transformers, and the page that says so.

`python -m tests.support.survey` writes the table of docs/families.md anew.
Shapes: B samples, L tokens per sample.
"""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.adapt import FAMILIES
from tests.support.adapted import Batch, DrawnFromScores, distance, exactly, grads_of, part_of
from tests.support.families import found, tiny

PAGE = Path(__file__).parents[2] / "docs/families.md"
HEAD = "| type | trains as in transformers | router loss | packed documents kept apart |"
RANDOM = "phimoe"
"""Draws experts by chance in training."""

LEFT_OUT = re.compile(
    r"^cannot be scheduled: |^is of no family that Penstock knows, and |: model\..*| \(model\.[^)]*\)"
)
"""What goes without saying in the table, or is of one family alone."""

LAYER = re.compile(r"^\w+DecoderLayer ")
NUMBER = re.compile(r"no \((\d+)\)")

SENTENCE = re.compile(r"\.(?: |$)")
"""The end of a sentence, and not of a part of a name."""


@dataclass(frozen=True)
class Case:
    """A batch. packed: samples are two documents each, told by positions; else the last one has padding at
    its beginning. balanced: the model is asked for its router loss."""

    packed: bool
    balanced: bool

    def inputs(self, first: int, stop: int) -> dict[str, Any]:
        given: dict[str, Any] = Batch(padded=not self.packed).inputs(first, stop)
        if self.packed:
            given |= {
                "position_ids": positions()[first:stop],
                "use_cache": False,
            }  # a cache ignores documents
        return {**given, "output_router_logits": True} if self.balanced else given


CASES = {
    f"{'packed' if packed else 'padded'}{' and balanced' if balanced else ''}": Case(packed, balanced)
    for packed in (False, True)
    for balanced in (False, True)
}
FEW = ("padded and balanced", "packed")
"""Cases in which everything occurs."""


def positions() -> torch.Tensor:
    """Positions of two documents in each sample, which are longer in one sample than in another."""
    lengths = [5 + number for number in range(Batch().samples)]
    return torch.stack([torch.cat([torch.arange(n), torch.arange(Batch().length - n)]) for n in lengths])


def agreement(rank: int, world: int, family: str, cases: tuple[str, ...] = FEW) -> dict[str, float]:
    """Relative distances of losses and gradients from those of transformers, of all ranks' samples.

    Cases that transformers cannot compute itself, or whose router loss is refused, are left out.
    """
    first = 0 if rank == 0 else Batch().samples - world + rank  # the first rank has more samples than others
    stop = Batch().samples - world + rank + 1
    distances: dict[str, float] = {}
    with exactly(torch.float64), DrawnFromScores() if family == RANDOM else nullcontext():
        wanted = tiny(family, torch.float64)
        model = penstock.parallelize(copy.deepcopy(wanted), plan="flowmoe")
        for name in cases:
            case, whole = CASES[name], Batch().samples
            try:
                theirs = wanted(**case.inputs(0, whole))
            except Exception:  # whatever the code of transformers raises
                assert name != "padded", family
                continue
            try:
                ours = model(**case.inputs(first, stop))
            except ValueError as error:
                assert case.balanced and "weighs its router loss was not understood" in str(error)
                continue
            for each in (wanted, model):
                each.zero_grad()
            theirs.loss.backward()
            ours.loss.backward()
            expected, grads = grads_of(wanted), grads_of(model)
            parameters = dict(model.named_parameters())
            for key in ("loss", "aux_loss") if ours.get("aux_loss") is not None else ("loss",):
                found_, whole_ = ours[key].detach().double(), theirs[key].detach().double()
                distances[f"{name}: {key}"] = distance(found_, whole_)
            for key, grad in expected.items():
                distances[f"{name}: {key}"] = distance(grads[key], part_of(parameters[key], grad, rank))
            assert not any(grad.any() for key, grad in grads.items() if key not in expected), name
    return distances


def row(family: str) -> str:
    """The row of a family in the table."""
    model, given = tiny(family), Batch().inputs()
    begin = f"| `{family}` |"
    try:
        scheduled = penstock.parallelize(copy.deepcopy(model), plan="flowmoe")
    except ValueError as error:
        why = SENTENCE.split(str(error), maxsplit=1)[0].removeprefix(type(model).__name__).lstrip(": ")
        return f"{begin} no: {LAYER.sub('a layer ', LEFT_OUT.sub('', why))} | | |"
    weighs = _router_loss(model)
    if weighs == "yes":
        try:
            scheduled(**given, output_router_logits=True)
        except ValueError:
            weighs = "refused"
    how = "described" if family in FAMILIES else "yes"
    return f"{begin} {how} | {weighs} | {_kept_apart(model)} |"


def _router_loss(model: Any) -> str:
    """Whether a model of transformers has a router loss."""
    try:
        out = model(**Batch().inputs(), output_router_logits=True)
    except Exception:  # whatever the code of transformers raises
        return "fails in transformers"
    return "none" if out.get("aux_loss") is None else "yes"


def _kept_apart(model: Any) -> str:
    """Whether tokens of a document depend on those of the one before, in transformers."""
    tokens = Batch().inputs()["input_ids"]
    first_BL = torch.arange(Batch().length) < positions().diff(dim=1).argmin(dim=1, keepdim=True) + 1
    changed = torch.where(first_BL, (tokens + 7) % 40 + 3, tokens)
    with torch.no_grad():
        try:
            model.eval()
            one, other = (
                model(input_ids=ids, position_ids=positions(), use_cache=False).logits
                for ids in (tokens, changed)
            )
        except Exception:  # whatever the code of transformers raises
            return "fails in transformers"
        finally:
            model.train()
    return "yes" if torch.allclose(one[~first_BL], other[~first_BL], atol=1e-5) else "no"


def table() -> str:
    """The table of all families, with the reasons of those that are refused below it."""
    return _numbered([row(family) for family in found()])


def _numbered(lines: list[str]) -> str:
    """The table of these rows, with numbers in the place of reasons."""
    reasons: dict[str, int] = {}
    short = [
        re.sub(
            r"no: (.*) \| \| \|", lambda no: f"no ({reasons.setdefault(no[1], len(reasons) + 1)}) | | |", line
        )
        for line in lines
    ]
    below = [f"{number}. {why}" for why, number in reasons.items()]
    return "\n".join([HEAD, "| --- " * 4 + "|", *short, "", *below])


def rows() -> dict[str, str]:
    """The rows that the page has, by family, with reasons in the place of numbers."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    reasons = dict(line.split(". ", 1) for line in lines if re.match(r"\d+\. ", line))
    return {
        line.split("`")[1]: NUMBER.sub(lambda no: f"no: {reasons[no[1]]}", line)
        for line in lines
        if line[:3] == "| `"
    }


if __name__ == "__main__":
    before, _, after = PAGE.read_text(encoding="utf-8").partition(HEAD)
    print(f"{before}{table()}\n\n- **trains{after.partition('- **trains')[2]}", end="")
