"""The loss mask of a conversation: which tokens are learnt, computed by rendering its prefixes, for any template.

    prompt of turn i   the messages before it, and the template's beginning of an answer
    whole of turn i    the messages up to it

    |  prompt of the first turn  |  its answer  |  what leads to the next turn  |  its answer  |
       context                      learnt up to    context                        learnt
                                    its end of turn

Each text begins with the one before it; otherwise the template rewrites earlier messages. The difference of two texts
is encoded by itself, as in generation: the model gets the prompt's tokens and produces the answer's. Of an answer the
tokens up to the one that ends the turn are learnt; the model never produces what a template puts after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from superstep.data.sources.media_input import Medium, count_rows
from superstep.data.tokenizer import Tokenizer
from superstep.errors import ConfigError, DataError
from superstep.serve.text.chat_template import Chat, ChatPrefix, ChatTemplate
from superstep.serve.text.chat_tokens import ChatEncoder, Part
from superstep.serve.text.control_token_guard import Marks
from superstep.tune.config import History
from superstep.tune.conversation_records import Completion, Conversation, Record, record_error
from superstep.tune.media_parts import WORDS, ConversationMedia


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedConversation:
    """A tokenized conversation.

    Attributes:
        ids: of the whole conversation.
        is_answer: for each id 1 where it is learnt, 0 elsewhere.
        answer_bytes: of the learnt text.
        media: its pictures or sounds.
        places: of each of them the first id, and one past the last one.
    """

    ids: tuple[int, ...]
    is_answer: bytes
    answer_bytes: int
    media: tuple[Medium, ...] = ()
    places: tuple[tuple[int, int], ...] = ()

    @property
    def media_tokens(self) -> int:
        """Ids that stand for pictures or sounds."""
        return sum(stop - start for start, stop in self.places)

    def cut(self, size: int, media_tokens: int) -> TokenizedConversation:
        """Its first ids: at most ``size``, and at most ``media_tokens`` of pictures or sounds. None of these is cut or
        has the last id.
        """
        ends = accumulate(stop - start for start, stop in self.places)
        size = min([size, *(start for (start, _), end in zip(self.places, ends, strict=True) if end > media_tokens)])
        for start, stop in reversed(self.places):
            if start < size <= stop:
                size = start
        kept = sum(stop < size for _, stop in self.places)
        return replace(
            self,
            ids=self.ids[:size],
            is_answer=self.is_answer[:size],
            media=self.media[:kept],
            places=self.places[:kept],
        )


class Masker:
    """Makes samples from records.

    Args:
        template: of the model.
        tokenizer: of the model.
        ends: ids that are known to end the model's answers.
        history: what to do where a template renders earlier turns differently later.
        media: reads pictures and sounds; None for text alone.

    Attributes:
        ends: ids that have ended answers so far.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        ends: Sequence[int] = (),
        history: History = "refuse",
        media: ConversationMedia | None = None,
    ) -> None:
        self._encoder = ChatEncoder(template, tokenizer)
        self._tokenizer = tokenizer
        self._known_ends = self._encoder.special | set(ends)
        self._history = history
        self._media = media or ConversationMedia(None, Path())
        self.ends: set[int] = set()

    def samples(self, record: Record) -> list[TokenizedConversation]:
        """A record as tokens: one sample, or several where earlier turns are rendered differently later.

        Raises:
            DataError: the template cannot render it, rewrites it, or leaves nothing to learn; names the record's line.
        """
        if isinstance(record, Completion):
            return [self._mask_completion(record)]
        try:
            (shown,) = self._encoder.turns([self._template_input(record)])
        except ConfigError as error:
            raise record_error(record.where, f"cannot be shown: {str(error).rstrip('.')}", "mend the record") from None
        return self._mask_conversation(record, *shown)

    def many(self, several: Sequence[Record]) -> list[list[TokenizedConversation]]:
        """``samples`` of each record; the template renders all of them in one call.

        Raises:
            DataError: as ``samples``, for the first faulty record.
        """
        chats = [record for record in several if isinstance(record, Conversation)]
        try:
            shown = dict(zip(map(id, chats), self._encoder.turns(list(map(self._template_input, chats))), strict=True))
        except (ConfigError, DataError):  # of one of them, or of all together: each is tried alone
            return [self.samples(record) for record in several]
        return [
            [self._mask_completion(record)]
            if isinstance(record, Completion)
            else self._mask_conversation(record, *shown[id(record)])
            for record in several
        ]

    def _mask_completion(self, record: Completion) -> TokenizedConversation:
        prompt_ids, completion_ids = self._encoder.plain([record.prompt, record.completion])
        end = self._tokenizer.end_of_text
        self.ends.add(end)
        if not prompt_ids:  # a prediction needs a token before it
            prompt_ids = [end]
        if self._media.reads is not None and self._media.reads.token in (*prompt_ids, *completion_ids):
            raise record_error(
                record.where,
                f"spells the token {self._media.reads.token}, which stands for a {WORDS[self._media.reads.kind]}",
                "leave it out, or give messages with parts",
            )
        return _sample([(prompt_ids, False), ([*completion_ids, end], True)], len(record.completion.encode()))

    def _template_input(self, record: Conversation) -> tuple[Chat, list[ChatPrefix]]:
        """The chat and prefixes to render for a record."""
        self._check_shown(record)
        answers = _answers(record)
        if answers[0] == 0:
            raise record_error(record.where, "begins with an answer, to nothing", "put a message of the user before it")
        turns = [turn for k in answers for turn in (ChatPrefix(k, is_open=True), ChatPrefix(k + 1, is_open=False))]
        shown = self._media.show(record)
        return Chat(messages=shown, tools=record.tools, parts=self._media.kinds), turns

    def _mask_conversation(
        self, record: Conversation, texts: Sequence[str], marks: Marks
    ) -> list[TokenizedConversation]:
        answers = _answers(record)
        chains: list[list[tuple[int, str, bool]]] = []
        before = ""
        for number, prompt, whole in zip(answers, texts[::2], texts[1::2], strict=True):
            if not whole.startswith(prompt):
                raise record_error(
                    record.where,
                    f"has an answer, messages[{number}], that the chat template does not show as it begins one",
                    "give a template that does (sft.template)",
                )
            if not chains or not prompt.startswith(before):
                if chains and self._history == "refuse":
                    raise record_error(
                        record.where,
                        f"has turns before messages[{number}] that the chat template then shows otherwise: it rewrites "
                        "history",
                        'give another template (sft.template), or learn each turn by itself (sft.history = "split")',
                    )
                chains.append([])
                before = ""
            chains[-1].append((number, prompt[len(before) :], False))
            chains[-1].append((number, whole[len(prompt) :], record.learnt[number]))
            before = whole
        made = [
            self._mask_chain(record, chain, self._encoder.parts([text for _, text, _ in chain], marks))
            for chain in chains
        ]
        return [sample for sample in made if any(sample.is_answer)]

    def _mask_chain(
        self, record: Conversation, chain: list[tuple[int, str, bool]], encoded: list[list[Part]]
    ) -> TokenizedConversation:
        parts: list[tuple[list[int], bool]] = []
        answer_bytes = 0
        for (number, _, is_learnt), encoded_part in zip(chain, encoded, strict=True):
            ids = [id_ for part, _ in encoded_part for id_ in part]
            if not is_learnt:
                parts.append((ids, False))
                continue
            end = self._end_of_turn(record, number, encoded_part)
            self.ends.add(ids[end - 1])
            answer_bytes += len(self._tokenizer.decode(ids[: end - 1]).encode())
            parts += [(ids[:end], True), (ids[end:], False)]
        return self._place_media(record, _sample(parts, answer_bytes), chain[-1][0])

    def _place_media(self, record: Conversation, sample: TokenizedConversation, last: int) -> TokenizedConversation:
        """The sample with as many tokens as each picture or sound of the messages up to ``last`` has, not one."""
        reads = self._media.reads
        if reads is None:
            return sample
        media, shown = self._media.measure(record, last + 1), sample.ids.count(reads.token)
        if shown != len(media):
            word = WORDS[reads.kind]
            raise record_error(
                record.where,
                f"has {len(media)} {word}{'s' * (len(media) != 1)}, and as the chat template shows it {shown} of the "
                f"tokens {reads.token} that stand for one",
                "give a template that shows each once (sft.template)",
            )
        return expand(sample, reads.token, media, [count_rows(medium) // reads.rows for medium in media])

    def _end_of_turn(self, record: Conversation, number: int, parts: list[Part]) -> int:
        """The number of an answer's ids up to the one that ends it."""
        sizes = list(accumulate(len(ids) for ids, _ in parts))
        # A message's spelling of a control token is encoded as characters, and ends nothing.
        for (ids, _), size in zip(reversed(parts), reversed(sizes), strict=True):
            for k in range(len(ids) - 1, -1, -1):
                if ids[k] in self._known_ends:
                    end = size - len(ids) + k + 1
                    before = [id_ for part, _ in parts for id_ in part][: end - 1]
                    if not self._tokenizer.decode(before).strip():
                        raise record_error(
                            record.where,
                            f"has an empty answer, messages[{number}]",
                            "leave it out, or give it weight 0",
                        )
                    return end
                if self._tokenizer.decode([ids[k]]).strip():
                    break
            else:
                continue
            break
        raise record_error(
            record.where,
            f"has an answer, messages[{number}], that the chat template does not end with a token: a model would not "
            "learn to stop",
            "put {{ eos_token }} behind answers in a template of your own (sft.template)",
        )

    def _check_shown(self, record: Conversation) -> None:
        """Check that the template renders tools and their calls."""
        source = self._encoder.template.source(has_tools=bool(record.tools))
        calls = any(message.get("tool_calls") for message in record.messages)
        for word, is_there in (("tools", bool(record.tools)), ("tool_calls", calls)):
            if is_there and word not in source:
                raise record_error(
                    record.where,
                    f"has {word}, which the chat template does not show",
                    "give one that does (sft.template)",
                )


def expand(
    sample: TokenizedConversation, token: int, media: Sequence[Medium], counts: Sequence[int]
) -> TokenizedConversation:
    """A sample whose k-th token of a sort is repeated ``counts[k]`` times, and never learnt."""
    ids, marks, places, left = list[int](), bytearray(), list[tuple[int, int]](), iter(counts)
    for id_, is_answer in zip(sample.ids, sample.is_answer, strict=True):
        count = next(left) if id_ == token else 1
        if id_ == token:
            places.append((len(ids), len(ids) + count))
        ids += [id_] * count
        marks += bytes([is_answer and id_ != token]) * count
    return replace(sample, ids=tuple(ids), is_answer=bytes(marks), media=tuple(media), places=tuple(places))


def _answers(record: Conversation) -> list[int]:
    """The indices of its answers."""
    return [k for k, message in enumerate(record.messages) if message.get("role") == "assistant"]


def _sample(parts: list[tuple[list[int], bool]], answer_bytes: int) -> TokenizedConversation:
    ids = tuple(id_ for part, _ in parts for id_ in part)
    return TokenizedConversation(
        ids=ids,
        is_answer=b"".join(bytes([is_answer]) * len(part) for part, is_answer in parts),
        answer_bytes=answer_bytes,
    )
