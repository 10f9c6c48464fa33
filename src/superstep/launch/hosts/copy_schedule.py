"""Which state all hosts copy to their neighbours next. All must copy the same one; otherwise none is of use.

    each host    its newest complete step, the last state that its neighbour has, the one that it holds itself
    the lead     copied: the step that every neighbour has;  next: the step to copy next, a few steps ahead

A step is chosen before ranks reach it, far enough ahead that all hosts learn of it in time. If one had already passed
it, the step is skipped and the next one is chosen farther ahead. So ranks never wait for copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

BEATS = 3
"""Heartbeats until all hosts have learnt of a step."""


@dataclass(frozen=True, slots=True)
class HostProgress:
    """A host's progress; 0 stands for no step.

    Attributes:
        newest: the newest step that is complete in its own memory.
        copied: the step whose state its neighbour has.
        held: the newest step that it holds for its neighbour.
    """

    newest: int = 0
    copied: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class CopySteps:
    """What all hosts receive of the schedule.

    Attributes:
        copied: the step that every neighbour has.
        next: the step to copy next; 0 while undecided.
    """

    copied: int
    next: int


@dataclass(frozen=True, slots=True)
class CopySchedule:
    """The schedule, and the lead's memory.

    Attributes:
        copied: the step that every neighbour has; its states are kept until those of the next one are complete.
        next: the step to copy next; 0 while undecided.
        newest: the newest step of any host, one heartbeat earlier.
        ahead: the least distance of the next step, in intervals of snapshots.
    """

    copied: int = 0
    next: int = 0
    newest: int = 0
    ahead: int = 1


def steer(course: CopySchedule, progress: Sequence[HostProgress], every: int) -> CopySchedule:
    """The schedule after a heartbeat of all hosts; ``every``: steps between snapshots."""
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


class ScheduleKeeper:
    """The lead's side; keeps the schedule. ``every``: steps between two snapshots."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._hosts: tuple[int, ...] = ()
        self._course = CopySchedule()

    def begin(self, step: int, hosts: tuple[int, ...]) -> None:
        """Ranks of these hosts start from the state after ``step``, complete in each host's memory; 0 for no state."""
        self._hosts = hosts
        self._course = CopySchedule(copied=step, next=step, newest=step)

    def after(self, progress: Mapping[int, HostProgress | None]) -> CopySteps | None:
        """What to copy, given the progress of the present hosts; None with fewer than two."""
        if len(self._hosts) < 2:
            return None
        reports = [report for host in self._hosts if (report := progress.get(host)) is not None]
        if len(reports) == len(self._hosts):
            self._course = steer(self._course, reports, self._every)
        return CopySteps(self._course.copied, self._course.next)
