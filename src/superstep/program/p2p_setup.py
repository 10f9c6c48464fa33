"""Channels between pipeline ranks, and what becomes of a program where they are made only at their first use.

NCCL makes what a channel needs when it is first used, and that use keeps its host until the other end has come to its
own. Programs list sends and receives where it suits their computes, so that first uses cross. With gpipe, pp=2, m=2:

    rank 0    send act m0    recv grad m0    forward m1     send act m1
    rank 1    recv act m0    recv act m1     forward m1     backward m0    send grad m0

Rank 0 would stay at its second instruction until rank 1 sends a gradient. Rank 1's host comes that far without the m1
that rank 0 sends behind it, unless it waits for its GPU on the way. So ``comm.mesh`` makes every channel of ``routes``
ahead, and ``compile`` has ``check_first_uses`` refuse a program whose other channels would cross.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from itertools import pairwise

from superstep.plan.resolution.resolve import Plan
from superstep.program.instructions import Program, Recv, Send
from superstep.program.issue_order import Channel, issue_order


def routes(placement: Sequence[int], encoders: Collection[int] = ()) -> list[Channel]:
    """The channels (from, to, wire) between pipeline ranks: activations forward to the next stage, gradients back.

    All ranks make them in this order.

    Args:
        placement: the pipeline rank of each stage.
        encoders: the pipeline ranks that compute the first stage, where they are several.
    """
    channels: dict[Channel, None] = {}
    for here, there in [*pairwise(placement), *((rank, placement[1]) for rank in encoders)]:
        if here != there:
            channels |= {(here, there, "act"): None, (there, here, "grad"): None}
    return list(channels)


def find_tied_places(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The sets of pipeline ranks that share parameters: of the embedding and a tied head where they differ, and
    of an encoder that all hold."""
    readers: dict[int, set[int]] = {}
    for rank in range(plan.mesh.pp):
        for unit in plan.list_units_of(rank):
            for owner in plan.params[unit]:
                readers.setdefault(owner, set()).add(rank)
    return tuple(sorted({tuple(sorted(ranks)) for ranks in readers.values() if len(ranks) > 1}))


def uses(program: Program) -> set[Channel]:
    """The channels that the program sends or receives on."""
    channels: set[Channel] = set()
    for number, instructions in enumerate(program.ranks):
        for i in instructions:
            match i:
                case Send(wire=wire, peer=peer):
                    channels.add((number, peer, wire))
                case Recv(wire=wire, peer=peer):
                    channels.add((peer, number, wire))
    return channels


def check_first_uses(program: Program, made: Collection[Channel]) -> Program:
    """The same program, if no first use of a channel keeps a rank for ever.

    A compute counts as one that its host waits for, as it does where it reads the sizes of experts, and where CUDA's
    queue of launches is full: 1,024 of them, which a stage of some twenty blocks makes in one pass. NCCL itself
    lets more programs through: those whose hosts never wait for what they receive.

    Args:
        program: with its transfers.
        made: the channels that are there before the first step; any other is made at its first use, at which each of
            its ranks waits for the other.

    Raises:
        InvalidProgram: saying which first uses cross.
    """
    if not uses(program) <= set(made):
        deque(issue_order(program, made=made), maxlen=0)
    return program
