"""Sampling of groups: the engine answers each task several times, turn by turn, in large batches.

The draws of an answer depend on the weights, its prompt and its seed, and the seed only on the run's seed, the group,
the answer's index in it and the turn. In exact mode the bits of a token do not depend on the batch either, so that a
group sampled again after a restart is the same group.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from superstep.data.tokenizer import load_tokenizer
from superstep.errors import ConfigError, Fault
from superstep.grade.environment import Tasks
from superstep.grade.task import Done, Task
from superstep.serve.engine import InferenceEngine
from superstep.serve.scheduling.request import Finish, Request, Sampling, TokenOutput
from superstep.serve.text.chat_template import ChatTemplate, load_chat_template
from superstep.serve.text.chat_tokens import ChatEncoder
from superstep.tune.rl.config import RolloutConfig
from superstep.tune.rl.rollout import Encoder, Episode, TaskAnswer, TextDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGroup:
    """A task with several answers.

    Attributes:
        number: of the group.
        version: of the weights that sampled it.
        answers: of the group.
        drawn_s: start and end of sampling, in seconds since 1970; not part of the result.
    """

    number: int
    version: int
    answers: tuple[TaskAnswer, ...]
    drawn_s: tuple[float, float] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCodec:
    """Conversion between words and token ids.

    Attributes:
        encoder: of chats.
        decoder: of answers.
        vocab: one more than the largest id.
        template: must be closed at the end.
    """

    encoder: Encoder
    decoder: TextDecoder
    vocab: int
    template: ChatTemplate


def words_of(folder: Path) -> TextCodec:
    """The template and the tokenizer of a model's folder.

    Raises:
        ConfigError, DataError: they cannot be read.
    """
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    template = load_chat_template(folder)
    return TextCodec(
        encoder=ChatEncoder(template, tokenizer), decoder=tokenizer, vocab=tokenizer.vocab, template=template
    )


def require_vocab(words: TextCodec, vocab: int, folder: Path) -> None:
    """Check that a model has every token of its tokenizer.

    Raises:
        ConfigError: it does not.
    """
    if words.vocab > vocab:
        raise ConfigError(
            f"{folder}: the tokenizer has {words.vocab} ids and the model {vocab}; start from a folder whose tokenizer "
            f"is the model's, or set model.vocab to {words.vocab} or more."
        )


def seed_of(seed: int, group: int, member: int, turn: int) -> int:
    """The seed of one turn's draws: independent of place and time."""
    text = f"rollout:{seed}:{group}:{member}:{turn}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class RolloutSampler:
    """Answers the tasks of groups.

    Args:
        engine: idle.
        words: codec of its model.
        environment: replies to turns.
        how: settings of sampling.
        group: answers to a task.
        seed: of the run.
        adapter: name of the adapter in the engine; empty for none.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        words: TextCodec,
        environment: Tasks,
        how: RolloutConfig,
        *,
        group: int,
        seed: int,
        adapter: str = "",
    ) -> None:
        self.engine = engine
        self._words = words
        self._environment = environment
        self._how = how
        self._group = group
        self._seed = seed
        self._adapter = adapter

    def sample(
        self, tasks: Sequence[tuple[int, Task]], version: int, tell: Callable[[], None] = lambda: None
    ) -> Iterator[TaskGroup]:
        """Yield each group once all of its answers are complete.

        Args:
            tasks: groups and their tasks.
            version: of the engine's weights.
            tell: called after each of the engine's steps, and each answer, as the environment's reply may take time.

        Raises:
            ConfigError: a task is invalid, or the environment fails.
            Fault: the model's logits are not finite.
        """
        begin_s = time.time()
        parts = [Part(number, member, task) for number, task in tasks for member in range(self._group)]
        words, talks = self._words, list[Episode]()
        for _, task in tasks:
            begun = Episode(task.messages, words.encoder, words.decoder, self.engine.info.end_of_text)
            talks += (begun, *(begun.again() for _ in range(self._group - 1)))
        outputs: list[list[TokenOutput]] = [[] for _ in parts]
        left = {number: self._group for number, _ in tasks}
        try:
            for at in range(len(parts)):
                self._ask(at, parts[at], talks[at])
            while not self.engine.is_idle:
                ended = self._step(outputs)
                tell()
                for at, finish in ended:
                    if finish == "abort":
                        raise Fault(f"the sampler's logits of task {parts[at].number} are no numbers.")
                    talks[at].answer(outputs[at], finish)
                    outputs[at] = []
                    goes_on = self._goes_on(parts[at], talks[at], finish)
                    tell()
                    if goes_on:
                        self._ask(at, parts[at], talks[at])
                        continue
                    number = parts[at].number
                    left[number] -= 1
                    if left[number] == 0:
                        first = next(n for n, part in enumerate(parts) if part.number == number)
                        answers = tuple(talk.with_answer() for talk in talks[first : first + self._group])
                        yield TaskGroup(number=number, version=version, answers=answers, drawn_s=(begin_s, time.time()))
        finally:
            if not self.engine.is_idle:  # the trainer left during sampling
                self.engine.abort_all()
                self.engine.step()

    def _step(self, outputs: list[list[TokenOutput]]) -> list[tuple[int, Finish]]:
        ended = []
        for news in self.engine.step():
            outputs[news.request] += news.tokens
            if news.finish is not None:
                ended.append((news.request, news.finish))
        return ended

    def _ask(self, at: int, part: Part, talk: Episode) -> None:
        turn = sum(message.role == "assistant" for message in talk.turns)
        sampling = Sampling(
            max_tokens=self._how.max_tokens,
            temperature=self._how.temperature,
            seed=seed_of(self._seed, part.number, part.member, turn),
        )
        try:
            self.engine.add(Request(id=at, prompt=talk.prompt, sampling=sampling, adapter=self._adapter))
        except ConfigError as error:
            raise ConfigError(f"{self._environment.path}: task {part.number}: {error}") from None

    def _goes_on(self, part: Part, talk: Episode, finish: Finish) -> bool:
        """Whether the model has another turn, after the environment's reply."""
        turns = sum(message.role == "assistant" for message in talk.turns)
        if turns >= self._how.turns or finish == "length":
            return False
        reply = self._environment.reply(part.task, tuple(talk.turns))
        if isinstance(reply, Done):
            talk.refuse(reply.violation)
            return False
        talk.observe(reply.messages)
        return len(talk.prompt) < self.engine.info.context_tokens


@dataclass(frozen=True, slots=True)
class Part:
    """One answer to be drawn: its group, its index in it, and the task."""

    number: int
    member: int
    task: Task
