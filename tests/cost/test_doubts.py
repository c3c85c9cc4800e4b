"""What measurements could not tell, in words."""

from __future__ import annotations

from penstock.cost.contention import Contention
from penstock.cost.measured import STOPPED, listed, scattered


def test_kinds_that_differ_from_step_to_step_share_a_line() -> None:
    """On a busy machine there are a dozen of them; what is said for other reasons stays as it is."""
    differing = [
        scattered(what, Contention(scatter=share).words) for what, share in (("AT.F", 0.58), ("U.F", 0.73))
    ]
    far = scattered("X.B", Contention(solo=3.0).words)
    assert listed([*differing, far, STOPPED]) == (
        "predicted as measured by themselves, since they differ from step to step: AT.F (58 %), U.F (73 %)",
        far,
        STOPPED,
    )
    assert listed([differing[0], STOPPED]) == (differing[0], STOPPED)
    assert listed([]) == ()
