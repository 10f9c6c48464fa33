import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from reported import ROUTERS, STARTED, STEP
from superstep.cli.train.display import LiveDisplay, PlainDisplay, open_display
from superstep.cli.train.downsample import Curve
from superstep.cli.train.progress import Progress
from superstep.cli.train.progress_frame import frame
from superstep.observe.events import Evaluated, Resumed, RunFinished, Saved
from superstep.observe.number_format import bytes_text, count_text, duration_text, seconds_text, sparkline

CONVENTION = "6N + attention model FLOPs a token, causal attention counted half"
RUN = replace(STARTED, steps=60, unigram_entropy=6.5, predicted_step_s=0.5, predicted_memory_bytes=3 << 30)
EVALUATED = Evaluated(step=20, loss=4.5, bits_per_byte=1.5, seconds=0.8)
SAVED = Saved(step=20, path="runs/demo/checkpoints/20", seconds=0.25, bytes=61 << 20)


def steps(first, last):
    return [replace(STEP, step=s, loss=8.0 / s, elapsed_s=0.5 * s) for s in range(first, last + 1)]


def progress_of(events, convention=CONVENTION):
    progress = Progress(mfu_convention=convention)
    for event in events:
        progress.add(event, getattr(event, "elapsed_s", 0.0))
    return progress


def drawn(events, *, width=80, now=10.0, **rest):
    return [text.plain for text in frame(progress_of(events), width=width, now=now, **rest)]


# ── a pipe ──


def logged(events, log_every=10):
    stream = io.StringIO()
    with open_display(stream, mfu_convention=CONVENTION, log_every=log_every) as display:
        assert isinstance(display, PlainDisplay)
        for event in events:
            display.write(event)
    return stream.getvalue().splitlines()


def test_a_pipe_gets_the_first_step_every_tenth_and_the_last():
    run = replace(RUN, steps=25)
    found = [int(text.split("/")[0].split()[-1]) for text in logged([run, *steps(1, 25)]) if " lr " in text]
    assert found == [1, 10, 20, 25]


def test_a_pipe_gets_one_line_for_each_validation_and_checkpoint():
    shown = logged([RUN, *steps(1, 20), EVALUATED, SAVED])
    assert shown[-2:] == [
        "step 20/60  validation loss 4.5000  unigram entropy 6.5000  1.500 bits per byte  took 800 ms",
        "step 20/60  saved runs/demo/checkpoints/20  61 MiB  took 250 ms",
    ]


def test_a_pipe_gets_one_line_for_each_report_of_the_routers():
    shown = logged([RUN, *steps(1, 2), ROUTERS])
    assert shown[-1] == "step  2/60  routers  busiest expert 3.00x the mean, in layer 0  dropped 12.5%"


def test_a_log_says_the_convention_and_the_prediction_once():
    run, end = replace(RUN, layers="norm in C++"), RunFinished(step=60, elapsed_s=30.0, tokens_seen=9)
    shown = logged([run, Resumed(step=3, path="c"), *steps(4, 60), end])
    assert shown[0] == "runs/demo: demo, dp 2, 7M parameters, 2 ranks over shared memory, 60 steps"
    assert shown[1:3] == [
        "layers: norm in C++",
        "predicted: 500 ms a step, 3 GiB of tensors on the fullest rank",
    ]
    assert [text for text in shown if "causal" in text] == [f"MFU: {CONVENTION}"]
    assert shown[4] == "resumed after step 3 from c"
    assert shown[-1] == "finished step 60 in 0:30, 9 tokens seen"


def test_a_log_holds_no_control_codes_and_no_wrapped_lines():
    text = "\n".join(logged([RUN, *steps(1, 60), EVALUATED, SAVED]))
    assert "\x1b" not in text
    assert all(row.startswith(("step ", "runs/demo", "predicted", "MFU")) for row in text.splitlines())


# ── the frame ──


@given(
    width=st.integers(5, 200),
    until=st.integers(0, 60),
    is_evaluated=st.booleans(),
    has_routers=st.booleans(),
    is_started=st.booleans(),
    is_ascii=st.booleans(),
)
def test_no_line_is_wider_than_the_terminal(width, until, is_evaluated, has_routers, is_started, is_ascii):
    events = [RUN] * is_started + steps(1, until) + [ROUTERS] * has_routers + [EVALUATED, SAVED] * is_evaluated
    assert all(len(text) <= width for text in drawn(events, width=width, is_ascii=is_ascii))


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_the_frame_says_everything_at_any_width(width):
    shown = " ".join(" ".join(drawn([RUN, *steps(1, 30), EVALUATED, SAVED], width=width)).split())
    for words in (
        "runs/demo",
        "30 / 60 steps",
        "4.5000",
        "unigram entropy 6.5000",
        "learning rate 1.00e-03",
        "gradient norm 0.5",
        "tokens/s 8.19k",
        "MFU 25.0%",
        "memory 1 GiB",
        "data wait 0.2%",
        "elapsed 0:10",
        "left 0:",
        "saved step 20",
        "predicted: 500 ms a step, 3 GiB of tensors on the fullest rank",
        f"MFU: {CONVENTION}",
    ):
        assert words in shown, words


def test_the_frame_has_a_line_of_routers_where_there_are_experts():
    shown = drawn([RUN, *steps(1, 2), ROUTERS])
    assert "  routers     busiest expert 3.00x the mean, in layer 0   dropped 12.5%" in shown
    assert not any("routers" in line for line in drawn([RUN, *steps(1, 2)]))


@pytest.mark.parametrize("width", [80, 100])
def test_the_columns_end_where_the_bar_ends(width):
    shown = drawn([RUN, *steps(1, 30), EVALUATED, SAVED], width=width)
    bar = next(text for text in shown if "steps" in text)
    assert {len(text) for text in shown if "elapsed" in text or "saved" in text} == {len(bar)} == {width - 2}


def test_a_loss_that_is_not_finite_is_red_and_leaves_the_curve_alone():
    events = [RUN, *steps(1, 9), replace(STEP, step=10, loss=float("nan"))]
    row = next(text for text in frame(progress_of(events), width=80, now=0.0) if "loss" in text.plain)
    assert any("red" in str(span.style) and "nan" in row.plain[span.start : span.end] for span in row.spans)
    assert progress_of(events).losses.resample(99) == progress_of(events[:-1]).losses.resample(99)


def test_an_ascii_terminal_gets_ascii():
    assert "\n".join(drawn([RUN, *steps(1, 30)], is_ascii=True)).isascii()


@given(st.integers(2, 60), st.floats(0.01, 100.0))
def test_what_is_left_at_an_even_pace_is_the_steps_left_times_the_pace(done, pace_s):
    progress = Progress(mfu_convention="")
    progress.add(RUN, 0.0)
    for step in range(1, done + 1):
        progress.add(replace(STEP, step=step, elapsed_s=step * pace_s), step * pace_s)
    assert progress.left_s(done * pace_s) == pytest.approx((60 - done) * pace_s)
    assert progress.elapsed_s((done + 1) * pace_s) == pytest.approx((done + 1) * pace_s)


def test_before_the_second_step_nothing_is_known_of_what_is_left():
    assert progress_of([RUN, *steps(1, 1)]).left_s(0.0) is None
    assert "starting" in "".join(drawn([]))


@given(st.integers(0, 5000), st.integers(1, 60))
def test_a_curve_is_bounded_and_keeps_its_course(points, count):
    curve = Curve()
    for point in range(points):
        curve.add(float(point))
    means = curve.resample(count)
    assert len(means) <= count
    assert len(curve.resample(10**6)) < Curve.CAPACITY
    assert means == sorted(means)
    if points:
        assert means
        assert 0 <= means[0] <= means[-1] < points


@given(st.lists(st.floats(-1e6, 1e6), max_size=50))
def test_a_sparkline_orders_as_its_values(values):
    marks = sparkline(values)
    assert len(marks) == len(values)
    for (low, low_mark), (high, high_mark) in zip(
        sorted(zip(values, marks, strict=True)), sorted(zip(values, marks, strict=True))[1:], strict=False
    ):
        assert low <= high
        assert low_mark <= high_mark


def test_figures():
    counts = (0, 950, 999.6, 12_345, 999_600, 7_112_448, 8_030_000_000)
    assert [count_text(n) for n in counts] == ["0", "950", "1000", "12.3k", "1000k", "7.11M", "8.03B"]
    assert [bytes_text(n) for n in (0, 1536, 61 << 20, 5 << 28)] == ["0 B", "1.5 KiB", "61 MiB", "1.25 GiB"]
    assert [seconds_text(s) for s in (0.0125, 1.25, 310.2, 5000.4)] == [
        "12.5 ms",
        "1.25 s",
        "310 s",
        "5000 s",
    ]
    times = (5, 83, 7509, 274_200)
    assert [duration_text(s) for s in times] == ["0:05", "1:23", "2:05:09", "3d 04:10"]


# ── a terminal ──

SHOW = """
import signal

# A shell's background job, as this suite may be, has its children ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
import sys, time
sys.path.insert(0, {support!r})
from test_display import *
with open_display(sys.stdout, mfu_convention=CONVENTION, log_every=10) as display:
    assert isinstance(display, LiveDisplay)
    for event in [RUN, *steps(1, 30), EVALUATED, SAVED]:
        display.write(event)
    print("from elsewhere")
    {then}
"""


def run_on_terminal(then, *, signal_after=None, env=None):
    """What a child wrote to a terminal of 80 columns, and how it ended."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", SHOW.format(then=then, support=str(Path(__file__).parents[1] / "support"))],
        cwd=Path(__file__).parent,
        stdin=child,
        stdout=child,
        stderr=child,
        env={"PATH": os.environ["PATH"], "TERM": "xterm-256color", "LANG": "C.UTF-8"} | (env or {}),
    )
    os.close(child)
    written = b""
    try:
        while True:
            try:
                written += os.read(parent, 65536)
            except OSError:  # the child has closed the terminal
                break
            if signal_after is not None and signal_after in written:
                process.send_signal(signal.SIGINT)
                signal_after = None
        return written.decode(), process.wait(timeout=10)
    finally:
        process.kill()
        os.close(parent)


@pytest.mark.parametrize(
    ("then", "signal_after", "status"),
    [
        ("pass", None, 0),
        ("raise RuntimeError('boom')", None, 1),
        ("time.sleep(20)", b"from elsewhere", -signal.SIGINT),
    ],
    ids=["end", "exception", "ctrl-c"],
)
def test_the_terminal_is_given_back_by_whatever_way_the_block_ends(then, signal_after, status):
    written, ended = run_on_terminal(then, signal_after=signal_after)
    assert ended == status
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")
    assert "from elsewhere" in written
    assert "30 / 60 steps" in written
    if status == 1:
        assert written.rindex("RuntimeError: boom") > written.rindex("\x1b[?25h")


def test_no_color_is_respected():
    colour = re.compile(r"\x1b\[[0-9;]*\b3[0-7]m")
    assert colour.search(run_on_terminal("pass")[0])
    assert not colour.search(run_on_terminal("pass", env={"NO_COLOR": "1"})[0])


class Screen(io.StringIO):
    """A terminal that wraps its rows again when its width changes, as most do."""

    def isatty(self):
        return True


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_display(Screen(), mfu_convention="", log_every=1), PlainDisplay)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_display(Screen(), mfu_convention="", log_every=1), LiveDisplay)


@pytest.mark.parametrize("narrow", [30, 49, 50, 79])
def test_a_narrowed_terminal_is_cleared_of_the_whole_last_frame(monkeypatch, narrow):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Screen()
    display = open_display(stream, mfu_convention=CONVENTION, log_every=1)
    for event in [RUN, *steps(1, 30), EVALUATED, SAVED]:
        display.write(event)
    display._live.auto_refresh = False
    with display:
        rows = [len(text) for text in drawn([RUN, *steps(1, 30), EVALUATED, SAVED], width=100)]
        stream.truncate(0)
        display._console.width = narrow
        display._live.refresh()
        ups = stream.getvalue().count("\x1b[1A")
    assert ups + 1 == sum(max(1, -(-columns // narrow)) for columns in rows)


def test_writing_is_cheap_beside_a_step():
    display = LiveDisplay(Console(file=Screen()), mfu_convention="")
    began_s = time.perf_counter()
    for event in steps(1, 10_000):
        display.write(event)
    assert (time.perf_counter() - began_s) / 10_000 < 1e-3
