"""The page of a large step in a browser: how long it opens, and how long a frame takes while it is scrubbed and zoomed.

    python -m bench.step_page                   64 ranks, 512 microbatches
    python -m bench.step_page --ranks 8 --microbatches 64

The rival is the screen: a frame of 33 ms is 30 in a second. Frames are drawn one after the other without waiting for
the screen, each at another place of the step; the window is 1,280 by 900.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.machine import write_result

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
OUT = Path(__file__).parent / "results" / "step_page.json"
FRAMES = 120
# Times of frames, in milliseconds: FRAME is one of them, k its number.
TIMED = """(() => {
  const S = superstep.S, step = S.step.first.step_ns, found = [];
  for (let k = 0; k < COUNT; k++) {
    const before = performance.now();
    FRAME;
    superstep.drawNow();
    document.getElementById('time').getContext('2d').getImageData(0, 0, 1, 1);
    found.push(performance.now() - before);
  }
  return found;
})()"""


def main() -> None:
    """Build the page, open it, draw."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--ranks", type=int, default=64)
    options.add_argument("--microbatches", type=int, default=512)
    options.add_argument("--opens", type=int, default=5)
    asked = options.parse_args()
    sys.path.insert(0, str(SUPPORT))
    import browser
    import step_pages

    started = time.perf_counter()
    config = step_pages.config(sequences=asked.microbatches, layers=asked.ranks, pp=asked.ranks, zero=0)
    page = step_pages.page_of(config, is_alone=True)
    built_s = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder, browser.browser() as tab:
        path = Path(folder) / "page.html"
        path.write_text(page, encoding="utf-8")
        tab.look()
        opened_s = []
        for number in range(asked.opens):
            tab.call("Page.navigate", url=f"{path.as_uri()}?{number}")
            tab.wait_for(f"location.search === '?{number}' && document.documentElement?.dataset.ready")
            # From the start of the navigation to the first picture.
            opened_s.append(tab.value("performance.getEntriesByName('ready')[0].startTime") / 1e3)
        events = tab.value("superstep.S.step.ranks.reduce((sum, one) => sum + one.kind.length, 0)")
        timed = TIMED.replace("COUNT", str(FRAMES))
        scrubbed = tab.value(timed.replace("FRAME", f"S.t = step * k / {FRAMES}"))
        zoomed = tab.value(timed.replace("FRAME", "superstep.zoom(0.95)"))
        tab.value("superstep.S.from = 0; superstep.S.to = superstep.S.step.first.step_ns; 0")
        wide = tab.value(timed.replace("FRAME", "superstep.zoom(k % 2 ? 0.99 : 1.01)"))
    figures = {
        "ranks": asked.ranks,
        "microbatches": asked.microbatches,
        "instructions": events,
        "page_bytes": len(page.encode()),
        "built_s": round(built_s, 2),
        "opened_s": {"median": round(median(opened_s), 3), "most": round(max(opened_s), 3), "allowed": 2.0},
        "frame_ms": {
            name: {"median": round(median(times), 2), "p95": round(sorted(times)[int(0.95 * len(times))], 2)}
            for name, times in (("scrubbed", scrubbed), ("zoomed", zoomed), ("zoomed at its whole width", wide))
        },
        "frame_ms_allowed": 33.3,
    }
    write_result(OUT, **figures)
    print(figures)


if __name__ == "__main__":
    main()
