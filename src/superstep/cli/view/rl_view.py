"""superstep view RUN, of a run of reinforcement learning: rollouts, grades and steps on one timeline, and a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from superstep.errors import StateError
from superstep.observe.drawing.lanes import Clock, Lane, LaneItem, draw_lanes, length, merge
from superstep.observe.number_format import seconds_text
from superstep.train.run_folder.run_paths import RunFolder
from superstep.tune.recipe import RECIPE
from superstep.tune.rl.config import RlRecipe, read_rl
from superstep.tune.rl.history import AnsweredGroup, History, Span, Trained, read_history
from superstep.tune.rl.rollout_log import NAME

LAST = 20
"""Steps of the table: the last ones."""


def is_rolled(folder: RunFolder) -> bool:
    """Whether a run learns from rewards."""
    return (folder.root / NAME).is_file()


def draw_rl(folder: RunFolder, *, width: int, has_signs: bool) -> str:
    """The picture of a run.

    Raises:
        StateError: it has no record yet, or a damaged one.
    """
    recipe_path = folder.root / RECIPE
    if not recipe_path.is_file():
        raise StateError(f"'{folder.root}' lacks {RECIPE}, which describes its groups; name a run of tune rl.")
    recipe = read_rl(recipe_path)
    history = read_history(folder.root / NAME, folder.metrics, recipe.rl.groups)
    drawn = draw_lanes(_lanes(history), width=width, seconds=seconds_text, has_signs=has_signs)
    return f"{_title(folder, recipe, history)}\n\n{drawn}\n\n{_time_lines(history)}\n\n{_table(recipe, history)}\n"


def _title(folder: RunFolder, recipe: RlRecipe, history: History) -> str:
    rl = recipe.rl
    return (
        f"{folder.root}: {len(history.trained)} of {recipe.train.steps} steps, each on {rl.groups} groups of "
        f"{rl.group} answers, lag {rl.lag}, placement {recipe.rollout.placement}; {len(history.drawn)} groups drawn by "
        f"{len({each.version for each in history.drawn.values()})} versions"
    )


def _lanes(history: History) -> list[Lane]:
    drawn = sorted(history.drawn.values(), key=lambda each: each.span)
    lanes = [
        Lane("publish", [LaneItem((at_s, at_s), "") for at_s in sorted(history.published.values())], ("▲", "^")),
        Lane("sample", [piece for each in _by_version(drawn) for piece in each], ("▒", ":")),
        Lane("grade", [LaneItem(span) for span in merge(history.graded.values())], ("░", ".")),
        Lane("train", [LaneItem(each.span, str(each.step)) for each in history.trained], ("▓", "#")),
        Lane("save", [LaneItem(span) for span in history.saved], ("█", "=")),
    ]
    return [lane for lane in lanes if lane.pieces]


def _by_version(drawn: Sequence[AnsweredGroup]) -> Iterable[list[LaneItem]]:
    """Consecutive samples of one version are joined."""
    for version, each in groupby(drawn, key=lambda one: one.version):
        yield [LaneItem(span, f"v{version}") for span in merge(one.span for one in each)]


def _time_lines(history: History) -> str:
    """Where the time went."""
    sampling = [each.span for each in history.drawn.values()]
    training, grading = [each.span for each in history.trained], list(history.graded.values())
    published = [(at_s, at_s) for at_s in history.published.values()]
    whole_s = Clock([*sampling, *training, *grading, *history.saved, *published]).seconds or 1.0
    beside_s = length(grading) + length([*sampling, *training]) - length([*grading, *sampling, *training])
    parts = (("sampling", sampling), ("training", training), ("saving", history.saved), ("grading", grading))
    shares = ", ".join(f"{name} {length(spans) / whole_s:.0%}" for name, spans in parts if spans)
    alone_s = length(grading) - beside_s
    waited = f", {seconds_text(alone_s)} of it while nothing else ran" if alone_s >= 0.01 * whole_s else ""
    lines = [f"{seconds_text(whole_s)}: {shares}{waited}"]
    if history.retried:
        lines.append(f"{len(history.retried)} graded again; the last reason: {history.retried[-1]}")
    return "\n".join(lines)


def _table(recipe: RlRecipe, history: History) -> str:
    if not history.trained:
        return "no step is finished yet"
    shown = history.trained[-LAST:]
    head = ("step", "version", "lag", "answers", "reward", "loss", "sampled", "graded", "trained")
    rows = [head, *(_row(recipe, history, each) for each in shown)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:>{wide}}" for cell, wide in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(shown) < len(history.trained):
        lines.insert(1, f"  ... {len(history.trained) - len(shown)} steps before these")
    return "\n".join(lines)


def _row(recipe: RlRecipe, history: History, trained: Trained) -> tuple[str, ...]:
    mine = history.tasks_of(trained.step, recipe.rl.groups)
    drawn = [history.drawn[group] for group in mine if group in history.drawn]
    versions = sorted({each.version for each in drawn})
    return (
        str(trained.step),
        " ".join(f"v{version}" for version in versions) or "-",
        str(trained.lag),
        str(trained.answers) + (f" of {trained.answers + trained.lost}" if trained.lost else ""),
        "-" if trained.reward is None else f"{trained.reward:.4f}",
        "-" if trained.loss is None else f"{trained.loss:.4f}",
        _took(each.span for each in drawn),
        _took(history.graded[group] for group in mine if group in history.graded),
        seconds_text(trained.span[1] - trained.span[0]),
    )


def _took(spans: Iterable[Span]) -> str:
    """Seconds from the first begin to the last end."""
    known = list(spans)
    return seconds_text(max(end for _, end in known) - min(begin for begin, _ in known)) if known else "-"
