"""Iterations as a value: what holds of every program, wherever it begins and however its lanes run; and its faults."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superstep.errors import ConfigError, UserError
from superstep.tune.program.check import check
from superstep.tune.program.compile import after, compile_iterations
from superstep.tune.program.instructions import (
    Cursor,
    Grade,
    Instruction,
    InvalidIterations,
    Iterations,
    Publish,
    Retire,
    RlSchedule,
    Sample,
    Save,
    Take,
    Train,
)
from superstep.tune.program.memory import Sizes, memory, peaks, require_room
from superstep.tune.program.order import clocks, is_before, issue_order
from superstep.tune.program.simulate import InstructionRates, simulate
from superstep.tune.program.text import read_iterations, write_iterations

SIZES = Sizes(weights=7, keys=11, taking=5, training=100, step=50, asleep=30, kept=3, snapshot=1000, group=10**6)

asked = st.builds(
    RlSchedule,
    steps=st.integers(1, 7),
    groups=st.integers(1, 3),
    lag=st.integers(0, 3),
    placement=st.sampled_from(["shared", "apart"]),
    save_every=st.integers(1, 3),
    gaps=st.sets(st.integers(0, 6), max_size=2).map(lambda steps: tuple(sorted(steps))),
)


def run(program: Iterations, data: st.DataObject, most: int | None = None) -> list[Instruction]:
    """Instructions in an order in which they may run, drawn; so many of them, or all."""
    random = data.draw(st.randoms(use_true_random=False))
    at = {lane: 0 for lane, _ in program.lanes}
    done: list[Instruction] = []
    ended: set[Instruction] = set()
    while most is None or len(done) < most:
        ready = [
            lane
            for lane, instructions in program.lanes
            if at[lane] < len(instructions) and ended.issuperset(program.uses(instructions[at[lane]]))
        ]
        if not ready:
            break
        lane = random.choice(ready)
        done.append(program.lane(lane)[at[lane]])
        ended.add(done[-1])
        at[lane] += 1
    return done


@given(asked, st.data())
def test_each_group_is_trained_once_and_by_the_same_version_wherever_a_run_is_cut(asked, data):
    whole = compile_iterations(asked)
    versions = {i.group: i.version for _, i in whole if isinstance(i, Sample)}
    cursor, sampled, trained = Cursor(), Counter(), Counter()
    for _ in range(6):
        program = compile_iterations(asked, cursor)
        most = data.draw(st.none() | st.integers(0, sum(1 for _ in program)))
        done = run(program, data, most)
        for i in done:
            if isinstance(i, Sample):
                sampled[i.group] += 1
                assert i.version == versions[i.group]
                assert 0 <= asked.step_of(i.group) - i.version <= asked.lag
        before, cursor = cursor.step, after(program, done)
        # What a save has behind it stays; what has none is done again.
        trained.update(i.step for i in done if isinstance(i, Train) and before <= i.step < cursor.step)
        if cursor.step == asked.steps:
            break
    else:
        program = compile_iterations(asked, cursor)
        done = run(program, data)
        sampled.update(i.group for i in done if isinstance(i, Sample))
        trained.update(i.step for i in done if isinstance(i, Train))
    assert dict(trained) == dict.fromkeys(range(asked.steps), 1)
    assert dict(sampled) == dict.fromkeys(range(asked.steps * asked.groups), 1)


@given(asked, st.integers(1, 4), st.data())
def test_a_complete_run_with_more_steps_samples_with_the_weights_that_it_has(asked, more, data):
    """Its older versions are retired, which the next steps within the lag would have been sampled by."""
    whole = compile_iterations(asked)
    cursor = after(whole, run(whole, data))
    assert cursor == Cursor(step=asked.steps)
    longer = compile_iterations(replace(asked, steps=asked.steps + more), cursor)
    sampled = [i for i in run(longer, data) if isinstance(i, Sample)]
    assert sorted(i.group for i in sampled) == list(
        range(asked.steps * asked.groups, (asked.steps + more) * asked.groups)
    )
    assert all(i.version >= asked.steps for i in sampled)


@given(asked, st.data())
def test_no_order_of_the_lanes_waits_for_ever_or_takes_a_snapshot_that_is_gone(asked, data):
    program = compile_iterations(asked)
    done = run(program, data)
    assert Counter(done) == Counter(i for _, i in program)
    there: set[int] = set()
    for i in done:
        match i:
            case Publish(version):
                there.add(version)
            case Take(version) | Sample(_, version):
                assert version in there
            case Retire(version):
                there.remove(version)
            case _:
                pass
    assert not there


@given(asked, st.data())
def test_the_bytes_on_the_host_are_the_most_of_all_orders(asked, data):
    program = compile_iterations(asked)
    most = peaks(program, SIZES)["host"].bytes
    now = 0
    for i in run(program, data):
        match i:
            case Publish():
                now += SIZES.snapshot
            case Retire():
                now -= SIZES.snapshot
            case Sample():
                now += SIZES.group
            case Train():
                now -= SIZES.group * asked.groups
            case _:
                pass
        assert now <= most


@pytest.mark.parametrize("sizes", [Sizes(snapshot=1), Sizes(group=1)], ids=["snapshots", "groups"])
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_the_bytes_on_the_host_are_reached(sizes, lag):
    """The bound is no looser than it must be: some order of the lanes comes to it."""
    program = compile_iterations(RlSchedule(steps=9, groups=2, lag=lag, placement="apart"))
    found = []
    for first in itertools.permutations(range(3)):
        done: set[Instruction] = set()
        now = most = 0
        waiting = [list(program.lanes[lane][1]) for lane in first]
        while any(waiting):
            lane = next(lane for lane in waiting if lane and done.issuperset(program.uses(lane[0])))
            done.add(i := lane.pop(0))
            now += {Sample: sizes.group, Publish: sizes.snapshot, Retire: -sizes.snapshot}.get(type(i), 0)
            now -= 2 * sizes.group if isinstance(i, Train) else 0
            most = max(most, now)
        found.append(most)
    assert max(found) == peaks(program, sizes)["host"].bytes


def test_shared_ranks_hold_the_one_or_the_other():
    program = compile_iterations(RlSchedule(steps=2, groups=1))
    found = {
        write: held.bytes
        for held in memory(program, SIZES)
        if held.where == "ranks"
        for write in [type(program.lane("ranks")[held.at[1]]).__name__]
    }
    training, sampling = 100 + 3, 30 + 7 + 11
    assert found == {
        "Publish": training,
        "Swap": training,
        "Take": sampling + 5,
        "Sample": sampling,
        "Retire": sampling,
        "Train": training + 50,
        "Save": training,
    }
    apart = peaks(compile_iterations(RlSchedule(steps=2, groups=1, placement="apart")), SIZES)
    assert (apart["sampler"].bytes, apart["trainer"].bytes) == (7 + 11 + 5, 150)


def test_what_does_not_fit_is_refused_with_the_mend():
    program = compile_iterations(RlSchedule(steps=2, groups=1))
    require_room(program, SIZES, {"ranks": 153})
    with pytest.raises(ConfigError, match=r"'train s0' needs 153 bytes of the ranks, which has 152; set a smaller"):
        require_room(program, SIZES, {"ranks": 152})
    big = Sizes(keys=10**9, weights=10**9)
    with pytest.raises(ConfigError, match=r"'swap sample' needs 2,000,000,000 bytes .* set fewer rollout.pages"):
        require_room(program, big, {"ranks": 10**9})


@given(asked, st.data())
def test_text_is_read_back(asked, data):
    program = compile_iterations(asked)
    program = compile_iterations(asked, after(program, run(program, data, data.draw(st.integers(0, 40)))))
    assert read_iterations(write_iterations(program)) == program


@given(asked)
def test_clocks_agree_with_an_order(asked):
    program = compile_iterations(asked)
    order, clock = issue_order(program), clocks(program)
    for at, place in enumerate(order):
        assert not any(is_before(clock, later, place) for later in order[at + 1 :])


def test_a_lag_fills_the_bubble():
    rates = InstructionRates(sample_s=1.0, grade_s=0.5, train_s=5.0)
    seconds = {}
    for lag in (0, 1):
        found = simulate(compile_iterations(RlSchedule(steps=10, groups=4, lag=lag, placement="apart")), rates)
        seconds[lag] = found.seconds
        assert found.busy_s == {"sampler": 40.0, "grader": 20.0, "trainer": 50.0}
        assert found.bubble("trainer") == pytest.approx(1 - 50.0 / found.seconds)
    # On policy: sampling, the last grade and the step follow each other. One step of lag: the longer one decides.
    assert seconds == {0: 10 * (4 * 1.0 + 0.5 + 5.0), 1: 4 * 1.0 + 0.5 + 10 * 5.0}


def test_shared_ranks_swap_once_for_all_steps_of_a_version():
    rates = InstructionRates(sample_s=1.0, grade_s=0.0, train_s=1.0, swap_s=10.0)
    on_policy = simulate(compile_iterations(RlSchedule(steps=4, groups=1)), rates)
    lagging = simulate(compile_iterations(RlSchedule(steps=4, groups=1, lag=3)), rates)
    assert (on_policy.seconds, lagging.seconds) == (4 * (1 + 20 + 1), 4 + 20 + 4)


@pytest.mark.parametrize(
    ("placement", "versions"), [("shared", [0, 0, 0, 3, 3, 3, 6, 6]), ("apart", [0, 0, 0, 3, 3, 3, 4, 5])]
)
def test_behind_a_gap_no_version_samples_from_before_it(placement, versions):
    schedule = RlSchedule(steps=8, groups=2, lag=2, placement=placement, gaps=(3,))
    assert [schedule.version_of(group) for group in range(0, 16, 2)] == versions
    assert [replace(schedule, gaps=()).version_of(group) for group in range(8, 16, 2)] == (
        [3, 3, 6, 6] if placement == "shared" else [2, 3, 4, 5]
    )


@pytest.mark.parametrize(
    ("field", "value"), [("steps", 0), ("groups", 0), ("lag", -1), ("save_every", 0), ("placement", "beside")]
)
def test_what_cannot_be_asked_is_named(field, value):
    with pytest.raises(ConfigError, match=rf"{field} = '?{value}"):
        RlSchedule(**({"steps": 2, "groups": 2} | {field: value}))


LINES = write_iterations(compile_iterations(RlSchedule(steps=3, groups=2, lag=1, placement="apart")))
SHARED = write_iterations(compile_iterations(RlSchedule(steps=2, groups=1)))
RESUMED = write_iterations(
    compile_iterations(
        RlSchedule(steps=3, groups=1, lag=1, placement="apart"),
        Cursor(step=1, recorded=frozenset({1}), published=frozenset({1})),
    )
)


def changed(text: str, *changes: str) -> Iterations:
    """A program with lines dropped (-), put behind others (a > b), exchanged (a = b) or written otherwise (a ~ b)."""
    lines = text.splitlines()
    for change in changes:
        if change.startswith("-"):
            lines.remove(f"  {change[1:]}")
        elif found := re.fullmatch(r"(.*) ([>=~]) (.*)", change):
            one, how, other = f"  {found[1]}", found[2], f"  {found[3]}"
            if how == ">":
                lines.remove(one) if one in lines and one != other else None
                lines.insert(lines.index(other) + 1, one)
            elif how == "~":
                lines[lines.index(one)] = other
            else:
                at, there = lines.index(one), lines.index(other)
                lines[at], lines[there] = lines[there], lines[at]
    return read_iterations("\n".join(lines))


FAULTS = [
    (LINES, ["-sample g3 v0"], "group 3 is never sampled"),
    (LINES, ["sample g1 v0 > sample g1 v0"], "the same was done before"),
    (LINES, ["sample g3 v1 > take v1"], "a restart would sample the group with version 0"),
    (LINES, ["sample g9 v1 > take v1"], "the steps 0 to 2 that are left have no such group"),
    (LINES, ["sample g4 v1 ~ sample g4 v0"], "the version is 2 steps old when it is trained on, and lag allows 0 to 1"),
    (LINES, ["sample g4 v1 ~ sample g4 v3"], "the version is -1 steps old"),
    (LINES, ["sample g4 v1 ~ sample g4 v2"], "a restart would sample the group with version 1"),
    (LINES, ["-take v1"], "the sampler has version 0 in its place; take version 1 first"),
    (LINES, ["-take v0"], "the sampler has none in its place"),
    (LINES, ["-grade g2"], "group 2 is never graded"),
    (LINES, ["grade g7 > grade g5"], "have no such group"),
    (LINES, ["-train s2"], "the trainer has finished 2 steps"),
    (LINES, ["-train s2", "-save s3"], "step 2 is never trained"),
    (LINES, ["train s0 = train s1"], "the trainer has finished 0 of 3 steps"),
    (LINES, ["-save s3"], "the last step is never saved"),
    (LINES, ["-save s1"], "2 steps since the last save, and save_every is 1"),
    (LINES, ["save s1 > train s1"], "the trainer has finished 2 steps"),
    (LINES, ["publish v1 > train s1"], "the trainer has version 2"),
    (LINES, ["-publish v1"], "version 1 is retired and was never published"),
    (LINES, ["-retire v1"], "version 1 is published and never retired"),
    (LINES, ["-publish v1", "-retire v1"], "deadlock: sampler waits for 'publish v1'"),
    (LINES, ["retire v0 > sample g1 v0"], "it may come before sampler's instruction 4 (sample g2 v0), which needs"),
    (LINES, ["retire v0 > take v1"], None),
    (LINES, ["train s0 > retire v0"], "lane sampler does none of these"),
    (LINES, ["swap train > retire v0"], "lane sampler does none of these"),
    (LINES, ["sample g0 v0 = sample g2 v0"], None),
    (SHARED, ["-swap train", "-swap train"], "the ranks' memory is the other's; swap to 'train' first"),
    (SHARED, ["-swap sample"], "the ranks' memory is the other's; swap to 'sample' first"),
    (SHARED, ["swap sample > swap sample"], "already there to sample"),
    (SHARED, ["-retire v1", "retire v1 > publish v1"], "which needs the snapshot"),
    (SHARED, ["-retire v1", "retire v1 > train s0"], "version 1 may be retired before it is published"),
    (SHARED, ["-swap train", "-swap train", "-train s0", "-train s1"], "the ranks' memory"),
    (RESUMED, ["sample g1 v0 > take v1"], "on record; it would be sampled twice"),
    (RESUMED, ["publish v1 > train s1"], "the version is published already"),
    (RESUMED, ["-retire v1"], "version 1 is published and never retired"),
]


@pytest.mark.parametrize(("text", "changes", "rule"), FAULTS, ids=[" ".join(c) for _, c, _ in FAULTS])
def test_a_planted_fault_is_named(text, changes, rule):
    if rule is None:
        assert check(changed(text, *changes))
        return
    with pytest.raises(InvalidIterations, match=re.escape(rule)):
        check(changed(text, *changes))


def test_a_deadlock_of_lanes_is_named():
    """The trainer wants the grades of answers that nobody can give before it publishes what they are sampled with."""
    text = write_iterations(compile_iterations(RlSchedule(steps=2, groups=1, placement="apart")))
    lines = text.replace("  publish v0\n", "").replace("  train s0\n", "  train s0\n  publish v0\n")
    with pytest.raises(InvalidIterations, match="the trainer has version 1"):
        check(read_iterations(lines))
    with pytest.raises(InvalidIterations, match=r"deadlock: sampler waits for 'publish v0' .*; grader waits for 'samp"):
        issue_order(read_iterations(lines))


def test_a_retirement_on_another_lane_comes_too_early():
    """Lanes do not wait for what they do not use, so nothing but a lane's order keeps a snapshot."""
    program = compile_iterations(RlSchedule(steps=1, groups=1))
    lanes = dict(program.lanes)
    moved = [i for i in lanes["ranks"] if not isinstance(i, Retire)]
    with pytest.raises(InvalidIterations, match="lane grader does none of these"):
        check(
            Iterations(
                schedule=program.schedule,
                cursor=program.cursor,
                lanes=(("ranks", tuple(moved)), ("grader", (Retire(0), *lanes["grader"]))),
            )
        )
    with pytest.raises(InvalidIterations, match="placement shared has the lanes ranks, grader, not grader, ranks"):
        check(Iterations(schedule=program.schedule, cursor=program.cursor, lanes=tuple(reversed(program.lanes))))
    with pytest.raises(InvalidIterations, match="the ranks are left to the sampler"):
        check(read_iterations(SHARED.replace("  save s2\n", "  save s2\n  swap sample\n")))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "line 1: iterations start with"),
        (SHARED + "lane kitchen\n", "'lane kitchen' is neither a lane nor an instruction"),
        (SHARED + "  sleep\n", "'sleep' is no instruction of an iteration"),
    ],
)
def test_text_that_is_no_program_is_refused(text, error):
    with pytest.raises(UserError, match=error):
        read_iterations(text)


def test_a_long_run_is_compiled_and_checked_in_time():
    """Counted: what is done for an instruction does not grow with the run."""
    program = compile_iterations(RlSchedule(steps=400, groups=8, lag=2, placement="apart"))
    assert len([i for _, i in program if isinstance(i, Sample | Grade)]) == 2 * 3200
    assert peaks(program, Sizes(snapshot=1))["host"].bytes == 4
    assert peaks(program, Sizes(group=1))["host"].bytes == 3 * 8
    assert [i for i in program.lane("trainer") if isinstance(i, Save)][-1] == Save(400)


def test_programs_need_no_torch():
    code = (
        "import sys\nimport superstep.tune.program.compile, superstep.tune.program.simulate\n"
        "import superstep.tune.program.memory\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
