"""An answer as one piece, for clients that do not stream, and the token counts of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from superstep.serve.api.app_state import AppState
from superstep.serve.api.generation import AnswerRequest, AnswerUpdate, hear
from superstep.serve.scheduling.request import Finish, TokenOutput


class Usage:
    """Counts tokens as updates come. A prompt counts once, for any number of answers."""

    def __init__(self, asks: Sequence[AnswerRequest], choices: int) -> None:
        self._firsts = {ask.index for ask in asks[::choices]}
        self.prompt = sum(len(ask.prompt) for ask in asks[::choices])
        self.completion = 0
        self.cached = 0

    def add(self, news: AnswerUpdate) -> None:
        self.completion += len(news.tokens)
        if news.index in self._firsts:
            self.cached += news.cached_tokens

    def to_json(self) -> dict[str, Any]:
        """In OpenAI's form."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(slots=True)
class CollectedAnswer:
    """One answer so far; ``add`` changes it.

    Attributes:
        texts: the pieces of its text.
        tokens: the sampled ones.
        prompt: outputs for the prompt.
        stop: the text or the named token that ended it.
        cached_tokens: prompt tokens that were cached.
    """

    texts: list[str] = field(default_factory=list)
    tokens: list[TokenOutput] = field(default_factory=list)
    prompt: tuple[TokenOutput, ...] = ()
    finish: Finish = "abort"
    stop: str | int | None = None
    cached_tokens: int = 0

    def add(self, news: AnswerUpdate) -> None:
        self.texts.append(news.text)
        self.tokens += news.tokens
        self.prompt = self.prompt or news.prompt
        self.finish = news.finish or self.finish
        self.stop = news.stop
        self.cached_tokens = self.cached_tokens or news.cached_tokens

    def news(self, index: int) -> AnswerUpdate:
        """All of it as one update."""
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
        return "".join(self.texts)


async def collect(asks: Sequence[AnswerRequest], service: AppState, usage: Usage) -> list[CollectedAnswer]:
    """All answers, in order, once the last one has ended; changes ``usage``."""
    answers = [CollectedAnswer() for _ in asks]

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
