"""The doctor on ranks that are really there: faults planted in turn, each named with its rank and place."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest

import planted
import small
from pool import RankError
from superstep.cli.doctor.doctor import look
from superstep.monitor.rank_inspector import RankInspector, views_of, vitals
from superstep.observe.doctor.stragglers import STEPS, WINDOW_S
from superstep.plan.resolution.resolve import resolve
from superstep.program.text import describe
from superstep.train.run_folder.inspect_run import LiveRun
from superstep.train.run_folder.run_paths import RunFolder

pytestmark = [pytest.mark.multiproc, pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")]

RANKS = 2
MOST_S = 60.0
"""After so long nothing more is expected. That a fault is named within three seconds is tested without a clock."""


class Patient:
    """The ranks, and what is planted in them.

    Args:
        pool: of ranks.
        place: the folder of the run.
        job: what each of them does.
    """

    def __init__(self, pool, place, job=planted.train):
        self.place, self._job, self._ended = place, job, None
        self._pool = pool
        (place / "now").write_text("healthy")
        run = resolve(small.config(layers=2, microbatch=2, dp=RANKS, zero=2), RANKS)
        self._thread = threading.Thread(target=self._train, args=(pool, run))
        self._thread.start()

    def _train(self, pool, run):
        try:
            pool.run(RANKS, self._job, run, str(self.place), timeout_s=240.0)
        except RankError as error:
            self._ended = str(error)

    def processes(self):
        return {rank: int((self.place / f"rank-{rank}").read_text()) for rank in range(RANKS)}

    def views(self, stack):
        """Of each rank's page, once it has one, until the stack ends."""
        self.wait(lambda: all((self.place / f"rank-{rank}").exists() for rank in range(RANKS)))
        views = {rank: view for pid in self.processes().values() for rank, view in views_of(pid).items()}
        for view in views.values():
            stack.callback(view.close)
        return views

    def wait(self, is_there, most_s=MOST_S):
        until_s = time.monotonic() + most_s
        while not is_there():
            assert self._thread.is_alive(), self._ended
            assert time.monotonic() < until_s
            time.sleep(0.01)

    def plant(self, name):
        """Have it begin; one that keeps a rank has begun afterwards."""
        (self.place / "now").write_text(name)
        if name in ("hook", "held", "skip"):
            begun = self.place / "begun"
            self.wait(lambda: begun.exists() and begun.read_text() == name)

    def heal(self):
        (self.place / "now").write_text("healthy")
        (self.place / "free").touch()

    def end(self):
        (self.place / "leave").touch()
        self._thread.join(30.0)
        assert not self._thread.is_alive()
        until_s = time.monotonic() + 30.0
        # By the pool's own word: of a process that ends, the first thread is gone before its pipes are.
        while self._pool.alive(RANKS):
            assert time.monotonic() < until_s, "the pool starts others only once these have gone"
            time.sleep(0.01)


@pytest.fixture
def patient(pool, tmp_path):
    found = Patient(pool, tmp_path)
    yield found
    found.end()


def runs_done(live):
    return min(rank.run for rank in live.looker.look())


@pytest.mark.long
def test_each_fault_is_named_with_its_rank_and_place_and_nothing_is_said_of_healthy_ranks(patient):
    with ExitStack() as stack:
        views = patient.views(stack)

        def live(**system):
            return LiveRun(RunFolder(root=patient.place), views, RankInspector(views, **system))

        def go_on(steps):
            first = runs_done(live())
            patient.wait(lambda: runs_done(live()) >= first + steps)

        def found(kind=None):
            """The first cause.

            With a ``kind`` its first is waited for: that the GIL is held shows only from one look to the next.
            """
            verdict = None

            def is_named():
                nonlocal verdict
                verdict = look(live())[1]
                return bool(verdict.findings) and kind in (None, verdict.findings[0].kind)

            patient.wait(is_named)
            return verdict.findings[0]

        forward = f"forward u{planted.UNIT} m0 keep=all"
        go_on(40)
        assert look(live())[1].findings == (), "of a healthy run nothing is said"

        # A rank that is stopped.
        os.kill(patient.processes()[planted.RANK], signal.SIGSTOP)
        one = found()
        os.kill(patient.processes()[planted.RANK], signal.SIGCONT)
        assert (one.kind, one.rank) == ("stopped", planted.RANK)

        # A lock in a hook that nobody lets go of.
        patient.plant("hook")
        one = found()
        assert (one.kind, one.rank, one.at) == ("hook", planted.RANK, forward)
        assert "planted.py" in one.what
        assert "in wait_for_nobody" in one.what
        patient.heal()
        go_on(1)

        # Code in C that holds the GIL.
        patient.plant("held")
        one = found("held")
        assert (one.kind, one.rank) == ("held", planted.RANK)
        assert one.at.startswith(f"forward u{planted.HELD_UNIT} ")
        patient.heal()
        go_on(1)

        # A rank that swaps: what the system says of it is made up.
        begun_s = time.monotonic()

        def swapping(process):
            if process != patient.processes()[planted.RANK]:
                return vitals(process)
            missed = int(500 * (time.monotonic() - begun_s))
            return replace(vitals(process), swapped_bytes=2**27, major_faults=missed)

        swaps = [one for one in look(live(system=swapping))[1].findings if one.kind == "swaps"]
        assert [one.rank for one in swaps] == [planted.RANK]

        # A slow loader, and a slow rank: what is seen of them is their last steps, all of the last seconds. A busy
        # machine takes longer over so many: as long as healthy ones are among them, nothing is said.
        for kind, at in (("data", "data"), ("slow", forward)):
            patient.plant(kind)
            time.sleep(WINDOW_S)
            go_on(STEPS + 1)
            one = found()
            assert (one.kind, one.rank, one.at) == (kind, planted.RANK, at)
            patient.heal()


@pytest.mark.parametrize(
    ("job", "said"),
    [
        pytest.param(planted.train_over_gloo, "has waited for", marks=pytest.mark.long),
        (planted.train, "found another operation in its place"),
    ],
    ids=["the others wait for it", "the lane sees that others are elsewhere, and an error ends the ranks"],
)
def test_a_rank_that_leaves_out_a_sum_is_named(pool, tmp_path, job, said):
    patient = Patient(pool, tmp_path, job)
    try:
        with ExitStack() as stack:
            views = patient.views(stack)
            live = LiveRun(RunFolder(root=patient.place), views, RankInspector(views))
            patient.wait(lambda: runs_done(live) >= 40)
            assert look(LiveRun(live.folder, views, RankInspector(views)))[1].findings == (), (
                "of a healthy run nothing is said"
            )
            patient.plant("skip")
            until_s, findings = time.monotonic() + MOST_S, ()
            while not findings:
                assert time.monotonic() < until_s
                findings = look(LiveRun(live.folder, views, RankInspector(views)))[1].findings
            (one,) = findings
            assert (one.kind, one.rank, one.at) == ("skipped", planted.RANK, describe(planted.SKIPPED))
            assert said in one.evidence[0]
    finally:
        patient.end()
