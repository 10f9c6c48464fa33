"""A small server with a scripted engine, and the official client of it, unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import openai

from plain_words import PlainWords, small_tokenizer
from scripted import Scripted
from served import served
from superstep.serve.app import make_app
from superstep.serve.scheduling.request import ModelInfo, Request

TOKENIZER = small_tokenizer()
ANSWER = "naïve 😀 café"
"""Characters of one, two and four bytes: each byte is a token of its own, so that all are cut."""

HELLO = [{"role": "user", "content": "hello"}]


class OfficialClient:
    """A server, its scripted engine, and a client."""

    def __init__(self, url: str, backend: Scripted, words: PlainWords) -> None:
        self.backend, self.words, self.url = backend, words, url
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def say(self, text: str) -> None:
        """What the engine answers from now on."""
        tokens = TOKENIZER.encode(text)
        self.backend.script = lambda request: tokens

    @property
    def last(self) -> Request:
        """What the engine was asked last."""
        return self.backend.asked[-1]

    def reset(self) -> None:
        """Forgets what was asked."""
        self.say(ANSWER)
        self.backend.asked.clear()
        self.words.checked.clear()


@contextmanager
def official_client() -> Iterator[OfficialClient]:
    """Serves until the block ends."""
    info = ModelInfo(
        name="small",
        vocab=TOKENIZER.vocab,
        context_tokens=256,
        version="v1",
        end_of_text=(TOKENIZER.end_of_text,),
    )
    backend = Scripted(info, lambda request: [], adapters=("pirate",))
    words = PlainWords(TOKENIZER)
    with served(make_app(backend, words)) as server:
        yield OfficialClient(server.url, backend, words)
