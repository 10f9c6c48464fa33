"""The ring: what ran is what the program says, instruction by instruction, and the newest of it is kept."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest

import small
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.engine.engine import Engine
from superstep.engine.instruction_timer import HostRecorder
from superstep.engine.values.microbatch import microbatches, rows
from superstep.launch.stack_dump import ask_spy, threads_of
from superstep.model.axes import units
from superstep.monitor.flight_recorder import NOTES, RecordedLines, notes_in
from superstep.monitor.memory_history import ResidentMemory, sizes_in
from superstep.monitor.page_layout import SIZES
from superstep.monitor.rank_inspector import read_last_observation, vitals
from superstep.monitor.status_page import HeartbeatWriter, StatusPage, beside, read_beat
from superstep.observe.doctor.observations import Note
from superstep.plan.resolution.resolve import resolve
from superstep.program.instructions import Forward, Recv, Step
from superstep.program.text import describe

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")

PROGRAM = (Recv("act", 1, 0, 0), Forward(1, 0, "all"), Step())


class Clock:
    """Nanoseconds that pass when they are told to."""

    def __init__(self):
        self.now_ns = 1000

    def __call__(self):
        return self.now_ns


@pytest.fixture
def page():
    made = StatusPage()
    yield made
    made.close()


def notes(page):
    return notes_in(page.view, RecordedLines(page.view))


def run_through(heart, clock, *, step, wait_ns=7, work_ns=30, within_ns=0):
    heart.begin(PROGRAM, step=step)
    for index in range(len(PROGRAM)):
        heart.waits(index)
        clock.now_ns += wait_ns
        heart.works(index)
        clock.now_ns += work_ns
        if within_ns and index == len(PROGRAM) - 1:
            heart.waits()
            clock.now_ns += within_ns
            heart.works()
            clock.now_ns += work_ns
    heart.waits()
    clock.now_ns += 5000
    heart.rests()


def test_a_note_has_the_wait_the_work_and_what_was_waited_for_within(page):
    clock = Clock()
    heart = HeartbeatWriter(os.dup(page.handle), clock)
    run_through(heart, clock, step=4, within_ns=11)
    found = notes(page)
    assert [note.what for note in found] == [describe(each) for each in PROGRAM]
    assert [(note.run, note.step, note.index) for note in found] == [(1, 4, 0), (1, 4, 1), (1, 4, 2)]
    ns = [tuple(round(1e9 * each) for each in (n.ready_s, n.start_s, n.end_s, n.within_s)) for n in found]
    assert ns == [(1000, 1007, 1037, 0), (1037, 1044, 1074, 0), (1074, 1081, 1152, 11)]
    assert [round(1e9 * note.own_s) for note in found] == [30, 30, 60], "what the step waited for is not its own"
    heart.stop()


def test_what_is_beside_the_programs_is_noted_and_is_what_the_rank_does(page):
    clock = Clock()
    heart = HeartbeatWriter(os.dup(page.handle), clock)
    run_through(heart, clock, step=1)
    with beside(heart, "validation"):
        assert read_beat(page.view).instruction == "validation"
        clock.now_ns += 100
        run_through(heart, clock, step=1)
        assert read_beat(page.view).instruction == "validation", "after a program of its own as well"
        with beside(heart, "data"):
            clock.now_ns += 50
    assert read_beat(page.view).instruction == ""
    apart = [(note.what, round(1e9 * (note.end_s - note.start_s))) for note in notes(page) if note.index < 0]
    assert apart[0] == ("validation", 100 + 3 * 37 + 5000)
    assert apart[1] == ("data", 50)
    assert [note.run for note in notes(page) if note.index == 0] == [1, 2]
    heart.stop()


def test_the_newest_are_kept_and_none_is_there_twice(page):
    clock = Clock()
    heart = HeartbeatWriter(os.dup(page.handle), clock)
    runs = NOTES // len(PROGRAM) + 100
    for step in range(1, runs + 1):
        run_through(heart, clock, step=step)
    found = notes(page)
    assert len(found) == NOTES
    assert found[-1].step == runs
    assert [note.ready_s for note in found] == sorted({note.ready_s for note in found})
    heart.stop()


@pytest.mark.parametrize("at", ["waits", "works"])
def test_what_raised_is_where_a_rank_was(page, at):
    clock = Clock()
    heart = HeartbeatWriter(os.dup(page.handle), clock)
    run_through(heart, clock, step=1)
    heart.begin(PROGRAM, step=2)
    heart.waits(0)
    heart.works(0)
    heart.waits(1)
    if at == "works":
        heart.works(1)
    heart.rests()  # as the executor does on its way out
    seen = read_last_observation(page.view, 3)
    assert (seen.rank, seen.doing, seen.what, seen.step, seen.index) == (3, at, "forward u1 m0 keep=all", 2, 1)
    assert not seen.notes[-1].is_done
    assert seen.follows == PROGRAM
    heart.stop()


def test_how_a_process_grew_is_kept_from_its_begin_on(page, tmp_path):
    statm = tmp_path / "statm"
    looks = ResidentMemory(page.view, statm)
    for second in range(4000):
        statm.write_text(f"9 {second} 9")
        looks.look(second * 10**9)
    found = sizes_in(page.view)
    assert SIZES.count // 2 <= len(found) <= SIZES.count
    assert found[0] == (0.0, 0)
    assert found[-1][0] > 3800
    assert all(size == at_s * os.sysconf("SC_PAGE_SIZE") for at_s, size in found)


def test_the_systems_word_of_a_process(tmp_path):
    found = vitals(os.getpid())
    assert found.state in "RS"
    assert found.resident_bytes > 2**20
    assert vitals(2**22 + 1).state == ""
    place = tmp_path / "7"
    place.mkdir()
    (place / "status").write_text("Name:\tx\nVmRSS:\t  2048 kB\nVmSwap:\t 1024 kB\n")
    (place / "stat").write_bytes(b"7 (a (b) c) D 1 1 1 1 1 1 1 1 42 0")
    assert vitals(7, tmp_path).queued_ns == 0
    (place / "schedstat").write_text("900 100 5\n")
    found = vitals(7, tmp_path)
    assert (found.ran_ns, found.queued_ns) == (900, 100)
    assert (found.state, found.resident_bytes, found.swapped_bytes, found.major_faults) == ("D", 2**21, 2**20, 42)


def test_stacks_are_read_the_main_thread_first():
    said = (
        "Thread 0x00007f01 (most recent call first):\n"
        '  File "/a/ticker.py", line 3 in wait\n\n'
        "Current thread 0x00007f02 (most recent call first):\n"
        '  File "/a/hook.py", line 7 in hook\n  File "/a/run.py", line 9 in <module>\n'
    )
    main, ticker = threads_of(said)
    assert main == ("/a/hook.py:7 in hook", "/a/run.py:9 in <module>")
    assert ticker == ("/a/ticker.py:3 in wait",)


SPY = """#!/bin/sh
test "$*" = "dump --nonblocking --pid 42" || exit 1
cat <<END
Process 42: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 42 (idle): "MainThread"
    wait (threading.py:320)
    <module> (/a/run.py:9)
Thread 43 (idle): "ticker"
    tick (/a/ticker.py:3)
END
"""


def test_py_spy_is_understood(tmp_path):
    spy = tmp_path / "py-spy"
    spy.write_text(SPY)
    spy.chmod(0o755)
    main, ticker = threads_of(ask_spy(str(spy), 42))
    assert main == ("threading.py:320 in wait", "/a/run.py:9 in <module>")
    assert ticker == ("/a/ticker.py:3 in tick",)
    assert ask_spy(str(spy), 41) == ""
    assert ask_spy(str(tmp_path / "none"), 42) == ""


def ran(rank, world):
    """For each of two layouts: what each run of a program noted, and what the other recorder has of it."""
    found = []
    for layout in ({"pp": 2, "schedule": "interleaved", "chunks": 2}, {"dp": 2, "zero": 3, "recompute": "full"}):
        run = resolve(small.config(layers=small.layers_for(layout), microbatch=2, **layout), world)
        mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=timedelta(seconds=60))
        page = StatusPage()
        heart = HeartbeatWriter(os.dup(page.handle))
        engine = Engine(run, units(run.shape), mesh, heart=heart)
        mine = rows(run.plan, mesh)
        records = []
        for batch in small.batches(steps=2):
            parts = microbatches(batch.tokens_BS[mine], batch.targets_BS[mine], run.plan, mesh)
            records.append(HostRecorder())
            engine.train_step(parts, valid_tokens=batch.valid_tokens, lr=1e-3, record=records[-1])
        engine.evaluate(parts)
        runs: dict[int, list[Note]] = {}
        for note in notes(page):
            runs.setdefault(note.run, []).append(note)
        at = mesh.at.pp
        programs = [engine.step_program.ranks[at]] * 2 + [engine.evaluation_program.ranks[at]]
        found.append((list(runs.values()), programs, [record.ran() for record in records]))
        heart.stop()
        page.close()
        mesh.destroy()
    return found


@pytest.mark.multiproc
def test_what_is_recorded_is_what_the_program_says_instruction_by_instruction(pool):
    for layouts in pool.run(2, ran, timeout_s=120.0):
        for runs, programs, records in layouts:
            assert len(runs) == len(programs)
            for notes_, program in zip(runs, programs, strict=True):
                assert [note.what for note in notes_] == [describe(each) for each in program]
                assert [note.index for note in notes_] == list(range(len(program)))
                times = [at for note in notes_ for at in (note.ready_s, note.start_s, note.end_s)]
                assert times == sorted(times)
            for notes_, record in zip(runs[:2], records, strict=True):
                for note, other in zip(notes_, record, strict=True):
                    # The other's clock is read within, for the same instruction.
                    assert note.start_s <= other.start_s <= other.end_s <= note.end_s
