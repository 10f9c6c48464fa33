"""The pages in a browser: opened from a file, played, scrubbed, zoomed, flipped, by mouse, by keys and on a phone."""

from __future__ import annotations

import re

import pytest

import browser
import step_pages
from longer import longer
from seen_pages import READY, Seen

pytestmark = pytest.mark.skipif(browser.PATH is None, reason=f"none of {', '.join(browser.NAMES)} is installed")

CLOSED = {
    "gpipe": 3 / 8,
    "1f1b": 3 / 8,
    "interleaved": 3 / 16,
    "breadth-first": 3 / 16,
    "zb-h1": 3 / 24,
    "zb-v": 3 / 48,
}
"""The papers' bubble at p = 4, m = 8; zb-h1's where its passes take the same time, which here they nearly do."""
STEP = "superstep.S.step.first.step_ns"


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    with browser.browser() as tab:
        yield Seen(tab, tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def eight_ranks():
    return step_pages.page_of(step_pages.EIGHT_RANKS)


def colours(x, y, width, height):
    """How many there are in a part of the timeline, in pixels of the page."""
    return f"""(() => {{
      const canvas = document.getElementById('time'), scale = canvas.width / canvas.clientWidth, found = new Set();
      const part = [{x}, {y}, {width}, {height}].map((size) => size * scale);
      const data = canvas.getContext('2d').getImageData(...part).data;
      for (let i = 0; i < data.length; i += 4) found.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
      return found.size;
    }})()"""


def test_the_page_plays_scrubs_and_zooms_and_asks_for_nothing(seen, eight_ranks):
    assert len(eight_ranks) < 1_000_000
    seen.open(eight_ranks)
    assert seen(READY) == "1f1b/1"
    assert seen(colours(100, 24, 800, 200)) > 20
    seen.keep("step-light")
    # From its end it plays from the start; a pause stays where it is.
    seen.tab.click("#play")
    seen.until(f"superstep.S.isPlaying && superstep.S.t > 0 && superstep.S.t < {STEP} / 2")
    seen.tab.click("#play")
    before = seen("superstep.S.t")
    frames = seen("superstep.S.frames")
    seen("new Promise((done) => setTimeout(done, 120))")
    assert (seen("superstep.S.t"), seen("superstep.S.isPlaying")) == (before, False)
    assert seen("superstep.S.frames") <= frames + 1
    # Scrubbing draws no event anew: the picture below is kept.
    drawn = seen("superstep.S.stills")
    seen("(() => { const s = document.getElementById('scrub'); for (const v of [0, 2500, 5000, 7500]) {"
         " s.value = v; s.dispatchEvent(new Event('input')); superstep.drawNow(); } })()")  # fmt: skip
    assert seen(f"superstep.S.t / {STEP}") == pytest.approx(0.75)
    assert seen("superstep.S.stills") == drawn
    seen.tab.click("#closer")
    seen.until(f"superstep.S.to - superstep.S.from === {STEP} / 2 && superstep.S.stills > {drawn}")
    assert seen("superstep.S.from <= superstep.S.t && superstep.S.t <= superstep.S.to")
    seen.tab.click("#farther")
    seen.until(f"superstep.S.from === 0 && superstep.S.to === {STEP}")
    assert seen("superstep.save()").startswith("data:image/png;base64,iVBOR")
    seen.shows_no_fault()


def test_plans_are_flipped_and_the_share_of_the_bubble_with_them(seen, eight_ranks):
    seen.open(eight_ranks)
    shares = {}
    for name in seen("[...document.querySelectorAll('input[name=schedule]')].map((one) => one.value)"):
        seen(f"document.querySelector('input[name=schedule][value=\"{name}\"]').click()")
        seen.until(f"{READY} === '{name}/1'")
        shares[name] = seen("superstep.S.step.first.bubble")
        cards = seen("document.getElementById('cards').innerText")
        assert f"{shares[name]:.1%}" in cards
        assert seen("superstep.S.step.first.formula") in cards
        closed = float(re.search(r"([\d.]+)%\nclosed form", cards)[1])
        assert closed == pytest.approx(100 * CLOSED[name], abs=0.06 if name != "zb-h1" else 5)
    assert len(shares) == 6
    assert shares["gpipe"] > shares["interleaved"] > shares["zb-v"]
    seen("document.querySelector('input[name=zero][value=\"3\"]').click()")
    seen.until(f"{READY} === 'zb-v/3'")
    assert seen("superstep.S.step.usedLanes.length") > 3
    seen.shows_no_fault()


def test_what_is_pointed_at_is_told_and_its_arrows_drawn(seen, eight_ranks):
    seen.open(eight_ranks)
    # The first forward of rank 1, which rank 0 sends its input to.
    place = seen(
        "(() => { const S = superstep.S, box = document.getElementById('time').getBoundingClientRect(),"
        " row = S.rows.find((r) => r.rank === 1 && r.lane === 0), t = S.step.first.ranks[1];"
        " const i = t.lanes[0][0], x = superstep.x((t.start[i] + t.end[i]) / 2);"
        " return [box.left + x, box.top + row.y + 5]; })()"
    )
    seen.tab.hover(*place)
    seen.until("!document.getElementById('tip').hidden")
    told = seen("document.getElementById('tip').innerText")
    assert told.startswith("forward · u3 block.2 · microbatch 0\nrank 1, instruction ")
    # Its input comes from there, and what its stage makes of it goes on to rank 2.
    assert [[one["from"], one["to"]] for one in seen("superstep.arrowsOf(superstep.S.chosen)")] == [[0, 1], [1, 2]]
    seen("document.getElementById('levels').scrollIntoView({block: 'center'})")
    corner = seen("(({left, top}) => [left, top])(document.getElementById('memory').getBoundingClientRect())")
    seen.tab.hover(corner[0] + 400, corner[1] + 30)
    seen.until("document.getElementById('tip').innerText.startsWith('rank 0 at ')")
    assert "optimizer" in seen("document.getElementById('tip').innerText")
    seen.shows_no_fault()


def test_keys_do_what_the_mouse_does(seen, eight_ranks):
    seen.open(eight_ranks)
    seen.tab.press("Home")
    seen.until("superstep.S.t === 0")
    seen.tab.press(".", text=".")
    seen.until("superstep.S.t > 0")
    seen.tab.press("End")
    seen.until(f"superstep.S.t === {STEP}")
    seen.tab.press("+", text="+")
    seen.until(f"superstep.S.to - superstep.S.from < {STEP}")
    seen.tab.press("0", text="0")
    seen.until(f"superstep.S.to - superstep.S.from === {STEP}")
    seen.tab.press("s", text="s")
    seen.until(f"{READY} === 'interleaved/1'")
    seen.tab.press("z", text="z")
    seen.until(f"{READY} === 'interleaved/2'")
    seen.tab.press(" ", text=" ")
    seen.until("superstep.S.isPlaying")
    seen.tab.press(" ", text=" ")
    seen.until("!superstep.S.isPlaying")
    seen("document.getElementById('time').focus()")
    seen.tab.press("ArrowRight")
    seen.until("superstep.S.chosen && superstep.S.chosen.rank === 0")
    seen.tab.press("ArrowDown")
    seen.until("superstep.S.chosen.rank === 1 && document.getElementById('chosen').textContent.includes('rank 1')")
    seen.tab.press("d", text="d")
    seen.until("superstep.S.tab === 'where' && !document.getElementById('panel-where').hidden")
    seen.shows_no_fault()


def test_a_run_is_drawn_above_its_prediction_and_the_difference_marked(seen):
    page = step_pages.page_of(step_pages.A_RUN, is_measured=True, is_alone=True)
    seen.open(page, dark=True)
    sets = seen("[...new Set(superstep.S.rows.map((row) => row.set))]")
    assert sets == ["measured", "difference", "predicted", "name"]
    row = seen("superstep.S.rows.find((row) => row.set === 'difference' && row.rank === 1)")
    assert seen(colours(100, row["y"], 900, row["h"])) > 3
    table = seen("document.getElementById('numbers').innerText")
    assert "ran\tpredicted\tdifference" in table
    assert seen("document.querySelectorAll('#numbers .more').length") > 1
    seen.keep("step-run-dark")
    seen.is_accessible()
    seen.shows_no_fault()


@pytest.mark.parametrize("dark", longer([True, False], lambda dark: not dark), ids=["dark", "light"])
def test_both_scenes_are_accessible(seen, eight_ranks, dark):
    seen.open(eight_ranks, dark=dark)
    seen.is_accessible()
    seen.tab.click("#tab-where")
    seen.is_accessible()
    # The page has become so long that it scrolls, and narrower by that.
    assert seen("(({scrollWidth, clientWidth}) => scrollWidth <= clientWidth)(document.querySelector('.where'))")


def test_it_fits_a_phone(seen, eight_ranks):
    seen.open(eight_ranks, width=390, height=844)
    seen.fits()
    seen.keep("step-phone")
    seen.tab.click("#tab-where")
    seen.fits()
    seen.is_accessible()


def state(seen, share, rank=0):
    """What a rank is said to hold after that share of the step."""
    found = f"superstep.stateAt(superstep.S.step, {rank}, {share} * {STEP})"
    return seen(f"(() => {{ const found = {found}; return {{...found, units: [...found.units.values()]}}; }})()")


def test_parameters_and_gradients_come_and_go_with_zero_3(seen):
    seen.open(step_pages.page_of(step_pages.config(sequences=16, layers=6, dp=4, zero=3), is_alone=True), height=520)
    seen.tab.click("#tab-where")
    start, end = state(seen, 0), state(seen, 1)
    assert [unit["gathered"] for unit in start["units"]] == [0] * 8
    assert not any(unit["buffer"] for unit in start["units"])
    # Some are whole in the middle, never all.
    whole = [sum(unit["gathered"] == 1 for unit in state(seen, share / 40)["units"]) for share in range(1, 40)]
    assert max(whole) in range(1, 5)
    assert any(unit["buffer"] for unit in state(seen, 0.7)["units"])
    assert end["isUpdated"]
    assert all(unit["isSummed"] and not unit["buffer"] and unit["gathered"] == 0 for unit in end["units"])
    seen("superstep.seek(0.74 * superstep.S.step.first.step_ns)")
    seen.keep("where-zero3")
    seen.shows_no_fault()


def test_without_zero_everything_is_everywhere(seen):
    seen.open(step_pages.page_of(step_pages.config(sequences=16, layers=4, dp=4, zero=0), is_alone=True))
    for share in (0, 0.3, 0.9):
        assert all(unit["gathered"] == 1 and unit["buffer"] for unit in state(seen, share)["units"])
    assert all(unit["isSummed"] for unit in state(seen, 1)["units"])
    assert all(unit["kept"] == [] for unit in state(seen, 1)["units"])


def test_keys_go_round_the_ring_and_tokens_to_their_experts(seen):
    middle = (
        "(() => { const S = superstep.S, c = S.step.ranks[0], t = S.step.first.ranks[0];"
        " const i = c.kind.findIndex((k, i) => k === 0 && c.unit[i] === 2 && c.microbatch[i] === 0);"
        " superstep.seek(t.start[i] + t.took[i] * SHARE); superstep.drawNow();"
        " return superstep.ringAt(0, superstep.stateAt(S.step, 0, S.t)); })()"
    )
    seen.open(step_pages.page_of(step_pages.config(sequences=2, layers=4, cp=4), is_alone=True), height=520)
    seen.tab.click("#tab-where")
    hops = [seen(middle.replace("SHARE", str(share)))["hop"] for share in (0.1, 0.3, 0.6, 0.9)]
    assert hops == [0, 1, 2, 3]
    seen(middle.replace("SHARE", "0.62"))
    seen.keep("where-ring")
    experts = step_pages.config(sequences=8, layers=4, experts=8, dp=4, ep=4, zero=1)
    seen.open(step_pages.page_of(experts, is_alone=True), height=520)
    seen.tab.click("#tab-where")
    assert not seen(middle.replace("SHARE", "0.2"))["isOn"]
    sent = seen("superstep.sendsOver(0, superstep.stateAt(superstep.S.step, 0, superstep.S.t), 'ep')")
    assert sent[0] == "all-to-all"
    seen.keep("where-experts")
    seen.shows_no_fault()


def test_of_many_events_only_what_is_visible_is_drawn(seen):
    page = step_pages.page_of(step_pages.config(sequences=512, layers=4, pp=4), is_alone=True)
    seen.open(page)
    events = seen("superstep.S.step.ranks.reduce((sum, one) => sum + one.kind.length, 0)")
    seen("superstep.S.rects = 0; superstep.zoom(0.999); superstep.drawNow()")
    whole = seen("superstep.S.rects")
    assert whole < events / 4
    for _ in range(8):
        seen("superstep.zoom(0.5); superstep.drawNow()")
    seen("superstep.S.rects = 0; superstep.zoom(0.9); superstep.drawNow()")
    assert seen("superstep.S.rects") < 400
    seen.shows_no_fault()


def test_what_is_summed_beforehand_is_what_lies_under_each_pixel(seen):
    """Each pixel of a dense lane, at three zooms, from sums over cells and from the events themselves."""
    seen.open(step_pages.page_of(step_pages.config(sequences=256, layers=8, pp=8, zero=0), is_alone=True))
    for share in (1.0, 0.5, 0.25):
        far = seen(f"""(() => {{
          const {{ S, covered, perPixel }} = superstep, step = S.step.first.step_ns, width = 300;
          S.from = 0.3 * step * (1 - {share}); S.to = S.from + {share} * step;
          const times = S.step.predicted.ranks[2], shade = S.step.ranks[2].shade, list = times.lanes[0];
          const palette = Float32Array.from({{ length: 3 * 256 }}, (_, i) => (7 * i) % 256);
          const reach = times.end.reduce((a, b) => Math.max(a, b));
          const lane = {{ start: times.start, end: times.end, shade, palette, reach }};
          const summed = perPixel(lane, list, [0, 0], width);  // of no event in sight: only the cells are asked
          const direct = covered(lane, list, 0, list.length, S.from, (S.to - S.from) / width, width);
          let most = 0, any = 0;
          for (let i = 0; i < direct.length; i++) if (i % 5 < 4) {{
            most = Math.max(most, Math.abs(direct[i] - summed[i]) / (i % 5 < 3 ? 255 : 1)); any += direct[i] > 0;
          }}
          return any > 100 ? most : 1;
        }})()""")
        assert far < 0.06, share
    # A cell is a 27th of a pixel at the whole width, and a 7th at a quarter of it.
    assert seen("""(() => {
      const { S, perPixel } = superstep, times = S.step.predicted.ranks[2], list = times.lanes[0], width = 300;
      const shade = S.step.ranks[2].shade, palette = new Float32Array(768), reach = S.to = S.step.first.step_ns;
      const lane = { start: times.start, end: times.end, shade, palette, reach };
      S.from = 0;
      const found = perPixel(lane, list, [0, 0], width);
      let begun = 0;
      for (let x = 0; x < width; x++) begun += found[5 * x + 4];
      return Math.round(begun) === list.length;
    })()"""), "each event begins once"
