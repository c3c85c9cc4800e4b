"""The batch in microbatches: as many steps side by side, joined where sums are over the batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.graph import Name
from penstock.step.passes import Microbatches, Transpose
from penstock.step.plain import PlainStep
from tests.step.passes.pictures import check_picture
from tests.step.support import names, reads
from tests.steps import task_at

PLAIN = PlainStep(moe_layers=(True, False)).graph()


def test_the_picture_is_true() -> None:
    graph = PlainStep(moe_layers=(True,)).graph()
    check_picture(Microbatches, graph, Microbatches(2)(graph), layer=0)


def test_the_statistics_read_every_microbatch_and_every_backward_reads_them() -> None:
    graph = Microbatches(3)(Transpose()(PLAIN)).check()
    assert reads(graph, "L1.ST.F") == {
        "loss": "L1.HD.m0.F L1.HD.m1.F L1.HD.m2.F",
        "routers": "L0.AT.m0.F L0.AT.m1.F L0.AT.m2.F",
    }
    assert all(reads(graph, f"L1.HD.m{m}.B")["d_loss"] == "L1.ST.F" for m in range(3))
    assert names(graph).count("L1.ST.F") == 1


@given(st.integers(1, 5))
def test_every_microbatch_is_the_whole_step_again(count: int) -> None:
    """Apart from sums over the batch, no task of one reads one of another."""
    whole = Transpose()(PLAIN)
    graph = Microbatches(count)(whole).check()
    for m in range(count):
        mine = [task for task in graph.tasks if task.microbatch == m]
        assert [t.name._replace(microbatch=0) for t in mine] == [
            t.name for t in whole.tasks if t.microbatch is not None
        ]
        for task in mine:
            original = whole.by_name[task.name._replace(microbatch=0)]
            assert (task.lane, task.axes, task.accumulates) == (
                original.lane,
                original.axes,
                original.accumulates,
            )
            assert task.inputs == {
                role: tuple(_moved(name, m) for name in read) for role, read in original.inputs.items()
            }


def _moved(name: Name, microbatch: int) -> Name:
    return name if name.microbatch is None else name._replace(microbatch=microbatch)


def test_a_task_knows_into_how_many_the_batch_is_cut() -> None:
    graph = Microbatches(3)(PLAIN)
    assert {task.cut.microbatches for task in graph.tasks if task.microbatch is not None} == {3}
    assert task_at(graph, "L1.ST.F").cut.microbatches == 1
