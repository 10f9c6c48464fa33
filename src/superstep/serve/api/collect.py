"""An answer as one piece, for who does not want it as a stream, and the sums of tokens of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from superstep.serve.api.app_state import AppState
from superstep.serve.api.generation import AnswerRequest, AnswerUpdate, hear
from superstep.serve.scheduling.request import Finish, TokenOutput


class Usage:
    """Counts as news comes. A prompt counts once, however many answers it has."""

    def __init__(self, asks: Sequence[AnswerRequest], choices: int) -> None:
        self._firsts = {ask.index for ask in asks[::choices]}
        self.prompt = sum(len(ask.prompt) for ask in asks[::choices])
        self.completion = 0
        self.cached = 0

    def add(self, news: AnswerUpdate) -> None:
        """Counts what came."""
        self.completion += len(news.tokens)
        if news.index in self._firsts:
            self.cached += news.cached_tokens

    def told(self) -> dict[str, Any]:
        """As OpenAI tells it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(slots=True)
class Whole:
    """What came of one answer so far; mutated by ``add``.

    Attributes:
        texts: the pieces of its text.
        tokens: those drawn.
        prompt: what was told of its prompt.
        finish: why it ended.
        stop: the text or the named token that ended it.
        cached_tokens: of its prompt, those that were known.
    """

    texts: list[str] = field(default_factory=list)
    tokens: list[TokenOutput] = field(default_factory=list)
    prompt: tuple[TokenOutput, ...] = ()
    finish: Finish = "abort"
    stop: str | int | None = None
    cached_tokens: int = 0

    def add(self, news: AnswerUpdate) -> None:
        """The next news."""
        self.texts.append(news.text)
        self.tokens += news.tokens
        self.prompt = self.prompt or news.prompt
        self.finish = news.finish or self.finish
        self.stop = news.stop
        self.cached_tokens = self.cached_tokens or news.cached_tokens

    def news(self, index: int) -> AnswerUpdate:
        """All of it as one piece of news."""
        return AnswerUpdate(
            index=index,
            text=self.text,
            tokens=tuple(self.tokens),
            prompt=self.prompt,
            finish=self.finish,
            stop=self.stop,
            cached_tokens=self.cached_tokens,
        )

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)


async def collect(asks: Sequence[AnswerRequest], service: AppState, usage: Usage) -> list[Whole]:
    """All answers, in their order, once the last of them has ended.

    Args:
        asks: what is asked for.
        service: who is asked.
        usage: mutated.
    """
    answers = [Whole() for _ in asks]

    def keep(news: AnswerUpdate) -> None:
        usage.add(news)
        answers[news.index].add(news)

    with service.queue.place(len(asks)):
        tasks = [asyncio.ensure_future(hear(ask, service, keep)) for ask in asks]
        try:
            await asyncio.gather(*tasks)
        finally:  # one that fails takes the others back
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return answers
