"""The report's page in a browser: its curves, smoothed and over one another, and that it is fit to be read by all."""

from __future__ import annotations

import re

import pytest

import browser
import step_pages
import told_runs
from longer import longer
from seen_pages import READY, Seen
from superstep.observe.doctor.diagnose import Diagnosis, Finding
from superstep.observe.doctor.observations import RankObservation, RunObservation
from superstep.observe.doctor.wait_graph import RankWait
from superstep.observe.page.compare import compare
from superstep.observe.page.doctor import doctor_page
from superstep.observe.page.report import ReportedRun, report_page, split_step
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step

pytestmark = pytest.mark.skipif(browser.PATH is None, reason=f"none of {', '.join(browser.NAMES)} is installed")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    with browser.browser() as tab:
        yield Seen(tab, tmp_path_factory.mktemp("reports"))


@pytest.fixture(scope="module")
def report():
    one = step_pages.drawn(step_pages.A_RUN, is_measured=True)
    lines = list(told_runs.lines(experts=4))
    lines[0]["predicted_spent_s"] = split_step(one.timeline)
    lines[0]["predicted_step_s"] = one.timeline.step_s
    for line in lines:
        if line["event"] == "step":  # as long as the recorded one
            line["step_s"] *= one.measured.step_s / 0.165
    lines[0]["predicted_traffic_bytes"] = {"shards": 17_000_000, "tp": 55_000_000}
    told = ReportedRun(
        name="a made-up run",
        lines=lines,
        settings="[model]\n",
        ran=one.measured,
        facts={"python": "3.12", "torch": "2.13.0"},
    )
    return report_page([told])


def ink(curve):
    """Pixels of a chart that are not its ground."""
    return f"""(() => {{
      const canvas = document.querySelectorAll('#curves canvas')[{curve}];
      const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      let count = 0;
      for (let i = 3; i < data.length; i += 4) count += data[i] > 0;
      return count;
    }})()"""


def _ms(found):
    number, unit = found
    return float(number) / (1000 if unit == "µs" else 1)


def turn(seen, name, value):
    """Set a control."""
    seen(f"document.getElementById('{name}').value = '{value}'")
    seen(f"document.getElementById('{name}').dispatchEvent(new Event('input'))")


def test_a_report_has_its_curves_and_asks_for_nothing(seen, report):
    seen.open(report)
    assert seen(READY) == "report"
    titles = seen("[...document.querySelectorAll('figcaption')].map((one) => one.firstChild.textContent)")
    assert titles[0] == "Loss, nats a token"
    assert "Busiest expert over the even load" in titles
    assert len(titles) == 8
    assert all(seen(ink(k)) > 500 for k in range(8))
    assert seen("document.querySelectorAll('#falls .bar').length") == 2
    ledger = seen("document.getElementById('ledger').innerText").splitlines()
    assert [line.split("\t")[:2] for line in ledger[1:3]] == [
        ["a step", "316.8\u00a0ms"],
        ["the recorded step", "316.8\u00a0ms"],
    ]
    # What is written adds up as a reader adds it, to the last digit but for its rounding.
    told = seen("[...document.querySelectorAll('#falls .soft')].map((one) => one.textContent)")
    assert [text.partition(":")[0] for text in told] == ["as it ran", "predicted"]
    for text in told:
        whole_ms, *parts_ms = map(_ms, re.findall(r"([\d.]+)\u00a0(µs|ms)", text))
        assert len(parts_ms) >= 6, text
        assert sum(parts_ms) == pytest.approx(whole_ms, rel=5e-4), text
    assert seen("[...document.querySelectorAll('#axes b')].map((one) => one.textContent)") == ["tp", "shards"]
    assert "step-000600" in seen("document.getElementById('events').innerText")
    seen.keep("report-light")
    # Smoothed, the curve keeps what was told beneath it in pale.
    before = seen("superstep.R.plots[0].series.length")
    turn(seen, "smooth", "0.9")
    assert seen("superstep.R.plots[0].series.length") == before + 1
    assert seen("superstep.smoothed([1, null, 3], 0.5)") == [1, None, pytest.approx((0.25 * 1 + 0.5 * 3) / 0.75)]
    seen.tab.click("#log")
    assert seen("superstep.R.plots[0].scales.y.distr") == 3
    turn(seen, "over", "tokens_seen")
    assert seen("superstep.R.plots[0].data[0].at(-1)") == 600 * 4096
    # The cursor tells the values of all charts at one step.
    seen("document.getElementById('curves').scrollIntoView()")
    corner = seen("(({left, top}) => [left, top])(document.querySelector('#curves .u-over').getBoundingClientRect())")
    seen.tab.hover(corner[0] + 150, corner[1] + 60)
    seen.until("document.querySelectorAll('figcaption span')[1].textContent.includes(':')")
    seen.shows_no_fault()


def test_a_small_number_is_written_with_an_exponent(seen):
    lines = list(told_runs.lines())
    for line in lines:
        if line["event"] == "step":
            line["grad_norm"] = 0.000008362
    seen.open(report_page([ReportedRun(name="a run", lines=lines)]))
    seen("document.getElementById('curves').scrollIntoView()")
    corner = seen("(({left, top}) => [left, top])(document.querySelector('#curves .u-over').getBoundingClientRect())")
    seen.tab.hover(corner[0] + 150, corner[1] + 60)
    seen.until("document.querySelectorAll('figcaption span')[1].textContent.includes(':')")
    said = seen("document.body.innerText")
    assert "8.4e-6" in said
    assert "0.0000" not in said


@pytest.mark.parametrize("dark", longer([False, True], bool), ids=["light", "dark"])
def test_it_is_accessible(seen, report, dark):
    seen.open(report, dark=dark)
    seen.is_accessible()


def test_it_fits_a_phone(seen, report):
    seen.open(report, width=390, height=844)
    seen.fits()
    seen.is_accessible()


def test_reinforcement_learning_has_curves_of_its_own(seen):
    seen.open(report_page([ReportedRun(name="runs/rl", lines=list(told_runs.learning()))]), dark=True)
    titles = seen("[...document.querySelectorAll('figcaption')].map((one) => one.firstChild.textContent)")
    assert titles[1] == "Reward"
    assert {"Tokens of an answer", "Distance from the reference (KL)"} <= set(titles)
    assert all(seen(ink(k)) > 500 for k in range(len(titles)))
    seen.keep("report-learning-dark")
    seen.is_accessible()
    seen.shows_no_fault()


def test_who_waits_for_whom_is_a_picture_that_all_can_read(seen):
    said = "\n".join(["a long line of what was seen, " * 8] * 40)
    plan = resolve(step_pages.A_RUN).plan
    ranks = tuple(
        RankObservation(rank=rank, doing="waits" if rank else "works", what="forward u1 m0 keep=all", since_s=63.0)
        for rank in range(4)
    )
    run = RunObservation(program=compile_step(plan), mesh=plan.mesh, ranks=ranks)
    waits = (RankWait(1, "reduce u3", (0,)), RankWait(2, "act u1 m0", (0,)), RankWait(3, "reduce u3", (), (2,)))
    wrong = Finding(kind="hang", rank=0, what="rank 0 hangs in forward u1 m0")
    verdict = Diagnosis(findings=(wrong,), waits=waits, spent={}, is_still=True, step_s=0.1)
    for look in ({"dark": True}, {"width": 390, "height": 844}):
        seen.open(doctor_page("runs/x", run, verdict, said), **look)
        dashes = "[...document.querySelectorAll('svg > path')].map((one) => getComputedStyle(one).strokeDasharray)"
        assert seen(dashes) == ["none", "none", "5px, 4px"]
        seen.fits()
        seen.is_accessible()
        seen.shows_no_fault()


def test_runs_lie_over_one_another(seen):
    runs = [ReportedRun(name=f"made-up {n}", lines=list(told_runs.lines(seed=n, worse=0.1 * n))) for n in range(2)]
    losses = tuple({line["step"]: line["loss"] for line in run.lines if line["event"] == "step"} for run in runs)
    found = compare(("made-up 0", "made-up 1"), ({"train.lr": 3e-3}, {"train.lr": 1e-3}), losses)
    seen.open(report_page(runs, [found]), dark=True)
    labels = seen("superstep.R.plots[0].series.slice(1).map((one) => one.label)")
    assert {"made-up 0, training", "made-up 1, training", "made-up 0, validation"} <= set(labels)
    told = seen("document.getElementById('differences').innerText")
    assert "more than noise" in told
    assert "train.lr\t0.003\t0.001" in told
    seen.keep("compare-dark")
    seen.is_accessible()
    seen.shows_no_fault()
