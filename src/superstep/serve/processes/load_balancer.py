"""Load balancer over several engines of one model: each request goes to the least busy one.

    handlers ──stream──► Replicas ──► Host 0, Host 1, ...       each with ranks of its own

The load of a replica is the number of tokens that its requests still have to compute. A prefix that it has recently
computed does not count: its pages may be cached. A lost replica ends its own streams; the others continue.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from superstep.errors import SuperstepError
from superstep.plan.config import DeviceKind
from superstep.serve.api.admin_backend import EngineGroup, OneOfSeveral
from superstep.serve.api.backend import Backend, Health
from superstep.serve.config import ServeConfig
from superstep.serve.processes.engine_client import EngineClient
from superstep.serve.processes.worker import Forms
from superstep.serve.scheduling.engine_messages import Command, EngineStatus
from superstep.serve.scheduling.request import Counters, ModelInfo, RequestUpdate, Sampling

DEPTHS = (1024, 256, 64, 16)
"""Lengths of the prefixes by which prompts are matched."""

KNOWN = 8192
"""Remembered prefixes of all replicas together."""


class Replica(Backend, OneOfSeveral, Protocol):
    """A backend that can be started and closed."""

    def begin(self) -> None: ...
    def open(self) -> ModelInfo:
        """Wait until it is ready."""

    def close(self) -> None: ...
    @property
    def failure(self) -> SuperstepError | None:
        """Why it will not be ready again; None otherwise."""


class LoadBalancer:
    """A ``Backend`` of several.

    Args:
        members: at least one; all of one model.
    """

    def __init__(self, members: Sequence[Replica]) -> None:
        self._members = list(members)
        self._left = [0] * len(self._members)
        self._prefixes: OrderedDict[bytes, int] = OrderedDict()
        self._together = EngineGroup(self._members)

    # From the thread that opens and closes it.

    def open(self) -> ModelInfo:
        """Start all at once.

        Raises:
            SuperstepError: the first failure. None is left then.
        """
        for member in self._members:
            member.begin()
        try:
            for member in self._members:
                member.open()
        except SuperstepError:
            self.close()
            raise
        return self.info

    @property
    def failure(self) -> SuperstepError | None:
        """The first member's failure, if all have failed."""
        failures = [member.failure for member in self._members]
        return failures[0] if all(failures) else None

    def close(self) -> None:
        """Close all."""
        with ThreadPoolExecutor(len(self._members)) as pool:
            list(pool.map(lambda member: member.close(), self._members))

    # From the event loop.

    @property
    def info(self) -> ModelInfo:
        """Of the first member that is ready."""
        return next((one for one in self._members if one.health().is_ready), self._members[0]).info

    @property
    def adapters(self) -> Sequence[str]:
        """Adapters of all replicas."""
        first, *others = self._members
        return [name for name in first.adapters if all(name in other.adapters for other in others)]

    async def stream(
        self, prompt: tuple[int, ...], sampling: Sampling, *, priority: int = 0, adapter: str = "", salt: str = ""
    ) -> AsyncGenerator[RequestUpdate, None]:
        """The updates of one request, from the least busy replica; see ``Backend``."""
        with self._assign(prompt, sampling, adapter, salt) as (member, came):
            stream = member.stream(prompt, sampling, priority=priority, adapter=adapter, salt=salt)
            async with aclosing(stream) as news:
                async for one in news:
                    came(one)
                    yield one

    async def hear(
        self,
        prompt: tuple[int, ...],
        sampling: Sampling,
        heard: Callable[[RequestUpdate], bool],
        *,
        priority: int = 0,
        adapter: str = "",
        salt: str = "",
    ) -> None:
        """The same with a callback; see ``Backend``."""
        with self._assign(prompt, sampling, adapter, salt) as (member, came):

            def take_update(news: RequestUpdate) -> bool:
                came(news)
                return heard(news)

            await member.hear(prompt, sampling, take_update, priority=priority, adapter=adapter, salt=salt)

    @contextmanager
    def _assign(
        self, prompt: tuple[int, ...], sampling: Sampling, adapter: str, salt: str
    ) -> Iterator[tuple[Replica, Callable[[RequestUpdate], None]]]:
        """A request's replica, and the function that subtracts its progress."""
        keys = list(_keys(prompt, adapter, salt))
        number, cached = self._choose(keys)
        for _, key in keys:
            self._prefixes[key] = number
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > KNOWN:
            self._prefixes.popitem(last=False)
        most = min(sampling.max_tokens, max(1, self.info.context_tokens - len(prompt)))
        left = len(prompt) - cached + most
        self._left[number] += left

        def came(news: RequestUpdate) -> None:
            nonlocal left
            done = min(left, len(news.tokens) + (left - most if news.tokens and left > most else 0))
            self._left[number] -= done
            left -= done

        try:
            yield self._members[number], came
        finally:
            self._left[number] -= left

    def abort(self) -> int:
        """Abort all requests."""
        return sum(member.abort() for member in self._members)

    def health(self) -> Health:
        """Ready while one is; the state gives their number, and whether their weights differ."""
        states = [member.health() for member in self._members]
        ready = sum(one.is_ready for one in states)
        if ready == len(states):
            versions = [member.info.version for member in self._members]
            return states[0] if len(set(versions)) == 1 else replace(states[0], state=f"ready, weights {versions}")
        state = next(one.state for one in states if not one.is_ready)
        return Health(is_ready=ready > 0, state=f"{ready} of {len(states)} ready, others {state}" if ready else state)

    def counters(self) -> Counters:
        """The sums over all."""
        counts = [member.counters() for member in self._members]
        return Counters(**{field.name: sum(getattr(one, field.name) for one in counts) for field in fields(Counters)})

    @property
    def standing(self) -> EngineStatus:
        """Of all together; see ``EngineGroup``."""
        return self._together.standing

    async def do(self, command: Command) -> EngineStatus:
        """Run a command on all or none; see ``EngineGroup``."""
        return await self._together.do(command)

    def _choose(self, keys: Sequence[tuple[int, bytes]]) -> tuple[int, int]:
        """The least busy replica, and the tokens of the prompt that it may have cached."""
        ready = [n for n, member in enumerate(self._members) if member.health().is_ready]
        known = next(((self._prefixes[key], depth) for depth, key in keys if key in self._prefixes), None)

        def load(number: int) -> tuple[int, int]:
            spared = known[1] if known is not None and known[0] == number else 0
            return self._left[number] - spared, number

        best = min(ready or range(len(self._members)), key=load)
        return best, known[1] if known is not None and known[0] == best else 0


def _keys(prompt: tuple[int, ...], adapter: str, salt: str) -> Iterator[tuple[int, bytes]]:
    """The prefixes of a prompt, the longest first."""
    for depth in DEPTHS:
        if len(prompt) > depth:
            text = f"{len(adapter)} {adapter} {len(salt)} {salt} ".encode() + array("q", prompt[:depth]).tobytes()
            yield depth, hashlib.sha256(text).digest()


def replicas_of(
    folder: Path,
    serve: ServeConfig,
    *,
    device: DeviceKind,
    name: str,
    forms: Forms | None,
    tell: Callable[[str], None],
) -> EngineClient | LoadBalancer:
    """The engines of a server: one client, or a load balancer over ``serve.dp``."""
    if serve.dp == 1:
        return EngineClient(folder, serve, device=device, name=name, forms=forms, tell=tell)
    return LoadBalancer(
        [
            EngineClient(
                folder,
                replace(serve, replay=_number_path(serve.replay, number)),
                device=device,
                name=name,
                forms=forms,
                tell=partial(_tell, tell, number),
                first=number * serve.tp,
            )
            for number in range(serve.dp)
        ]
    )


def _tell(tell: Callable[[str], None], number: int, line: str) -> None:
    tell(f"replica {number}: {line}")


def _number_path(path: Path | None, number: int) -> Path | None:
    return None if path is None else path.with_name(f"{path.stem}-{number}{path.suffix}")
