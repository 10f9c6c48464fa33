"""What the process of the HTTP interface and rank 0 of the engine say to each other."""

from __future__ import annotations

from typing import Literal

import msgspec

from superstep.comm.codec import Codec
from superstep.serve.scheduling.request import AdapterInfo, Counters, ModelInfo, Request, RequestUpdate

Requests = Literal["recompute", "keep", "wait", "abort"]
PauseMode = Literal["abort", "wait", "keep"]


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """To the engine: answer a request."""

    request: Request


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """To the engine: take some requests back."""

    requests: tuple[int, ...]


class EndEngine(msgspec.Struct, frozen=True, tag=True):
    """To the engine: end."""


class ChangeWeights(msgspec.Struct, frozen=True, tag=True):
    """To be done: answer with other weights.

    Attributes:
        path: of a snapshot, a checkpoint, a Hugging Face folder or a safetensors file.
        requests: what becomes of those under way. They begin again with the tokens they have (``recompute``), go on
            with the keys they have (``keep``), are answered before (``wait``), or are taken back (``abort``).
    """

    path: str
    requests: Requests = "recompute"


class Pause(msgspec.Struct, frozen=True, tag=True):
    """To be done: compute nothing. Requests under way stay where they are (``keep``), are answered first (``wait``)
    or are taken back (``abort``).
    """

    mode: PauseMode = "keep"


class Resume(msgspec.Struct, frozen=True, tag=True):
    """To be done: go on after a pause."""


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """To be done: give the memory of keys back, and that of the weights where they are not kept."""

    keeps_weights: bool = False


class Wake(msgspec.Struct, frozen=True, tag=True):
    """To be done: take the memory again, with the weights of a path or else the newest ones."""

    path: str | None = None


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """To be done: have an adapter to answer with, in the place of one of the same name."""

    name: str
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """To be done: have it no more. Requests under way keep it."""

    name: str


Command = ChangeWeights | Pause | Resume | Sleep | Wake | LoadAdapter | UnloadAdapter


class RunCommand(msgspec.Struct, frozen=True, tag=True):
    """To the engine: a deed of whoever runs the server. ``CommandDone`` of the same number follows."""

    number: int
    deed: Command


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine stands.

    Attributes:
        state: ``serving``; ``paused``, where requests wait; ``closed``, a pause in which none is taken; ``asleep``.
        version: of the weights.
        path: where they came from.
        changes: of weights since the engine started.
        adapters: that can be asked for.
    """

    state: Literal["serving", "paused", "closed", "asleep"] = "serving"
    version: str = ""
    path: str = ""
    changes: int = 0
    adapters: tuple[AdapterInfo, ...] = ()


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From the engine: it answers from now on."""

    info: ModelInfo
    adapters: tuple[AdapterInfo, ...] = ()


class StepOutput(msgspec.Struct, frozen=True, tag=True):
    """From the engine: what a step brought."""

    progress: tuple[RequestUpdate, ...]
    counters: Counters


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    """From the engine: a request cannot be answered."""

    request: int
    why: str


class CommandDone(msgspec.Struct, frozen=True, tag=True):
    """From the engine: a deed is done, or cannot be; then nothing has changed, and ``why`` says why."""

    number: int
    standing: EngineStatus
    why: str = ""


Order = AddRequest | AbortRequests | EndEngine | RunCommand
Report = Ready | StepOutput | RequestRefused | CommandDone

ORDERS: Codec[Order] = Codec(Order)
REPORTS: Codec[Report] = Codec(Report)
