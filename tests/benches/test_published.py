"""The published runs: every row is read, and the constants in use come as near as is claimed."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from bench.published import main
from bench.published_ablation import MECHANISMS, ablated, taken
from bench.published_ablation_memory import memory_ablations
from bench.published_calibrated import calibrated, held, in_hindsight, narrowing, of_halves, tables_of
from bench.published_fit import refit, slopes_of
from bench.published_interval import Known, alike, covered, is_inside, known, spread, weights_of
from bench.published_left_out import named_without, seconds, unseen
from bench.published_memory import as_it_is, labels_of, peaks_of
from bench.published_refused import kept, refusal
from bench.published_rivals import calculon, constant_fraction
from bench.published_rows import (
    DATA,
    cluster_of,
    is_timed,
    known_of,
    number,
    read_rows,
    readings,
    software_of,
    year_of,
)
from bench.published_score import Scored, is_judged, ranked, spearman, summary
from bench.published_stated import judged as judged_memory
from bench.published_stated import stated
from bench.published_steps import Steps
from superstep.cost.closed import uncertainty
from superstep.cost.closed.efficiency import FITTED
from superstep.errors import DataError
from superstep.planner.calibration.calibrate_observation import NOISE, belief

ALL = [row for table in ("runs.csv", "runs_2.csv") for row in read_rows(DATA / table)]
ROWS, REFUSED = kept(ALL)
COMMITTED = DATA.parent.parent.parent / "bench" / "results" / "published.json"


@pytest.fixture(scope="module")
def steps():
    return Steps([row for row in ROWS if is_timed(row)])


@pytest.fixture(scope="module")
def judged(steps):
    published = np.array([number(row, "step_time_s") for row in steps.rows])
    return Scored(steps.rows, published, steps.seconds(FITTED)).where(is_judged)


def row(**over):
    return {**ROWS[0], **over}


def test_every_row_that_is_not_refused_can_be_priced(steps):
    assert steps.left_out == []
    assert len(steps.rows) == sum(1 for each in ROWS if is_timed(each))
    assert len(ROWS) + len(REFUSED) == len(ALL)


def test_rows_that_contradict_themselves_or_lack_a_number_are_refused_by_name():
    told = {each["row_id"]: why for each, why in REFUSED}
    assert told["nemo_long_sequence-001"] == "dp·tp·pp·cp = 2, n_gpus = 8"
    assert told["nemo_launcher_a100-001"] == "lacks gbs"
    assert told["megatron_bridge_2602-032"].startswith("lacks n_layers, hidden")
    assert told["megatron_bridge_2025-040"] == "ep = 64 does not divide dp·tp·cp = 32"
    assert len(told) == 22
    good = next(each for each in ROWS if each["tokens_per_s_per_gpu"] and each["mbs"] and each["num_microbatches"])
    assert not refusal(good)
    assert "tokens/s a chip" in refusal({**good, "step_time_s": str(2 * number(good, "step_time_s"))})
    assert "gbs = " in refusal({**good, "gbs": str(3 * number(good, "gbs"))})


def test_judged_rows_come_within_the_claim(judged):
    count, median, ninth = summary(judged)
    assert count == 896
    assert median <= 0.05
    assert ninth <= 0.15


def test_half_the_rate_of_products_would_not(steps):
    halved = {name: value / 2 for name, value in FITTED.values.items() if name.startswith("products")}
    wrong = FITTED.with_changes(halved)
    published = np.array([number(each, "step_time_s") for each in steps.rows])
    assert summary(Scored(steps.rows, published, steps.seconds(wrong)).where(is_judged))[1] > 0.3


def test_plans_of_a_sweep_are_put_in_order(judged):
    found = ranked(judged)
    assert len(found) >= 26
    assert np.median([each.spearman for each in found]) >= 0.92
    assert np.median([each.loss for each in found]) <= 0.03


def test_peak_memory_comes_within_the_claim():
    peaks = peaks_of(ROWS)
    assert len(peaks.rows) == 110
    assert np.median(peaks.errors) <= 0.06
    assert np.quantile(peaks.errors, 0.9) <= 0.15


def test_layouts_that_did_not_fit_are_told_from_those_that_did():
    labels = labels_of(ROWS)
    count, right = labels.right
    # Sources without any failure count as the others do.
    assert count == 1680
    assert right >= 0.95
    # Neither answer alone would be right so often.
    assert 0.3 < labels.published[: len(labels.rows)].mean() < 0.7


def test_what_is_told_of_a_software_without_a_name_is_all_that_is_known_of_it():
    rows = [each for each in ROWS if each["leak_group"] == "aleph"][::4]
    found = stated([*rows, *(each for each in ROWS if number(each, "peak_mem_gb"))], lambda each: each not in rows)
    named, unknown = labels_of(rows), labels_of(rows, lambda _each: False)
    peaks = [each for each in ROWS if number(each, "peak_mem_gb")]
    ran = labels_of(peaks).wrong
    # All that these layouts' memory hangs on: with it told they are what they are with their name.
    assert (found["all three"].false_alarms - ran[0], found["all three"].missed - ran[1]) == named.wrong
    assert (found["nothing"].false_alarms - ran[0], found["nothing"].missed - ran[1]) == unknown.wrong
    assert found["logits and gradients"].right > found["nothing"].right + 0.02
    assert found["all three"].median == float(np.median(peaks_of(peaks).errors))


def test_one_row_of_a_stack_mends_what_is_wrong_with_all_of_it(steps, judged):
    near = slopes_of(steps, np.zeros(len(FITTED.values)))
    ours = Scored(steps.rows, np.array([number(each, "step_time_s") for each in steps.rows]), steps.seconds(FITTED))
    slow = ours.replaced(ours.predicted_s * 1.3)
    wrong = summary(slow.where(is_judged))[1]
    tables = tables_of(slow, near)
    found = {choice: calibrated(tables, choice) for choice in ("any", "middle", "alike")}
    assert all(each.summary[1] < 0.6 * wrong for each in found.values())
    assert found["alike"].summary[1] < found["any"].summary[1]
    for each in found.values():
        assert len(set(each.rows.tolist())) >= 0.95 * len(judged.rows)
        assert (each.narrowed > 0.1).all()
        assert (each.narrowed <= 1).all()
        assert np.allclose(np.bincount(each.rows, each.weights)[np.unique(each.rows)], 1)
    halves, with_hindsight = of_halves(tables, draws=5), in_hindsight(tables)
    assert halves.low <= halves.mean <= halves.high < 0.6 * wrong
    # Who knew what each table should take off would have come nearer.
    assert with_hindsight < found["any"].summary[1]
    told = known(slow.rows, steps.parts(FITTED))
    assert 0.5 < held(found["alike"], told) < 1
    assert held(replace(found["alike"], narrowed=found["alike"].narrowed / 1e9), told) < 0.01


def test_a_constant_is_believed_to_be_wrong_as_far_as_it_is_uncertain_and_bears_on_the_step():
    variances = np.array([0.04, 0.0004, 0.04])
    slopes = np.array([1.0, 1.0, 0.0])
    share = belief(slopes, variances)
    assert share == pytest.approx(np.array([0.04, 0.0004, 0]) / (0.0404 + NOISE**2))
    # Nothing but noise is left of a plan that depends on the same; all of one that depends on another constant.
    same, other = narrowing(slopes, np.stack([slopes, np.array([0.0, 0.0, 1.0])]), variances)
    assert same == pytest.approx(np.sqrt(1 - (0.0404 / (0.0404 + NOISE**2)) ** 2))
    assert other == 1


def test_an_interval_is_as_wide_as_residuals_are_and_wider_where_less_is_known():
    rng = np.random.default_rng(0)
    traffic = rng.uniform(0, 0.5, 4000)
    is_open, is_mixture = (rng.integers(0, 2, 4000).astype(float) for _ in range(2))
    told = Known(traffic, is_open, is_mixture)
    scale = np.sqrt(0.05**2 + (0.4 * traffic) ** 2 + (0.1 * is_mixture) ** 2)
    drawn = rng.laplace(0, 1, 4000) * scale
    # Slower than predicted is twice as far off.
    deviations = np.where(drawn > 0, 2 * drawn, drawn)
    stacks = [f"s{place % 8}" for place in range(4000)]
    found = spread(deviations, stacks, told)
    assert found.below == pytest.approx(0.5, abs=0.07)
    assert found.traffic / found.plain == pytest.approx(8, rel=0.3)
    assert found.mixture / found.plain == pytest.approx(2, rel=0.3)
    assert found.unstated < 0.7 * found.plain
    assert is_inside(deviations, told, found).mean() == pytest.approx(uncertainty.SHARE, abs=0.02)
    assert covered(deviations, stacks, told).mean() == pytest.approx(uncertainty.SHARE, abs=0.02)


def test_rows_that_are_off_together_count_as_few():
    """A table of 2,000 rows is one stack: by its rows alone intervals would be for it, not for the next stack."""
    rng = np.random.default_rng(0)
    counts = [2000, *[6] * 40]
    stacks = [f"s{place}" for place, count in enumerate(counts) for _ in range(count)]
    offsets = np.concatenate([[0.0], rng.normal(0, 0.2, 40)])
    deviations = np.repeat(offsets, counts) + rng.normal(0, 0.05, len(stacks))
    assert alike(rng.normal(0, 1, len(stacks)), stacks) < 0.1
    common = alike(deviations, stacks)
    assert common == pytest.approx(0.2**2 / (0.2**2 + 0.05**2), abs=0.05)
    weights = weights_of(stacks, common)
    assert weights[0] * 2000 < 1.2 * weights[-1] * 6
    assert weights_of(stacks, 0.0) == pytest.approx(1 / len(stacks))
    told = Known(*(np.zeros(len(stacks)) for _ in range(3)))
    inside = is_inside(deviations, told, spread(deviations, stacks, told))
    assert np.mean([inside[np.array(stacks) == name].mean() for name in set(stacks)]) == pytest.approx(0.8, abs=0.04)


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
        ("NeMo 24.03", "2024-03", "", "flash-2"),
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
    rows = json.loads(COMMITTED.read_text(encoding="utf-8"))["rows"]
    told = {each["row_id"]: each["predicted_s"] for each in rows if "predicted_s" in each}
    found = dict(zip((each["row_id"] for each in steps.rows), steps.seconds(FITTED), strict=True))
    assert told == pytest.approx(found)


def test_the_planners_intervals_are_those_of_published_rows():
    told = json.loads(COMMITTED.read_text(encoding="utf-8"))
    assert told["intervals"]["spread"] == pytest.approx(asdict(uncertainty.STEP), abs=0.002)
    # For the next stack, large or small; of all rows, two of five of which are of one table, a little more are inside.
    assert 0.75 <= np.mean(list(told["intervals"]["by_stack"].values())) <= 0.85
    assert 0.75 <= told["intervals"]["judged"] <= 0.85
    assert 0.75 <= told["intervals"]["but_largest"] <= 0.85
    assert 0.75 <= told["intervals"]["covered"] <= 0.86
    assert (told["memory_interval"]["low"], told["memory_interval"]["high"]) == pytest.approx(
        uncertainty.MEMORY, abs=0.005
    )
    out = {(each["from"], each["to"]): each["out"] / each["rows"] for each in told["fits_by_share"]}
    assert out[(0.8, 0.85)] <= 1 - uncertainty.SURE < out[(0.85, 0.9)]
    assert uncertainty.FULL == 0.85
    plain, busy = (uncertainty.around(10.0, traffic=share) for share in (0.0, 0.3))
    assert plain[0] < 10 < plain[1]
    assert busy[0] < plain[0]
    assert busy[1] > plain[1]
    mixture = uncertainty.around(10.0, traffic=0.0, is_mixture=True)
    assert mixture[1] > plain[1]
    half = uncertainty.around(10.0, traffic=0.0, narrowed=0.5)
    assert np.log(half[1] / 10) == pytest.approx(np.log(plain[1] / 10) / 2)


def test_a_mechanism_that_is_taken_away_is_judged_by_the_rows_that_it_moves(few):
    whole = taken(few.rows, None)
    off = taken(few.rows, MECHANISMS["learned positions turn nothing"])
    found = ablated(off, whole, ["runs.csv"] * len(few.rows))
    turned = {each["row_id"] for each in few.rows if each["arch"] == "gpt" and each["trust"] != "C"}
    assert 0 < found.moved <= len(turned)
    mine = [whole.out.rows.index(each) for each in few.rows if each["row_id"] in turned]
    assert found.moved_without > found.moved_with
    assert found.moved_with == pytest.approx(np.median(whole.out.errors[mine]), abs=0.03)
    alone = ablated(whole, whole, ["runs.csv"] * len(few.rows))
    assert (alone.moved, alone.moved_with) == (0, None)


def test_memory_without_what_a_software_keeps_is_off_for_those_that_keep_it():
    rows = [each for each in ROWS if number(each, "peak_mem_gb")]
    found = memory_ablations(rows, lambda _each: False)
    assert found["nothing"].named.p90 < 0.5 * found["what an update makes"].named.p90
    assert found["nothing"].unknown == judged_memory(rows, lambda _each: False, as_it_is)
    # No row of these is of XLA.
    assert found["tensors placed by a compiler"] == found["nothing"]


def test_a_switch_that_a_row_tells_of_joins_its_domain():
    old = next(each for each in ROWS if each["row_id"] == "megatron_readme_sep2020-002")
    assert cluster_of(old).topology == "switched"
    assert cluster_of({**old, "interconnect": ""}).topology == "cube"


def test_the_frozen_predictions_were_made_without_what_was_published():
    frozen = json.loads((COMMITTED.parent / "published_blind.json").read_text(encoding="utf-8"))
    names = {each["row_id"] for each in read_rows(DATA / "runs_2.csv")}
    assert {each["row_id"] for each in frozen["rows"]} == names
    assert all(set(each) <= {"row_id", "predicted_s", "reserved_bytes", "fits", "refused"} for each in frozen["rows"])


@pytest.fixture(scope="module")
def few():
    """Three stacks with a name each, and one whose name another has too."""
    wanted = ("internevo", "zero_bubble_pp", "stas00_h200_b200", "mtnlg530b", "megatron_readme_sep2020")
    return Steps([each for each in ROWS if each["source"] in wanted and is_timed(each)])


def test_a_stack_that_is_left_out_bears_on_no_constant_and_is_known_by_no_name(few):
    near = slopes_of(few, np.zeros(len(FITTED.values)))
    stacks = {each.group: each for each in unseen(few.rows, near)}
    mine = [each for each in few.rows if each["leak_group"] == "internevo"]
    assert not stacks["internevo"].is_named(mine[0])
    assert known_of(mine[0], is_named=False).words == ""
    # Megatron-LM's name is borne by two stacks: each knows it from the other.
    fork = next(each for each in few.rows if each["leak_group"] == "zero_bubble")
    assert stacks["zero_bubble"].is_named(fork)
    assert not named_without([fork], "zero_bubble")(fork)
    slower = replace(near, errors=near.errors + np.where(near.stacks == "internevo", 1.0, 0.0))
    kept_out = refit(slower, near.stacks != "internevo")
    assert {name: each.value for name, each in kept_out.items()} == pytest.approx(stacks["internevo"].values)
    assert refit(slower, near.stacks != "")["products.ampere"].value > kept_out["products.ampere"].value
    assert "internevo" not in kept_out["products.ampere"].stacks
    assert (seconds(few.rows, list(stacks.values())) > 0).all()


def test_a_constant_of_one_stack_is_marked_and_held_back(few):
    near = slopes_of(few, np.zeros(len(FITTED.values)))
    found = refit(near, near.stacks != "")
    assert found["host_bytes_per_s"].is_alone
    assert found["host_bytes_per_s"].stacks == ("stas00",)
    assert not found["products.ampere"].is_alone
    assert found["products.cdna"].rows == 0


def test_an_interval_is_from_other_stacks():
    stacks = [name for name in "abcdefgh" for _ in range(50)]
    deviations = np.random.default_rng(0).normal(scale=0.1, size=400)
    told = Known(*(np.zeros(400) for _ in range(3)))
    assert covered(deviations, stacks, told).mean() == pytest.approx(0.8, abs=0.05)
    odd = np.where(np.array(stacks) == "h", 0.5, deviations)
    assert not covered(odd, stacks, told)[-50:].any()


def test_rivals_learn_from_other_stacks_or_are_read_from_a_file(judged, tmp_path):
    flat = constant_fraction(judged.rows, judged.published_s)
    mine = np.array([each["leak_group"] == "llm_foundry" for each in judged.rows])
    slower = constant_fraction(judged.rows, np.where(mine, 10.0, 1.0) * judged.published_s)
    assert slower[mine] == pytest.approx(flat[mine])
    assert (slower[~mine] != flat[~mine]).any()
    told = tmp_path / "calculon.json"
    told.write_text(json.dumps({judged.rows[0]["row_id"]: 2.5, "unheard-of": 1}), encoding="utf-8")
    assert calculon(told, judged.rows) == {judged.rows[0]["row_id"]: 2.5}
    told.write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match="names none of the rows"):
        calculon(told, judged.rows)


def test_another_table_is_scored_without_a_fit_and_ends_with_the_summary(tmp_path, capsys):
    table = tmp_path / "runs.csv"
    lines = (DATA / "runs.csv").read_text(encoding="utf-8").splitlines()
    unknown = lines[20].replace("A100-80GB-SXM", "Z9000")
    table.write_text("\n".join([*lines[:20], unknown]) + "\n", encoding="utf-8")
    out = tmp_path / "out.json"
    main(["--runs", str(table), "--json", str(out), "--plot", str(tmp_path / "plot.svg")])
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("summary: ")
    assert any(line.startswith("refused: ") and "Z9000" in line for line in printed)
    assert len(json.loads(out.read_text(encoding="utf-8"))["rows"]) == 19
    assert (tmp_path / "plot.svg").read_text(encoding="utf-8").count("<circle") > 19
