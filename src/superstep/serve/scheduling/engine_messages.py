"""Messages between the HTTP server's process and rank 0 of the engine."""

from __future__ import annotations

from typing import Literal

import msgspec

from superstep.comm.codec import Codec
from superstep.serve.scheduling.request import AdapterInfo, Counters, ModelInfo, Request, RequestUpdate

Requests = Literal["recompute", "keep", "wait", "abort"]
PauseMode = Literal["abort", "wait", "keep"]


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """To the engine: a new request."""

    request: Request


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """To the engine: abort requests."""

    requests: tuple[int, ...]


class EndEngine(msgspec.Struct, frozen=True, tag=True):
    """To the engine: stop."""


class ChangeWeights(msgspec.Struct, frozen=True, tag=True):
    """Command: update the weights.

    Attributes:
        path: of a snapshot, a checkpoint, a Hugging Face folder or a safetensors file.
        requests: treatment of running requests. They are computed again (``recompute``), keep their keys (``keep``),
            are finished first (``wait``), or are aborted (``abort``).
    """

    path: str
    requests: Requests = "recompute"


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Command: compute nothing. Running requests keep their state (``keep``), are finished first (``wait``) or are
    aborted (``abort``).
    """

    mode: PauseMode = "keep"


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Command: end a pause."""


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Command: free the memory of the KV cache, and of the weights unless ``keeps_weights``."""

    keeps_weights: bool = False


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Command: allocate memory again, with the weights of a path or else the newest ones."""

    path: str | None = None


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Command: load an adapter, in place of one with the same name."""

    name: str
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Command: remove an adapter. Running requests keep it."""

    name: str


Command = ChangeWeights | Pause | Resume | Sleep | Wake | LoadAdapter | UnloadAdapter


class RunCommand(msgspec.Struct, frozen=True, tag=True):
    """To the engine: an administrator's command. ``CommandDone`` with the same number follows."""

    number: int
    command: Command


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state.

    Attributes:
        state: ``serving``; ``paused``, where requests wait; ``closed``, a pause that refuses requests; ``asleep``.
        version: of the weights.
        path: of the weights.
        changes: updates of the weights since the engine started.
        adapters: available ones.
    """

    state: Literal["serving", "paused", "closed", "asleep"] = "serving"
    version: str = ""
    path: str = ""
    changes: int = 0
    adapters: tuple[AdapterInfo, ...] = ()


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From the engine: it is ready."""

    info: ModelInfo
    adapters: tuple[AdapterInfo, ...] = ()


class StepOutput(msgspec.Struct, frozen=True, tag=True):
    """From the engine: results of a step."""

    progress: tuple[RequestUpdate, ...]
    counters: Counters


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    """From the engine: a request cannot be answered."""

    request: int
    why: str


class CommandDone(msgspec.Struct, frozen=True, tag=True):
    """From the engine: a command is done; or it failed without any effect, and ``why`` is the reason."""

    number: int
    standing: EngineStatus
    why: str = ""


Order = AddRequest | AbortRequests | EndEngine | RunCommand
Report = Ready | StepOutput | RequestRefused | CommandDone

ORDERS: Codec[Order] = Codec(Order)
REPORTS: Codec[Report] = Codec(Report)
