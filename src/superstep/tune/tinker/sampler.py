"""Samples of saved weights: an engine that loads adapters on request, and drops the least recently used."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from superstep.errors import ConfigError, Fault, SuperstepError
from superstep.serve.engine import InferenceEngine
from superstep.serve.scheduling.request import Finish, Request, Sampling, TokenOutput
from superstep.serve.text.answer_reader import AnswerReader
from superstep.serve.text.detokenize import TokenTexts
from superstep.serve.text.stop_strings import check_stops
from superstep.tune.tinker.proto_messages import Sampled, SampledSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A prompt and its sampling parameters.

    Attributes:
        prompt: token ids.
        samples: number of answers.
        sampling: parameters; each answer has a seed of its own, the first this one's.
        stops: texts that end an answer.
        top_sampled: number of likeliest tokens at each place of an answer.
        top_prompt: likewise of the prompt.
        last: number of last prompt tokens with a log-probability; None means all.
        adapter: the folder of saved weights; None for the base.
    """

    prompt: tuple[int, ...]
    samples: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    top_sampled: int = 0
    top_prompt: int = 0
    last: int | None = None
    adapter: Path | None = None


Tell = Callable[[Sampled | SuperstepError], None]


@dataclass(slots=True)
class _Answer:
    tokens: list[TokenOutput] = field(default_factory=list)
    finish: Finish | None = None
    reader: AnswerReader | None = None


@dataclass(slots=True)
class _Order:
    request: SampleRequest
    tell: Tell
    answers: dict[int, _Answer]
    prompt: tuple[TokenOutput, ...] = ()
    cached_tokens: int = 0

    @property
    def is_done(self) -> bool:
        return all(answer.finish is not None for answer in self.answers.values())


class PromptSampler:
    """Answers prompts; one thread calls it.

    Args:
        engine: idle.
        words: of its tokens; None where its folder has no tokenizer, and no text can end an answer.
        most: adapters that are held at once.
    """

    def __init__(self, engine: InferenceEngine, words: TokenTexts | None, most: int) -> None:
        self.engine = engine
        self._words = words
        self._most = most
        self._held: OrderedDict[str, None] = OrderedDict()
        self._orders: dict[int, _Order] = {}
        self._last = 0

    @property
    def is_idle(self) -> bool:
        """Whether no prompt is pending."""
        return not self._orders

    def ask(self, request: SampleRequest, tell: Tell) -> None:
        """Add a prompt; ``tell`` is called once, with all of its answers or with an error.

        Raises:
            UserError: it cannot be answered.
        """
        if request.stops and self._words is None:
            raise ConfigError("sampling_params.stop has texts, and the model has no tokenizer.json; give token ids.")
        check_stops(request.stops)
        adapter = "" if request.adapter is None else self._hold(request.adapter)
        order = _Order(request, tell, {})
        try:
            for at in range(request.samples):
                self._last += 1
                reader = AnswerReader(self._words, request.stops) if request.stops and self._words else None
                self.engine.add(self._request(request, at, adapter))
                order.answers[self._last] = _Answer(reader=reader)
        except SuperstepError:
            for number in order.answers:
                self.engine.abort(number)
            raise
        self._orders |= dict.fromkeys(order.answers, order)

    def _request(self, request: SampleRequest, at: int, adapter: str) -> Request:
        room = self.engine.info.context_tokens - len(request.prompt)
        sampling = replace(
            request.sampling,
            seed=(request.sampling.seed + at) % 2**64,
            max_tokens=min(request.sampling.max_tokens, max(1, room)),
            prompt_logprobs=request.sampling.prompt_logprobs and at == 0,
            top_logprobs=max(request.top_sampled, request.top_prompt),
        )
        return Request(id=self._last, prompt=request.prompt, sampling=sampling, adapter=adapter)

    def _hold(self, folder: Path) -> str:
        """Load an adapter if needed; its name. Running answers keep dropped ones."""
        name = str(folder)
        if name not in self._held:
            self.engine.adapters.load(name, folder)
            if len(self._held) >= self._most:
                oldest, _ = self._held.popitem(last=False)
                self.engine.adapters.unload(oldest)
            self._held[name] = None
        self._held.move_to_end(name)
        return name

    def step(self) -> None:
        """Compute one step, and report finished prompts."""
        try:
            news = self.engine.step()
        except (SuperstepError, RuntimeError) as error:
            self._fail(error if isinstance(error, SuperstepError) else Fault(f"sampling failed: {error}"))
            return
        for one in news:
            order = self._orders.get(one.request)
            if order is None:
                continue
            answer = order.answers[one.request]
            order.prompt += one.prompt
            order.cached_tokens = max(order.cached_tokens, one.cached_tokens)
            self._take(answer, one.tokens)
            if one.finish is not None and answer.finish is None:
                answer.finish = one.finish
            if answer.finish == "stop" and one.finish is None:
                self.engine.abort(one.request)
            if answer.finish is not None:
                del self._orders[one.request]
            if order.is_done:
                self._tell(order)

    def _take(self, answer: _Answer, tokens: Sequence[TokenOutput]) -> None:
        """Keep tokens up to the one that completes a stop text."""
        for output in tokens:
            if answer.finish is not None:
                return
            answer.tokens.append(output)
            if answer.reader is not None:
                answer.reader.push(output.token)
                if answer.reader.stop is not None:
                    answer.finish = "stop"

    def _tell(self, order: _Order) -> None:
        if any(answer.finish == "abort" for answer in order.answers.values()):
            order.tell(Fault("the logits are no numbers; the weights have gone wrong in training."))
            return
        request = order.request
        drawn = [
            SampledSequence(
                tokens=[output.token for output in answer.tokens],
                logprobs=[output.drawn_logprob for output in answer.tokens],
                is_cut=answer.finish == "length",
                top=_tops(answer.tokens, request.top_sampled) if request.top_sampled else None,
            )
            for answer in order.answers.values()
        ]
        prompt, prompt_top = None, None
        if request.sampling.prompt_logprobs:
            scored = len(order.prompt) if request.last is None else request.last
            hidden = 1 + len(order.prompt) - scored
            output = order.prompt[hidden - 1 :]
            prompt = [math.nan] * hidden + [one.logprob for one in output]
            if request.top_prompt:
                prompt_top = [()] * hidden + _tops(output, request.top_prompt)
        order.tell(Sampled(sequences=drawn, prompt=prompt, prompt_top=prompt_top, cached_tokens=order.cached_tokens))

    def _fail(self, error: SuperstepError) -> None:
        """Report an error to all pending prompts."""
        orders = {id(order): order for order in self._orders.values()}
        self._orders.clear()
        self.engine.abort_all()
        for order in orders.values():
            order.tell(error)


def _tops(tokens: Sequence[TokenOutput], most: int) -> list[tuple[tuple[int, float], ...]]:
    return [output.top[:most] for output in tokens]
