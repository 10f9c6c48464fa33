"""The diagnosis as a function of what is seen: no processes, and any rank may hang in any of its instructions."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

import small
from superstep.cli.doctor.doctor_text import page
from superstep.observe.doctor.diagnose import HERE, diagnose
from superstep.observe.doctor.failure_file import read_box, write_box
from superstep.observe.doctor.observations import DATA, Disk, Note, RankObservation, RunObservation
from superstep.observe.multi_step_trace import newest_step, perfetto_steps, trace_of_step
from superstep.observe.page.doctor import doctor_page, graph
from superstep.observe.trace import load_trace
from superstep.plan.mesh import Coordinate
from superstep.plan.resolution.resolve import resolve
from superstep.program.compile import compile_step
from superstep.program.instructions import Fetch, Recv, Reduce, Send, Step, Tie
from superstep.program.text import describe
from superstep.program.timeline import Needs, brings

LAYOUTS = [
    {"dp": 2, "zero": 2},
    {"dp": 2, "zero": 3, "recompute": "full"},
    {"pp": 2, "dp": 2, "zero": 1},
    {"pp": 4, "schedule": "1f1b"},
    {"pp": 2, "schedule": "interleaved", "chunks": 2},
    {"pp": 2, "schedule": "zb-h1"},
]


def resolved(layout):
    world = layout.get("pp", 1) * layout.get("dp", 1)
    return resolve(small.config(layers=small.layers_for(layout), microbatch=2, **layout), world)


def run_of(layout, ranks=()):
    plan = resolved(layout).plan
    return RunObservation(program=compile_step(plan), mesh=plan.mesh, ranks=tuple(ranks), host="h")


class World:
    """Ranks that follow a program as far as they can where one of them does not go on: a toy of the executor."""

    def __init__(self, layout):
        self.run = run_of(layout)
        self.mesh, self.program = self.run.mesh, self.run.program
        self.lists = {r: self.program.ranks[self.mesh.at(r).pp] for r in range(self.mesh.world)}
        self.needs = Needs(self.program)

    def stop(self, rank, index):
        """Where each is in the end: (index, what it does)."""
        at = dict.fromkeys(self.lists, 0)
        has_gone = True
        while has_gone:
            has_gone = False
            for r, instructions in self.lists.items():
                limit = index if r == rank else len(instructions)
                while at[r] < limit and self._is_ready(r, at):
                    at[r] += 1
                    has_gone = True
        # Who needs nothing at the place of the fault has come to it, and works there.
        return {r: (i, "works" if r == rank else "waits") for r, i in at.items()}

    def _is_ready(self, r, at):
        i, instruction = at[r], self.lists[r][at[r]]
        for arrival in self.needs(instruction):
            j = next((j for j in reversed(range(i)) if brings(self.lists[r][j]) == arrival), None)
            if j is not None and not self._has_come(r, self.lists[r][j], j, at):
                return False
        if isinstance(instruction, Step):
            return all(at[p] >= self.lists[p].index(instruction) for p in self.lists)
        if isinstance(instruction, Tie):
            members = [self._at(r, pp) for pp in self.program.holders(instruction.unit)]
            return all(at[p] >= self.lists[p].index(instruction) for p in members)
        return True

    def _has_come(self, r, started, j, at):
        match started:
            case Recv(wire, unit, m, peer):
                p = self._at(r, peer)
                return at[p] > self.lists[p].index(Send(wire, unit, m, self.mesh.at(r).pp))
            case Fetch() | Reduce():
                return all(at[p] > j for p in self.lists if self.mesh.at(p).pp == self.mesh.at(r).pp)
            case _:
                return True

    def _at(self, r, pp):
        here = self.mesh.at(r)
        return self.mesh.rank(Coordinate(pp=pp, dp=here.dp, cp=here.cp, tp=here.tp))

    def seen(self, places, **fields):
        """What is seen of them; past the end of its list a rank is between two programs."""
        ranks = []
        for r, (index, doing) in places.items():
            follows = self.lists[r]
            is_over = index >= len(follows)
            told = {"rank": r, "process": 100 + r, "run": 7, "step": 7, "follows": follows, "looked_s": 1.5}
            told |= {"since_s": 63.0, "longest_s": 0.02, "index": 0 if is_over else index, "is_asleep": True}
            told |= {"doing": "apart" if is_over else doing, "what": "" if is_over else describe(follows[index])}
            ranks.append(RankObservation(**told | fields))
        return replace(self.run, ranks=tuple(ranks))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_rank_that_hangs_in_any_instruction_is_named_and_no_other(layout):
    world = World(layout)
    for rank, instructions in world.lists.items():
        for index, instruction in enumerate(instructions):
            places = world.stop(rank, index)
            if places[rank][0] != index:
                continue
            found = diagnose(world.seen(places)).findings
            assert [(f.kind, f.rank, f.at) for f in found] == [("hang", rank, describe(instruction))], places
            assert found[0].step == 7
            assert "63" not in found[0].what or found[0].kind == "hang"
            # The same within the time that it may take is no finding.
            assert diagnose(world.seen(places, since_s=0.09)).findings == ()
            assert diagnose(world.seen(places, has_moved=True)).findings == ()


def test_who_waits_for_whom_is_said_down_to_the_tensor():
    world = World({"pp": 4, "schedule": "1f1b"})
    index = next(i for i, each in enumerate(world.lists[1]) if describe(each).startswith("forward"))
    run = world.seen(world.stop(1, index))
    said = page("runs/x", run, diagnose(run), width=120, is_whole=False)
    stuck = describe(world.lists[1][index]).removesuffix(" keep=all")
    unit = world.program.units_of(2)[0]
    assert f"1. rank 1 hangs in {stuck} of step 7, asleep, while Python runs" in said
    assert f"act u{unit} m0 from rank 1, which is 63 s in {stuck}" in said
    assert f"act u{world.program.units_of(3)[0]} m0 from rank 2, which waits in forward u{unit} m0" in said


def test_who_waits_for_whom_is_drawn():
    world = World({"pp": 2, "dp": 2, "zero": 1})
    index = next(i for i, each in enumerate(world.lists[2]) if describe(each).startswith("forward"))
    run = world.seen(world.stop(2, index))
    verdict = diagnose(run)
    drawn = ElementTree.fromstring(graph(run, verdict))
    boxes = {box.findtext("text").split(",")[0]: box.get("class") for box in drawn.iter("g")}
    assert boxes == {f"rank {rank}": "rank blamed" if rank == 2 else "rank" for rank in range(4)}
    told = [path.findtext("title") for path in drawn.findall("path")]
    assert told == [f"rank {wait.rank}: {wait.what}" for wait in verdict.waits for _ in wait.missing]
    edges = {(wait.rank, other) for wait in verdict.waits for other in wait.missing}
    assert {(0, 2), (1, 0), (3, 2)} == edges
    evil = doctor_page("<b>x", changed(run, 2, what="forward <script>"), verdict, "<i>all")
    assert "<b>x" not in evil
    assert "forward <script>" not in evil
    assert "&lt;i&gt;all" in evil


def test_who_is_past_a_sum_that_another_is_still_in_has_left_one_out():
    world = World({"dp": 2, "zero": 2})
    at = [i for i, each in enumerate(world.lists[0]) if describe(each).startswith("settle")][-1]
    run = world.seen({0: (at, "waits"), 1: (len(world.lists[1]) - 1, "waits")})
    (found,) = diagnose(run).findings
    reduce = describe(world.lists[0][at]).replace("settle", "reduce")
    assert (found.kind, found.rank, found.at) == ("skipped", 1, reduce)
    assert diagnose(replace(run, ranks=tuple(replace(r, since_s=0.5) for r in run.ranks))).findings == ()
    # Where the lane sees it both have raised an error, and that is what is left of the run.
    raised = replace(run, ranks=tuple(replace(r, has_raised=True, since_s=0.1) for r in run.ranks))
    assert [(f.kind, f.rank, f.at) for f in diagnose(raised).findings] == [("skipped", 1, reduce)]
    left = replace(raised, is_live=False, fault="rank 0: rank 1 of the group is at another operation.")
    assert [(f.kind, f.rank) for f in diagnose(left).findings] == [("skipped", 1), ("fault", 0)]
    other = replace(left, fault="rank 0: the process of rank 1 of the group has ended.")
    assert [f.kind for f in diagnose(other).findings] == ["fault"], "of a link that breaks one may be past the other"
    elsewhere = replace(raised, ranks=raised.ranks[:1])
    assert [f.kind for f in diagnose(elsewhere).findings] == [], "within the first second"


def test_a_rank_that_has_raised_an_error_is_named():
    world = World({"dp": 2, "zero": 2})
    run = changed(world.seen(world.stop(1, 5)), 1, has_raised=True, since_s=2.0)
    (found,) = diagnose(run).findings
    assert (found.kind, found.rank, found.at) == ("raised", 1, describe(world.lists[1][5]))


def changed(run, rank, /, **fields):
    return replace(run, ranks=tuple(replace(r, **fields) if r.rank == rank else r for r in run.ranks))


def test_the_cause_is_told_by_what_the_system_and_the_stack_say():
    world = World({"dp": 2, "zero": 2})
    run = world.seen(world.stop(1, 5))
    ours, users = f"{HERE}/engine/executor.py:9 in _forward", "/home/me/hooks.py:12 in wait_for_me"
    python = "/usr/lib/python3.11/threading.py:320 in wait"
    cases = {
        "stopped": {"state": "T"},
        "gone": {"state": ""},
        "held": {"is_held": True},
        "busy": {"is_asleep": False, "cpu_s": 1.5},
        "hook": {"stacks": ((python, users, ours),)},
        "hang": {"stacks": ((python, ours, users),)},
    }
    for kind, fields in cases.items():
        (found,) = diagnose(changed(run, 1, **fields)).findings
        assert (found.kind, found.rank, found.at) == (kind, 1, describe(world.lists[1][5]))
    assert users in diagnose(changed(run, 1, **cases["hook"])).findings[0].what


def test_what_runs_for_the_first_time_is_given_more_time():
    world = World({"dp": 2, "zero": 2})
    run = world.seen(world.stop(1, 5))
    for fields, limit_s in (
        ({"longest_s": 0.0}, 10),
        ({"longest_s": 0.0, "is_asleep": False}, 60),
        ({"longest_s": 3.0}, 15),
    ):
        assert diagnose(changed(run, 1, **fields, since_s=limit_s - 1)).findings == ()
        assert diagnose(changed(run, 1, **fields, since_s=limit_s + 1)).findings[0].rank == 1


@pytest.mark.parametrize(
    ("what", "kind", "limit_s"), [("data", "data", 2), ("checkpoint", "beside", 30), ("report", "beside", 10)]
)
def test_a_rank_that_does_something_beside_its_programs_for_long_is_told_from_one_that_hangs(what, kind, limit_s):
    world = World({"dp": 2, "zero": 2})
    run = world.seen({0: (len(world.lists[0]) - 1, "waits"), 1: (len(world.lists[1]), "apart")})
    run = changed(run, 1, run=6, what=what)
    assert diagnose(changed(run, 1, since_s=limit_s - 0.5)).findings == ()
    (found,) = diagnose(changed(run, 1, since_s=limit_s + 0.5)).findings
    assert (found.kind, found.rank, found.at) == (kind, 1, what)


def paced(world, own_s, *, steps=12, data_s=None, slow=None):
    """Ranks that have done steps: seconds of each instruction by rank, and of waits for batches."""
    ranks = []
    for r, follows in world.lists.items():
        notes, now_s = [], 100.0
        for run in range(1, steps + 1):
            for index, each in enumerate(follows):
                took_s = own_s[r] * (3.0 if slow == (r, index) else 1.0)
                notes.append(Note(run, run, index, describe(each), now_s, now_s + 1e-4, now_s + 1e-4 + took_s))
                now_s = notes[-1].end_s
            if data_s:
                notes.append(Note(run, run, -1, DATA, now_s, now_s, now_s + data_s[r]))
                now_s = notes[-1].end_s
        ranks.append(
            RankObservation(rank=r, process=100 + r, follows=follows, notes=tuple(notes), has_moved=True, run=steps)
        )
    return replace(world.run, ranks=tuple(ranks))


def test_a_slow_rank_is_named_with_the_instruction_that_costs_most():
    world = World({"dp": 2, "zero": 2})
    assert diagnose(paced(world, {0: 1e-3, 1: 1.2e-3})).findings == ()
    run = paced(world, {0: 1e-3, 1: 1.4e-3}, slow=(1, 6))
    (found,) = diagnose(run).findings
    assert (found.kind, found.rank, found.at) == ("slow", 1, describe(world.lists[1][6]))
    assert "4.2 ms, theirs 1 (4.2x)" in found.evidence[0]
    assert diagnose(paced(world, {0: 1e-3, 1: 5e-3}, steps=4)).findings == (), "too few steps to say"
    assert diagnose(changed(run, 1, starved=0.3)).findings == (), "other work of the machine has its processor"


def test_waits_for_batches_are_told_from_slow_computing():
    world = World({"dp": 2, "zero": 2})
    each_s = 1e-3 * len(world.lists[0])
    assert diagnose(paced(world, {0: 1e-3, 1: 1e-3}, data_s={0: 0.1 * each_s, 1: 0.1 * each_s})).findings == ()
    (found,) = diagnose(paced(world, {0: 1e-3, 1: 1e-3}, data_s={0: 0.01 * each_s, 1: each_s})).findings
    assert (found.kind, found.rank) == ("data", 1)
    assert "rank 0 has theirs in time" in found.evidence


def test_swapping_growing_and_a_full_disk_are_said_and_their_harmless_kin_is_not():
    world = World({"dp": 2, "zero": 2})
    run = paced(world, {0: 1e-3, 1: 1e-3})
    mib = 2**20
    sizes = tuple((float(n), (300 + 5 * n) * mib) for n in range(64))
    cases = [
        ("swaps", {"swapped_bytes": 200 * mib, "faults_per_s": 400.0}),
        ("memory", {"memory": sizes}),
    ]
    for kind, fields in cases:
        (found,) = diagnose(changed(run, 1, **fields)).findings
        assert (found.kind, found.rank) == (kind, 1)
    level = tuple((float(n), (300 + min(5 * n, 80)) * mib) for n in range(64))
    for fields in ({"swapped_bytes": 200 * mib}, {"faults_per_s": 400.0}, {"memory": level}, {"memory": sizes[:8]}):
        assert diagnose(changed(run, 1, **fields)).findings == ()
    full = Disk(free_bytes=900 * mib, needed_bytes=1000 * mib)
    assert [f.kind for f in diagnose(replace(run, disk=full)).findings] == ["disk"]
    assert diagnose(replace(run, disk=replace(full, needed_bytes=800 * mib))).findings == ()


def test_what_a_failed_run_left_is_read_back_and_told(tmp_path):
    world = World({"pp": 2, "dp": 2, "zero": 1})
    run = world.seen(world.stop(2, 3))
    notes = paced(world, dict.fromkeys(world.lists, 1e-3)).ranks
    ranks = [
        replace(r, notes=n.notes, memory=((1.0, 2),), stacks=(("a:1 in f",),))
        for r, n in zip(run.ranks, notes, strict=True)
    ]
    path = tmp_path / "fault.json"
    path.write_text(write_box("rank 2, step 7: No space left on device", ranks))
    box = read_box(path)
    assert box.ranks == tuple(ranks), "of twelve runs all are kept"
    left = replace(run, ranks=box.ranks, is_live=False, fault=box.fault, host=box.host)
    (found,) = diagnose(left).findings
    assert (found.kind, found.rank, found.at) == ("disk", 2, describe(world.lists[2][3]))
    (other,) = diagnose(replace(left, fault="rank 2, step 7: it broke")).findings
    assert other.kind == "fault"
    assert "from rank 2, which is" in page("x", left, diagnose(left), width=100, is_whole=False)


def test_the_newest_whole_step_is_a_trace_and_the_last_steps_are_one_for_perfetto(tmp_path):
    world = World({"pp": 2, "dp": 2, "zero": 1})
    run = paced(world, dict.fromkeys(world.lists, 1e-3), steps=5, data_s=dict.fromkeys(world.lists, 1e-3))
    half = replace(run.ranks[0], notes=run.ranks[0].notes[:-5])  # its fifth step is not whole
    run = replace(run, ranks=(half, *run.ranks[1:]))
    step, ranks = newest_step(run)
    assert step == 4
    assert [[note.what for note in notes] for notes in ranks] == [
        [describe(each) for each in instructions] for instructions in world.program.ranks
    ]
    (tmp_path / "trace.json").write_text(trace_of_step(step, ranks))
    assert load_trace(tmp_path / "trace.json", world.program).step == 4
    slices = [e for e in json.loads(perfetto_steps(run, name="x", steps=2))["traceEvents"] if e["ph"] == "X"]
    assert {e["args"]["run"] for e in slices} == {4, 5}
    assert {e["pid"] for e in slices} == {0, 1, 2, 3}
    named = [e["name"] for e in slices if e["pid"] == 3 and e["cat"] not in ("waits", "beside")]
    assert named == 2 * [describe(each) for each in world.lists[3]]
