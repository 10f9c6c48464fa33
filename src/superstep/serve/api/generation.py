"""From requests to updates: each answer is read from the backend, decoded to text, and counted."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from starlette.responses import Response

from superstep.http.request_error import RequestError
from superstep.serve.api.app_state import AppState
from superstep.serve.api.backend import BackendAway
from superstep.serve.api.text_protocol import AnswerTextReader
from superstep.serve.scheduling.request import (
    Finish,
    Request,
    RequestUpdate,
    Sampling,
    TokenOutput,
    check_request,
    cut_text,
)

SEEDS = 1 << 64
"""Seeds are below this; OpenAI's may be negative and are taken modulo this."""

NO_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have and OpenAI's client would not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """One requested answer.

    Attributes:
        index: among the answers of its request.
        prompt: token ids.
        stop: texts that end it.
        priority: smaller ones go first.
        salt: of the prefix cache.
        shows_special: whether special tokens appear in the text.
        has_text: whether it has text; if not, ``stop`` is empty.
    """

    index: int
    prompt: tuple[int, ...]
    sampling: Sampling
    stop: tuple[str, ...] = ()
    priority: int = 0
    adapter: str = ""
    salt: str = ""
    shows_special: bool = False
    has_text: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerUpdate:
    """An update of one answer.

    Attributes:
        text: that is certain now; it may lag behind the tokens.
        tokens: sampled since the last update, with those that ended the answer.
        prompt: outputs for the prompt, in the first update.
        finish: why it ended; None while it goes on.
        stop: the text, or the token named by the client, that ended it.
        cached_tokens: cached prompt tokens, in the first update.
    """

    index: int
    text: str = ""
    tokens: tuple[TokenOutput, ...] = ()
    prompt: tuple[TokenOutput, ...] = ()
    finish: Finish | None = None
    stop: str | int | None = None
    cached_tokens: int = 0


def check_choices(count: int, prompts: int, service: AppState) -> None:
    """Refuse more answers than one request may have: ``count`` to each prompt."""
    most = service.limits.choices
    if prompts * count > most:
        raise RequestError(
            f"n = {count} answers to {prompts} prompts are over the limit of {most}; ask for fewer.", param="n"
        )


def choices_of(first: AnswerRequest, count: int, prompts: int, service: AppState) -> list[AnswerRequest]:
    """Several answers to one prompt, each with its own seed, if an engine can give them.

    The seeds do not depend on other prompts. Numbers above the maximum mean the maximum.

    Args:
        count: of the answers.
        prompts: of the whole request.

    Raises:
        ConfigError: no engine could; names field, value and rule.
        RequestError: they are too many.
    """
    info = service.backend.info
    check_choices(count, prompts, service)
    request = Request(id=0, prompt=first.prompt, sampling=first.sampling)
    check_request(request, vocab=info.vocab, context_tokens=info.context_tokens)
    sampling = first.sampling
    fitting = replace(
        sampling,
        max_tokens=min(sampling.max_tokens, info.context_tokens - len(first.prompt)),
        top_k=sampling.top_k if sampling.top_k < info.vocab else 0,
        top_logprobs=min(sampling.top_logprobs, info.vocab),
    )
    return [
        replace(
            first, index=first.index + choice, sampling=replace(fitting, seed=seed_of_choice(sampling.seed, choice))
        )
        for choice in range(count)
    ]


def warn_of_cut(response: Response, wanted: int | None, asks: Sequence[AnswerRequest]) -> Response:
    """Add a ``Warning`` (RFC 7234, 5.5) where the context has no room for the wanted tokens."""
    fitting = min(ask.sampling.max_tokens for ask in asks)
    if (cut := cut_text("max_tokens", wanted, fitting)) is not None:
        response.headers["Warning"] = f'299 - "{cut}"'
    return response


async def answers(asks: Sequence[AnswerRequest], service: AppState) -> AsyncGenerator[AnswerUpdate, None]:
    """The updates of some answers as they come. Closing it, or the failure of one, aborts all.

    Raises:
        RequestError: there is no place in the queue.
        SuperstepError: from the backend.
    """
    with service.queue.place(len(asks)):
        if len(asks) == 1:
            async with aclosing(answer(asks[0], service)) as only:
                async for news in only:
                    yield news
        else:
            async with aclosing(_merge(asks, service)) as all_of_them:
                async for news in all_of_them:
                    yield news


async def _merge(asks: Sequence[AnswerRequest], service: AppState) -> AsyncGenerator[AnswerUpdate, None]:
    came: asyncio.Queue[AnswerUpdate | asyncio.Task[None]] = asyncio.Queue()  # as long as the answers at most

    async def pump(ask: AnswerRequest) -> None:
        async with aclosing(answer(ask, service)) as stream:
            async for news in stream:
                came.put_nowait(news)

    tasks = [asyncio.create_task(pump(ask)) for ask in asks]
    for task in tasks:
        task.add_done_callback(came.put_nowait)
    try:
        left = len(tasks)
        while left:
            match await came.get():
                case AnswerUpdate() as news:
                    yield news
                case asyncio.Task() as done:
                    done.result()  # raises what the answer ended with
                    left -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def answer(ask: AnswerRequest, service: AppState) -> AsyncGenerator[AnswerUpdate, None]:
    """The updates of one answer; the last one has a ``finish``."""
    following = AnswerFollower(ask, service)
    stream = service.backend.stream(ask.prompt, ask.sampling, priority=ask.priority, adapter=ask.adapter, salt=ask.salt)
    try:
        async with aclosing(stream):
            async for progress in stream:
                news = following.read(progress)
                yield news
                if news.finish is not None:
                    return
        raise BackendAway("the engine ended an answer without a word; ask again.")
    finally:
        following.end()


async def hear(ask: AnswerRequest, service: AppState, keep: Callable[[AnswerUpdate], None]) -> None:
    """The same, passing each update on as it comes: no task wakes up before the last one."""
    following = AnswerFollower(ask, service)

    def take_progress(progress: RequestUpdate) -> bool:
        news = following.read(progress)
        keep(news)
        return news.finish is not None

    try:
        await service.backend.hear(
            ask.prompt, ask.sampling, take_progress, priority=ask.priority, adapter=ask.adapter, salt=ask.salt
        )
    finally:
        following.end()


class AnswerFollower:
    """Reads one answer's updates from the engine, and counts them."""

    def __init__(self, ask: AnswerRequest, service: AppState) -> None:
        self._index = ask.index
        self._service = service
        self._reader = service.words.reader(ask.stop, shows_special=ask.shows_special) if ask.has_text else None
        self._named = frozenset(ask.sampling.stop_tokens)
        own = frozenset() if ask.sampling.ignore_eos else frozenset(service.backend.info.end_of_text)
        self._ends = self._named | own
        self._watch, self._ended = service.metrics.watch(len(ask.prompt)), "abort"

    def read(self, progress: RequestUpdate) -> AnswerUpdate:
        """Read the next update."""
        if self._reader is None:
            news = silently(progress, index=self._index, named=self._named)
        else:
            news = read(progress, self._reader, index=self._index, ends=self._ends, named=self._named)
        self._watch.drew(len(news.tokens))
        self._ended = news.finish or self._ended
        return news

    def end(self) -> None:
        """End: nothing more comes, or nobody wants it."""
        self._service.queue.note(self._watch.end(self._ended))


def silently(progress: RequestUpdate, *, index: int, named: frozenset[int]) -> AnswerUpdate:
    """One update of the engine, without text."""
    stop = progress.tokens[-1].token if progress.tokens and progress.finish == "stop" else None
    return AnswerUpdate(
        index=index,
        tokens=progress.tokens,
        prompt=progress.prompt,
        finish=progress.finish,
        stop=stop if stop in named else None,
        cached_tokens=progress.cached_tokens,
    )


def read(
    progress: RequestUpdate, reader: AnswerTextReader, *, index: int, ends: frozenset[int], named: frozenset[int]
) -> AnswerUpdate:
    """One update of the engine, with text, which ends before a stop text.

    Args:
        reader: of the answer; changed.
        ends: tokens that end an answer, and have no text there.
        named: those that the client named.
    """
    finish = progress.finish
    stop: str | int | None = None
    text: list[str] = []
    last = len(progress.tokens) - 1
    taken = 0
    for place, output in enumerate(progress.tokens):
        taken += 1
        if place == last and finish == "stop" and output.token in ends:
            stop = output.token if output.token in named else None
            break
        text.append(reader.push(output.token))
        if reader.stop is not None:
            break
    if finish is not None and reader.stop is None:
        text.append(reader.end())
    if reader.stop is not None:
        finish, stop = "stop", reader.stop
    return AnswerUpdate(
        index=index,
        text="".join(text),
        tokens=progress.tokens[:taken],
        prompt=progress.prompt,
        finish=finish,
        stop=stop,
        cached_tokens=progress.cached_tokens,
    )


def draw_seed() -> int:
    """A random seed for a request without one."""
    return random.SystemRandom().getrandbits(64)


def seed_of_choice(seed: int, choice: int) -> int:
    """The seed of one of ``n`` answers: the first has the request's own, so it equals the answer for ``n = 1``."""
    if not choice:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {choice}".encode()).digest()[:8], "little")


def finite(logprob: float) -> float:
    """A log-probability for JSON."""
    return logprob if math.isfinite(logprob) else NO_LOGPROB
