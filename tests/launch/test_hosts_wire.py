"""Frames between launchers: who does not know the secret says nothing, and what was changed on the way is not heard."""

import os
import socket
import struct
import threading
import time
from contextlib import suppress

import msgspec
import pytest
from msgspec.structs import replace

from superstep.comm.codec import Codec
from superstep.kernels.checksum import checksum
from superstep.launch.hosts import listener as doors
from superstep.launch.hosts import secure_channel as wires
from superstep.launch.hosts.coordinator import unlike
from superstep.launch.hosts.copy_schedule import CopySteps, HostProgress
from superstep.launch.hosts.events import (
    AbortAll,
    Cause,
    HostFailed,
    HostHolds,
    HostJoined,
    RanksDone,
    RunOver,
    StartRanks,
)
from superstep.launch.hosts.listener import WAITING, JoinRefused, SecureListener, knock
from superstep.launch.hosts.membership import CopyPlacement, HeldStates
from superstep.launch.hosts.messages import (
    FROM_LEAD,
    FROM_MEMBER,
    SILENT_S,
    WELCOME,
    Fetching,
    Hello,
    LeadBeat,
    MemberBeat,
    NotNow,
    Orders,
    Refused,
    Silence,
    Welcome,
)
from superstep.launch.hosts.messages import (
    HELLO as HELLOS,
)
from superstep.launch.hosts.secure_channel import (
    MOST_BYTES,
    ForeignMessage,
    OtherProtocol,
    PayloadKind,
    WrongSecret,
    answer,
    ask,
)
from superstep.launch.hosts.state_transfer import CopyEnds, RateLimit, StateCorrupt, StateDropped, receive, send
from superstep.state.snapshots.damage import void_damaged
from superstep.state.snapshots.memory_snapshot import WHOLE, WRITING, make_memories

SECRET = b"known to both sides"
HELLO = Hello(purpose="join", host=1, hosts=2, run="abc", version="1", process="x", port=0)
CUT = CopyPlacement(3, (0, 2))
CAUSE = Cause("rank 1 was killed", is_lost=True, at_s=1.5)
GO = StartRanks(4, (8, 1), CAUSE, CUT, (0, 2))


class Step(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    step: int


STEPS = Codec(Step)


def _pair(asks=SECRET, answers=SECRET):
    """Both ends of a connection; an error in the place of one that has none."""
    listening = socket.create_server(("127.0.0.1", 0))
    found = []

    def serve():
        try:
            found.append(answer(listening.accept()[0], answers))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        one = ask(listening.getsockname()[:2], asks)
    except OSError as error:
        one = error
    thread.join()
    listening.close()
    return one, found[0]


def test_messages_and_blocks_go_both_ways():
    one, other = _pair()
    one.say(Step(3))
    assert other.hear(STEPS) == Step(3)
    block = os.urandom(MOST_BYTES)
    threading.Thread(target=other.send, args=(PayloadKind.BLOCK, block)).start()
    assert one.receive() == (PayloadKind.BLOCK, block)
    with pytest.raises(ValueError, match="is the most"):
        one.send(PayloadKind.BLOCK, block + b"x")
    one.close()
    with pytest.raises(OSError, match="has gone"):
        other.receive()


def test_who_has_another_secret_is_a_stranger_to_both():
    one, other = _pair(asks=b"another secret")
    assert isinstance(one, WrongSecret)
    assert isinstance(other, OSError)


def test_a_stranger_that_pretends_is_turned_away():
    """It goes on although it does not know what was shown to it."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=lambda: theirs.sendall(wires.MAGIC + bytes(wires.NONCE) + bytes(wires.PROOF)))
    thread.start()
    with pytest.raises(WrongSecret):
        answer(ours, SECRET)
    thread.join()
    theirs.close()


def test_what_speaks_otherwise_is_no_launcher():
    ours, theirs = socket.socketpair()
    theirs.sendall(b"GET / HTTP/1.1\r\n" * 10)
    with pytest.raises(OtherProtocol):
        answer(ours, SECRET)
    theirs.close()


SENT = [
    (HELLOS, HELLO),
    (WELCOME, Welcome()),
    (WELCOME, Refused("two of one number")),
    (WELCOME, NotNow("later")),
    (FROM_MEMBER, HostJoined(1, 2)),
    (FROM_MEMBER, HostHolds(1, HeldStates(frozenset({(4, 0), (5, 0)}), frozenset({(4, 0)}), CUT))),
    (FROM_MEMBER, HostFailed(1, 2, CAUSE)),
    (FROM_MEMBER, RanksDone(1, 2)),
    (FROM_MEMBER, MemberBeat()),
    (FROM_MEMBER, MemberBeat(HostProgress(7, 5, 6))),
    (FROM_LEAD, Orders(go=GO, store=("10.0.0.1", 9), facts=b"facts", next=("10.0.0.2", 8))),
    (FROM_LEAD, Fetching((8, 1), ("10.0.0.2", 8), CUT)),
    (FROM_LEAD, AbortAll(4, CAUSE)),
    (FROM_LEAD, RunOver(CAUSE)),
    (FROM_LEAD, RunOver()),
    (FROM_LEAD, LeadBeat(CopySteps(5, 6))),
]


@pytest.mark.parametrize(("codec", "message"), SENT, ids=lambda each: type(each).__name__)
def test_each_message_comes_back_as_it_was(codec, message):
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize(
    ("codec", "fields", "says"),
    [
        (FROM_MEMBER, {"type": "HostJoined", "host": 1, "epoch": "2"}, r"Expected `int`, got `str` - at `\$\.epoch`"),
        (FROM_MEMBER, {"type": "RanksDone", "host": 1}, "missing required field `epoch`"),
        (FROM_MEMBER, {"type": "RanksDone", "host": 1, "epoch": 2, "more": 3}, "unknown field `more`"),
        (FROM_MEMBER, {"type": "RunOver", "cause": None}, r"Invalid value 'RunOver' - at `\$\.type`"),
        (FROM_MEMBER, {"type": "HostFailed", "host": 1, "epoch": 2, "cause": {}}, r"`text` - at `\$\.cause`"),
        (FROM_LEAD, {"type": "Fetching", "state": [4], "source": ["a", 1]}, r"at `\$\.state`"),
        (HELLOS, {"type": "Hello", "purpose": "look"}, r"Invalid enum value 'look' - at `\$\.purpose`"),
        (HELLOS, {"host": 1}, "missing required field"),
    ],
)
def test_a_message_that_is_not_expected_is_refused_with_its_field(codec, fields, says):
    one, other = _pair()
    one.send(PayloadKind.MESSAGE, Codec(dict).encode(fields))
    with pytest.raises(ForeignMessage, match=says):
        other.hear(codec)


class Text(msgspec.Struct, frozen=True, tag=True):
    text: str


TEXTS = Codec(Text)


@pytest.mark.parametrize("length", [MOST_BYTES - 40, 2 * MOST_BYTES, 3 * MOST_BYTES + 1])
def test_a_message_longer_than_a_frame_comes_whole(length):
    one, other = _pair()
    threading.Thread(target=one.say, args=(Text("x" * length),)).start()
    assert other.hear(TEXTS) == Text("x" * length)
    other.say(Text(""))
    assert one.hear(TEXTS) == Text("")


def test_a_message_has_a_bound(monkeypatch):
    monkeypatch.setattr(wires, "MOST_FRAMES", 2)
    one, other = _pair()
    with pytest.raises(ValueError, match="is the most"):
        one.say(Text("x" * 2 * MOST_BYTES))
    for _ in range(3):
        one.send(PayloadKind.PART, b"x")
    with pytest.raises(ForeignMessage, match="no whole message"):
        other.hear(TEXTS)


def test_what_has_arrived_is_known_without_a_wait():
    one, other = _pair()
    assert not other.poll(0.0)
    one.say(Step(1))
    assert other.poll(5.0)
    assert other.hear(STEPS) == Step(1)
    one.close()
    assert other.poll(5.0), "its end is to be read"


def test_bytes_of_a_state_are_no_message():
    one, other = _pair()
    one.send(PayloadKind.BLOCK, b"x")
    with pytest.raises(ForeignMessage, match="no whole message"):
        other.hear(STEPS)


def test_the_door_tells_of_a_hello_that_is_not_expected():
    told = []
    door = SecureListener(("127.0.0.1", 0), SECRET, HELLOS, _welcome, told.append)
    try:
        wire = ask(door.address, SECRET)
        wire.say(Step(1))
        with pytest.raises(OSError, match=r"gone|reset"):
            wire.hear(WELCOME)
        until_s = time.monotonic() + 10
        while not told and time.monotonic() < until_s:
            time.sleep(0.01)
    finally:
        door.close()
    (line,) = told
    assert line.startswith(
        "127.0.0.1 knows the secret of this run, but its message is not expected: Invalid value 'Step'"
    )


def _changed(frames):
    raw = bytearray(frames[0])
    raw[-wires.PROOF - 3] ^= 1
    return [bytes(raw)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_changed, "not what the other side sent"),
        (lambda frames: [frames[1]], "not what the other side sent"),  # one left out
        (lambda frames: [frames[0], frames[0]], "not what the other side sent"),  # one repeated
        (lambda frames: [struct.pack("<IBQ", 2**31, 1, 0) + frames[0]], "claims 2147483648 bytes"),
    ],
)
def test_what_was_changed_left_out_or_repeated_ends_the_connection(change, says):
    one, other = _pair()
    sent, sock = [], one._socket

    class Kept:
        def sendall(self, data):
            sent.append(bytes(data))

    one._socket = Kept()
    one.say(Step(1))
    one.say(Step(2))
    for frame in change(sent):
        sock.sendall(frame)
    with pytest.raises(OSError, match=says):
        list(iter(lambda: other.hear(STEPS), None))
    sock.close()
    other.close()


def test_the_secret_is_in_nothing_that_is_sent_and_each_connection_has_keys_of_its_own():
    one, other = _pair()
    again, _ = _pair()
    keys = {one._sends, one._receives, again._sends, again._receives}
    assert len(keys) == 4
    assert (one._sends, one._receives) == (other._receives, other._sends)


def test_the_door_lets_in_who_knows_the_secret_and_tells_of_others():
    told = []

    def enters(wire, hello):
        if hello.hosts != 2:
            wire.say(Refused("there are two"))
            return
        wire.say(Welcome())
        wire.say(wire.hear(STEPS))

    door = SecureListener(("127.0.0.1", 0), SECRET, HELLOS, enters, told.append)
    try:
        wire = knock(door.address, SECRET, HELLO)
        wire.say(Step(3))
        assert wire.hear(STEPS) == Step(3)
        with pytest.raises(JoinRefused, match="there are two"):
            knock(door.address, SECRET, replace(HELLO, hosts=3))
        with pytest.raises(WrongSecret):
            knock(door.address, b"another secret", HELLO)
    finally:
        door.close()
    with pytest.raises(OSError, match=r"refused|gone"):
        knock(door.address, SECRET, HELLO)


def _has(family, address):
    try:
        socket.create_server((address, 0), family=family).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_door_listens_at_either_kind_of_address(family, address):
    """A name such as localhost may stand for each."""
    if not _has(family, address):
        pytest.skip("this machine has no such address")
    door = SecureListener((address, 0), SECRET, HELLOS, _welcome, lambda text: None)
    try:
        knock(door.address, SECRET, HELLO).close()
    finally:
        door.close()


def _welcome(wire, hello):
    wire.say(Welcome())
    wire.hear(STEPS)


def test_slow_strangers_keep_nobody_out_who_knows_the_secret(monkeypatch):
    """However many: who came first loses his place to the next, and guests have other places."""
    monkeypatch.setattr(wires, "GREETING_S", 60.0)
    door = SecureListener(("127.0.0.1", 0), SECRET, HELLOS, _welcome, lambda text: None)
    strangers = [socket.create_connection(door.address) for _ in range(WAITING + 5)]
    try:
        for each in strangers[5:]:
            each.sendall(wires.MAGIC[:1])
        strangers[0].settimeout(10)
        assert strangers[0].recv(1) == b"", "the first has had to leave"
        inside = [knock(door.address, SECRET, HELLO) for _ in range(5)]
        more = [socket.create_connection(door.address) for _ in range(WAITING)]
        for wire in inside:
            wire.say(Step(1))
        for each in more:
            each.close()
    finally:
        for each in strangers:
            each.close()
        door.close()


def test_each_that_comes_in_a_burst_takes_the_place_of_another_stranger(monkeypatch):
    """Also while the threads of those that were hung up have not come to run."""
    hung_up, all_came = [], threading.Event()

    def answers(sock, secret):
        all_came.wait(60)
        raise OSError

    monkeypatch.setattr(doors, "answer", answers)
    door = SecureListener(("127.0.0.1", 0), SECRET, HELLOS, _welcome, lambda text: None)
    monkeypatch.setattr(doors, "_hang_up", lambda sock: hung_up.append(sock.getpeername()))
    strangers = []
    try:
        strangers += [socket.create_connection(door.address) for _ in range(WAITING + 5)]
        until_s = time.monotonic() + 60
        while len(hung_up) < 5 and time.monotonic() < until_s:
            time.sleep(0.01)
        assert hung_up == [each.getsockname() for each in strangers[:5]]
    finally:
        all_came.set()
        for each in strangers:
            each.close()
        monkeypatch.undo()
        door.close()


@pytest.mark.parametrize("is_known", [False, True])
def test_a_greeting_that_drips_ends_in_time(is_known, monkeypatch):
    """Byte by byte, each of them soon enough: before the secret is shown, and after."""
    monkeypatch.setattr(wires, "GREETING_S", 0.4)
    monkeypatch.setattr(doors, "GREETING_S", 0.4)
    door = SecureListener(("127.0.0.1", 0), SECRET, HELLOS, _welcome, lambda text: None)
    try:
        sock = ask(door.address, SECRET)._socket if is_known else socket.create_connection(door.address)
        drops = struct.pack("<IBQ", 1000, 1, 0) + bytes(30) if is_known else wires.MAGIC + bytes(wires.NONCE)
        sent = 0
        with suppress(ConnectionError):  # once it was hung up
            for drop in drops:
                sock.sendall(bytes([drop]))
                sent += 1
                time.sleep(0.1)
        assert sent < len(drops)
    finally:
        sock.close()
        door.close()


def test_guests_have_a_bound_too(monkeypatch):
    monkeypatch.setattr(doors, "GUESTS", 2)
    door = SecureListener(("127.0.0.1", 0), SECRET, HELLOS, _welcome, lambda text: None)
    try:
        first, _ = [knock(door.address, SECRET, HELLO) for _ in range(2)]
        with pytest.raises(OSError, match=r"gone|reset"):
            knock(door.address, SECRET, HELLO)
        first.close()
        until_s = time.monotonic() + 10
        while door.guests == 2 and time.monotonic() < until_s:
            time.sleep(0.01)
        knock(door.address, SECRET, HELLO)
    finally:
        door.close()


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"version": "2"}, "has version 2 of superstep"),
        ({"hosts": 3}, "--hosts = 3 on host 1, and 2 on host 0"),
        ({"run": "abd"}, "another configuration"),
        ({"host": 2}, "--host = 2 is not one of 1 to 1"),
        ({"host": 0}, "--host = 0 is not one of 1 to 1"),
    ],
)
def test_launchers_of_a_run_must_be_alike(other, says):
    mine = replace(HELLO, host=0)
    assert unlike(HELLO, mine) is None
    assert says in unlike(replace(HELLO, **other), mine)


def test_silence_counts_only_while_somebody_listens():
    silence = Silence(0.0)
    assert not any(silence.look(0.25 * beat) for beat in range(1, 10))
    assert silence.look(SILENT_S + 0.25)
    silence.note_message()
    assert not silence.look(100.0), "this process was stopped, and may have been deaf itself"


@pytest.fixture
def memories():
    """Of two ranks, each with a state after step 4."""
    found = make_memories(2)[1]
    for rank, memory in enumerate(found):
        memory.lay_out({"pieces": [], "rank": rank}, 3 * MOST_BYTES // 2)
        slot = memory.free_slot()
        memory.put(slot, "state", WRITING)
        for name, value in (("step", 4), ("samples", 40), ("tokens", 400), ("turn", 7)):
            memory.put(slot, name, value)
        memory.values(slot, 0, 1000).fill_(rank + 0.5)
        memory.seal(slot, int(checksum(memory.words(slot))))
        memory.put(slot, "state", WHOLE)
    yield found
    for memory in found:
        memory.close()


def test_a_state_comes_over_whole_and_is_not_there_before(memories):
    one, other = _pair()
    copies, seen = make_memories(2)[1], []
    thread = threading.Thread(target=send, args=(one, memories, (4, 7), 1, RateLimit(None)))
    thread.start()

    def keep(state, epoch, mark):
        seen.append((state, epoch, [memory.states() for memory in copies]))
        mark()

    assert receive(other, copies, keep) == (4, 7)
    thread.join()
    assert seen == [((4, 7), 1, [{}, {}])]
    for rank, (memory, copy) in enumerate(zip(memories, copies, strict=True)):
        assert copy.table() == {"pieces": [], "rank": rank}
        assert copy.position(copy.whole()[4]) == memory.position(memory.whole()[4])
        assert (copy.values(copy.whole()[4], 0, 1000) == rank + 0.5).all()


def test_a_state_that_is_overwritten_while_it_is_sent_is_void(memories):
    one, other = _pair()
    copies, raised = make_memories(2)[1], []

    class Slow(RateLimit):
        def take(self, count):
            slot = memories[0].whole().get(4)
            if slot is not None and count > 1000:
                memories[0].put(slot, "state", WRITING)

    def sends():
        try:
            send(one, memories, (4, 7), 1, Slow(None))
        except StateDropped:
            raised.append(True)

    thread = threading.Thread(target=sends)
    thread.start()
    assert receive(other, copies, lambda state, epoch, mark: mark()) is None
    thread.join()
    assert raised == [True]
    assert all(copy.states() == {} for copy in copies)


def _flip(memory, step):
    memory.words(memory.whole()[step])[123] ^= 1 << 20


def test_a_state_with_a_flipped_bit_is_not_sent_as_whole(memories):
    one, other = _pair()
    copies, raised = make_memories(2)[1], []
    _flip(memories[1], 4)

    def sends():
        try:
            send(one, memories, (4, 7), 1, RateLimit(None))
        except StateCorrupt:
            raised.append(True)

    thread = threading.Thread(target=sends)
    thread.start()
    assert receive(other, copies, lambda state, epoch, mark: mark()) is None
    thread.join()
    assert raised == [True]
    assert all(copy.states() == {} for copy in copies)
    assert void_damaged(memories, first=2) == ["rank 3: the copy of step 4 in memory has other bits than were copied"]
    assert list(memories[0].states()) == [(4, 7)]
    assert memories[1].states() == {}


def test_a_bit_that_flips_where_a_state_arrives_is_seen_there(memories, monkeypatch):
    one, other = _pair()
    copies = make_memories(2)[1]
    hear = other.hear

    def hears(codec):
        message = hear(codec)
        if isinstance(message, CopyEnds):
            copies[0].words(0)[7] ^= 1
        return message

    monkeypatch.setattr(other, "hear", hears)
    outcome = []

    def sends():
        try:
            send(one, memories, (4, 7), 1, RateLimit(None))
        except StateDropped as void:
            outcome.append(type(void))

    thread = threading.Thread(target=sends)
    thread.start()
    assert receive(other, copies, lambda state, epoch, mark: mark()) is None
    thread.join()
    assert outcome == [StateDropped], "what was sent is right, and is sent again"
    assert all(copy.states() == {} for copy in copies)


def test_what_is_sent_can_be_held_back():
    began = time.monotonic()
    rate = RateLimit(1e6)
    for _ in range(4):
        rate.take(50_000)
    assert time.monotonic() - began >= 0.15
