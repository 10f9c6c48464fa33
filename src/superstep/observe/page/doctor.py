"""The doctor's page: the findings, and the wait graph.

Ranks are boxes, in a column for each pipeline stage. An arrow leads from a waiting rank to the one that it waits for; a
dashed one to a rank that has passed what the other is still in. A finding has a thick border.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping

from superstep.observe.doctor.diagnose import Diagnosis
from superstep.observe.doctor.observations import RankObservation, RunObservation
from superstep.observe.doctor.wait_graph import RankWait
from superstep.observe.page.bundle_html import assemble

WIDE, HIGH, ACROSS, DOWN, MARGIN = 216, 46, 92, 22, 10
"""Width and height of a box, space between columns and rows, margin."""
BULGE = 46
"""How far an arrow within a column bends out of it."""
MOST_LETTERS = 34

Place = tuple[float, float]


def doctor_page(name: str, run: RunObservation, verdict: Diagnosis, text: str) -> str:
    """The page. ``text``: the findings as text."""
    items = "".join(f"<li>{html.escape(each.what)}</li>" for each in verdict.findings)
    return assemble(
        markup="doctor.html",
        styles=["assets/step.css", "assets/doctor.css"],
        scripts=["doctor.js"],
        title=f"{name}: which rank waits for which",
        data={"format": 1},
        body={
            "findings": f"<ol>{items}</ol>" if items else "<p>Nothing is wrong, as far as can be seen.</p>",
            "graph": graph(run, verdict),
            "said": html.escape(text),
        },
    )


def graph(run: RunObservation, verdict: Diagnosis) -> str:
    """The wait graph as SVG."""
    places = dict(_places(run))
    blamed = {each.rank for each in verdict.findings}
    width = max((x for x, _ in places.values()), default=0.0) + WIDE + BULGE + MARGIN
    height = max((y for _, y in places.values()), default=0.0) + HIGH + MARGIN
    label = "; ".join(f"rank {w.rank} waits for {w.what} from {_list(w.missing or w.past)}" for w in verdict.waits)
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{html.escape(label or "no rank waits for another", quote=True)}">'
        '<defs><marker id="tip-of-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z"/></marker></defs>'
        + "".join(_box(rank, places[rank.rank], is_blamed=rank.rank in blamed) for rank in run.ranks)
        + "".join(_arrows(verdict.waits, places))
        + "</svg>"
    )


def _places(run: RunObservation) -> Iterator[tuple[int, Place]]:
    rows: dict[int, int] = {}
    for rank in run.ranks:
        column = run.mesh.at(rank.rank).pp
        row = rows[column] = rows.get(column, -1) + 1
        yield rank.rank, (MARGIN + column * (WIDE + ACROSS), MARGIN + row * (HIGH + DOWN))


def _box(rank: RankObservation, at: Place, *, is_blamed: bool) -> str:
    x, y = at
    doing = {"apart": "", "waits": "waits in ", "works": "in "}[rank.doing] + (rank.brief or "between its programs")
    since = f", {rank.since_s:.1f} s" if rank.since_s else ""
    short = doing if len(doing) <= MOST_LETTERS else doing[: MOST_LETTERS - 1] + "…"
    return (
        f'<g class="rank{" blamed" if is_blamed else ""}"><title>{html.escape(doing + since)}</title>'
        f'<rect x="{x:g}" y="{y:g}" width="{WIDE}" height="{HIGH}" rx="7"/>'
        f'<text x="{x + 10:g}" y="{y + 19:g}" class="who">rank {rank.rank}{html.escape(since)}</text>'
        f'<text x="{x + 10:g}" y="{y + 36:g}">{html.escape(short)}</text></g>'
    )


def _arrows(waits: Iterable[RankWait], places: Mapping[int, Place]) -> Iterator[str]:
    for wait in waits:
        for other in (*wait.missing, *wait.past):
            if other in places:
                style = ' class="past"' if other in wait.past else ""
                label = html.escape(f"rank {wait.rank}: {wait.what}")
                yield f'<path d="{_way(places[wait.rank], places[other])}"{style}><title>{label}</title></path>'


def _way(start: Place, end: Place) -> str:
    """A path from one box's side to another's; within a column it bends out and back."""
    (x, y), (u, v) = start, end
    y, v = y + HIGH / 2, v + HIGH / 2
    if x == u:
        right, apart = x + WIDE, 11 if y > v else -11  # so that the ends of two arrows do not meet
        y, v = y - apart, v + apart
        return f"M{right:g} {y:g} C{right + BULGE:g} {y:g} {right + BULGE:g} {v:g} {right:g} {v:g}"
    first, last = (x + WIDE, u) if x < u else (x, u + WIDE)
    bend = (last - first) / 2
    return f"M{first:g} {y:g} C{first + bend:g} {y:g} {last - bend:g} {v:g} {last:g} {v:g}"


def _list(ranks: tuple[int, ...]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
