"""superstep view FILE: the steps of a server's log, checked and drawn over time."""

from __future__ import annotations

from pathlib import Path

from superstep.cost.fit_serving import fit
from superstep.cost.serve import bounds, seconds
from superstep.observe.drawing.curve import PlottedCurve, draw_courses
from superstep.observe.number_format import bytes_text, count_text, seconds_text
from superstep.serve.scheduling.step_log import Replay, prompt_rows, read_log, samples, work_of

LEAST = 40
"""Fewest steps for a split of their seconds by cause."""


def draw_replay(path: Path, *, width: int, has_signs: bool) -> str:
    """The picture of a log.

    Raises:
        StateError: it is no log, or a step breaks a rule.
    """
    replay = read_log(path)
    if not replay.entries:
        return f"{path}: the file has no step yet.\n"
    return f"{_title(path, replay)}\n\n{_draw_steps(replay, width, has_signs=has_signs)}\n\n{_time_lines(replay)}\n"


def _title(path: Path, replay: Replay) -> str:
    setting, entries = replay.setting, replay.entries
    requests = {chunk.request for entry in entries for chunk in entry.step.chunks}
    preempted = sum(len(entry.step.frees) for entry in entries)
    lost = f"; {preempted} requests were preempted" if preempted else ""
    return (
        f"{path}: {len(entries):,} steps of {len(requests):,} requests, {setting.way.name}, each checked against the "
        f"rules{lost}\nat most {setting.budget.tokens:,} rows and {setting.budget.requests} requests a step, "
        f"{setting.pages:,} pages of {setting.page_tokens} tokens, "
        f"{bytes_text(setting.pages * setting.page_tokens * setting.model.key_bytes)}"
    )


def _draw_steps(replay: Replay, width: int, *, has_signs: bool) -> str:
    entries = replay.entries
    prompts = [sum(prompt_rows(entry)) for entry in entries]
    drawn = [work_of(entry, replay.setting.way).drawn for entry in entries]
    courses = [
        PlottedCurve("rows of prompts", prompts, count_text),
        PlottedCurve("tokens drawn", drawn, count_text),
        PlottedCurve("requests", [len(entry.step.chunks) for entry in entries], count_text),
        PlottedCurve("pages used", replay.used_pages, count_text),
        PlottedCurve("seconds a step", [entry.took_s for entry in entries], seconds_text),
    ]
    spans = [(entry.at_s, entry.at_s + entry.took_s) for entry in entries]
    return draw_courses(spans, courses, width=width, seconds=seconds_text, has_signs=has_signs)


def _time_lines(replay: Replay) -> str:
    """Where the time went, and the machine's rates by these steps."""
    setting, entries = replay.setting, replay.entries
    measured = samples(setting, entries)
    busy_s = sum(entry.took_s for entry in entries)
    whole_s = entries[-1].at_s + entries[-1].took_s
    tokens = sum(sample.work.drawn for sample in measured)
    lines = [
        f"{tokens:,} tokens drawn in {seconds_text(whole_s)}: {count_text(tokens / whole_s)} tokens/s; "
        f"steps took {busy_s / whole_s:.0%} of it"
    ]
    if len(entries) >= LEAST:
        rate = fit(measured, setting.way)
        held = bounds(rate, setting.model, [sample.work for sample in measured])
        words = ", ".join(f"{name} {share:.0%}" for name, share in held.items() if share >= 0.005)
        slow = max(measured, key=lambda sample: sample.seconds - seconds(rate, setting.model, sample.work))
        at = measured.index(slow)
        lines.append(f"limited by {words} (fitted to these steps, within {rate.spread:.0%} in the median)")
        lines.append(
            f"slowest for its work: step {at + 1} at {seconds_text(entries[at].at_s)}, {slow.work.rows:,} rows in "
            f"{seconds_text(slow.seconds)} where {seconds_text(seconds(rate, setting.model, slow.work))} were expected"
        )
    return "\n".join(lines)
