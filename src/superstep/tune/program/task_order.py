"""Which task is in which place of a run: that of the same number, until tasks are exchanged or left out.

places    0 1 2 3 4 5
tasks     0 1 2 3 4 5        exchange(1, 2)     0 2 1 3 4 5        leave_out(2, 2)     0 2 4 5 6 7
"""

from __future__ import annotations

from collections.abc import Iterable


class TaskOrder:
    """The order of a run's tasks."""

    def __init__(self) -> None:
        self._gaps: list[tuple[int, int]] = []
        self._tasks: dict[int, int] = {}
        self._homes: dict[int, int] = {}

    def task(self, place: int) -> int:
        """The number of the task in a place."""
        home = self._home_of(place)
        return self._tasks.get(home, home)

    def place(self, task: int) -> int | None:
        """The place of a task; None if it is left out."""
        return self._place_of(self._homes.get(task, task))

    def first_place(self, task: int) -> int | None:
        """The place of a task without exchanges; None if that place is left out."""
        return self._place_of(task)

    def differences(self, places: Iterable[int]) -> dict[int, int]:
        """The task of each place whose task has another number."""
        return {place: task for place in places if (task := self.task(place)) != place}

    def exchange(self, place: int, other: int) -> None:
        """Exchange the tasks of two places."""
        homes, tasks = (self._home_of(place), self._home_of(other)), (self.task(place), self.task(other))
        self._tasks |= {homes[0]: tasks[1], homes[1]: tasks[0]}
        self._homes |= {tasks[1]: homes[0], tasks[0]: homes[1]}

    def leave_out(self, first: int, count: int) -> None:
        """Leave out the tasks of ``count`` places from ``first`` on; later tasks move up."""
        self._gaps.append((first, count))

    def _home_of(self, place: int) -> int:
        """The place before anything was left out."""
        for first, count in reversed(self._gaps):
            if place >= first:
                place += count
        return place

    def _place_of(self, home: int) -> int | None:
        for first, count in self._gaps:
            if home >= first + count:
                home -= count
            elif home >= first:
                return None
        return home
