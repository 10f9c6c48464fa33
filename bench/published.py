"""Predicted beside published: step times, peak memory and what does not fit, from the plan alone.

    python -m bench.published                      all tables; every stack left out with all that names it
    python -m bench.published --runs FILE          another table with the columns of runs.csv; nothing is fitted
    python -m bench.published --ablate             each mechanism off, fitted again (minutes)
    python -m bench.published --calculon FILE      beside Calculon's seconds for the same rows, as JSON by row_id
    python -m bench.published --json FILE --plot FILE.svg
    python -m bench.published --fit                draw the constants towards the rows, and print their table

Beside ours stands a constant fraction of the peak, learned from other stacks for each chip and format.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.published_ablation import ablations
from bench.published_ablation_memory import memory_ablations
from bench.published_calibrated import Choice, calibrated, held, in_hindsight, of_halves, tables_of
from bench.published_fit import Estimated, Slopes, fit, table
from bench.published_interval import covered, known, spread
from bench.published_left_out import named_without, seconds, unseen
from bench.published_memory import labels_of, peaks_of, print_labels, print_peaks
from bench.published_plot import scatter
from bench.published_refused import kept
from bench.published_rivals import calculon, constant_fraction
from bench.published_rows import DATA, IsNamed, Row, is_timed, number, read_rows
from bench.published_score import STEPS, Scored, is_judged, ranked, summary
from bench.published_stated import stated
from bench.published_steps import Steps
from bench.published_text import AfterRow, Intervals, Result, print_sources, print_sweeps, write
from superstep.cost.closed.efficiency import FITTED
from superstep.errors import UserError

ROW: dict[Choice, str] = {
    "any": "any one row of the stack",
    "middle": "the row in the middle of its plans",
    "alike": "the row most alike",
}
"""Which row of a stack calibrates, in words."""
TABLES = (DATA / "runs.csv", DATA / "runs_2.csv")


def main(argv: Sequence[str] | None = None) -> None:
    """Score, print, write."""
    options = _options(argv)
    tables = {path.name: read_rows(path) for path in options.runs}
    source_of = {row["row_id"]: name for name, rows in tables.items() for row in rows}
    rows, refused = kept([row for each in tables.values() for row in each])
    steps = Steps([row for row in rows if is_timed(row) and row["kind"] in STEPS])
    refused += steps.left_out
    for row, why in refused:
        print(f"refused: {row['row_id']}: {why}")
    print(f"refused: {len(refused)} of {len(rows) + len(refused) - len(steps.left_out)} rows")
    if options.fit:
        print(table(fit(steps)[0]), end="")
        return
    published = np.array([number(row, "step_time_s") for row in steps.rows])
    ours = Scored(steps.rows, published, steps.seconds(FITTED))
    judged = ours.where(is_judged) if any(is_judged(row) for row in ours.rows) else ours
    lines = {"all judged rows": summary(judged)}
    for name in tables if len(tables) > 1 else ():
        lines[f"judged rows of {name}"] = summary(judged.where(lambda row, n=name: source_of[row["row_id"]] == n))  # type: ignore[misc]
    if ours.rows:
        flat = ours.replaced(constant_fraction(ours.rows, published))
        lines["constant fraction, learned from other stacks"] = summary(flat.where(lambda row: row in judged.rows))
        print_sources(ours, flat)
    out, intervals, after_row = None, None, None
    if tuple(options.runs) == TABLES and not options.quick:
        out, intervals, near = _left_out(steps, ours)
        lines |= _left_out_lines(out, source_of)
        after_row = _after_row(steps, out, near)
        lines |= {f"that, after {ROW[choice]}": line for choice, line in after_row.lines.items()}
    if options.calculon:
        lines |= _beside_calculon(ours, out, options.calculon)
    is_named = _names_left_out(rows)
    result = Result(
        lines=lines,
        refused=[(row["row_id"], why) for row, why in refused],
        ours=ours,
        left_out=out,
        intervals=intervals,
        after_row=after_row,
        sweeps=ranked(judged),
        sweeps_left_out=ranked(out.where(is_judged)) if out else [],
        peaks=peaks_of(rows),
        labels=labels_of(rows),
        memory_left_out=(peaks_of(rows, is_named), labels_of(rows, is_named)) if out else None,
        stated=stated(rows, is_named) if out else {},
        ablations=ablations(steps.rows, [source_of[row["row_id"]] for row in steps.rows]) if options.ablate else {},
        memory_ablations=memory_ablations(rows, is_named) if options.ablate else {},
    )
    _tell(result)
    if options.json:
        write(options.json, result)
    if options.plot:
        Path(options.plot).write_text(scatter(ours.published_s, ours.predicted_s, [r["source"] for r in ours.rows]))
    print(_summary(result))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.published", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--runs", type=Path, nargs="+", default=list(TABLES), help="tables with the columns of runs.csv"
    )
    parser.add_argument("--json", help="write every row and source here")
    parser.add_argument("--plot", help="write an SVG of predicted against published here")
    parser.add_argument("--fit", action="store_true", help="fit the constants and print their table")
    parser.add_argument("--quick", action="store_true", help="do not fit again without each stack")
    parser.add_argument("--ablate", action="store_true", help="fit again without each mechanism")
    parser.add_argument("--calculon", type=Path, help="Calculon's seconds by row_id, as JSON")
    return parser.parse_args(argv)


def _left_out(steps: Steps, ours: Scored) -> tuple[Scored, Intervals, Slopes]:
    """Every row predicted without its stack, the intervals that such residuals give, and the slopes of all steps."""
    found, near = fit(steps)
    _print_moved(found)
    stacks = unseen(steps.rows, near)
    out = ours.replaced(seconds(steps.rows, stacks))
    # Averages of whole runs, and rounded figures, tell nothing of a step's own deviation.
    precise = np.array([row["trust"] != "C" for row in steps.rows])
    told = known(steps.rows, steps.parts(FITTED)).where(precise)
    groups = [row["leak_group"] for row in steps.rows if row["trust"] != "C"]
    deviations = np.log(out.published_s / out.predicted_s)[precise]
    inside = covered(deviations, groups, told)
    by_stack = {group: float(inside[np.array(groups) == group].mean()) for group in dict.fromkeys(groups)}
    whole = np.array([is_judged(row) for row in steps.rows])[precise]
    largest = np.array(groups) == max(by_stack, key=groups.count)
    found = Intervals(
        spread(deviations, groups, told), inside, by_stack, float(inside[whole].mean()), float(inside[~largest].mean())
    )
    return out, found, near


def _after_row(steps: Steps, out: Scored, near: Slopes) -> AfterRow:
    told = known(steps.rows, steps.parts(FITTED))
    tables = tables_of(out, near)
    found = {choice: calibrated(tables, choice) for choice in ROW}
    return AfterRow(
        lines={choice: each.summary for choice, each in found.items()},
        inside={choice: held(each, told) for choice, each in found.items()},
        of_halves=of_halves(tables),
        any_in_hindsight=in_hindsight(tables),
    )


def _print_moved(found: Mapping[str, Estimated]) -> None:
    moved = [name for name, each in found.items() if abs(each.value / FITTED[name] - 1) > 0.05]
    if moved:
        print(f"a fit now would move {', '.join(moved)} by more than 5%: python -m bench.published --fit")


def _left_out_lines(out: Scored, table_of: Mapping[str, str]) -> dict[str, tuple[int, float, float]]:
    judged = out.where(is_judged)
    lines = {"each stack left out": summary(judged)}
    for name in dict.fromkeys(table_of.values()):
        lines[f"each stack left out, {name}"] = summary(judged.where(lambda row, n=name: table_of[row["row_id"]] == n))  # type: ignore[misc]
    lines["each stack left out, plans with something unstated"] = summary(out.where(lambda row: row["trust"] == "B"))
    return lines


def _beside_calculon(ours: Scored, out: Scored | None, path: Path) -> dict[str, tuple[int, float, float]]:
    told = calculon(path, ours.rows)
    both = ours.where(lambda row: row["row_id"] in told)
    theirs = both.replaced(np.array([told[row["row_id"]] for row in both.rows]))
    lines = {"Calculon, on the rows that it can price": summary(theirs), "ours on these rows": summary(both)}
    if out:
        lines["each stack left out, on these rows"] = summary(out.where(lambda row: row["row_id"] in told))
    return lines


def _names_left_out(rows: Sequence[Row]) -> IsNamed:
    """Whether a row's name is borne by rows of another stack."""
    without: dict[str, IsNamed] = {group: named_without(rows, group) for group in {r["leak_group"] for r in rows}}

    def is_named(row: Row) -> bool:
        return without[row["leak_group"]](row)

    return is_named


def _tell(result: Result) -> None:
    print_sweeps(result.sweeps_left_out or result.sweeps)
    for name, (count, median, ninth) in result.lines.items():
        print(f"{name:52} {count:5d} rows  median {median:6.1%}  90th percentile {ninth:6.1%}")
    if result.intervals:
        inside = result.intervals.inside
        by_stack = np.mean(list(result.intervals.by_stack.values()))
        print(
            f"80% intervals hold {inside.mean():.1%} of {len(inside)} rows of stacks left out, {by_stack:.1%} of stacks"
        )
        print(f"  {result.intervals.spread}")
    if result.after_row:
        print(f"after a row: inside {result.after_row.inside}, {result.after_row.of_halves}")
    for name, each in result.ablations.items():
        print(f"without {name:46} {each}")
    for words, told in result.stated.items():
        print(
            f"names unknown, stated: {words:52} fits or not {told.right:.1%}, peaks {told.median:.1%}, {told.p90:.1%}"
        )
    print_peaks(result.peaks)
    print_labels(result.labels)


def _summary(result: Result) -> str:
    count, median, ninth = result.lines["all judged rows"]
    order = f", Spearman {np.median([each.spearman for each in result.sweeps]):.2f}" if result.sweeps else ""
    times = f"median error {median:.1%}, 90th percentile {ninth:.1%}{order}" if count else "no step times"
    memory = "no peak memory"
    if result.peaks.rows:
        median, ninth = np.quantile(result.peaks.errors, (0.5, 0.9))
        memory = f"peak memory of {len(result.peaks.rows)}: median {median:.1%}, 90th percentile {ninth:.1%}"
    told, right = result.labels.right
    fits = f"; fits or not: {right:.1%} of {told} right" if told else ""
    return f"summary: {count} rows, {times}; {memory}{fits}"


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
