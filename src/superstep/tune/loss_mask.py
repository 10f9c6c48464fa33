"""Which tokens of a conversation are learnt: found by rendering its beginnings, for any chat template.

    prompt of turn i   the messages before it, and the template's beginning of an answer
    whole of turn i    the messages up to it

    |  prompt of the first turn  |  its answer  |  what leads to the next turn  |  its answer  |
       told                         learnt up to    told                           learnt
                                    its end of turn

Each text begins with the one before it; a template for which that is not so rewrites what was said. What lies between
two of them is encoded by itself, as a model meets it: it is given the prompt's tokens and says the answer's. Of an
answer the tokens up to the one that ends the turn are learnt; what a template puts behind it the model never says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from superstep.data.tokenizer import Tokenizer
from superstep.errors import ConfigError, DataError
from superstep.serve.text.chat_template import Chat, ChatPrefix, ChatTemplate
from superstep.serve.text.chat_tokens import ChatEncoder, Part
from superstep.serve.text.control_token_guard import Marks
from superstep.tune.config import History
from superstep.tune.conversation_records import Completion, Conversation, Record, record_error


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedConversation:
    """A conversation as tokens.

    Attributes:
        ids: of all of it.
        is_answer: for each id 1 where it is learnt, 0 elsewhere.
        answer_bytes: of the text that is learnt.
    """

    ids: tuple[int, ...]
    is_answer: bytes
    answer_bytes: int


class Masker:
    """Makes samples of records.

    Args:
        template: of the model.
        tokenizer: of the model.
        ends: ids that the model is known to end an answer with.
        history: what to do where a template shows earlier turns otherwise than when they were said.

    Attributes:
        ends: those that answers were ended with so far.
    """

    def __init__(
        self, template: ChatTemplate, tokenizer: Tokenizer, ends: Sequence[int] = (), history: History = "refuse"
    ) -> None:
        self._encoder = ChatEncoder(template, tokenizer)
        self._tokenizer = tokenizer
        self._known_ends = self._encoder.special | set(ends)
        self._history = history
        self.ends: set[int] = set()

    def samples(self, record: Record) -> list[TokenizedConversation]:
        """A record as tokens: one sample, or several where earlier turns are shown otherwise than they were said.

        Raises:
            DataError: the template cannot show it, rewrites it, or leaves nothing to learn; names the record's line.
        """
        if isinstance(record, Completion):
            return [self._mask_completion(record)]
        try:
            (shown,) = self._encoder.turns([self._template_input(record)])
        except ConfigError as error:
            raise record_error(record.where, f"cannot be shown: {str(error).rstrip('.')}", "mend the record") from None
        return self._mask_conversation(record, *shown)

    def many(self, several: Sequence[Record]) -> list[list[TokenizedConversation]]:
        """``samples`` of each record; the template is asked for all of them at once.

        Raises:
            DataError: as ``samples``, for the first record that it raises for.
        """
        chats = [record for record in several if isinstance(record, Conversation)]
        try:
            shown = dict(zip(map(id, chats), self._encoder.turns(list(map(self._template_input, chats))), strict=True))
        except (ConfigError, DataError):  # of one of them, or of all together: who it is shows one by one
            return [self.samples(record) for record in several]
        return [
            [self._mask_completion(record)]
            if isinstance(record, Completion)
            else self._mask_conversation(record, *shown[id(record)])
            for record in several
        ]

    def _mask_completion(self, record: Completion) -> TokenizedConversation:
        told, said = self._encoder.plain([record.prompt, record.completion])
        end = self._tokenizer.end_of_text
        self.ends.add(end)
        if not told:  # something must come before what is predicted
            told = [end]
        return _sample([(told, False), ([*said, end], True)], len(record.completion.encode()))

    def _template_input(self, record: Conversation) -> tuple[Chat, list[ChatPrefix]]:
        """What the template is to show of a record."""
        self._check_shown(record)
        answers = _answers(record)
        if answers[0] == 0:
            raise record_error(record.where, "begins with an answer, to nothing", "put a message of the user before it")
        turns = [turn for k in answers for turn in (ChatPrefix(k, is_open=True), ChatPrefix(k + 1, is_open=False))]
        return Chat(messages=record.messages, tools=record.tools), turns

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
        for (number, _, is_learnt), found in zip(chain, encoded, strict=True):
            ids = [id_ for part, _ in found for id_ in part]
            if not is_learnt:
                parts.append((ids, False))
                continue
            end = self._end_of_turn(record, number, found)
            self.ends.add(ids[end - 1])
            answer_bytes += len(self._tokenizer.decode(ids[: end - 1]).encode())
            parts += [(ids[:end], True), (ids[end:], False)]
        return _sample(parts, answer_bytes)

    def _end_of_turn(self, record: Conversation, number: int, parts: list[Part]) -> int:
        """How many ids of an answer there are up to the one that ends it."""
        sizes = list(accumulate(len(ids) for ids, _ in parts))
        # What a message spells like a control token is encoded as its characters, and ends nothing.
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
        """See that the template shows tools and their calls at all."""
        source = self._encoder.template.source(has_tools=bool(record.tools))
        calls = any(message.get("tool_calls") for message in record.messages)
        for word, is_there in (("tools", bool(record.tools)), ("tool_calls", calls)):
            if is_there and word not in source:
                raise record_error(
                    record.where,
                    f"has {word}, which the chat template does not show",
                    "give one that does (sft.template)",
                )


def _answers(record: Conversation) -> list[int]:
    """The places of its answers."""
    return [k for k, message in enumerate(record.messages) if message.get("role") == "assistant"]


def _sample(parts: list[tuple[list[int], bool]], answer_bytes: int) -> TokenizedConversation:
    ids = tuple(id_ for part, _ in parts for id_ in part)
    return TokenizedConversation(
        ids=ids,
        is_answer=b"".join(bytes([is_answer]) * len(part) for part, is_answer in parts),
        answer_bytes=answer_bytes,
    )
