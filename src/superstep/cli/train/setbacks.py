"""What a log says where a run goes on from an earlier state: resumed, recovered, or rolled back."""

from __future__ import annotations

from superstep.observe.events import Corrupted, Resumed, RolledBack


def setback(event: Resumed | RolledBack | Corrupted) -> list[str]:
    """The lines of an event."""
    match event:
        case Resumed():
            return _resumed(event)
        case Corrupted():
            return [_corrupted(event)]
        case RolledBack():
            _, _, batches = event.skip.partition(":")
            after = f"; {batches} batches are left out after step {event.skip.partition(':')[0]}" if event.skip else ""
            where = "" if event.step == event.refused - 1 and event.source == "memory" else f" from {event.source}"
            return [
                f"step {event.refused} does not stand: {event.why}",
                f"rolled back to after step {event.step}{where}{after}",
            ]


def _corrupted(event: Corrupted) -> str:
    where = ", ".join(f"rank {rank} on {host}" for rank, host in zip(event.ranks, event.hosts, strict=True))
    known = {"majority": "other copies outvote it", "replay": "the steps were done again", "at rest": "at rest"}
    return f"corrupt: {event.what} of {where}, after step {event.found} ({known[event.how]})"


def _resumed(event: Resumed) -> list[str]:
    if event.lost:
        return [f"lost {event.lost}", f"recovered after step {event.step}, from memory"]
    if not event.path:
        return ["started again: the run had no checkpoint yet"]
    passed = [f"passed over: {why}" for why in event.passed_over]
    return [*passed, f"resumed after step {event.step} from {event.path}"]
