"""The sums of tokens of one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from superstep.serve.api.generation import AnswerRequest, AnswerUpdate


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
