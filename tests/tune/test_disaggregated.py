"""Ranks apart: other processes sample than train, and the bits are those of ranks that do both in turn."""

from __future__ import annotations

import pickle
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest

import reinforced
from superstep.errors import Fault
from superstep.grade.task import Rollout
from superstep.grade.verdict import Verdict
from superstep.launch.failure import trouble_of
from superstep.launch.hosts.listener import SecureListener
from superstep.launch.hosts.secure_channel import PayloadKind, ask
from superstep.launch.rendezvous import LaunchStore
from superstep.plan.config import LoraConfig
from superstep.tune.program.compile import compile_iterations
from superstep.tune.program.instructions import RlSchedule
from superstep.tune.program.text import write_iterations
from superstep.tune.rl.disaggregated.hub_connection import HUB, HubConnection
from superstep.tune.rl.disaggregated.hub_messages import (
    ADDRESS,
    SAMPLER_HELLO,
    HubAddress,
    RemainingProgram,
    Retired,
    SampledGroup,
    SamplerHello,
)
from superstep.tune.rl.disaggregated.rollout_hub import RolloutHub, TaskWindow
from superstep.tune.rl.from_rank0 import WaitLimit
from superstep.tune.rl.grading import Grading
from superstep.tune.rl.rollout import TaskAnswer
from superstep.tune.rl.rollout_log import NAME, RolloutLog
from superstep.tune.rl.sampling import TaskGroup

APART = {"placement": "apart"}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return reinforced.start(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def in_turn(pool, start, tmp_path_factory):
    """Steps and last weights of one rank that does what ranks apart would do, an instruction after the other."""
    root = tmp_path_factory.mktemp("run")
    job = reinforced.in_turn(reinforced.job(root, start, rollout=APART))
    return pool.run(1, reinforced.run, job)[0], reinforced.weights(root)


@pytest.fixture
def folder():
    """Of a launch."""
    with tempfile.TemporaryDirectory(prefix="apart-") as name:
        yield name


def require_same(found, root, wanted):
    """Losses, norms, rewards and weights to the bit; no snapshot is left."""
    reinforced.require_same(found, root, wanted)
    assert not list((root / "weights").iterdir())


@pytest.mark.multiproc
def test_ranks_apart_have_the_bits_of_ranks_in_turn(pool, start, in_turn, folder, tmp_path):
    job = reinforced.job(tmp_path / "run", start, rollout=APART | {"tp": 2}, dp=2, zero=1)
    found = pool.run(4, reinforced.run_apart, job, folder)[0]
    assert [each["lag"] for each in found] == [0, 1, 1]
    require_same(found, tmp_path / "run", in_turn)


@pytest.mark.long
@pytest.mark.multiproc
def test_two_samplers_have_the_bits_of_shared_ranks_where_the_versions_are_theirs(pool, start, folder, tmp_path):
    """The first lag + 1 steps are sampled by the first version, wherever. Adapters are handed over as well."""
    lora = LoraConfig(rank=4, alpha=8.0)
    shared = pool.run(1, reinforced.run, reinforced.job(tmp_path / "shared", start, steps=2, lora=lora))[0]
    job = reinforced.job(tmp_path / "run", start, steps=2, lora=lora, rollout=APART | {"ranks": 2})
    found = pool.run(3, reinforced.run_apart, job, folder)[0]
    require_same(found, tmp_path / "run", (shared, reinforced.weights(tmp_path / "shared")))


@pytest.mark.multiproc
def test_a_run_apart_that_is_cut_or_stopped_goes_on_to_the_same_bits(pool, start, in_turn, tmp_path):
    """Between samples, where a version is gone, and behind a step; with one sampler and with two."""
    root, steps = tmp_path / "run", {}
    for samplers, cut, stop in ((1, 2, None), (2, 3, None), (1, None, 1), (1, None, None)):
        job = reinforced.job(root, start, rollout=APART | {"ranks": samplers})
        with tempfile.TemporaryDirectory(prefix="apart-") as folder:
            found = pool.run(1 + samplers, reinforced.run_apart, job, folder, cut, stop)[0]
        steps |= {told["step"]: told for told in found}
    require_same([steps[step] for step in sorted(steps)], root, in_turn)


@pytest.mark.multiproc
def test_a_sampler_that_is_left_ends_what_it_draws_on_all_its_ranks_and_draws_again(pool, start, tmp_path):
    job = reinforced.job(tmp_path / "run", start, rollout=APART | {"tp": 2})
    first, second = pool.run(2, reinforced.leaves, job)
    assert first[0] == []
    assert sorted(first[1]) == [0, 1]
    assert second == ([], [])  # the other rank of the model


LEFT = RemainingProgram(write_iterations(compile_iterations(RlSchedule(steps=1, groups=2, placement="apart"))), {1: 0})
GROUP = TaskGroup(number=3, version=0, answers=())
ASKED = RlSchedule(steps=4, groups=2, lag=1, placement="apart")


@pytest.fixture
def meeting(folder, tmp_path):
    """Makes an exchange of so many samplers; and lines to it."""
    store = LaunchStore.of_folder(Path(folder))
    record = RolloutLog(tmp_path / NAME)

    def exchange(samplers=1, timeout_s=0.2):
        grading = Grading(record, None, 0)
        record.verdicts[3] = ()
        owners = {3: 0, 4: samplers - 1}
        window = TaskWindow(0, ASKED)
        made = RolloutHub(
            store,
            record,
            grading,
            program=LEFT,
            samplers=samplers,
            ranks=1,
            owners=owners,
            window=window,
            timeout_s=timeout_s,
        )
        return made, record

    def line(sampler=0, timeout_s=0.2):
        return HubConnection(store, SamplerHello(sampler, 0), timeout_s)

    return exchange, line


def ends(exchange, lines, **how):
    """What lines say of whether the run goes on, which are at their ends before the trainer is."""
    with ThreadPoolExecutor(len(lines)) as threads:
        closing = [threads.submit(each.close) for each in lines]
        assert not wait(closing, 0.1).done
        exchange.finish(**how)
        return [each.result(60.0) for each in closing]


def waits(exchange, places, seconds=60.0):
    """What an exchange says of some places, within so much patience."""
    return exchange.wait(places, 60.0, WaitLimit(seconds))


def test_who_is_late_is_named_with_what_was_waited_for(meeting):
    make, line = meeting
    with pytest.raises(Fault, match=r"^the trainer does not listen after 0.2 s"):
        line()
    exchange, record = make(samplers=2)
    with exchange:
        drawing, idle = line(0), line(1)
        drawing.tell(SampledGroup(GROUP))
        waits(exchange, range(3, 4))
        with pytest.raises(Fault, match=r"^sampler 1 has no answers of task 4 after 0.2 s\.$"):
            waits(exchange, range(3, 5), 0.2)
        assert list(record.groups) == [3]
        assert exchange.wait(range(4, 5), 0.05, WaitLimit(60.0)) is None  # the other ranks hear that it goes on
        with pytest.raises(Fault, match=r"^the trainer has not published version 0 after 0.2 s\.$"):
            idle.version(0)
        with pytest.raises(Fault, match=r"^a sampler has not come to its end after 0.2 s\.$"):
            exchange.finish()
        while not idle.is_over:
            time.sleep(0.01)
        assert idle.version(0) is None


def test_a_line_that_breaks_is_a_fault_that_follows_from_another(meeting):
    make, line = meeting
    exchange, _ = make()
    with exchange:
        line()._wire.close()
        with pytest.raises(Fault, match=r"^sampler 0, rank 0 has gone\.$") as raised:
            waits(exchange, range(3, 4))
    assert trouble_of(0, raised.value).order == 3
    exchange, _ = make()
    with exchange:
        left = line()
    with pytest.raises(Fault, match=r"^the trainer has gone\.$") as raised:
        left.version(0)
    assert trouble_of(0, raised.value).order == 3


def test_a_snapshot_goes_once_every_sampler_is_through_and_not_while_another_of_its_bits_is_written(meeting, tmp_path):
    make, line = meeting
    exchange, record = make(samplers=2, timeout_s=60.0)
    place = record.snapshots / "weights-same"
    place.mkdir(parents=True)
    with exchange:
        lines = [line(0, 60.0), line(1, 60.0)]
        exchange.publish(0, lambda: place)
        assert [each.version(0) for each in lines] == [place, place]
        assert [each.program()[1] for each in lines] == [{1: 0}, {1: 0}]
        lines[0].tell(Retired(0))
        lines[0].tell(SampledGroup(GROUP))  # heard behind it
        waits(exchange, range(3, 4))
        assert place.is_dir()

        def write():
            """The same weights again, and while they are written nobody wants the first ones any more."""
            lines[1].tell(Retired(0))
            time.sleep(0.2)
            return place

        exchange.publish(1, write)
        assert lines[0].version(1) == place
        assert ends(exchange, lines) == [False, False]
    assert place.is_dir()
    assert list(record.published) == [1]


class ByHand:
    """Graders who say what a test says."""

    def __init__(self):
        self.asked = {}

    def submit(self, index, seed, rollout):
        return self.asked.setdefault(index, Future())


def test_a_step_takes_what_is_graded_within_its_window_and_each_task_is_trained_once(folder, tmp_path):
    record, graders = RolloutLog(tmp_path / NAME), ByHand()
    grading, good = Grading(record, graders, 0), Verdict("ok", 1.0)
    answer = TaskAnswer(strands=(), rollout=Rollout((), "stop"))
    window, store = TaskWindow(1, ASKED), LaunchStore.of_folder(Path(folder))
    exchange = RolloutHub(
        store,
        record,
        grading,
        program=LEFT,
        samplers=1,
        ranks=1,
        owners=dict.fromkeys(range(8), 0),
        window=window,
        timeout_s=60.0,
    )

    def step(number, beat_s=60.0):
        found = exchange.wait(ASKED.groups_of(number), beat_s, WaitLimit(60.0))
        return None if found is None else [group.number for group in found[0]]

    with exchange:
        line = HubConnection(store, SamplerHello(0, 0), 60.0)
        for number in (1, 2, 3, 4, 5, 6):
            line.tell(SampledGroup(TaskGroup(number=number, version=0, answers=(answer,))))
        while 6 not in graders.asked:
            time.sleep(0.01)
        for number in (1, 4, 5, 6):
            graders.asked[number].set_result(good)
        assert step(0, 0.05) is None  # task 2 and 3 have no grades, and 4 is two steps away
        graders.asked[3].set_result(good)
        assert step(0) == [3, 1]
        # What came late has the other's place, there and in the file; and it waits no longer than its window.
        line.tell(SampledGroup(TaskGroup(number=0, version=0, answers=(answer,))))
        assert [record.place(0), record.place(3)] == [3, 0]
        assert step(1, 0.05) is None
        graders.asked[2].set_result(good)
        while 0 not in graders.asked:
            time.sleep(0.01)
        graders.asked[0].set_result(good)
        assert step(1) == [2, 0]
        assert step(2) == [4, 5]
    again = RolloutLog(tmp_path / NAME, is_kept=False)
    assert {place: group.number for place, group in again.groups.items()} == {0: 3, 1: 1, 2: 2, 3: 0, 4: 4, 5: 5, 6: 6}
    assert again.verdicts.keys() == {0, 1, 2, 3, 4, 5}
    assert [again.task(place) for place in range(8)] == [3, 1, 2, 0, 4, 5, 6, 7]


WAITS = """
import pathlib, time

def task(index, seed):
    return Task(prompt="to be", answer=str(index))

def grade(task, rollout):
    while task.answer == "0" and not pathlib.Path({first!r}).exists():
        time.sleep(0.05)
    return float(len(rollout.answer) % 2)
"""


@pytest.mark.multiproc
def test_a_slow_grade_holds_up_no_step_that_has_other_groups(pool, start, folder, tmp_path):
    """The grade of the first task waits for the first step, which it is of."""
    root = tmp_path / "run"
    (start / "waits.py").write_text(reinforced.ENVIRONMENT + WAITS.format(first=str(root / "checkpoints/step-000001")))
    job = reinforced.job(
        root,
        start,
        exact=False,
        rollout=APART,
        rl={"window": 1, "group": 2},
        grade={"workers": 3},
        environment="waits.py",
    )
    told = pool.run(2, reinforced.run_apart, job, folder)[0]
    assert [each["step"] for each in told] == [1, 2, 3]
    record = RolloutLog(root / NAME, is_kept=False)
    assert record.place(0) in ASKED.groups_of(1)
    assert sorted(record.task(place) for place in range(6)) == list(range(6))


class Harm:
    """What runs code where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def store(folder):
    return LaunchStore.of_folder(Path(folder))


def test_what_comes_over_a_line_is_never_unpickled(meeting, store, tmp_path):
    make, line = meeting
    planted = pickle.dumps(Harm(tmp_path / "harmed"))
    exchange, _ = make()
    with exchange:
        line()._wire.send(PayloadKind.MESSAGE, planted)
        with pytest.raises(Fault, match=r"^sampler 0, rank 0: its message is not expected: a message begins with"):
            waits(exchange, range(4, 5))
    said = []

    def enters(wire, hello):
        said.append(hello)
        wire.send(PayloadKind.MESSAGE, planted)
        wire.receive()

    listener = SecureListener(("127.0.0.1", 0), b"secret", SAMPLER_HELLO, enters, said.append)
    try:
        store.put(HUB.format(attempt=0), ADDRESS.encode(HubAddress(*listener.address, b"secret")))
        with pytest.raises(Fault, match=r"^the trainer: its message is not expected: a message begins with"):
            line(1).version(0)
    finally:
        listener.close()
    assert said == [SamplerHello(1, 0)]
    assert not (tmp_path / "harmed").exists()


def test_the_hub_takes_nothing_from_who_does_not_know_its_secret(meeting, store):
    make, line = meeting
    exchange, _ = make()
    with exchange:
        hub = ADDRESS.decode(store.get(HUB.format(attempt=0)))
        with pytest.raises(ConnectionError, match="has another secret"):
            ask((hub.host, hub.port), b"another")
        connection = line()  # which lives as long as its messages are read
        connection.tell(SampledGroup(GROUP))
        waits(exchange, range(3, 4))


def test_with_a_secret_of_the_run_the_hub_publishes_none(folder, tmp_path):
    store = replace(LaunchStore.of_folder(Path(folder)), secret=b"of the run")
    record = RolloutLog(tmp_path / NAME)
    hub = RolloutHub(
        store,
        record,
        Grading(record, None, 0),
        program=LEFT,
        samplers=1,
        ranks=1,
        owners={},
        window=TaskWindow(0, ASKED),
        timeout_s=60.0,
    )
    with hub:
        assert ADDRESS.decode(store.get(HUB.format(attempt=0))).secret is None
        line = HubConnection(store, SamplerHello(0, 0), 60.0)
        assert ends(hub, [line], goes_on=True) == [True]


def test_an_address_that_the_hub_did_not_write_is_refused(meeting, store):
    store.put(HUB.format(attempt=0), b"10.0.0.1:80")
    with pytest.raises(Fault, match=r"^the launch's store holds under superstep/hub/0 what the trainer did not write"):
        meeting[1]()
