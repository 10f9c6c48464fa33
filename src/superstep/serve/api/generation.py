"""From requests to news: each answer is pulled from the backend, read as text, and watched; many become one stream."""

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
from superstep.serve.api.backend import Away
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
"""Seeds are below this; OpenAI's, which may be below zero, have the bits of one above."""

NO_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say and OpenAI's client would not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """One answer that is asked for.

    Attributes:
        index: among the answers of its request.
        prompt: token ids.
        sampling: how to draw.
        stop: texts that end it.
        priority: smaller ones go first.
        adapter: to answer with.
        salt: of what is cached.
        shows_special: whether special tokens are spelt out in the text.
        has_text: whether its text is told; if not, ``stop`` is empty.
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
    """What is new of one answer.

    Attributes:
        index: of the answer.
        text: that is certain now; it may lag behind the tokens.
        tokens: drawn since the last news, those that ended the answer among them.
        prompt: what is told of the prompt, with the first news.
        finish: why it ended; None while it goes on.
        stop: the text, or the token that the client had named, that ended it.
        cached_tokens: of the prompt, those that were known; with the first news.
    """

    index: int
    text: str = ""
    tokens: tuple[TokenOutput, ...] = ()
    prompt: tuple[TokenOutput, ...] = ()
    finish: Finish | None = None
    stop: str | int | None = None
    cached_tokens: int = 0


def check_choices(count: int, prompts: int, service: AppState) -> None:
    """Refuse more answers than one request may ask for: ``count`` to each prompt."""
    most = service.limits.choices
    if prompts * count > most:
        raise RequestError(
            f"n = {count} answers to {prompts} prompts are over the limit of {most}; ask for fewer.", param="n"
        )


def choices_of(first: AnswerRequest, count: int, prompts: int, service: AppState) -> list[AnswerRequest]:
    """Some answers to one prompt, each with a seed of its own, if the engine could give them.

    The seeds do not depend on the prompts beside it. Numbers that ask for more than there is ask for all.

    Args:
        first: of the answers.
        count: of the answers.
        prompts: of the whole request.
        service: whose limits hold.

    Raises:
        ConfigError: no engine could; the backend never sees it. Names field, value and rule.
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
    """The response, with a ``Warning`` (RFC 7234, 5.5) where the context has no room for so many tokens."""
    fitting = min(ask.sampling.max_tokens for ask in asks)
    if (cut := cut_text("max_tokens", wanted, fitting)) is not None:
        response.headers["Warning"] = f'299 - "{cut}"'
    return response


async def answers(asks: Sequence[AnswerRequest], service: AppState) -> AsyncGenerator[AnswerUpdate, None]:
    """The news of some answers as they come. Closing it takes all of them back, as does the failure of one.

    Raises:
        RequestError: there is no place in the queue.
        SuperstepError: what the backend raised.
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
    """The news of one answer, the last of which has a ``finish``."""
    following = Following(ask, service)
    stream = service.backend.stream(ask.prompt, ask.sampling, priority=ask.priority, adapter=ask.adapter, salt=ask.salt)
    try:
        async with aclosing(stream):
            async for progress in stream:
                news = following.read(progress)
                yield news
                if news.finish is not None:
                    return
        raise Away("the engine ended an answer without a word; ask again.")
    finally:
        following.end()


async def hear(ask: AnswerRequest, service: AppState, keep: Callable[[AnswerUpdate], None]) -> None:
    """The same, each piece handed over as it comes: nobody is woken before the last one."""
    following = Following(ask, service)

    def heard(progress: RequestUpdate) -> bool:
        news = following.read(progress)
        keep(news)
        return news.finish is not None

    try:
        await service.backend.hear(
            ask.prompt, ask.sampling, heard, priority=ask.priority, adapter=ask.adapter, salt=ask.salt
        )
    finally:
        following.end()


class Following:
    """Reads the engine's news of one answer, and counts what comes."""

    def __init__(self, ask: AnswerRequest, service: AppState) -> None:
        self._index = ask.index
        self._service = service
        self._reader = service.words.reader(ask.stop, shows_special=ask.shows_special) if ask.has_text else None
        self._named = frozenset(ask.sampling.stop_tokens)
        own = frozenset() if ask.sampling.ignore_eos else frozenset(service.backend.info.end_of_text)
        self._ends = self._named | own
        self._watch, self._ended = service.metrics.watch(len(ask.prompt)), "abort"

    def read(self, progress: RequestUpdate) -> AnswerUpdate:
        """The next piece."""
        if self._reader is None:
            news = silently(progress, index=self._index, named=self._named)
        else:
            news = read(progress, self._reader, index=self._index, ends=self._ends, named=self._named)
        self._watch.drew(len(news.tokens))
        self._ended = news.finish or self._ended
        return news

    def end(self) -> None:
        """There is no more of it, or nobody wants more."""
        self._service.queue.note(self._watch.end(self._ended))


def silently(progress: RequestUpdate, *, index: int, named: frozenset[int]) -> AnswerUpdate:
    """One piece of the engine's news without its text."""
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
    """One piece of the engine's news, with its text. Nothing is told of what follows a stop text.

    Args:
        progress: the engine's news.
        reader: of the answer; mutated.
        index: of the answer.
        ends: tokens that end an answer: such a token at its end has no text.
        named: those of them that the client named.
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


def drawn_seed() -> int:
    """A seed for a request that has none: another one each time."""
    return random.SystemRandom().getrandbits(64)


def seed_of_choice(seed: int, choice: int) -> int:
    """The seed of one of ``n`` answers: the first has the request's own, so that it is what ``n = 1`` gives."""
    if not choice:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {choice}".encode()).digest()[:8], "little")


def finite(logprob: float) -> float:
    """A log-probability that JSON can say."""
    return logprob if math.isfinite(logprob) else NO_LOGPROB
