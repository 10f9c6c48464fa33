"""issue_order: an order in which the program's instructions can run, all ranks together.

An instruction may wait for another rank: a compute for its received input, a sum or the step for all its ranks, and the
first use of a channel that does not exist yet for the other end. A program where some wait forever has no such order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

from superstep.errors import SuperstepError
from superstep.program import instructions as ins
from superstep.program.instructions import Instruction, Program, Wire
from superstep.program.needed_values import NeededValues, Value
from superstep.program.text import describe

Channel = tuple[int, int, Wire]
Place = tuple[int, int]

ALONE = frozenset(
    {
        ins.BackwardWeight,
        ins.Fetch,
        ins.Free,
        ins.Offload,
        ins.Recompute,
        ins.Reduce,
        ins.ReduceRows,
        ins.ReducePartial,
        ins.ReduceReplicas,
        ins.Reload,
        ins.Settle,
        ins.Snapshot,
    }
)
"""Instructions that wait for no other rank."""

RECEIVING = frozenset({ins.Forward, ins.Backward, ins.BackwardInput})
"""Instructions that wait only for their received input."""


class InvalidProgram(SuperstepError):
    """A program breaks a rule; the message names rank, position and instruction."""


def issue_order(program: Program, *, made: Collection[Channel] | None = None) -> Iterator[tuple[Place, ...]]:
    """Every instruction's place (rank, index), after everything that it waits for.

    A compute waits for its received input, and that for its send and for earlier values of the channel. A tie and the
    step wait for all their ranks, and come as one tuple of all places; so do the first send and receive on a channel
    that is not among those ``made``, by default all.

    Raises:
        InvalidProgram: some ranks wait forever; the message says who waits for what.
    """
    at = [0] * program.pp
    channels = _Channels(NeededValues(program), made)
    is_moving = True
    while is_moving:
        is_moving = False
        for number, instructions in enumerate(program.ranks):
            while at[number] < len(instructions):
                i = instructions[at[number]]
                # Most instructions take this short way: programs have hundreds of thousands.
                if type(i) in ALONE or (type(i) in RECEIVING and channels.missing(number, i) is None):
                    yield ((number, at[number]),)
                    at[number] += 1
                    is_moving = True
                    continue
                together = channels.first_use(number, i) or dict.fromkeys(_members(program, number, i), i)
                if channels.missing(number, i) or not all(_is_at(program, at, *each) for each in together.items()):
                    break
                for other, theirs in together.items():
                    channels.issue(other, theirs)
                yield tuple((other, at[other]) for other in together)
                for other in together:
                    at[other] += 1
                is_moving = True
    waits = []
    for number, instructions in enumerate(program.ranks):
        if at[number] < len(instructions):
            i = instructions[at[number]]
            value = channels.missing(number, i)
            what = f" for {value[0]} u{value[1]} m{value[2]}" if value else ""
            if isinstance(i, ins.Send | ins.Recv):  # these wait at their first use alone
                source, target, wire = _channel(number, i)
                what = f" for rank {i.peer} at the first use of channel {wire} from rank {source} to rank {target},"
            waits.append(f"rank {number} waits{what} at instruction {at[number]} ({describe(i)})")
    if waits:
        raise InvalidProgram("deadlock: " + "; ".join(waits))


def _members(program: Program, number: int, i: Instruction) -> tuple[int, ...]:
    """The ranks that run the instruction together."""
    match i:
        case ins.Step():
            return tuple(range(program.pp))
        case ins.Tie(unit):
            return program.holders(unit)
        case _:
            return (number,)


def _is_at(program: Program, at: list[int], number: int, i: Instruction) -> bool:
    return at[number] < len(program.ranks[number]) and program.ranks[number][at[number]] == i


def _channel(number: int, i: ins.Send | ins.Recv) -> Channel:
    return (number, i.peer, i.wire) if isinstance(i, ins.Send) else (i.peer, number, i.wire)


class _Channels:
    """What was sent, posted and delivered so far. A channel delivers in the order of its sends. ``made``: the channels
    that exist from the start; None means all.
    """

    def __init__(self, needed: NeededValues, made: Collection[Channel] | None) -> None:
        self.needed = needed
        self.made = None if made is None else set(made)
        self.sent: dict[Channel, deque[Value]] = {}
        self.posted: dict[Channel, set[Value]] = {}
        self.awaited: dict[int, set[Value]] = {}

    def issue(self, number: int, i: Instruction) -> None:
        """Advance over a send or a receive."""
        if not isinstance(i, ins.Send | ins.Recv):
            return
        value, channel = (i.wire, i.unit, i.microbatch), _channel(number, i)
        target = channel[1]
        if self.made is not None:
            self.made.add(channel)
        sent, posted = self.sent.setdefault(channel, deque()), self.posted.setdefault(channel, set())
        if isinstance(i, ins.Send):
            sent.append(value)
        else:
            posted.add(value)
            self.awaited.setdefault(number, set()).add(value)
        while sent and sent[0] in posted:
            posted.discard(sent[0])
            self.awaited[target].discard(sent.popleft())

    def first_use(self, number: int, i: Instruction) -> dict[int, Instruction]:
        """The instruction that each end must have reached, where this one makes its channel; else nothing."""
        if not isinstance(i, ins.Send | ins.Recv) or self.made is None or _channel(number, i) in self.made:
            return {}
        other = ins.Recv if isinstance(i, ins.Send) else ins.Send
        return {number: i, i.peer: other(i.wire, i.unit, i.microbatch, number)}

    def missing(self, number: int, i: Instruction) -> Value | None:
        """The value that an instruction needs, posted and not yet delivered."""
        if not (awaited := self.awaited.get(number)):
            return None
        return next((value for value in self.needed(i) if value in awaited), None)
