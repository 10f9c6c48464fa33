"""The lead and its members over loopback, with ranks that are made up: who comes, who is lost, what all are told."""

import threading
import time

import msgspec
import pytest
from msgspec.structs import replace

from superstep.launch.hosts.coordinator import Coordinator
from superstep.launch.hosts.coordinator_state import CoordinatorState
from superstep.launch.hosts.copy_schedule import ScheduleKeeper
from superstep.launch.hosts.events import Cause, HostHolds, HostJoined, RunOver
from superstep.launch.hosts.follow_orders import attend
from superstep.launch.hosts.listener import JoinRefused, SecureListener, knock
from superstep.launch.hosts.member import Member
from superstep.launch.hosts.membership import HeldStates
from superstep.launch.hosts.messages import HELLO as HELLOS
from superstep.launch.hosts.messages import Hello, Refused, Welcome

SECRET = b"known to both sides"
HELLO = Hello(purpose="join", host=1, hosts=2, run="abc", version="1", process="x", port=1)


class Nothing:
    """Copies of a host that keeps none."""

    def progress(self):
        return None

    def steer(self, told):
        pass

    def enters(self, wire, hello):
        wire.say(Refused("there are no copies"))


class Ranks:
    """Those of a host: each start is noted, and goes on until something is ordered, or the test lets it end."""

    def __init__(self):
        self.given, self.may_end, self.states = [], threading.Event(), set()

    def list_held(self):
        return HeldStates(own=frozenset(self.states))

    def fetch(self, order):
        self.states.add(order.state)

    def run(self, given, cut, on_trouble):
        self.given.append(given)
        while not cut.poll(0.01):
            if self.may_end.is_set():
                return True
        return False


class Host(threading.Thread):
    """A launcher that attends; ``over`` is how it ended."""

    def __init__(self, number, side, *states):
        super().__init__(daemon=True)
        self.number, self.side, self.ranks, self.said, self.over = number, side, Ranks(), [], None
        self.ranks.states.update(states)
        self.start()

    def run(self):
        tell = self.side.handle_event
        self.over = attend(self.number, str(self.number), self.side.orders, tell, self.ranks, self.said.append)


@pytest.fixture
def lead():
    table = CoordinatorState(seats=(None, None), can_recover=True, patience_s=30, since_s=time.time())
    told = []
    found = Coordinator(
        ("127.0.0.1", 0), SECRET, mine=replace(HELLO, host=0), table=table,
        prepare=lambda go: (("127.0.0.1", 9), b"facts"), copies=(Nothing(), ScheduleKeeper(1)), tell=told.append,
    )  # fmt: skip
    found.said = told
    yield found
    found.close(RunOver(Cause("the test is over")))


def _member(lead, secret=SECRET, patience_s=5, **other):
    return Member(lead.address, secret, mine=replace(HELLO, **other), patience_s=patience_s, copies=Nothing())


def _until(is_so, seconds=8.0):
    began_s = time.monotonic()
    while not is_so():
        assert time.monotonic() - began_s < seconds
        time.sleep(0.01)
    return time.monotonic() - began_s


def test_both_start_together_are_told_the_same_and_end_together(lead):
    one, other = Host(0, lead), Host(1, _member(lead))
    lead.begin()
    _until(lambda: one.ranks.given and other.ranks.given)
    (mine,), (its,) = one.ranks.given, other.ranks.given
    assert mine.go == its.go
    assert its.facts == b"facts"
    assert its.store == ("127.0.0.1", 9)
    assert its.next == lead.address
    for host in (one, other):
        host.ranks.may_end.set()
    _until(lambda: one.over and other.over)
    assert one.over == other.over == RunOver()


def test_a_member_that_says_nothing_is_named_within_three_seconds_and_waited_for(lead):
    host = Host(0, lead, (4, 0))
    lead.begin()
    wire = knock(lead.address, SECRET, replace(HELLO, process="silent"))
    wire.say(HostJoined(1))
    wire.say(HostHolds(1, HeldStates(frozenset({(4, 0)}))))
    _until(lambda: host.ranks.given)
    took_s = _until(lambda: any("Waiting for host 1" in line for line in lead.said))
    assert 2.0 < took_s < 3.25, "its last word came up to a beat before"
    again = Host(1, _member(lead), (4, 0))
    _until(lambda: again.ranks.given)
    go = again.ranks.given[0].go
    assert (go.epoch, go.state) == (2, (4, 0))
    assert "host 1 (127.0.0.1): it is lost, it has said nothing for" in go.lost.text
    _until(lambda: len(host.ranks.given) > 1)
    assert host.ranks.given[1].go == go


class Odd(msgspec.Struct, tag=True):
    """A message of nobody."""


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (Odd(), "its message is not expected: Invalid value 'Odd' - at `$.type`"),
        (HostJoined(1, "first"), "its message is not expected: Expected `int`, got `str` - at `$.epoch`"),
        (HostJoined(0), "its message says that it is host 0"),
    ],
)
def test_a_member_with_another_message_is_lost_by_its_name_and_the_field(lead, message, says):
    host = Host(0, lead)
    lead.begin()
    wire = knock(lead.address, SECRET, HELLO)
    wire.say(HostJoined(1))
    wire.say(HostHolds(1, HeldStates()))
    _until(lambda: host.ranks.given)
    wire.say(message)
    again = Host(1, _member(lead, process="again"))
    _until(lambda: again.ranks.given)
    assert again.ranks.given[0].go.lost.text == f"host 1 (127.0.0.1): it is lost, {says}"


def test_a_lead_with_another_message_is_named_with_the_field():
    def enters(wire, hello):
        wire.say(Welcome())
        wire.say(Odd())
        while True:
            wire.receive()

    door = SecureListener(("127.0.0.1", 0), SECRET, HELLOS, enters, lambda line: None)
    try:
        host = Host(1, Member(door.address, SECRET, mine=HELLO, patience_s=60, copies=Nothing()))
        _until(lambda: host.said)
        port = door.address[1]
        assert host.said[0].startswith(
            f"host 0 at 127.0.0.1:{port} is lost, its message is not expected: Invalid value 'Odd' - at `$.type`"
        )
        host.side.close()
    finally:
        door.close()


def test_a_member_without_its_lead_ends_its_ranks_and_asks_until_its_patience_is_over():
    table = CoordinatorState(seats=(None, None), can_recover=True, patience_s=30, since_s=time.time())
    first = Coordinator(
        ("127.0.0.1", 0), SECRET, mine=replace(HELLO, host=0), table=table,
        prepare=lambda go: (("127.0.0.1", 9), b""), copies=(Nothing(), ScheduleKeeper(1)), tell=lambda line: None,
    )  # fmt: skip
    mine, other = Host(0, first), Host(1, _member(first, patience_s=1.0))
    first.begin()
    _until(lambda: other.ranks.given)
    first._is_closed.set()
    first._door.close()  # as if it were gone, without a word
    _until(lambda: other.over)
    assert "is lost" in other.said[0]
    assert "has not answered within 1 s" in other.over.cause.text
    mine.ranks.may_end.set()


@pytest.mark.parametrize(
    ("secret", "other", "says"),
    [
        (b"another", {}, "has another secret than this host"),
        (SECRET, {"hosts": 3}, "--hosts = 3 on host 1, and 2 on host 0"),
        (SECRET, {"run": "b"}, "another configuration"),
        (SECRET, {"version": "0"}, "has version 0"),
    ],
)
def test_one_that_does_not_belong_here_ends_with_a_line(lead, secret, other, says):
    host = Host(1, _member(lead, secret, **other))
    _until(lambda: host.over)
    assert host.over.cause.is_mistake
    assert says in host.over.cause.text


def test_a_number_that_is_taken_is_refused(lead):
    wire = knock(lead.address, SECRET, replace(HELLO, process="first"))
    with pytest.raises(JoinRefused, match=r"host 1 is here already, from 127\.0\.0\.1"):
        knock(lead.address, SECRET, replace(HELLO, process="second"))
    wire.close()


def test_who_comes_after_the_run_is_complete_is_told_at_once():
    door = SecureListener(("127.0.0.1", 0), SECRET, HELLOS, lambda wire, hello: None, lambda line: None)
    door.close()
    asked = iter((False, True))
    late = Member(door.address, SECRET, mine=HELLO, patience_s=60, copies=Nothing(), is_complete=lambda: next(asked))
    assert late.orders.poll(5.0)
    assert late.orders.recv() == RunOver()
