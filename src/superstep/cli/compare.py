"""superstep compare: several runs in one chart, their differences, and whether a difference in loss exceeds noise."""

from __future__ import annotations

import webbrowser
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from superstep.cli.arguments.compare import read
from superstep.cli.damage import say_damage
from superstep.observe.page.compare import Comparison, compare
from superstep.observe.page.report import report_page
from superstep.run.reports.report import load_reported_run, settings_of
from superstep.train.run_folder.run_paths import RunFolder, write_whole


def main(argv: Sequence[str]) -> int:
    """Print the differences, and write the page."""
    paths, options = read(argv)
    folders = [RunFolder(root=path) for path in paths]
    runs = [load_reported_run(folder) for folder in folders]
    for folder in folders:
        say_damage(folder.metrics)
    comparisons = [
        compare(
            (runs[0].name, run.name),
            (settings_of(folders[0]), settings_of(folder)),
            (losses(runs[0].lines), losses(run.lines)),
        )
        for folder, run in zip(folders[1:], runs[1:], strict=True)
    ]
    for one in comparisons:
        print(_text(one))
    path = Path(options.out)
    write_whole(path, report_page(runs, comparisons), makes_folder=True)
    print(f"all curves: {path}")
    if options.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


def losses(lines: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """The finite losses of a run by step; of repeated steps, the last."""
    return {line["step"]: line["loss"] for line in lines if line["event"] == "step" and line["loss"] is not None}


def _text(one: Comparison) -> str:
    first, other = one.names
    wide = max((len(name) for name, _, _ in one.settings), default=0)
    lines = [f"  {name:{wide}}  {a} -> {b}" for name, a, b in one.settings] or ["  all settings are the same"]
    return "\n".join([f"{first} -> {other}", *lines, f"  loss: {one.verdict()}", ""])
