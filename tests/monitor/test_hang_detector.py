"""Which rank hangs: what each sign takes, and that neither a slow rank nor a busy machine is a sign."""

import os
import subprocess
import time
from dataclasses import replace

import pytest

from superstep.monitor import hang_rules as hang
from superstep.monitor.activity import Activity
from superstep.monitor.hang_detector import HangDetector, Process, Thread, process_of, thread
from superstep.monitor.status_page import Heartbeat, HeartbeatWriter, StatusPage
from superstep.monitor.stopped_process import LOOK_S
from superstep.program.instructions import Forward, Step

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")

WORKS = Heartbeat(
    beats=90, doing=Activity.WORKS, step=5, index=3, longest_s=0.02, instruction="forward u1 m0", ticks=40, ticker=7,
    pause_s=0.12, expected_s=0.1,
)  # fmt: skip
WAITS = replace(WORKS, doing=Activity.WAITS, index=6, instruction="step")
MAIN, TICKER = Thread("S", 100), Thread("S", 300)
LONGEST_S = 600.0


class World:
    """Two ranks, 1 and 2, and what the system says of their threads as time goes on."""

    def __init__(self, one=WORKS, two=WAITS):
        self.now_s = 0.0
        self.beats = {1: one, 2: two}
        self.ticking = {1: True, 2: True}
        self.going: set[int] = set()
        self.mains = {1: lambda n: MAIN, 2: lambda n: MAIN}
        self.tickers = {1: lambda n: Thread("S", 300 + 2 * n), 2: lambda n: Thread("S", 300 + 2 * n)}
        self.looks = 0
        self.processes = dict.fromkeys((1, 2), lambda n: Process(0.0, is_ready=False))
        self.watcher = HangDetector(
            lambda: self.now_s, self._thread, lambda process, _: self.processes[process](self.looks)
        )

    def _thread(self, process, number):
        kind = self.mains if number == process else self.tickers
        return kind[process](self.looks)

    def hold_lock(self, rank):
        """It is woken, 200 times a second, and gets no turn."""
        self.ticking[rank] = False
        self.tickers[rank] = lambda n: Thread("S", 300 + int(200 * LOOK_S) * n)

    def until(self, most_s=LONGEST_S, passed_s=LOOK_S):
        """What is named, and after how long; None where nothing is."""
        began_s = self.now_s
        while self.now_s - began_s < most_s:
            self.now_s += passed_s
            self.looks += 1
            for rank, beat in self.beats.items():
                ticks = beat.ticks + (2 if self.ticking[rank] else 0)
                beats = beat.beats + (1 if rank in self.going else 0)
                self.beats[rank] = replace(beat, ticks=ticks, beats=beats)
            if (found := self.watcher.look(self.beats)) is not None:
                return found, self.now_s - began_s
        return None


def test_who_keeps_pythons_lock_is_named_within_three_seconds_and_not_who_waits_for_it():
    world = World()
    world.hold_lock(1)
    found, after_s = world.until()
    assert (found.process, found.beat.step, found.beat.instruction, found.others) == (1, 5, "forward u1 m0", ())
    assert after_s < 2.5
    assert "the GIL" in found.why


def test_a_ticker_that_gets_no_processor_says_nothing_of_the_lock():
    world = World()
    world.ticking[1] = False
    world.tickers[1] = lambda n: Thread("R", 300 + n)  # starved: four wakes a second
    world.mains[1] = lambda n: Thread("R", 100 + n)
    assert world.until(hang.BUSY_S - 1) is None


def test_code_that_has_the_lock_and_no_processor_does_not_hang():
    """A machine with 29 programs for 2 cores: a fifth of a second's work in C takes three, and the ticker is woken."""
    for elsewhere in (WORKS, replace(WORKS, doing=Activity.OTHER)):
        world = World(elsewhere)
        world.hold_lock(1)
        world.mains[1] = lambda n: Thread("R", 100 + n, LOOK_S * n * 2 / 29)
        world.processes[1] = lambda n: Process(LOOK_S * n * 2 / 29, is_ready=True)
        assert world.until(15.0) is None
        assert world.until()[0].process == 1, "its work has no end"
    alone = World()
    alone.hold_lock(1)
    alone.mains[1] = lambda n: Thread("R", 100 + n, LOOK_S * n)
    alone.processes[1] = lambda n: Process(LOOK_S * n, is_ready=True)
    assert alone.until()[1] < 2.5, "with a processor of its own it is named as soon as one that sleeps"


def test_where_the_launcher_itself_is_short_of_a_processor_wakes_are_counted_over_its_own_pause():
    world = World(WAITS)
    world.ticking[1] = False
    world.tickers[1] = lambda n: Thread("R", 300 + 20 * n)  # starved: twenty wakes in the two seconds between two looks
    assert world.until(60, passed_s=2.0) is None


def test_as_long_as_any_rank_goes_on_none_hangs():
    world = World()
    world.hold_lock(1)
    world.going = {2}
    assert world.until() is None
    world.going = set()
    assert world.until()[0].process == 1


def test_the_first_time_and_beside_a_program_the_lock_may_be_kept_longer():
    for beat in (replace(WORKS, longest_s=0.0), replace(WORKS, doing=Activity.OTHER)):
        world = World(beat)
        world.hold_lock(1)
        assert world.until(hang.HELD_ELSEWHERE_S - LOOK_S) is None
        assert world.until()[0].process == 1
    world = World(replace(WORKS, pause_s=2.0, longest_s=2.0))
    world.hold_lock(1)
    assert world.until(5.5) is None, "its own operations keep it for two seconds"
    assert world.until()[1] < 2


def test_who_sleeps_in_an_instruction_is_named_and_not_who_waits_or_did_this_before():
    found, after_s = World().until()
    assert found.process == 1
    assert hang.STILL_S <= after_s <= hang.STILL_S + 2 * LOOK_S
    slow = World(replace(WORKS, longest_s=3.0))
    assert slow.until(29) is None, "ten times its history"
    assert slow.until()[0].process == 1
    assert World(WAITS).until() is None, "all wait: what for is not theirs to know"
    first = World(replace(WORKS, longest_s=0.0, expected_s=20.0))
    assert first.until(399) is None, "twenty predicted steps"
    assert first.until()[0].process == 1


def test_where_two_stand_alike_both_are_named_and_the_one_behind_is_first():
    found, _ = World(WORKS, replace(WORKS, beats=88)).until()
    assert (found.process, found.others) == (1, (2,))
    found, _ = World(WORKS, replace(WORKS, index=2)).until()
    assert (found.process, found.others) == (2, ())


def test_who_computes_is_given_twenty_times_what_it_took():
    world = World()
    world.mains[1] = lambda n: Thread("R", 100 + n, LOOK_S * n)
    assert world.until(hang.BUSY_S - 1) is None
    assert world.until()[0].process == 1
    slow = World(replace(WORKS, longest_s=5.0))
    slow.mains[1] = lambda n: Thread("R", 100 + n, LOOK_S * n)
    assert slow.until(99) is None
    assert slow.until()[0].process == 1
    starved = World()  # a twentieth of a processor: what is a second's work takes it twenty
    starved.mains[1] = lambda n: Thread("R", 100 + n, LOOK_S * n / 20)
    assert starved.until(hang.IDLE_TIMES * hang.BUSY_S - 1) is None


def test_who_sleeps_may_wait_within_what_it_computes_for_one_that_is_slow():
    for other in (replace(WORKS, index=2), replace(WORKS, doing=Activity.OTHER)):
        world = World(WORKS, other)
        world.mains[2] = lambda n: Thread("R", 100 + n, LOOK_S * n / 20)
        assert world.until(60) is None


def test_time_in_which_nobody_looked_does_not_count_and_a_debugger_is_left_alone():
    world = World()
    world.hold_lock(1)
    assert world.until(3 * 3600, passed_s=3600.0) is None
    for state in "tT":
        world = World()
        world.hold_lock(1)
        world.mains[1] = lambda n, state=state: Thread(state, 100)
        assert world.until() is None


def test_a_rank_that_has_run_no_program_never_hangs():
    assert World(replace(WORKS, beats=0)).until() is None
    world = World()
    world.beats.pop(2)
    world.hold_lock(1)
    assert world.until()[0].process == 1, "alone it is waited for by nobody"


def test_a_page_has_what_the_rank_does_and_the_longest_that_it_took():
    """One step of three runs takes 50 ns, and is not forgotten; what is said of a wait is not a part of it."""
    now_ns, page = [0], StatusPage()
    heart = HeartbeatWriter(os.dup(page.handle), lambda: now_ns[0])
    assert page.read().beats == 0
    program = (Forward(0, 0, "all"), Step())
    for number, took_ns in enumerate((10, 50, 20), start=1):
        heart.begin(program, step=number)
        heart.waits(0)
        now_ns[0] += 1000
        heart.works(0)
        found = page.read()
        assert (found.doing, found.step, found.index) == (Activity.WORKS, number, 0)
        assert found.instruction == "forward u0 m0 keep=all"
        assert found.longest_s == (0.0, 10e-9, 50e-9)[number - 1]
        now_ns[0] += took_ns
        heart.waits(1)
        assert page.read().instruction == "step"
        heart.works()
        heart.rests()
    found = page.read()
    assert (found.doing, found.instruction, found.beats) == (Activity.OTHER, "", 15)
    heart.expect(0.25)
    assert page.read().expected_s == 0.25
    assert page.read().ticker > 0
    page.close()


def test_the_systems_word_of_a_thread():
    found = thread(os.getpid(), os.getpid())
    assert found.state == "R"
    assert found.switches > 0
    assert 0 < found.cpu_s <= sum(os.times()[:2]) + 0.1
    assert thread(os.getpid(), 2**22 + 1) is None


def test_the_systems_word_of_a_process():
    found = process_of(os.getpid(), 0)
    assert found.is_ready, "it asks"
    assert 0 < found.cpu_s <= sum(os.times()[:2]) + 0.1
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        try:
            while process_of(sleeper.pid, 0).is_ready:
                time.sleep(0.01)
        finally:
            sleeper.kill()
    assert process_of(2**22 + 1, 0) is None
