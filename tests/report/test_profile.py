"""What `penstock profile` prints and draws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cost.cluster_file import Fit, LinkModel
from penstock.cost.clusters import find_cluster
from penstock.report.profile import draw_profile, link_bandwidth, profile_text
from tests.cost.test_clusters import MEASURED


def link(collective: str, ranks: int, op: str = "") -> LinkModel:
    return LinkModel(
        collective=collective, group="ep", lane="inter", ranks=ranks, alpha_s=0.0, beta_s_per_byte=1e-8, op=op
    )


@pytest.mark.parametrize(
    ("collective", "op", "share"),
    [
        ("all_to_all", "", 3 / 4),
        ("all_gather", "", 3 / 4),
        ("reduce_scatter", "", 3 / 4),
        ("all_reduce", "", 6 / 4),
        ("uneven_all_to_all", "", 6 / 5),
        ("broadcast", "", 3),
        ("point_to_point", "", 1),
        ("hierarchical_1d", "DG", 1),
        ("hierarchical_1d", "D", 1),
        ("hierarchical_2d", "D", 1 / 2),
    ],
)
def test_bandwidth_is_that_of_the_busiest_link(collective: str, op: str, share: float) -> None:
    """Of four ranks on two nodes: bytes over that link per byte of the model's argument."""
    file = replace(MEASURED, nodes=2, ranks_per_node=2, slowness=())
    assert link_bandwidth(file, link(collective, 4, op)) == pytest.approx(share * 1e8)


def test_nothing_crosses_a_link_inside_a_node_of_one_rank() -> None:
    assert link_bandwidth(MEASURED, link("hierarchical_2d", 2, "DG")) is None


def test_groups_that_were_measured_once_share_a_row() -> None:
    world = replace(MEASURED.links[0], group="world")
    slower = replace(world, group="rail", alpha_s=1.0)
    text = profile_text(replace(MEASURED, links=(*MEASURED.links, world, slower)))
    rows = [line for line in text.splitlines() if "| all_to_all" in line]
    assert len(rows) == 2 and "ep world" in rows[0] and "rail" in rows[1]
    assert "100" in rows[0] and "50.0" in rows[0] and "0.990" in rows[0] and "2.0 %" in rows[0]


def test_all_parts_are_shown() -> None:
    text = profile_text(MEASURED)
    assert text.startswith("measured: 2 ranks on 2 nodes, p, PyTorch 2, 2026-11-21")
    for shown in ("AT.F", "1.50", "1.10", "copy", "10.0 GB/s", "5.0 %", "rank 1 1.50"):
        assert shown in text
    for said in (
        "transfers take 1.30 times as long during computation as alone; in steps 1.10 times as long as above",
        "9 real steps took 1.05 times as long as their parts say",
        "to take 0.95 to 1.05 times their prediction",
        *MEASURED.doubts,
    ):
        assert said in text
    assert all(len(line) <= 110 for line in text.splitlines())


def test_a_file_written_by_hand_shows_what_it_has() -> None:
    link = replace(MEASURED.links[0], collective="reduce_scatter", fit=None)
    text = profile_text(replace(find_cluster("fsmoe-testbed-b"), links=(link,)))
    assert text.startswith("fsmoe-testbed-b: 32 ranks on 8 nodes\n")
    assert "reduce_scatter" in text and "kernel" not in text and "FSMoE" in text


def test_the_figure_shows_every_line(tmp_path: Path) -> None:
    path = draw_profile(MEASURED, tmp_path / "new" / "folder")
    assert path.name == "profile.png" and path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.stat().st_size > 5000


def test_a_rate_that_explains_nothing_is_not_printed() -> None:
    noisy = replace(MEASURED.links[0].fit or Fit(r2=0, residual=0, points=()), r2=0.1)
    file = replace(MEASURED, links=(replace(MEASURED.links[0], fit=noisy),))
    rate = link_bandwidth(file, file.links[0])
    assert rate is not None
    text = profile_text(file)
    assert f"{rate / 1e6:.1f}" not in text
    assert "| unknown | 0.100 |" in text.replace("  ", " ")
    assert "unknown: R2 is below 0.5" in text
    assert "unknown" not in profile_text(MEASURED)


@pytest.mark.parametrize("points", [1, 2, 3])
def test_two_points_do_not_say_how_well_a_line_fits(points: int) -> None:
    link = MEASURED.links[0]
    assert link.fit is not None
    exact = Fit(r2=1.0, residual=0.0, points=link.fit.points[:points])
    text = " ".join(profile_text(replace(MEASURED, links=(replace(link, fit=exact),))).split())
    assert ("| 1.000 | 0.0 % |" in text) is (points == 3)
    assert ("| unknown | unknown |" in text) is (points < 3)
    assert ("R2 and residual unknown: fewer than 3 points" in text) is (points < 3)
