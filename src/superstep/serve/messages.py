"""What the process of the HTTP interface and rank 0 of the engine say to each other, as MessagePack.

No pickle: a message of one can do nothing to the other but be one of these.
"""

from __future__ import annotations

import msgspec

from superstep.serve.request import Counters, Info, Progress, Request


class Ask(msgspec.Struct, frozen=True, tag=True):
    """To the engine: answer a request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """To the engine: take some requests back."""

    requests: tuple[int, ...]


class Leave(msgspec.Struct, frozen=True, tag=True):
    """To the engine: end."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From the engine: it answers from now on."""

    info: Info


class News(msgspec.Struct, frozen=True, tag=True):
    """From the engine: what a step brought."""

    progress: tuple[Progress, ...]
    counters: Counters


class Refused(msgspec.Struct, frozen=True, tag=True):
    """From the engine: a request cannot be answered."""

    request: int
    why: str


Order = Ask | Abort | Leave
Report = Ready | News | Refused

encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
