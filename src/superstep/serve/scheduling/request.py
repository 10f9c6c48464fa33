"""Requests to the engine and their answers: the types that all parts of ``serve`` share.

Nothing here needs torch, so that clients, the API's process and the simulator read the same types.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Literal

from superstep.errors import ConfigError

Finish = Literal["stop", "length", "abort"]
"""Why an answer ended: a stop token or text, the length limit, or an abort."""

MOST_TOP = 64
"""Most top log-probabilities of a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The grammar of an answer.

    Attributes:
        kind: of grammar.
        text: the schema, the expression or the grammar.
    """

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling parameters. Every endpoint accepts all of them, under these names."""

    temperature: float = 1.0
    """Divides the logits before drawing; 0 takes the likeliest token."""
    top_k: int = 0
    """Draw among this many likeliest tokens; 0 means all."""
    top_p: float = 1.0
    """Draw among the likeliest tokens with this total probability (Holtzman 2019)."""
    min_p: float = 0.0
    """Draw among tokens with at least this share of the likeliest one's probability."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the answer so far."""
    frequency_penalty: float = 0.0
    """Subtracted once for each occurrence in the answer so far."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt or answer, and multiplies negative ones (Keskar 2019)."""


_read_options = attrgetter(*(option.name for option in fields(SamplingOptions) if option.name != "temperature"))
_UNCHANGED = _read_options(SamplingOptions())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(SamplingOptions):
    """How to draw the tokens of an answer.

    Attributes:
        max_tokens: the most tokens to draw; the context's end may come first.
        seed: of the draws: equal seeds and prompts give equal answers, whatever else is served.
        logit_bias: added to the logits of some tokens.
        stop_tokens: end the answer.
        ignore_eos: the model's own end of text does not end the answer.
        top_logprobs: number of likeliest tokens reported for each drawn one.
        prompt_logprobs: whether log-probabilities of the prompt's tokens are reported.
        constraint: the grammar of the answer.
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
        return self.temperature == 0.0

    @property
    def is_plain(self) -> bool:
        """Whether the model's logits are drawn from unchanged but for the temperature."""
        return _read_options(self) == _UNCHANGED and not self.logit_bias and self.constraint is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to be answered.

    Attributes:
        id: a number of the engine's own.
        prompt: token ids, at least one.
        sampling: its parameters.
        priority: smaller ones go first; among equals the first to arrive.
        adapter: the adapter's name; empty for the model itself.
        salt: prompts share cached pages only under equal salts.
    """

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    priority: int = 0
    adapter: str = ""
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """A token with its log-probabilities.

    Attributes:
        token: its id.
        logprob: of the model's own distribution, in nats.
        drawn_logprob: of the distribution that was drawn from: after penalties, temperature and truncation.
        kept: tokens that could have been drawn; 0 means all.
        top: the likeliest tokens of the model's own distribution and their log-probabilities, the likeliest first.
        version: of its weights, followed by ``+`` and that of the adapter, if any.
    """

    token: int
    logprob: float
    drawn_logprob: float = 0.0
    kept: int = 0
    top: tuple[tuple[int, float], ...] = ()
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUpdate:
    """New results of one request.

    Attributes:
        request: its number.
        prompt: of the prompt's tokens but the first, if requested; in the first update.
        tokens: drawn since the last update.
        finish: why it ended; None while it runs.
        cached_tokens: of the prompt, from the prefix cache; set in the first update.
    """

    request: int
    prompt: tuple[TokenOutput, ...] = ()
    tokens: tuple[TokenOutput, ...] = ()
    finish: Finish | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The served model.

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
    """An available adapter.

    Attributes:
        name: in requests.
        version: a digest of its content.
    """

    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Numbers of an engine at one moment; totals count from its start.

    Attributes:
        running: requests with pages.
        waiting: requests without pages: new, or preempted.
        pages: of the KV cache: free, cached and used together.
        used_pages: of running requests.
        preemptions: times that a request lost its pages to another one.
        prefix_queried_tokens: of texts that were looked up in the prefix cache.
        prefix_hit_tokens: of those, the cached ones.
        drafts: number of drafts.
        drafted_tokens: draft tokens.
        accepted_tokens: of those, the accepted ones.
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
    """Check a request before it reaches the engine.

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
    """The warning that the context's end cuts an answer; None where it does not.

    Args:
        name: of the field.
        wanted: tokens; None without a limit in the request.
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
        if not least <= value <= most:  # NaN is in no range
            room = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
            raise ConfigError(f"{name} = {value} must be {room}.")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ConfigError(f"top_p = {sampling.top_p} must be above 0 and at most 1.")
    if not 0.0 < sampling.repetition_penalty < math.inf:
        raise ConfigError(f"repetition_penalty = {sampling.repetition_penalty} must be above 0 and finite.")
    for token, bias in sampling.logit_bias:
        if not -100.0 <= bias <= 100.0:
            raise ConfigError(f"logit_bias of token {token} = {bias} must be from -100 to 100.")
