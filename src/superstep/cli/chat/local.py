"""A local model: the engine as a library, without a server."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType

from superstep.cli.arguments.chat import ChatOptions
from superstep.cli.serve.serve_settings import serve_config
from superstep.comm.device import choose, pick
from superstep.errors import ConfigError
from superstep.run.serving.served_model import find_model
from superstep.serve.api.text_protocol import AnswerTextReader
from superstep.serve.build_engine import open_engine
from superstep.serve.config import plan_of
from superstep.serve.scheduling.request import Request, Sampling, cut_text
from superstep.serve.text_backend import load_words

Message = Mapping[str, str]


class LocalModel:
    """A chat with a model in this process.

    Args:
        path: of a run, a checkpoint or a Hugging Face folder.
        options: of the chat.
        note: shows messages to the user.

    Raises:
        StateError, DataError: there is no model, or it has no tokenizer.
        ConfigError: it cannot be served, or its chat template cannot be used.
    """

    def __init__(self, path: Path, options: ChatOptions, note: Callable[[str], None]) -> None:
        model = find_model(path)
        config = serve_config(model.run, options)
        shape = plan_of(model.folder, config).shape
        self._words = load_words(model.folder, shape.vocab)
        device = pick(0, choose(options.plan.device, 1))
        self._engine = open_engine(model.folder, config, device=device)
        self._options = options
        self._note = note
        self._number = 0
        self.name = model.name
        self.has_template = not self._words.chat_stops
        """Whether the model says how its chats are written; else they are written as plain turns."""

    def answer(self, messages: Sequence[Message]) -> Iterator[str]:
        """The pieces of an answer, as they are drawn. Closing it stops the answer.

        Raises:
            ConfigError: the conversation is longer than the context.
            KeyboardInterrupt: Ctrl-C, between two steps of the engine.
        """
        prompt = tuple(self._words.chat([dict(one) for one in messages], ()))
        options, context = self._options, self._engine.info.context_tokens
        if len(prompt) >= context:
            raise ConfigError(
                f"the conversation has {len(prompt)} tokens, and the context {context}; begin a new one with /reset."
            )
        if (cut := cut_text("--max-tokens", options.max_tokens, context - len(prompt))) is not None:
            self._note(cut)
        sampling = Sampling(
            max_tokens=options.max_tokens or context,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=secrets.randbits(32) if options.seed is None else options.seed,
        )
        self._number += 1
        self._engine.add(Request(id=self._number, prompt=prompt, sampling=sampling))
        try:
            with _catch_interrupts() as stops:
                yield from self._pieces(self._words.reader(self._words.chat_stops), stops)
        finally:
            self._engine.abort(self._number)
            while not self._engine.is_idle:
                self._engine.step()

    def _pieces(self, reader: AnswerTextReader, stops: list[int]) -> Iterator[str]:
        while not self._engine.is_idle:
            for news in self._engine.step():
                for output in news.tokens:
                    yield reader.push(output.token)
                    if reader.stop is not None:
                        return
            if stops:
                raise KeyboardInterrupt
        yield reader.end()


@contextmanager
def _catch_interrupts() -> Iterator[list[int]]:
    """A list that Ctrl-C adds to, so that it does not interrupt a step of the engine; a second one ends the program."""
    stops: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if stops:
            raise KeyboardInterrupt
        stops.append(number)

    if current_thread() is not main_thread():
        yield stops
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield stops
    finally:
        signal.signal(signal.SIGINT, before)
