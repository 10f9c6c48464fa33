"""The hub of samplers with ranks of their own: on the trainer's rank 0, which keeps the record.

    connections, a thread each   groups ──▶ record ──▶ graders        retired by all ──▶ the snapshot is removed
    the training thread          publishes ──▶ all connections        waits for groups and grades

Results are recorded when they arrive, while the main thread trains.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from superstep.errors import Fault
from superstep.grade.verdict import Verdict
from superstep.launch.hosts.listener import SecureListener
from superstep.launch.hosts.secure_channel import ForeignMessage, SecureChannel
from superstep.launch.rendezvous import LaunchStore
from superstep.tune.program.instructions import RlSchedule
from superstep.tune.rl.disaggregated.hub_connection import HUB
from superstep.tune.rl.disaggregated.hub_messages import (
    ADDRESS,
    FROM_SAMPLER,
    SAMPLER_HELLO,
    EndSampling,
    FromSampler,
    FromTrainer,
    HubAddress,
    RemainingProgram,
    Retired,
    SampledGroup,
    SamplerEnd,
    SamplerHello,
    Version,
)
from superstep.tune.rl.from_rank0 import WaitLimit
from superstep.tune.rl.grading import Grading
from superstep.tune.rl.rollout_log import RolloutLog
from superstep.tune.rl.sampling import TaskGroup

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class TaskWindow:
    """Places that may exchange their tasks: none, or those of the next steps.

    Attributes:
        steps: number of next steps.
        schedule: the schedule of the run.
    """

    steps: int
    schedule: RlSchedule

    def places(self, first: int, own: int) -> range:
        """Places for a missing task: from ``first`` on, near its own place."""
        last = min(self.schedule.step_of(own) + self.steps, self.schedule.steps - 1)
        return range(first, self.schedule.groups_of(last).stop)


class RolloutHub:
    """The trainer's end of all connections.

    Args:
        store: of the launch, where samplers find the hub.
        record: of rollouts.
        grading: of recorded groups.
        program: for the samplers.
        samplers: their number.
        ranks: of each; all of them connect.
        owners: the sampler of each task.
        window: of places.
        timeout_s: for samplers and graders.
        attempt: how often the run has gone back in this launch.

    Raises:
        Fault: it cannot listen.
    """

    def __init__(  # noqa: PLR0913
        self,
        store: LaunchStore,
        record: RolloutLog,
        grading: Grading,
        *,
        program: RemainingProgram,
        samplers: int,
        ranks: int,
        owners: Mapping[int, int],
        window: TaskWindow,
        timeout_s: float,
        attempt: int = 0,
    ) -> None:
        self._record = record
        self._grading = grading
        self._samplers = samplers
        self._owners = owners
        self._window = window
        self._timeout_s = timeout_s
        self._news = threading.Condition()
        grading.heard = self._hear
        self._lines: list[SecureChannel] = []
        self._sent: list[FromTrainer] = [program, *(Version(n, path) for n, path in record.published.items())]
        self._retired: Counter[int] = Counter()
        self._left = samplers * ranks
        self._problem: Exception | None = None
        self._is_closed = False
        self._listener = self._listening(store, HUB.format(attempt=attempt))

    def __enter__(self) -> RolloutHub:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._news:
            self._is_closed = True
            for line in self._lines:
                line.close()
        self._listener.close()

    def publish(self, version: int, write: Callable[[], Path]) -> None:
        """Write a snapshot, and report it to the samplers."""
        # A snapshot of the same bits that is being retired is either gone before, or stays.
        with self._record.lock:
            path = write()
            self._record.publish(version, path)
        self._tell(Version(version, path))

    def wait(self, places: range, beat_s: float, patience: WaitLimit) -> GradedGroups | None:
        """The groups of a step with their grades; None if some are missing after ``beat_s``.

        Raises:
            ConfigError: the environment has no such task.
            Fault: a sampler or the grader is late, or a sampler has gone.
        """
        until_s = time.monotonic() + beat_s
        with self._news:
            while missing := self._missing(places):
                self._require_well()
                if not patience.left_s:
                    self._require_drawn(missing)
                    break  # the grader is late
                seconds = min(until_s - time.monotonic(), patience.left_s)
                if seconds <= 0 and patience.left_s:
                    return None
                if self._news.wait(max(0.0, seconds)):
                    patience.renew()
            self._require_well()
        verdicts = self._grading.collect(places, until_s - time.monotonic(), patience)
        return None if verdicts is None else ([self._record.groups[place] for place in places], verdicts)

    def forget(self, places: range) -> None:
        """Drop groups after training."""
        self._record.forget(places)

    def _missing(self, places: range) -> list[int]:
        """The missing places. Places within the window exchange their tasks with finished ones."""
        if not self._window.steps:
            return [place for place in places if place not in self._record.groups]
        missing = [place for place in places if not self._grading.is_done(place)]
        pairs: list[tuple[int, int]] = []
        for place in missing:
            first = self._record.order.first_place(self._record.task(place))
            later = self._window.places(places.stop, place if first is None else first)
            done = (n for n in later if self._grading.is_done(n) and all(n != taken for _, taken in pairs))
            if (other := next(done, None)) is not None:
                pairs.append((place, other))
        if len(pairs) < len(missing):
            return missing
        for place, other in pairs:
            self._record.exchange(place, other)
        return []

    def _require_drawn(self, missing: Sequence[int]) -> None:
        for place in missing:
            if place not in self._record.groups:
                task = self._record.task(place)
                raise Fault(f"sampler {self._owners[task]} has no answers of task {task} after {self._timeout_s:g} s.")

    def _hear(self) -> None:
        with self._news:
            self._news.notify_all()

    def finish(self, *, goes_on: bool = False) -> None:
        """End the samplers, and wait for them. ``goes_on``: whether they connect to another hub, with another program.

        Raises:
            Fault: one does not end, or breaks its connection.
        """
        self._tell(EndSampling(goes_on))
        patience = WaitLimit(self._timeout_s)
        with self._news:
            while self._left:
                self._require_well()
                if not patience.left_s:
                    raise Fault(f"a sampler has not come to its end after {self._timeout_s:g} s.")
                self._news.wait(patience.left_s)

    def _require_well(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _tell(self, message: FromTrainer) -> None:
        with self._news:
            self._sent.append(message)
            for line in self._lines:
                with suppress(OSError):  # its reading thread detects a broken connection
                    line.say(message)

    def _listening(self, store: LaunchStore, key: str) -> SecureListener[SamplerHello]:
        """Listen, and publish where. Strangers are turned away without a word: nobody sets this secret."""
        secret = secrets.token_bytes(SECRET_BYTES) if store.secret is None else store.secret
        at = (store.address, 0)
        try:
            listener = SecureListener(at, secret, SAMPLER_HELLO, self._enters, lambda line: None)
        except OSError as error:
            raise Fault(f"the trainer cannot listen for samplers at {store.address} ({error}).") from error
        store.put(key, ADDRESS.encode(HubAddress(*listener.address, None if store.secret else secret)))
        return listener

    # A thread for each connection.

    def _enters(self, line: SecureChannel, hello: SamplerHello) -> None:
        with self._news:
            if self._is_closed:
                return
            self._lines.append(line)
            for message in self._sent:
                with suppress(OSError):
                    line.say(message)
        self._read(line, f"sampler {hello.sampler}, rank {hello.rank}")

    def _read(self, line: SecureChannel, name: str) -> None:
        try:
            while not isinstance(message := _hear(line, name), SamplerEnd):
                match message:
                    case SampledGroup(group):
                        with self._news:  # a recorded group already has its grades requested
                            self._record.keep_answers(group)
                            self._grading.submit(self._record.place(group.number))
                    case Retired(version):
                        self._retire(version)
                with self._news:
                    self._news.notify_all()
        except Exception as error:  # noqa: BLE001 - the thread that waits raises it
            self._problem = error
        with self._news:
            self._lines.remove(line)
            line.close()
            self._left -= 1
            self._news.notify_all()

    def _retire(self, version: int) -> None:
        self._retired[version] += 1
        if self._retired[version] == self._samplers:
            self._record.retire(version)


def _hear(line: SecureChannel, name: str) -> FromSampler:
    """The next message of a sampler's rank; raises Fault where it has gone, or sends something else."""
    try:
        return line.hear(FROM_SAMPLER)
    except ForeignMessage as error:
        raise Fault(f"{name}: {error}.") from error.__cause__
    except OSError as error:
        raise Fault(f"{name} has gone.") from error


GradedGroups = tuple[list[TaskGroup], list[tuple[Verdict, ...]]]
"""Groups of a step, and their grades."""
