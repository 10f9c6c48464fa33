"""The published runs: every row is read, and the constants in use come as near as is claimed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench.published import KEPT, Scored, calibrated, is_judged, main, ranked, spearman, summary
from bench.published_memory import labels_of, peaks_of
from bench.published_rows import DATA, is_timed, number, read_rows, readings, software_of, year_of
from bench.published_steps import Steps
from superstep.cost.closed.efficiency import FITTED

ROWS = read_rows()


@pytest.fixture(scope="module")
def steps():
    return Steps([row for row in ROWS if is_timed(row)])


@pytest.fixture(scope="module")
def judged(steps):
    published = np.array([number(row, "step_time_s") for row in steps.rows])
    return Scored(steps.rows, published, steps.seconds(FITTED)).where(is_judged)


def row(**over):
    return {**ROWS[0], **over}


def test_every_row_of_the_table_can_be_priced(steps):
    assert steps.left_out == []
    # Four of the 857 timed rows have no dims: hybrids of attention and state spaces.
    assert len(steps.rows) == sum(1 for each in ROWS if is_timed(each)) == 853


def test_judged_rows_come_within_the_claim(judged):
    count, median, ninth = summary(judged)
    assert count == 640
    assert median <= 0.05
    assert ninth <= 0.15


def test_half_the_rate_of_products_would_not(steps):
    wrong = FITTED.changed({name: value / 2 for name, value in FITTED.values.items() if name.startswith("products")})
    published = np.array([number(each, "step_time_s") for each in steps.rows])
    assert summary(Scored(steps.rows, published, steps.seconds(wrong)).where(is_judged))[1] > 0.3


def test_plans_of_a_sweep_are_put_in_order(judged):
    found = ranked(judged)
    assert len(found) >= 26
    assert np.median([each.spearman for each in found]) >= 0.92
    assert np.median([each.loss for each in found]) <= 0.03


def test_peak_memory_comes_within_the_claim():
    peaks = peaks_of([each for each in ROWS if each["hidden"] and each["n_layers"]])
    assert len(peaks.rows) == 110
    assert np.median(peaks.errors) <= 0.06
    assert np.quantile(peaks.errors, 0.9) <= 0.15


def test_layouts_that_did_not_fit_are_told_from_those_that_did():
    labels = labels_of([each for each in ROWS if each["hidden"] and each["n_layers"]])
    count, right = labels.right
    assert count == 736
    assert right >= 0.95
    # Neither answer alone would be right so often.
    assert 0.3 < labels.published[: len(labels.rows)].mean() < 0.7


def test_one_row_of_a_stack_mends_what_is_wrong_with_all_of_it(judged):
    assert calibrated(judged)[1] <= 0.05
    slow = judged.replaced(judged.predicted_s * 1.3)
    assert calibrated(slow)[1] < 0.8 * summary(slow)[1]


def test_a_stack_is_calibrated_by_each_of_its_other_rows():
    rows = [row(source="a", framework="x", gpu="A100"), row(source="a", framework="x", gpu="A100")]
    pair = Scored(rows, np.array([1.0, 1.0]), np.array([1.0, 1.2]))
    # The first is divided by 1.2 to the share that is believed, the second by nothing.
    count, median, ninth = calibrated(pair)
    assert (count, ninth) == (2, pytest.approx(0.2))
    assert median == pytest.approx(1 - 1.2**-KEPT)


def test_what_a_row_leaves_open_is_read_several_ways():
    whole = row(mbs="4", vpp="", schedule="1f1b")
    assert [float(each.layout.microbatch) for each in readings(whole)] == [4]
    unsaid = row(mbs="", dp="8", gbs="64", n_gpus="8", tp="1", pp="1", schedule="none")
    assert [float(each.layout.microbatch) for each in readings(unsaid)] == [1, 2, 4, 8]
    assert {float(each.layout.microbatches * each.layout.microbatch) for each in readings(unsaid)} == {8}
    chunks = row(mbs="1", vpp="", pp="4", n_layers="48", schedule="1f1b-interleaved (v unstated)")
    assert [float(each.layout.chunks) for each in readings(chunks)] == [2, 3, 4, 6]


@pytest.mark.parametrize(
    ("framework", "date", "attention", "expected"),
    [
        ("Megatron-LM", "2021-09", "", "fused-softmax"),
        ("NeMo/Megatron-Core", "2024-07", "", "flash-3"),
        ("anything", "2023", "torch", "eager"),
        ("anything", "2023", "flash_attention2 + RMS kernel", "flash-2"),
        ("anything", "2023", "flash_attentionv1.0.8", "flash-1"),
        ("anything", "2025", "FA3", "flash-3"),
    ],
)
def test_the_attention_kernel_is_what_the_row_says_or_its_time_had(framework, date, attention, expected):
    assert software_of(row(framework=framework, date=date, attn_kernel=attention)).attention == expected


def test_a_season_is_read_as_its_year():
    assert year_of(row(date="2023-24")) == pytest.approx(2023 + 5 / 12)
    assert year_of(row(date="2021-04")) == 2021.25


def test_spearman_is_one_for_the_same_order_and_shares_ties():
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([10.0, 20.0, 90.0])) == pytest.approx(1)
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])) == pytest.approx(-1)
    assert spearman(np.array([1.0, 1.0, 2.0]), np.array([5.0, 5.0, 6.0])) == pytest.approx(1)


def test_the_committed_figures_are_those_of_the_constants_in_use(steps):
    """bench/results/published.json is stale otherwise: python -m bench.published --json writes it anew."""
    path = DATA.parent.parent.parent / "bench" / "results" / "published.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    told = {each["row_id"]: each["predicted_s"] for each in rows if "predicted_s" in each}
    found = dict(zip((each["row_id"] for each in steps.rows), steps.seconds(FITTED), strict=True))
    assert told == pytest.approx(found)


def test_another_table_is_scored_without_a_fit_and_ends_with_the_summary(tmp_path, capsys):
    table = tmp_path / "runs.csv"
    lines = (DATA / "runs.csv").read_text(encoding="utf-8").splitlines()
    unknown = lines[20].replace("A100-80GB-SXM", "Z9000")
    table.write_text("\n".join([*lines[:20], unknown]) + "\n", encoding="utf-8")
    out = tmp_path / "out.json"
    main(["--runs", str(table), "--json", str(out), "--plot", str(tmp_path / "plot.svg")])
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("summary: ")
    assert any(line.startswith("left out: ") and "Z9000" in line for line in printed)
    assert len(json.loads(out.read_text(encoding="utf-8"))["rows"]) == 19
    assert (tmp_path / "plot.svg").read_text(encoding="utf-8").count("<circle") > 19
