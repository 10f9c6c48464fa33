"""Predicted beside published: step times, peak memory and what does not fit, from the plan alone.

    python -m bench.published                      every table, leave-one-source-out, after one calibration row
    python -m bench.published --runs FILE          another table with the columns of runs.csv; nothing is fitted
    python -m bench.published --json FILE --plot FILE.svg
    python -m bench.published --fit                draw the constants towards the rows, and print their table

Beside ours stand two others: a constant fraction of the peak (the median of the same chip and format), and Calculon as
it was measured by others on these and sibling tables (tests/data/published/README.md).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.published_fit import fit
from bench.published_memory import Labels, Peaks, labels_of, peaks_of, print_labels, print_peaks
from bench.published_plot import scatter
from bench.published_rows import Row, is_timed, number, read_rows
from bench.published_steps import Steps
from superstep.cost.closed.efficiency import CONSTANTS, FITTED
from superstep.errors import UserError
from superstep.hardware.units import Array

CALCULON = "Calculon, as others measured it on 958 such rows: median 19.8% on plain GPT, 22.4% overall; Spearman 0.81"
STEPS = ("pretrain_step", "sft_step", "lora_step", "layer_fwd_bwd_ms")
KEPT = 0.35
"""Of what one calibration row says, the share that is believed: rows of one stack differ among themselves more than
stacks do, so most of a single row's deviation is its own."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Rows and what was predicted for them."""

    rows: Sequence[Row]
    published_s: Array
    predicted_s: Array

    @property
    def errors(self) -> Array:
        """Relative."""
        return np.abs(self.predicted_s / self.published_s - 1)

    def where(self, keep: Callable[[Row], bool]) -> Scored:
        """Those rows only."""
        mask = np.array([keep(row) for row in self.rows], dtype=bool)
        kept = [row for row in self.rows if keep(row)]
        return Scored(kept, self.published_s[mask], self.predicted_s[mask])

    def replaced(self, predicted_s: Array) -> Scored:
        """The same rows, predicted otherwise."""
        return Scored(self.rows, self.published_s, predicted_s)


def is_judged(row: Row) -> bool:
    """Complete plans with precise figures."""
    return row["trust"] == "A" and row["kind"] in STEPS


def main(argv: Sequence[str] | None = None) -> None:
    """Score, print, write."""
    options = _options(argv)
    rows = read_rows(options.runs)
    steps = Steps([row for row in rows if is_timed(row) and row["kind"] in STEPS])
    for row, why in steps.left_out:
        print(f"left out: {row['row_id']}: {why}")
    if options.fit:
        found = fit(steps)
        for name, constant in CONSTANTS.items():
            print(f"{name:34} before {constant.before:<10.4g} in use {constant.value:<10.4g} fit {found[name]:.4g}")
        return
    published = np.array([number(row, "step_time_s") for row in steps.rows])
    ours = Scored(steps.rows, published, steps.seconds(FITTED))
    flat = ours.replaced(constant_fraction(ours))
    print_sources(ours, flat)
    judged = ours.where(is_judged) if any(is_judged(row) for row in ours.rows) else ours
    sweeps = ranked(judged)
    print_sweeps(sweeps)
    lines = {"all judged rows": summary(judged), "constant fraction": summary(flat.where(is_judged))}
    if options.runs == _default() and not options.quick:
        unseen = left_out(steps, published).where(is_judged)
        lines["leave one source out"] = summary(unseen)
        lines["that, after one calibration row"] = calibrated(unseen)
    lines["after one calibration row"] = calibrated(judged)
    for name, (count, median, ninth) in lines.items():
        print(f"{name:32} {count:5d} rows  median {median:6.1%}  90th percentile {ninth:6.1%}")
    print(CALCULON)
    whole = [row for row in rows if row["hidden"] and row["n_layers"]]
    peaks, labels = peaks_of(whole), labels_of(whole)
    print_peaks(peaks)
    print_labels(labels)
    if options.json:
        _write(options.json, ours, lines, sweeps, (peaks, labels))
    if options.plot:
        Path(options.plot).write_text(scatter(ours.published_s, ours.predicted_s, [r["source"] for r in ours.rows]))
    count, median, ninth = lines["all judged rows"]
    order = f", Spearman {np.median([each.spearman for each in sweeps]):.2f}" if sweeps else ""
    times = f"median error {median:.1%}, 90th percentile {ninth:.1%}{order}" if count else "no step times"
    print(f"summary: {count} rows, {times}; {said_of_memory(peaks, labels)}")


def said_of_memory(peaks: Peaks, labels: Labels) -> str:
    """Errors of peak memory, and how many layouts are rightly said to fit or not."""
    said = "no peak memory"
    if peaks.rows:
        median, ninth = np.quantile(peaks.errors, (0.5, 0.9))
        said = f"peak memory of {len(peaks.rows)}: median {median:.1%}, 90th percentile {ninth:.1%}"
    count, right = labels.right
    return f"{said}; fits or not: {right:.1%} of {count} right" if count else said


def _default() -> Path:
    return Path(__file__).parent.parent / "tests" / "data" / "published" / "runs.csv"


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.published", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=_default(), help="a table with the columns of runs.csv")
    parser.add_argument("--json", help="write every row and source here")
    parser.add_argument("--plot", help="write an SVG of predicted against published here")
    parser.add_argument("--fit", action="store_true", help="fit the constants and print them")
    parser.add_argument("--quick", action="store_true", help="do not fit again without each source")
    return parser.parse_args(argv)


def summary(scored: Scored) -> tuple[int, float, float]:
    """Rows, median and 90th percentile of the error."""
    if not scored.rows:
        return 0, float("nan"), float("nan")
    return len(scored.rows), float(np.median(scored.errors)), float(np.quantile(scored.errors, 0.9))


def constant_fraction(scored: Scored) -> Array:
    """The baseline: each chip and format at the median share of its peak that its rows reach."""
    flops = np.array([_step_flops(row) for row in scored.rows])
    rate = flops / scored.published_s
    kinds = [(row["gpu"], "8" if "8" in row["precision"] else row["precision"][:2]) for row in scored.rows]
    medians = {kind: np.median(rate[[k == kind for k in kinds]]) for kind in set(kinds)}
    return flops / np.array([medians[kind] for kind in kinds])


def _step_flops(row: Row) -> float:
    """Operations of a chip's share of a step: 3 forward passes, 4 with full recomputation."""
    width, layers, tokens = number(row, "hidden"), number(row, "n_layers"), number(row, "seq_len")
    heads = number(row, "n_heads", 1) * number(row, "head_dim", width / number(row, "n_heads", 1))
    matrices = 2 if row["gated_mlp"] == "0" else 3
    active = number(row, "top_k") + number(row, "n_shared_experts")
    inner = number(row, "moe_ffn") * active if number(row, "n_experts") else number(row, "ffn")
    grouped = number(row, "n_kv_heads", number(row, "n_heads", 1)) / number(row, "n_heads", 1)
    layer = 2 * (2 + 2 * grouped) * width * heads + 2 * matrices * width * inner + 4 * tokens * heads
    passes = 4 if row["recompute"].startswith("full") else 3
    whole = passes * (layers * layer) + 6 * width * number(row, "vocab")
    return whole * number(row, "gbs", 1) * tokens / number(row, "n_gpus", 1)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Plans of one model on one cluster.

    Attributes:
        spearman: rank correlation of predicted and published seconds.
        loss: by how much the plan that is predicted to be fastest is slower than the fastest published one.
    """

    name: str
    plans: int
    spearman: float
    loss: float


def ranked(scored: Scored) -> list[Sweep]:
    """Every sweep of four or more plans."""
    columns = ("source", "framework", "model", "seq_len", "n_gpus", "gbs", "gpu", "precision")
    groups: dict[tuple[str, ...], list[int]] = {}
    for place, row in enumerate(scored.rows):
        groups.setdefault(tuple(row[column] for column in columns), []).append(place)
    found = []
    for key, places in groups.items():
        seconds, predicted = scored.published_s[places], scored.predicted_s[places]
        if len(set(np.round(seconds, 4))) >= 4:
            loss = float(seconds[np.argmin(predicted)] / seconds.min() - 1)
            found.append(Sweep(" ".join(key[:1] + key[2:5]), len(places), spearman(predicted, seconds), loss))
    return found


def spearman(first: Array, second: Array) -> float:
    """The correlation of the ranks; ties share their mean rank."""

    def ranks(values: Array) -> Array:
        return np.array([np.mean(np.flatnonzero(np.sort(values) == value)) for value in values])

    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def left_out(steps: Steps, published: Array) -> Scored:
    """Each source with judged rows predicted with constants that were fitted without it."""
    predicted = np.zeros_like(published)
    for source in dict.fromkeys(row["source"] for row in steps.rows if is_judged(row)):
        mine = np.array([row["source"] == source for row in steps.rows])
        values = fit(steps, keep=~mine)
        predicted[mine] = steps.seconds(FITTED.changed(values))[mine]
    return Scored(steps.rows, published, predicted)


def calibrated(scored: Scored) -> tuple[int, float, float]:
    """Rows, median and 90th percentile of the error after one other row of the same stack was seen.

    One factor for a stack, believed as far as ``KEPT`` says. Every other row is the one that was seen, in turn, and all
    these errors count, those of one row together as much as a row does.
    """
    stacks: dict[tuple[str, str, str], list[int]] = {}
    for place, row in enumerate(scored.rows):
        stacks.setdefault((row["source"], row["framework"], row["gpu"]), []).append(place)
    errors, weights = [], []
    for places in stacks.values():
        ratio = scored.predicted_s[places] / scored.published_s[places]
        seen = np.abs(ratio[:, None] / ratio[None, :] ** KEPT - 1)
        others = ~np.eye(len(places), dtype=bool) if len(places) > 1 else np.ones((1, 1), dtype=bool)
        errors.append(seen[others] if len(places) > 1 else np.abs(ratio - 1))
        weights.append(np.full(errors[-1].shape, 1 / max(len(places) - 1, 1)))
    if not errors:
        return 0, float("nan"), float("nan")
    each, weight = np.concatenate(errors), np.concatenate(weights)
    order = np.argsort(each)
    share = np.cumsum(weight[order]) / weight.sum()
    median, ninth = (float(each[order][np.searchsorted(share, q)]) for q in (0.5, 0.9))
    return len(scored.rows), median, ninth


def print_sources(ours: Scored, flat: Scored) -> None:
    """One line a source and trust."""
    print(f"{'source':26}{'trust':>6}{'rows':>6}{'median':>9}{'90th':>8}{'bias':>7}   {'constant fraction':>18}")
    for source, trust in dict.fromkeys((row["source"], row["trust"]) for row in ours.rows):
        mine = ours.where(lambda row, s=source, t=trust: (row["source"], row["trust"]) == (s, t))
        base = flat.where(lambda row, s=source, t=trust: (row["source"], row["trust"]) == (s, t))
        count, median, ninth = summary(mine)
        bias = float(np.median(mine.predicted_s / mine.published_s))
        print(f"{source:26}{trust:>6}{count:6d}{median:9.1%}{ninth:8.1%}{bias:7.2f}   {summary(base)[1]:18.1%}")


def print_sweeps(sweeps: Sequence[Sweep]) -> None:
    """One line a sweep."""
    print(f"\n{'sweep':60}{'plans':>6}{'Spearman':>10}{'chosen':>9}")
    for each in sweeps:
        print(f"{each.name:60}{each.plans:6d}{each.spearman:10.3f}{each.loss:+9.1%}")
    print()


def _write(
    path: str,
    ours: Scored,
    lines: dict[str, tuple[int, float, float]],
    sweeps: Sequence[Sweep],
    held: tuple[Peaks, Labels],
) -> None:
    peaks, labels = held
    rows: dict[str, dict[str, object]] = {}
    for row, p, q in zip(ours.rows, ours.published_s, ours.predicted_s, strict=True):
        rows[row["row_id"]] = {"published_s": float(p), "predicted_s": float(q)}
    for row, p, q in zip(peaks.rows, peaks.published, peaks.predicted, strict=True):
        rows.setdefault(row["row_id"], {}).update(published_mem_gb=float(p), predicted_mem_gb=round(float(q), 2))
    for row, p, q in zip(labels.rows, labels.published, labels.predicted, strict=True):
        rows.setdefault(row["row_id"], {}).update(published_oom=bool(p), predicted_oom=bool(q))
    known = {row["row_id"]: row["source"] for row in (*ours.rows, *peaks.rows, *labels.rows)}
    sources = {}
    for source in dict.fromkeys(row["source"] for row in ours.rows):
        count, median, ninth = summary(ours.where(lambda row, s=source: row["source"] == s))
        sources[source] = {"rows": count, "median": median, "p90": ninth}
    count, right = labels.right
    text = {
        "summary": {name: {"rows": n, "median": m, "p90": q} for name, (n, m, q) in lines.items()},
        "memory": {"rows": len(peaks.rows), "median": _at(peaks.errors, 0.5), "p90": _at(peaks.errors, 0.9)},
        "fits": {"rows": count, "right": right},
        "sources": sources,
        "sweeps": [{"name": s.name, "plans": s.plans, "spearman": s.spearman, "loss": s.loss} for s in sweeps],
        "rows": [{"row_id": name, "source": known[name], **values} for name, values in rows.items()],
    }
    Path(path).write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def _at(values: Array, share: float) -> float | None:
    return float(np.quantile(values, share)) if len(values) else None


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
