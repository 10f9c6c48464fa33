"""What bench/moe.py measured, in docs/explanation/experts.md: tables, and the curves as an SVG.

    python -m bench.moe_report        writes them anew from bench/results/moe.json

A block of the page stands between ``<!-- measured: NAME -->`` and ``<!-- /measured -->``.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "moe.json"
PAGE = ROOT / "docs" / "explanation" / "experts.md"
PLOT = PAGE.with_name("switch-vs-dense.svg")

COLOURS = {"dense": "#1f5fa8", "switch": "#c2571a"}
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 96, 24, 52
"""Around the plot, in the SVG's units."""


def runs_of(results: dict, name: str) -> list[dict]:
    """The runs of one model, by seed."""
    return sorted((run for run in results["runs"] if run["name"] == name), key=lambda run: run["seed"])


def losses_table(results: dict) -> str:
    """Dense beside Switch, and the ratio of their processor time."""
    dense, switch = runs_of(results, "dense"), runs_of(results, "switch")
    head = ("model", "parameters", "FLOPs a token", *(f"seed {run['seed']}" for run in dense), "mean", "ms a step")
    rows = []
    for name, runs in (("dense", dense), ("Switch", switch)):
        finals = [final(run) for run in runs]
        rows.append(
            (
                name,
                f"{runs[0]['parameters']:,}",
                f"{runs[0]['flops_per_token'] / 1e6:.2f} M",
                *(f"{loss:.3f}" for loss in finals),
                f"{statistics.mean(finals):.3f}",
                f"{statistics.median(run['median_cpu_s'] for run in runs) * 1e3:.0f}",
            )
        )
    gaps = [final(d) - final(s) for d, s in zip(dense, switch, strict=True)]
    ratios = [s["median_cpu_s"] / d["median_cpu_s"] for d, s in zip(dense, switch, strict=True)]
    rows.append(
        (
            "difference, ratio",
            f"{switch[0]['parameters'] / dense[0]['parameters']:.2f}x",
            f"{switch[0]['flops_per_token'] / dense[0]['flops_per_token']:.3f}x",
            *(f"{gap:.3f}" for gap in gaps),
            f"{statistics.mean(gaps):.3f}",
            f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})",
        )
    )
    return table(head, rows)


def balance_table(results: dict) -> str:
    """With the balance loss and without, over the first steps and over the last, as means over layers."""
    stretch = results["workload"]["steps_a_report"]
    last = results["workload"]["steps"]
    rows = []
    for weight, name in (("0", "switch, no balance loss"), ("0.01", "switch")):
        (run,) = [run for run in runs_of(results, name) if run["seed"] == results["runs"][0]["seed"]]
        for words, reports in (
            (f"1 to {2 * stretch}", run["routers"][:2]),
            (f"{last - 2 * stretch + 1} to {last}", run["routers"][-2:]),
        ):
            measures = [
                statistics.mean(value for report in reports for value in report[key])
                for key in ("busiest_over_mean", "entropy_bits", "dropped_share")
            ]
            rows.append((weight, words, f"{measures[0]:.2f}", f"{measures[1]:.2f} of 3", f"{measures[2]:.1%}"))
    return table(("`balance_weight`", "steps", "busiest over mean load", "entropy, bits", "dropped"), rows)


def final(run: dict) -> float:
    """The validation loss after the last step."""
    return float(run["validation"][-1]["loss"])


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, tuple("---" for _ in head), *rows))


BLOCKS: dict[str, Callable[[dict], str]] = {"switch": losses_table, "balance": balance_table}
_BLOCK = re.compile(r"(<!-- measured: ([\w -]+?) -->\n).*?(\n<!-- /measured -->)", re.DOTALL)


def filled(page: str, results: dict) -> str:
    """A page with its measured blocks as the results have them."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{BLOCKS[block[2]](results)}\n{block[3]}", page)


def curves_svg(results: dict) -> str:
    """Validation loss over steps: a thin line for each seed, a thick one for their mean."""
    curves = {name: [_curve(run) for run in runs_of(results, name)] for name in COLOURS}
    points = [point for lines in curves.values() for line in lines for point in line]
    (x_low, x_high), (y_low, y_high) = (0, points[-1][0]), (min(y for _, y in points), max(y for _, y in points))
    y_low, y_high = y_low - 0.05 * (y_high - y_low), y_high + 0.05 * (y_high - y_low)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low)
        down = (y_high - y) / (y_high - y_low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), TOP + down * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13" fill="#333">',
        "<title>Validation loss of a dense model and of Switch at equal FLOPs a token</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        *_axes((x_low, x_high), (y_low, y_high), place),
    ]
    for name, lines in curves.items():
        mean = [(line[0][0], statistics.mean(y for _, y in line)) for line in zip(*lines, strict=True)]
        for line, style in [
            *((line, 'stroke-width="1" opacity="0.45"') for line in lines),
            (mean, 'stroke-width="2.5"'),
        ]:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))
            parts.append(f'<polyline fill="none" stroke="{COLOURS[name]}" {style} points="{path}"/>')
        x, y = place(*mean[-1])
        parts.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" fill="{COLOURS[name]}">{name} {mean[-1][1]:.2f}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _curve(run: dict) -> list[tuple[int, float]]:
    # The start is log V for every model, and would flatten the rest.
    return [(point["step"], point["loss"]) for point in run["validation"] if point["step"] > 0]


def _axes(
    steps: tuple[float, float], losses: tuple[float, float], place: Callable[[float, float], tuple[float, float]]
) -> Iterator[str]:
    low = HEIGHT - BOTTOM
    for step in range(0, int(steps[1]) + 1, 50):
        x, _ = place(step, losses[0])
        yield f'<text x="{x:.1f}" y="{low + 18}" text-anchor="middle">{step}</text>'
    tenth = -(-losses[0] * 10 // 2) * 2
    while tenth <= losses[1] * 10:
        _, y = place(0, tenth / 10)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tenth / 10:.1f}</text>'
        tenth += 2
    yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{low}" y2="{low}" stroke="#333"/>'
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">step</text>'
    middle = (TOP + low) / 2
    yield (
        f'<text transform="translate(18 {middle:.0f}) rotate(-90)" text-anchor="middle">'
        "validation loss, nats a token</text>"
    )


def main() -> None:
    """Write what is out of date."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    PLOT.write_text(curves_svg(results), encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
