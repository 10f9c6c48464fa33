"""The fields that chat and plain completions share, and their meaning for the engine."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from superstep.http.body_validation import StrictBody, takes, value_or
from superstep.http.request_error import RequestError
from superstep.serve.api.generation import SEEDS, draw_seed
from superstep.serve.api.limits import Limits, biases_of
from superstep.serve.scheduling.request import MOST_TOP, Constraint, Sampling, SamplingOptions

NAMES = {"stop_tokens": "stop_token_ids"}
"""This API's names of fields that the engine calls otherwise."""

MOST_CHOICES = 128
"""As OpenAI's own."""


class StreamOptions(StrictBody):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # pads OpenAI's chunks against who listens; without effect


class SchemaFormat(StrictBody):
    """A schema in a ``response_format``; always strict here."""

    name: Annotated[str, Field(max_length=64)]
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | bool, Field(alias="schema")] = Field(default_factory=dict)
    strict: bool | None = None


class ResponseFormat(StrictBody):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class WithoutEffect(StrictBody):
    """Fields that have no effect here. They are read, so that misspelt fields can be refused."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    verbosity: str | None = None
    reasoning_effort: str | None = None
    prediction: dict[str, Any] | None = None


@takes(SamplingOptions, or_null=True)
class Common(WithoutEffect):
    """The fields of both endpoints."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(SEEDS // 2), lt=SEEDS)] | None = None
    stop: str | list[str] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    # Beyond OpenAI's, as vLLM and SGLang have them.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | bool | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    grammar: str | None = None
    regex: str | None = None

    @property
    def has_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def prompt_top(self) -> int | None:
        """The number of likely tokens beside each of the prompt's; None without."""
        if self.prompt_logprobs is None or self.prompt_logprobs is False:
            return None
        return int(self.prompt_logprobs is not True and self.prompt_logprobs)


def check_common(fields: Common) -> None:
    """Refuse fields that contradict each other; raises RequestError with the field and the rule."""
    if fields.stream_options is not None and not fields.stream:
        raise RequestError(
            "stream_options is for streams; set stream to true, or leave it out.", param="stream_options"
        )


def stops_of(fields: Common, limits: Limits) -> tuple[str, ...]:
    """The texts that end an answer."""
    stops = [fields.stop] if isinstance(fields.stop, str) else value_or(fields.stop, [])
    if len(stops) > limits.stops:
        raise RequestError(f"stop has {len(stops)} texts; give at most {limits.stops}.", param="stop")
    for text in stops:
        if not 0 < len(text) <= limits.stop_chars:
            raise RequestError(
                f"stop holds a text of {len(text)} characters; give texts of 1 to {limits.stop_chars}.", param="stop"
            )
    return tuple(stops)


def constraint_of(fields: Common) -> tuple[str, Constraint | None]:
    """The required form of the answer, if any, and the field that requires it.

    Raises:
        RequestError: two forms at once, or a schema is missing.
    """
    constraints: dict[str, Constraint] = {}
    form = fields.response_format
    if form is not None and form.type == "json_object":
        constraints["response_format"] = Constraint(kind="json_object")
    if form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise RequestError(
                "response_format.json_schema is missing; give it, or set response_format.type to json_object.",
                param="response_format.json_schema",
            )
        schema = msgspec.json.encode(form.json_schema.json_schema).decode()
        constraints["response_format"] = Constraint(kind="json_schema", text=schema)
    if fields.regex is not None:
        constraints["regex"] = Constraint(kind="regex", text=fields.regex)
    if fields.grammar is not None:
        constraints["grammar"] = Constraint(kind="lark", text=fields.grammar)
    if len(constraints) > 1:
        first, second = list(constraints)[:2]
        raise RequestError(f"{second} and {first} both say what form the answer has; give one of them.", param=second)
    return next(iter(constraints.items()), ("response_format", None))


def seed_of(fields: Common) -> int:
    return draw_seed() if fields.seed is None else fields.seed % SEEDS


def sampling_of(
    fields: Common, *, seed: int, max_tokens: int, top_logprobs: int, limits: Limits, constraint: Constraint | None
) -> Sampling:
    """The sampling settings, without the seed of each choice.

    Args:
        seed: of the first choice.
        max_tokens: of an answer.
        top_logprobs: beside each sampled token.
    """
    prompt_top = fields.prompt_top
    options = {each.name: getattr(fields, each.name) for each in dataclasses.fields(SamplingOptions)}
    options["top_k"] = max(0, value_or(fields.top_k, 0))  # -1 says all to other servers
    return Sampling(
        max_tokens=max_tokens,
        **{name: value for name, value in options.items() if value is not None},
        seed=seed,
        logit_bias=biases_of(value_or(fields.logit_bias, {}), limits.logit_biases),
        stop_tokens=tuple(value_or(fields.stop_token_ids, [])),
        ignore_eos=bool(fields.ignore_eos),
        top_logprobs=max(top_logprobs, prompt_top or 0),
        prompt_logprobs=prompt_top is not None,
        constraint=constraint,
    )
