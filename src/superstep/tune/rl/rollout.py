"""A rollout in tokens: what the sampler is asked, what it drew, and what the trainer trains on are the same ids.

    prompt ids │ drawn ids │ ids of the environment's words │ drawn ids │ ...
               └─ trained ─┘                                └─ trained ─┘

A turn appends ids to those before it; no text that has ids is given ids again, as no tokenizer promises to split a text
as a model wrote it. The template alone says what stands between two turns: the chat is rendered with the new messages,
and what stands behind the text so far is encoded. Where a template shows what was said before differently, as those do
that leave out the thinking of earlier turns, the strand ends, and the next turn begins one of its own.
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
    """Makes token ids of chats: ``serve.text.chat_tokens.ChatEncoder``."""

    def behind(self, chat: Chat, before: str = "") -> PromptPiece | None:
        """What stands in a chat's prompt behind a text; None where it does not begin with that."""


class TextDecoder(Protocol):
    """Makes text of token ids: ``data.tokenizer.Tokenizer``."""

    def decode(self, tokens: list[int]) -> str:
        """The text of some ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strand:
    """Tokens that followed each other in the sampler's context.

    Attributes:
        tokens: prompt, answers and what was said between them.
        spans: of the drawn ones: the first, and the one behind the last.
        logprobs: of the drawn ones in their order, of the distribution that they were drawn from.
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
    """What came of a task: in tokens for the trainer, in words for the grader."""

    strands: tuple[Strand, ...]
    rollout: Rollout

    @property
    def drawn_tokens(self) -> int:
        """How many were drawn."""
        return sum(len(strand.logprobs) for strand in self.strands)


@dataclass(slots=True)
class _Open:
    """The strand that goes on."""

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
        ends: tokens that end a turn; they are no part of what was said.
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
        """Another attempt at the same task, while neither has a turn: the template is not asked twice."""
        assert not self.turns, "an attempt is its own once something was said"
        other = copy(self)
        other.turns, other._messages, other._strands = [], list(self._messages), []
        other._open = _Open(self._open.text, list(self._open.tokens))
        return other

    @property
    def prompt(self) -> tuple[int, ...]:
        """What the sampler is asked next."""
        return tuple(self._open.tokens)

    def answer(self, outputs: Sequence[TokenOutput], finish: Finish) -> Message:
        """Append a turn of the model's; what it said."""
        now, ids = self._open, [one.token for one in outputs]
        now.spans.append((len(now.tokens), len(now.tokens) + len(ids)))
        now.tokens += ids
        now.logprobs += (one.drawn_logprob for one in outputs)
        text = self._decoder.decode(ids[:-1] if ids and ids[-1] in self._ends else ids)
        now.text += text
        self._finish = finish
        return self._check_said(Message("assistant", text))

    def observe(self, messages: Sequence[Message]) -> None:
        """Append what the environment says to the last turn; the model's next turn begins behind it."""
        now, last = self._open, self._messages[-1]
        assert last.role == "assistant", "an environment replies to a turn"
        for message in messages:
            self._check_said(message)
        for content in dict.fromkeys((last.content, last.content.strip())):
            # Some templates put their own space before what is said, which the model has then drawn itself.
            ids_behind = self._encoder.behind(self._chat(len(messages), content), now.text)
            if ids_behind is not None:
                is_closed = now.tokens[-1] in self._ends and ids_behind.ids[:1] == (now.tokens[-1],)
                now.tokens += ids_behind.ids[is_closed:]
                now.text += ids_behind.text
                return
        self._strands.append(now.close())
        self._open = self._begin()

    def refuse(self, violation: str) -> None:
        """Have the last turn of the model's be a violation, and the last of all."""
        self._violation = violation

    def with_answer(self) -> TaskAnswer:
        """All of it, behind a turn of the model's."""
        rollout = Rollout(tuple(self.turns), self._finish, self._violation)
        return TaskAnswer(strands=(*self._strands, self._open.close()), rollout=rollout)

    def _check_said(self, message: Message) -> Message:
        self.turns.append(message)
        self._messages.append(message)
        return message

    def _begin(self) -> _Open:
        piece = self._encoder.behind(self._chat(0, ""))
        assert piece is not None, "every text begins with the empty one"
        return _Open(piece.text, list(piece.ids))

    def _chat(self, behind: int, content: str) -> Chat:
        """The chat so far; ``content`` is what the message before the last ``behind`` ones says."""
        shown = [{"role": message.role, "content": message.content} for message in self._messages]
        if behind:
            shown[-behind - 1]["content"] = content
        return Chat(messages=shown)
