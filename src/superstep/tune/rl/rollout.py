"""A rollout in tokens: sampler, environment and trainer use the same ids.

    prompt ids │ drawn ids │ ids of the environment's words │ drawn ids │ ...
               └─ trained ─┘                                └─ trained ─┘

A turn appends ids to the earlier ones; no text is tokenized twice, as no tokenizer promises to split a text as a model
wrote it. The template defines the text between two turns: the chat is rendered with the new messages, and the part
after the text so far is encoded. Where a template renders earlier messages differently, as those do that leave out the
thinking of earlier turns, the strand ends, and the next turn begins a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Protocol

from superstep.grade.task import Finish, Message, Rollout
from superstep.serve.scheduling.request import TokenOutput
from superstep.serve.text.chat_template import Chat
from superstep.serve.text.chat_tokens import PromptPiece


class Encoder(Protocol):
    """Encodes chats: ``serve.text.chat_tokens.ChatEncoder``."""

    def behind(self, chat: Chat, before: str = "") -> PromptPiece | None:
        """The part of a chat's prompt after a text; None where the prompt does not begin with it."""


class TextDecoder(Protocol):
    """Decodes token ids: ``data.tokenizer.Tokenizer``."""

    def decode(self, tokens: list[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Strand:
    """Consecutive tokens in the sampler's context.

    Attributes:
        tokens: prompt, answers and the text between them.
        spans: of the drawn tokens, as [first, end).
        logprobs: of the drawn tokens in order, of the distribution that they were drawn from.
    """

    tokens: tuple[int, ...]
    spans: tuple[tuple[int, int], ...] = ()
    logprobs: tuple[float, ...] = ()

    @property
    def drawn(self) -> tuple[int, ...]:
        """The places of the drawn tokens."""
        return tuple(place for first, end in self.spans for place in range(first, end))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskAnswer:
    """The answer to a task: in tokens for the trainer, in words for the grader."""

    strands: tuple[Strand, ...]
    rollout: Rollout

    @property
    def drawn_tokens(self) -> int:
        """Number of drawn tokens."""
        return sum(len(strand.logprobs) for strand in self.strands)


@dataclass(slots=True)
class _Open:
    """The current strand."""

    text: str
    tokens: list[int]
    spans: list[tuple[int, int]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def close(self) -> Strand:
        return Strand(tokens=tuple(self.tokens), spans=tuple(self.spans), logprobs=tuple(self.logprobs))


class Episode:
    """One attempt at a task, turn by turn.

    Args:
        messages: the task's.
        encoder: of the model's template and tokenizer.
        decoder: of the same tokenizer.
        ends: tokens that end a turn and are no part of its text.
    """

    def __init__(
        self, messages: Sequence[Message], encoder: Encoder, decoder: TextDecoder, ends: Sequence[int]
    ) -> None:
        self.turns: list[Message] = []
        self._messages = list(messages)
        self._encoder = encoder
        self._decoder = decoder
        self._ends = frozenset(ends)
        self._strands: list[Strand] = []
        self._finish: Finish = "stop"
        self._violation = ""
        self._open = self._begin()

    def again(self) -> Episode:
        """Another attempt at the same task, before the first turn: the template is not rendered again."""
        assert not self.turns, "an attempt is its own once something was said"
        other = copy(self)
        other.turns, other._messages, other._strands = [], list(self._messages), []
        other._open = _Open(self._open.text, list(self._open.tokens))
        return other

    @property
    def prompt(self) -> tuple[int, ...]:
        """The next prompt of the sampler."""
        return tuple(self._open.tokens)

    def answer(self, outputs: Sequence[TokenOutput], finish: Finish) -> Message:
        """Append a turn of the model; its message."""
        now, ids = self._open, [one.token for one in outputs]
        now.spans.append((len(now.tokens), len(now.tokens) + len(ids)))
        now.tokens += ids
        now.logprobs += (one.drawn_logprob for one in outputs)
        text = self._decoder.decode(ids[:-1] if ids and ids[-1] in self._ends else ids)
        now.text += text
        self._finish = finish
        return self._check_message(Message("assistant", text))

    def observe(self, messages: Sequence[Message]) -> None:
        """Append the environment's reply to the last turn; the model's next turn follows it."""
        now, last = self._open, self._messages[-1]
        assert last.role == "assistant", "an environment replies to a turn"
        for message in messages:
            self._check_message(message)
        for content in dict.fromkeys((last.content, last.content.strip())):
            # Some templates put a space before a message, which the model has then drawn itself.
            ids_behind = self._encoder.behind(self._chat(len(messages), content), now.text)
            if ids_behind is not None:
                is_closed = now.tokens[-1] in self._ends and ids_behind.ids[:1] == (now.tokens[-1],)
                now.tokens += ids_behind.ids[is_closed:]
                now.text += ids_behind.text
                return
        self._strands.append(now.close())
        self._open = self._begin()

    def refuse(self, violation: str) -> None:
        """Mark the model's last turn as a violation, and end."""
        self._violation = violation

    def with_answer(self) -> TaskAnswer:
        """The complete answer, after a turn of the model."""
        rollout = Rollout(tuple(self.turns), self._finish, self._violation)
        return TaskAnswer(strands=(*self._strands, self._open.close()), rollout=rollout)

    def _check_message(self, message: Message) -> Message:
        self.turns.append(message)
        self._messages.append(message)
        return message

    def _begin(self) -> _Open:
        piece = self._encoder.behind(self._chat(0, ""))
        assert piece is not None, "every text begins with the empty one"
        return _Open(piece.text, list(piece.ids))

    def _chat(self, behind: int, content: str) -> Chat:
        """The chat so far; ``content`` replaces the message before the last ``behind`` ones."""
        shown = [{"role": message.role, "content": message.content} for message in self._messages]
        if behind:
            shown[-behind - 1]["content"] = content
        return Chat(messages=shown)
