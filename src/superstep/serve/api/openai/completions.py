"""POST /v1/completions: continue a prompt."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from superstep.http.body_validation import read_model, value_or
from superstep.http.limits import read_json
from superstep.http.request_error import RequestError, show
from superstep.http.sse import DONE, event, respond, stream_response, until_gone
from superstep.serve.api.app_state import AppState
from superstep.serve.api.backend_errors import make_backend_refusal
from superstep.serve.api.collect import Usage, collect
from superstep.serve.api.generation import AnswerRequest, AnswerUpdate, answers, check_choices, warn_of_cut
from superstep.serve.api.in_thread import check_constraint, encode
from superstep.serve.api.openai.fields import (
    Common,
    check_common,
    constraint_of,
    sampling_of,
    seed_of,
    stops_of,
)
from superstep.serve.api.openai.logprobs_format import PlainLogprobs, ids, prompt_logprobs
from superstep.serve.api.openai.to_sampling import asks_of, head_of
from superstep.serve.scheduling.request import MOST_TOP, TokenOutput

DEFAULT_TOKENS = 16
"""As OpenAI's own."""


class CompletionFields(Common):
    """The body of the endpoint."""

    prompt: Any = None  # text, token ids, or a list of either; read by ``prompts_of``, which is quicker and clearer
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    best_of: int | None = None
    suffix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A valid request.

    Attributes:
        asks: the requested answers.
        texts: the prompts as text, to echo them.
        head: the begin of each chunk.
    """

    fields: CompletionFields
    asks: list[AnswerRequest]
    texts: list[str]
    head: dict[str, Any]

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return value_or(self.fields.n, 1)

    @property
    def is_silent(self) -> bool:
        return self.fields.max_tokens == 0


async def completions(request: Request, service: AppState) -> Response:
    completion = await read_request(await read_json(request, service.limits), service)
    if completion.fields.stream:
        response = await stream_response(request, stream(completion, service), make_backend_refusal)
    else:
        response = respond(await until_gone(request, whole(completion, service)))
    return warn_of_cut(response, completion.fields.max_tokens, completion.asks)


async def read_request(body: dict[str, Any], service: AppState) -> CompletionRequest:
    """Read a body; raises RequestError with the field and the rule."""
    fields = read_model(CompletionFields, body)
    check_common(fields)
    service.adapter_of(fields.model)
    _check(fields)
    prompts = await prompts_of(fields.prompt, service)
    param, constraint = constraint_of(fields)
    await check_constraint(constraint, service, param=param)
    silent = fields.max_tokens == 0 and bool(fields.echo)
    sampling = sampling_of(
        fields,
        seed=seed_of(fields),
        max_tokens=1 if silent else value_or(fields.max_tokens, DEFAULT_TOKENS),
        top_logprobs=value_or(fields.logprobs, 0),
        limits=service.limits,
        constraint=constraint,
    )
    if fields.echo and fields.logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=True)
    asks = asks_of(fields, prompts, sampling, stops_of(fields, service.limits), service)
    head = head_of(fields, service, prefix="cmpl", kind="text_completion")
    return CompletionRequest(fields=fields, asks=asks, texts=_echoes(fields, prompts, service), head=head)


def _check(fields: CompletionFields) -> None:
    if fields.suffix is not None:
        raise RequestError(
            "suffix is not served: the model goes on, it does not fill in; leave it out.",
            param="suffix",
            code="unsupported_field",
        )
    if fields.best_of is not None and fields.best_of != value_or(fields.n, 1):
        raise RequestError(f"best_of = {fields.best_of} must be n; all answers are given.", param="best_of")


async def prompts_of(prompt: object, service: AppState) -> list[tuple[int, ...]]:
    """The tokens of each prompt; raises RequestError where it is neither text nor token ids."""
    match prompt:
        case None:
            raise RequestError("prompt is missing; give it.", param="prompt", code="missing_field")
        case str():
            return [await encode(prompt, service)]
        case [] | [[], *_] if not any(prompt):
            raise RequestError("prompt is empty; give at least one token.", param="prompt", code="invalid_value")
        case list() if all(isinstance(one, str) for one in prompt):
            check_choices(1, len(prompt), service)  # before any of them is tokenized
            return [await encode(one, service) for one in prompt]
        case list() if _are_ids(prompt):
            return [tuple(prompt)]
        case list() if all(_are_ids(one) for one in prompt):
            return [tuple(one) for one in prompt]
        case _:
            raise RequestError(
                f"prompt = {show(prompt)}: must be text, a list of token ids, or a list of either.",
                param="prompt",
                code="invalid_value",
            )


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


def _echoes(fields: CompletionFields, prompts: list[tuple[int, ...]], service: AppState) -> list[str]:
    if not fields.echo:
        return ["" for _ in prompts]
    match fields.prompt:
        case str() as text:
            return [text]
        case [str(), *_] as texts:
            return [str(text) for text in texts]
        case _:
            return [service.words.decode(prompt) for prompt in prompts]


class CompletionChoice:
    """One answer in OpenAI's form, in pieces."""

    def __init__(self, ask: AnswerRequest, completion: CompletionRequest, service: AppState) -> None:
        self._ask, self._fields, self._silent, self._words = ask, completion.fields, completion.is_silent, service.words
        self._echo = completion.texts[ask.index // completion.choices]
        top = completion.fields.logprobs
        self._logprobs = None if top is None else PlainLogprobs(top, service.words)
        self._is_first = True

    def to_json(self, news: AnswerUpdate) -> dict[str, Any]:
        is_first, self._is_first = self._is_first, False
        tokens = () if self._silent else news.tokens
        text = "" if self._silent else news.text
        choice: dict[str, Any] = {
            "index": self._ask.index,
            "text": self._echo + text if is_first else text,
            "logprobs": self._logprobs_of(tokens, news.prompt, is_first=is_first),
            "finish_reason": "length" if self._silent and news.finish else news.finish,
            "stop_reason": None if self._silent else news.stop,
        }
        if self._fields.return_token_ids:
            choice["token_ids"] = ids(tokens)
            if is_first:
                choice["prompt_token_ids"] = list(self._ask.prompt)
        top = self._fields.prompt_top
        if top is not None and is_first:
            choice["prompt_logprobs"] = prompt_logprobs(news.prompt, top, self._words)
        return choice

    def _logprobs_of(
        self, tokens: tuple[TokenOutput, ...], prompt: tuple[TokenOutput, ...], *, is_first: bool
    ) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        if is_first and self._fields.echo:
            return self._logprobs.to_json(prompt + tokens, first=self._ask.prompt[0])
        return self._logprobs.to_json(tokens)


async def whole(completion: CompletionRequest, service: AppState) -> dict[str, Any]:
    """The response, once all answers have ended."""
    usage = Usage(completion.asks, completion.choices)
    wholes = await collect(completion.asks, service, usage)
    if completion.is_silent:
        usage.completion = 0
    choices = [
        CompletionChoice(ask, completion, service).to_json(one.news(ask.index))
        for ask, one in zip(completion.asks, wholes, strict=True)
    ]
    return completion.head | {"choices": choices, "usage": usage.to_json()}


async def stream(completion: CompletionRequest, service: AppState) -> AsyncGenerator[bytes, None]:
    """The events, one for each update."""
    usage = Usage(completion.asks, completion.choices)
    choices = [CompletionChoice(ask, completion, service) for ask in completion.asks]
    head = completion.head | ({"usage": None} if completion.fields.has_usage else {})
    async with aclosing(answers(completion.asks, service)) as pieces:
        async for news in pieces:
            usage.add(news)
            yield event(head | {"choices": [choices[news.index].to_json(news)]})
    if completion.is_silent:
        usage.completion = 0
    if completion.fields.has_usage:
        yield event(completion.head | {"choices": [], "usage": usage.to_json()})
    yield DONE
