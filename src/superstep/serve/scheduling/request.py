"""What is asked of the engine, and what it answers: values that every other file here speaks in.

Nothing here needs torch, so that clients, the API's process and the simulator of schedules read the same types.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Literal

from superstep.errors import ConfigError

Finish = Literal["stop", "length", "abort"]
"""Why an answer ended: a stop token or text, its room, or somebody who took the request back."""

MOST_TOP = 64
"""The most likeliest tokens that are told beside a drawn one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What form the answer must have.

    Attributes:
        kind: of grammar.
        text: the schema, the expression or the grammar.
    """

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Numbers that change which token is drawn. Each endpoint takes every one of them, under these names."""

    temperature: float = 1.0
    """Divides the logits before drawing; 0 takes the likeliest token."""
    top_k: int = 0
    """Draw among so many likeliest tokens; 0 means all."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that together have this probability (Holtzman 2019)."""
    min_p: float = 0.0
    """Draw among tokens of at least this share of the likeliest one's probability."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that were drawn."""
    frequency_penalty: float = 0.0
    """The same for each time they were."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens that were seen, in the prompt too, where above 0 (Keskar 2019)."""


_read_options = attrgetter(*(option.name for option in fields(SamplingOptions) if option.name != "temperature"))
_UNCHANGED = _read_options(SamplingOptions())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(SamplingOptions):
    """How to draw the tokens of an answer.

    Attributes:
        max_tokens: the most tokens to draw; the context's end comes first where it is nearer.
        seed: of the draws: equal seeds give equal answers to equal prompts, whoever else is served.
        logit_bias: added to the logits of some tokens.
        stop_tokens: end the answer.
        ignore_eos: the model's own end of text does not end it.
        top_logprobs: how many of the likeliest tokens are told beside each drawn one.
        prompt_logprobs: whether the tokens of the prompt have their log-probabilities told as well.
        constraint: the form of the answer.
    """

    max_tokens: int = 16
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    constraint: Constraint | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is left to chance."""
        return self.temperature == 0.0

    @property
    def is_plain(self) -> bool:
        """Whether the logits are drawn from as the model gives them, but for the temperature."""
        return _read_options(self) == _UNCHANGED and not self.logit_bias and self.constraint is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to be answered.

    Attributes:
        id: a number of the engine's own.
        prompt: token ids, at least one.
        sampling: how to answer.
        priority: smaller ones go first; among equals the one that came first.
        adapter: the name of the adapter to answer with; empty for the model itself.
        salt: prompts share what is cached of them only under equal salts.
    """

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    priority: int = 0
    adapter: str = ""
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """What is told of a token.

    Attributes:
        token: its id.
        logprob: of the model's own distribution, in nats.
        drawn_logprob: of the distribution that was drawn from: after penalties, temperature, and what was cut off.
        kept: tokens that could have been drawn; 0 means all.
        top: the likeliest tokens of the model's own distribution and their log-probabilities, the likeliest first.
        version: of the weights that it was computed with, and behind a ``+`` that of the adapter, if there is one.
    """

    token: int
    logprob: float
    drawn_logprob: float = 0.0
    kept: int = 0
    top: tuple[tuple[int, float], ...] = ()
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUpdate:
    """News of one request.

    Attributes:
        request: its number.
        prompt: of the prompt's tokens but the first, where that was asked for; with the first news.
        tokens: drawn since the last news.
        finish: why it ended; None while it goes on.
        cached_tokens: of the prompt, those whose keys were there already; known with the first news.
    """

    request: int
    prompt: tuple[TokenOutput, ...] = ()
    tokens: tuple[TokenOutput, ...] = ()
    finish: Finish | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What is served.

    Attributes:
        name: of the model.
        vocab: token ids are below this.
        context_tokens: the most tokens of a prompt and its answer together.
        end_of_text: tokens with which the model ends an answer.
        version: of its weights: a digest of their content.
    """

    name: str
    vocab: int
    context_tokens: int
    end_of_text: tuple[int, ...]
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """An adapter that can be asked for.

    Attributes:
        name: that requests give.
        version: a digest of its content.
    """

    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Numbers of an engine at one moment; sums count from its start.

    Attributes:
        running: requests that have pages and are computed.
        waiting: requests that have none yet, or lost them to others.
        pages: of keys and values, free, cached and used together.
        used_pages: those of running requests.
        preemptions: times that a request lost its pages to another one.
        prefix_queried_tokens: of texts that were looked up in the prefix cache.
        prefix_hit_tokens: of those, what was there.
        drafts: times that tokens were guessed for a request.
        drafted_tokens: those that were guessed.
        accepted_tokens: of those, the ones that stood.
    """

    running: int = 0
    waiting: int = 0
    pages: int = 0
    used_pages: int = 0
    preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


def check_request(request: Request, *, vocab: int, context_tokens: int) -> None:
    """Refuse what cannot be answered, before the engine sees it.

    Raises:
        ConfigError: the message names the field, its value, the rule and what would work.
    """
    prompt, sampling = request.prompt, request.sampling
    if not prompt:
        raise ConfigError("prompt is empty; give at least one token.")
    if len(prompt) >= context_tokens:
        raise ConfigError(
            f"prompt has {len(prompt)} tokens, and the context has room for {context_tokens}, the answer among them; "
            f"give at most {context_tokens - 1}."
        )
    strange = next((token for token in prompt if not 0 <= token < vocab), None)
    if strange is not None:
        raise ConfigError(f"prompt holds token {strange}; token ids of this model are 0 to {vocab - 1}.")
    _check_ranges(sampling)
    for name, tokens in (
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("stop_tokens", sampling.stop_tokens),
    ):
        strange = next((token for token in tokens if not 0 <= token < vocab), None)
        if strange is not None:
            raise ConfigError(f"{name} names token {strange}; token ids of this model are 0 to {vocab - 1}.")


def cut_text(name: str, wanted: int | None, most: int) -> str | None:
    """That an answer is shorter than was asked for, because the context ends; None where it need not be.

    Args:
        name: of what was asked for.
        wanted: tokens; None where nobody asked for a number of them.
        most: tokens that the context has room for.
    """
    if wanted is None or wanted <= most:
        return None
    return f"{name} = {wanted} is more than the context has room for; an answer has at most {most}."


def _check_ranges(sampling: Sampling) -> None:
    ranges: dict[str, tuple[float, float, float]] = {
        "max_tokens": (sampling.max_tokens, 1, math.inf),
        "temperature": (sampling.temperature, 0.0, 100.0),
        "top_k": (sampling.top_k, 0, math.inf),
        "min_p": (sampling.min_p, 0.0, 1.0),
        "presence_penalty": (sampling.presence_penalty, -2.0, 2.0),
        "frequency_penalty": (sampling.frequency_penalty, -2.0, 2.0),
        "top_logprobs": (sampling.top_logprobs, 0, MOST_TOP),
        "seed": (sampling.seed, 0, 2**64 - 1),
    }
    for name, (value, least, most) in ranges.items():
        if not least <= value <= most:  # a NaN is in no range
            room = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
            raise ConfigError(f"{name} = {value} must be {room}.")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ConfigError(f"top_p = {sampling.top_p} must be above 0 and at most 1.")
    if not 0.0 < sampling.repetition_penalty < math.inf:
        raise ConfigError(f"repetition_penalty = {sampling.repetition_penalty} must be above 0 and finite.")
    for token, bias in sampling.logit_bias:
        if not -100.0 <= bias <= 100.0:
            raise ConfigError(f"logit_bias of token {token} = {bias} must be from -100 to 100.")
