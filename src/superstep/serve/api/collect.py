"""An answer as one piece, for who does not want it as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from superstep.serve.api.app_state import AppState
from superstep.serve.api.generation import AnswerRequest, AnswerUpdate, hear
from superstep.serve.api.usage import Usage
from superstep.serve.scheduling.request import Finish, TokenOutput


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
    found = [Whole() for _ in asks]

    def keep(news: AnswerUpdate) -> None:
        usage.add(news)
        found[news.index].add(news)

    with service.queue.place(len(asks)):
        tasks = [asyncio.ensure_future(hear(ask, service, keep)) for ask in asks]
        try:
            await asyncio.gather(*tasks)
        finally:  # one that fails takes the others back
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return found
