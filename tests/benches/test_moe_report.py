"""What the page on experts says was measured is what was measured."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from bench import moe_report

LOSS = "{http://www.w3.org/2000/svg}polyline"


@pytest.fixture
def results():
    return json.loads(moe_report.RESULTS.read_text(encoding="utf-8"))


def test_the_plot_is_current(results):
    plot = moe_report.PLOT.read_text(encoding="utf-8")
    assert plot == moe_report.curves_svg(results), "run python -m bench.moe_report"


def test_the_page_has_the_measured_numbers(results):
    page = moe_report.PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- measured: ([\w -]+?) -->", page)) == set(moe_report.BLOCKS)
    assert page == moe_report.filled(page, results), "run python -m bench.moe_report"
    assert f"({moe_report.PLOT.name})" in page


def run(name, seed, losses):
    return {"name": name, "seed": seed, "validation": [{"step": 25 * i, "loss": y} for i, y in enumerate(losses)]}


def test_curves_lie_where_their_losses_are():
    runs = [run("dense", 0, [7.6, 6.0, 4.0]), run("dense", 1, [7.6, 6.0, 5.0]), run("switch", 0, [7.6, 5.0, 4.0])]
    lines = [
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in ElementTree.fromstring(moe_report.curves_svg({"runs": runs})).iter(LOSS)
    ]
    low, high, mean, switch, _ = lines
    assert [len(line) for line in lines] == [2] * 5  # the first loss, before any step, is left out
    assert low[0] == high[0] == mean[0]
    assert low[1][1] > mean[1][1] > high[1][1]  # down is a lower loss
    assert mean[1][1] == pytest.approx((low[1][1] + high[1][1]) / 2, abs=0.1)
    assert switch[1] == low[1]
    assert switch[0][1] == pytest.approx(high[1][1])
