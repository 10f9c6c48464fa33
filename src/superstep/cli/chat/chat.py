"""superstep chat: a conversation in the terminal, with a local model or a server."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Protocol, cast

from superstep.cli.arguments.chat import ChatOptions, read
from superstep.cli.chat.local import LocalModel
from superstep.cli.chat.remote import RemoteModel
from superstep.errors import UserError

HELP = """\
/reset          begin a new conversation
/system TEXT    begin a new conversation with this system prompt; without TEXT, remove it
/help           this
Ctrl-C stops an answer, Ctrl-D ends."""


class ChatPartner(Protocol):
    """Answers messages."""

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """The pieces of an answer; a generator."""


def main(argv: Sequence[str]) -> int:
    """Chat until the input ends."""
    where, options = read(argv)
    if where.startswith(("http://", "https://")):
        talker: ChatPartner = RemoteModel(
            where, model=options.model, key=options.key, fields=_fields(options), note=_note
        )
        _note(f"{cast(RemoteModel, talker).name} at {where}")
    else:
        local = talker = LocalModel(Path(where), options, _note)
        _note(local.name)
        if not local.has_template:
            _note(
                "The model has no chat template, so that turns are written one below the other; one that was trained "
                "on chats has a chat_template.jinja in its folder. superstep sample goes on with a text."
            )
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):
            __import__("readline")  # enables line editing in input()
        _note("Ctrl-C stops an answer, Ctrl-D ends, /help lists the other commands.")
    return ChatHistory(talker, options.system, prompt="> " if is_terminal else "").run()


def _fields(options: ChatOptions) -> dict[str, object]:
    """Fields of a request to a server."""
    names = ("max_tokens", "seed", "temperature", "top_p")
    return {name: value for name in names if (value := getattr(options, name)) is not None}


class ChatHistory:
    """The conversation so far.

    Args:
        talker: answers.
        system: the system message; None for none.
        prompt: of the input line.
    """

    def __init__(self, talker: ChatPartner, system: str | None, *, prompt: str) -> None:
        self._talker, self._system, self._prompt = talker, system, prompt
        self._history: list[dict[str, str]] = []

    def run(self) -> int:
        """The exit status: 0, or that of a mistake if the input is no terminal."""
        while True:
            try:
                line = input(self._prompt).strip()
            except EOFError:
                if self._prompt:
                    print()
                return 0
            except KeyboardInterrupt:
                if not self._prompt:
                    raise
                print("\n(Ctrl-D ends)")
                continue
            if line.startswith("/"):
                self._obey(line)
            elif line:
                try:
                    self._ask(line)
                except UserError as error:
                    if not self._prompt:
                        raise
                    _note(str(error))

    def _obey(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        match word:
            case "/reset":
                self._history.clear()
                _note("A new conversation.")
            case "/system":
                self._system = rest.strip() or None
                self._history.clear()
                _note("A new conversation with this system prompt." if self._system else "A new conversation.")
            case "/help":
                _note(HELP)
            case _:
                _note(f"{word} is not a command; /help lists the commands. A message may not begin with /.")

    def _ask(self, text: str) -> None:
        before = [] if self._system is None else [{"role": "system", "content": self._system}]
        message = {"role": "user", "content": text}
        pieces: list[str] = []
        answer = self._talker.answer([*before, *self._history, message])
        try:
            with closing(cast("Generated", answer)):
                for piece in answer:
                    print(piece, end="", flush=True)
                    pieces.append(piece)
        except KeyboardInterrupt:
            if not self._prompt:
                raise
            print(" (stopped)", end="")
        finally:
            if pieces:
                print(flush=True)
        # A stopped answer was read up to there, and stays in the conversation.
        self._history += [message, {"role": "assistant", "content": "".join(pieces)}]


class Generated(Protocol):
    """An answer that can be stopped."""

    def close(self) -> None: ...


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
