"""Which state all hosts copy to their neighbours next. All must copy the same, or none of them is of use.

    each host    newest step it has whole, the state that its neighbour has had last, the one that it holds for that
    the lead     copied: the step that every neighbour has;  next: the step that all shall copy, a few from now

A step is asked for before ranks come to it, far enough ahead that the word reaches all of them; where one had passed it
already, it is left, and the next is asked for from farther ahead. So ranks never wait for copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

BEATS = 3
"""How many beats may pass until all have heard of a step."""


@dataclass(frozen=True, slots=True)
class HostProgress:
    """How far a host is.

    Attributes:
        newest: step that is whole in its own memory; 0 while there is none.
        copied: step whose state its neighbour has; 0 while there is none.
        held: newest step that it holds for its neighbour; 0 while there is none.
    """

    newest: int = 0
    copied: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class CopySchedule:
    """What all are told, and what the lead remembers.

    Attributes:
        copied: step that every neighbour has; its states are kept until those of the next one are.
        next: step that is copied next; 0 while that is open.
        newest: step that any had, a beat before.
        ahead: steps between two snapshots that the next one is asked for ahead, at least.
    """

    copied: int = 0
    next: int = 0
    newest: int = 0
    ahead: int = 1


def steer(course: CopySchedule, progress: Sequence[HostProgress], every: int) -> CopySchedule:
    """What is told after a beat, of all hosts; ``every`` so many steps there is a snapshot."""
    newest = max(each.newest for each in progress)
    advance, course = max(0, newest - course.newest), replace(course, newest=newest)
    if course.next and all(each.copied >= course.next for each in progress):
        course = replace(course, copied=course.next, next=0, ahead=1)
    elif course.next and any(each.newest > course.next and each.held != course.next for each in progress):
        course = replace(course, next=0, ahead=2 * course.ahead)
    if course.next == 0:
        target = newest + BEATS * advance + every * course.ahead
        course = replace(course, next=-(-target // every) * every)
    return course


class Steer:
    """The lead's: remembers the course.

    Args:
        every: steps between two snapshots.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._hosts: tuple[int, ...] = ()
        self._course = CopySchedule()

    def begin(self, step: int, hosts: tuple[int, ...]) -> None:
        """Ranks of these hosts start from a state that is whole in the memory of each, after so many steps; 0 where
        from none.
        """
        self._hosts = hosts
        self._course = CopySchedule(copied=step, next=step, newest=step)

    def after(self, progress: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """What all are told, given how far those are that are here."""
        if len(self._hosts) < 2:
            return {}
        reports = [progress.get(host, {}) for host in self._hosts]
        if all("newest" in report for report in reports):
            each = [HostProgress(int(p["newest"]), int(p["copied"]), int(p["held"])) for p in reports]
            self._course = steer(self._course, each, self._every)
        return {"copied": self._course.copied, "next": self._course.next}
