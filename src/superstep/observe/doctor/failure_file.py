"""The state of every rank when a run failed, as the text of a file.

{"fault": "rank 1, ...", "at_s": 1700000000.0, "host": "h", "lists": [["forward u0 m0 keep=all", ...]],
 "ranks": [{"rank": 0, "doing": "waits", ..., "follows": 0, "notes": [[run, step, index, what, ready_s, ...], ...]}]}
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from superstep.errors import StateError, UserError
from superstep.observe.doctor.observations import Note, RankObservation
from superstep.program.text import describe, read_instruction

RUNS = 20
"""Runs of a program whose notes are kept."""


@dataclass(frozen=True, slots=True)
class FailureFile:
    """The contents of a failure file.

    Attributes:
        fault: why the run ended.
        at_s: in seconds since 1970.
        ranks: as they were then.
    """

    fault: str
    at_s: float
    host: str
    ranks: tuple[RankObservation, ...]


def write_box(fault: str, ranks: Sequence[RankObservation]) -> str:
    lists: dict[tuple[str, ...], int] = {}
    written = []
    for rank in ranks:
        follows = lists.setdefault(tuple(describe(each) for each in rank.follows), len(lists))
        newest = max((note.run for note in rank.notes), default=0)
        notes = [_row(note) for note in rank.notes if note.run > newest - RUNS]
        plain = {name: getattr(rank, name) for name in _PLAIN}
        written.append(plain | {"memory": rank.memory, "stacks": rank.stacks, "follows": follows, "notes": notes})
    return json.dumps(
        {"fault": fault, "at_s": time.time(), "host": platform.node(), "lists": list(lists), "ranks": written}
    )


def read_box(path: Path) -> FailureFile:
    """Read what ``write_box`` wrote; raises StateError for an unreadable or other file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        lists = [tuple(read_instruction(text) for text in texts) for texts in raw["lists"]]
        ranks = tuple(_rank(raw_rank, lists) for raw_rank in raw["ranks"])
        return FailureFile(str(raw["fault"]), float(raw["at_s"]), str(raw["host"]), ranks)
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError, KeyError, IndexError, UserError) as error:
        raise StateError(f"{path} is not what a run leaves when it fails ({error!r}); delete it.") from error


def _rank(raw: dict[str, Any], lists: Sequence[Any]) -> RankObservation:
    plain = {name: raw[name] for name in _PLAIN}
    return RankObservation(
        **plain,
        memory=tuple((float(at_s), int(size)) for at_s, size in raw["memory"]),
        stacks=tuple(tuple(each) for each in raw["stacks"]),
        follows=lists[raw["follows"]],
        notes=tuple(Note(*row) for row in raw["notes"]),
    )


def _row(note: Note) -> list[Any]:
    return [getattr(note, field.name) for field in fields(Note)]


_PLAIN = tuple(f.name for f in fields(RankObservation) if f.name not in ("memory", "stacks", "follows", "notes"))
