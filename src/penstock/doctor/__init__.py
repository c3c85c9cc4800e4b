"""Checks a cluster before a job: what every rank finds about itself, clocks and links between ranks.

Ranks meet at the store of their launcher alone, with a deadline for everything, so a rank that never comes is
named instead of being waited for. `facts.py` looks at one machine, `meeting.py` brings ranks together,
`wire.py` measures between two of them, `examine.py` does all of this in turn, `checks.py` judges what was
found.
"""

from penstock.doctor.checks import Check, Finding, Wanted, judge
from penstock.doctor.examine import Examination, examine
from penstock.doctor.facts import Facts

__all__ = ["Check", "Examination", "Facts", "Finding", "Wanted", "examine", "judge"]
