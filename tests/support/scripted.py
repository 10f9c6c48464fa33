"""A backend that answers what a test tells it to, so that every field of a response can be asserted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from superstep.serve.api.backend import BackendAway, BackendBusy, Health
from superstep.serve.scheduling.request import (
    Counters,
    Finish,
    ModelInfo,
    Request,
    RequestUpdate,
    Sampling,
    TokenOutput,
)

Script = Callable[[Request], Sequence[int]]


def logprob_of(token: int) -> float:
    """Of a drawn token; the one drawn from is twice that."""
    return -0.125 * (1 + token % 7)


def told_of(token: int, sampling: Sampling, version: str) -> TokenOutput:
    """A token, with as many likeliest ones as were asked for: itself, then those after it."""
    top = tuple((token + rank, logprob_of(token) - rank) for rank in range(sampling.top_logprobs))
    return TokenOutput(
        token=token,
        logprob=logprob_of(token),
        drawn_logprob=2 * logprob_of(token),
        kept=sampling.top_k,
        top=top,
        version=version,
    )


@dataclass
class Scripted:
    """Answers each request with the tokens that its script gives, cut at ``max_tokens``.

    Attributes:
        info: of the model.
        script: the tokens of an answer; without its end, which is added where there is room.
        adapters: that can be asked for.
        at_once: tokens in each piece of news.
        gate: waited for before each piece.
        fails_after: pieces after which the engine is lost.
        is_full: whether nothing is taken.
        is_ready: whether it is healthy.
        asked: requests that were taken, in their order.
        ended: the numbers of those that ended or were taken back, and how.
        live: requests that are being answered.
    """

    info: ModelInfo
    script: Script
    adapters: tuple[str, ...] = ()
    at_once: int = 1
    gate: asyncio.Event | None = None
    fails_after: int | None = None
    is_full: bool = False
    is_ready: bool = True
    asked: list[Request] = field(default_factory=list)
    ended: dict[int, str] = field(default_factory=dict)
    live: int = 0
    streams: list[AsyncGenerator[RequestUpdate, None]] = field(default_factory=list)

    def stream(
        self, prompt: tuple[int, ...], sampling: Sampling, *, priority: int = 0, adapter: str = "", salt: str = ""
    ) -> AsyncGenerator[RequestUpdate, None]:
        """The script's tokens. It is kept: who does not close it leaves it open, and no collector of garbage helps."""
        request = Request(
            id=len(self.streams), prompt=prompt, sampling=sampling, priority=priority, adapter=adapter, salt=salt
        )
        self.streams.append(self._stream(request))
        return self.streams[-1]

    async def _stream(self, request: Request) -> AsyncGenerator[RequestUpdate, None]:
        if self.is_full:
            raise BackendBusy("the engine's queue is full; ask again.", retry_after_s=7.0)
        self.asked.append(request)
        self.live += 1
        try:
            for place, news in enumerate(self._pieces(request)):
                await self._wait()
                if place == self.fails_after:
                    raise BackendAway("the engine was lost; ask again.")
                yield news
            self.ended[request.id] = "finished"
        finally:
            self.live -= 1
            self.ended.setdefault(request.id, "taken back")

    async def _wait(self) -> None:
        if self.gate is not None:
            await self.gate.wait()
        else:
            await asyncio.sleep(0)

    async def hear(
        self, prompt: tuple[int, ...], sampling: Sampling, heard: Callable[[RequestUpdate], bool], **rest: Any
    ) -> None:
        """The same, handed over."""
        stream = self.stream(prompt, sampling, **rest)
        async with aclosing(stream):
            async for news in stream:
                if heard(news):
                    return

    def _pieces(self, request: Request) -> Iterator[RequestUpdate]:
        sampling = request.sampling
        ends = set(sampling.stop_tokens) | (set() if sampling.ignore_eos else set(self.info.end_of_text))
        tokens = [*self.script(request), *self.info.end_of_text]
        stop = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens) + 1)
        finish: Finish = "stop" if stop <= sampling.max_tokens else "length"
        drawn = [told_of(token, sampling, self.info.version) for token in tokens[: min(stop, sampling.max_tokens)]]
        prompt = tuple(told_of(token, sampling, self.info.version) for token in request.prompt[1:])
        for first in range(0, len(drawn), self.at_once):
            last = first + self.at_once >= len(drawn)
            yield RequestUpdate(
                request=request.id,
                prompt=prompt if sampling.prompt_logprobs and not first else (),
                tokens=tuple(drawn[first : first + self.at_once]),
                finish=finish if last else None,
                cached_tokens=0 if first else len(request.prompt) // 2,
            )

    def abort(self) -> int:
        """Nothing that a test needs."""
        return self.live

    def health(self) -> Health:
        """As the test says."""
        return Health(is_ready=self.is_ready, state="ready" if self.is_ready else "starting")

    def counters(self) -> Counters:
        """Numbers that differ from each other."""
        return Counters(
            running=self.live,
            waiting=3,
            pages=40,
            used_pages=10,
            preemptions=5,
            prefix_queried_tokens=64,
            prefix_hit_tokens=32,
        )
