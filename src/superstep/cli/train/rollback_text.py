"""Log lines of rollbacks and recoveries, and the share of time with progress."""

from __future__ import annotations

from superstep.observe.events import Corrupted, Goodput, Resumed, RolledBack
from superstep.observe.number_format import seconds_text


def setback(event: Resumed | RolledBack | Corrupted) -> list[str]:
    """The lines of an event."""
    match event:
        case Resumed():
            return _write_resumed(event)
        case Corrupted():
            return [_corruption_text(event)]
        case RolledBack():
            _, _, batches = event.skip.partition(":")
            after = f"; {batches} batches are skipped after step {event.skip.partition(':')[0]}" if event.skip else ""
            where = "" if event.step == event.refused - 1 and event.source == "memory" else f" from {event.source}"
            return [
                f"step {event.refused} was refused: {event.why}",
                *_write_passed_over(event.passed_over),
                f"rolled back to after step {event.step}{where}{after}",
            ]


def _corruption_text(event: Corrupted) -> str:
    where = ", ".join(f"rank {rank} on {host}" for rank, host in zip(event.ranks, event.hosts, strict=True))
    known = {
        "majority": "other copies disagree with it",
        "replay": "the steps were repeated",
        "at rest": "at rest",
        "recomputed": "others compute otherwise",
        "checksum": "by its checksum; it is copied again",
    }
    return f"corrupt: {event.what} of {where}, step {event.found} ({known[event.how]})"


def _write_passed_over(why: tuple[str, ...]) -> list[str]:
    return [f"passed over: {each}" for each in why]


def _write_resumed(event: Resumed) -> list[str]:
    passed = _write_passed_over(event.passed_over)
    if event.joined:
        return [f"{event.joined} has joined", *passed, f"continues after step {event.step}, from {event.path}"]
    if event.lost:
        whence = event.path or ("memory" if event.step else "the start")
        return [f"lost {event.lost}", *passed, f"recovered after step {event.step}, from {whence}"]
    if not event.path:
        return ["started again: the run had no checkpoint yet"]
    return [*passed, f"resumed after step {event.step} from {event.path}"]


def headway(goodput: Goodput, predicted: float | None) -> str:
    """The share of the time in steps that were kept, at the end of a run."""
    forecast_text = "" if predicted is None else f", {predicted:.1%} predicted"
    rest_s = max(0.0, goodput.wall_s - goodput.steps_s - goodput.validation_s)
    return (
        f"goodput: {goodput.ettr:.1%} of {seconds_text(goodput.wall_s)} in steps that count{forecast_text}; validation "
        f"{seconds_text(goodput.validation_s)}, starts, checkpoints and lost work {seconds_text(rest_s)}"
    )
