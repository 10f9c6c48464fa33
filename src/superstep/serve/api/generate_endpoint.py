"""POST /generate: token ids in, token ids and all their outputs out.

The fields of ``sampling`` are those of ``superstep.serve.scheduling.request.Sampling``; only ``logit_bias`` has another
form, an object from token to bias. Answers come in columns: the n-th entry of each belongs to the n-th token. A stream
is a line of JSON for each update, or server-sent events where the client accepts those.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from superstep.errors import ConfigError
from superstep.http.body_validation import StrictBody, read_model, takes, value_or
from superstep.http.limits import read_json
from superstep.http.request_error import RequestError, show
from superstep.http.sse import Form, event, respond, stream_response, until_gone
from superstep.serve.api.app_state import AppState
from superstep.serve.api.backend_errors import make_backend_refusal
from superstep.serve.api.collect import Usage, collect
from superstep.serve.api.generation import (
    SEEDS,
    AnswerRequest,
    AnswerUpdate,
    answers,
    choices_of,
    draw_seed,
    finite,
    warn_of_cut,
)
from superstep.serve.api.in_thread import check_constraint
from superstep.serve.api.limits import biases_of
from superstep.serve.scheduling.request import Constraint, Sampling, SamplingOptions, TokenOutput


class ConstraintFields(StrictBody):
    """The form of an answer."""

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    text: str = ""


@takes(SamplingOptions)
class SamplingFields(StrictBody):
    """Like ``Sampling``, but without a seed one is drawn for the request."""

    max_tokens: int = 16
    seed: Annotated[int, Field(ge=0, lt=SEEDS)] | None = None
    logit_bias: dict[str, float] = Field(default_factory=dict)
    stop_tokens: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    constraint: ConstraintFields | None = None


class GenerateFields(StrictBody):
    """The body of the endpoint."""

    prompt: Any = None
    sampling: SamplingFields = Field(default_factory=SamplingFields)
    n: Annotated[int, Field(ge=1)] = 1
    stream: bool = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    adapter: str | None = None
    salt: Annotated[str, Field(max_length=1024)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A valid request.

    Attributes:
        asks: the requested answers.
        seed: of the first answer to each prompt.
    """

    fields: GenerateFields
    asks: list[AnswerRequest]
    seed: int


async def generate(request: Request, service: AppState) -> Response:
    """Answer the request, as a stream or whole."""
    generation = await read_request(await read_json(request, service.limits), service)
    form: Form = "sse" if "text/event-stream" in request.headers.get("accept", "") else "lines"
    if generation.fields.stream:
        response = await stream_response(request, stream(generation, service, form), make_backend_refusal, form)
    else:
        response = respond(await until_gone(request, whole(generation, service)))
    return warn_of_cut(response, generation.fields.sampling.max_tokens, generation.asks)


async def read_request(body: dict[str, Any], service: AppState) -> GenerateRequest:
    """Read a body; raises RequestError with the field and the rule."""
    fields = read_model(GenerateFields, body)
    adapter = _adapter(fields, service)
    prompts = prompts_of(fields.prompt)
    seed = value_or(fields.sampling.seed, draw_seed())
    sampling = sampling_of(fields.sampling, seed, service)
    await check_constraint(sampling.constraint, service, param="sampling.constraint")
    asks: list[AnswerRequest] = []
    for prompt in prompts:
        first = AnswerRequest(
            index=len(asks),
            prompt=prompt,
            sampling=sampling,
            priority=fields.priority,
            adapter=adapter,
            salt=fields.salt,
            has_text=False,
        )
        try:
            asks += choices_of(first, fields.n, len(prompts), service)
        except ConfigError as error:
            names = {name: f"sampling.{name}" for name in SamplingFields.model_fields}
            raise make_backend_refusal(error, names=names) from None
    return GenerateRequest(fields=fields, asks=asks, seed=seed)


def prompts_of(prompt: object) -> list[tuple[int, ...]]:
    """The prompts: token ids, or several lists of them; raises RequestError for anything else."""
    match prompt:
        case None:
            raise RequestError("prompt is missing; give token ids.", param="prompt", code="missing_field")
        case []:
            return [()]
        case list() if all(type(one) is int for one in prompt):
            return [tuple(prompt)]
        case list() if all(isinstance(one, list) and all(type(id_) is int for id_ in one) for one in prompt):
            return [tuple(one) for one in prompt]
        case _:
            raise RequestError(
                f"prompt = {show(prompt)}: must be a list of token ids, or a list of such lists.",
                param="prompt",
                code="invalid_value",
            )


def _adapter(fields: GenerateFields, service: AppState) -> str:
    name = fields.adapter or ""
    if name and name not in service.backend.adapters:
        known = ", ".join(service.backend.adapters) or "none"
        raise RequestError(
            f"adapter = {show(name)} is not loaded; choose one of: {known}.",
            status=404,
            param="adapter",
            code="model_not_found",
        )
    return name


def sampling_of(fields: SamplingFields, seed: int, service: AppState) -> Sampling:
    """The sampling settings."""
    form = fields.constraint
    plain = fields.model_dump(exclude={"seed", "logit_bias", "stop_tokens", "constraint"})
    return Sampling(
        **plain,
        seed=seed,
        logit_bias=biases_of(fields.logit_bias, service.limits.logit_biases, param="sampling.logit_bias"),
        stop_tokens=tuple(fields.stop_tokens),
        constraint=None if form is None else Constraint(kind=form.kind, text=form.text),
    )


def columns(tokens: Sequence[TokenOutput]) -> dict[str, Any]:
    """Outputs of some tokens: log-probs in nats, of the model's own distribution and of the sampled one."""
    return {
        "tokens": [output.token for output in tokens],
        "logprobs": [finite(output.logprob) for output in tokens],
        "drawn_logprobs": [finite(output.drawn_logprob) for output in tokens],
        "kept": [output.kept for output in tokens],
        "versions": [output.version for output in tokens],
        "top": [[[token, finite(logprob)] for token, logprob in output.top] for output in tokens],
    }


def answer_json(news: AnswerUpdate, ask: AnswerRequest, *, is_first: bool) -> dict[str, Any]:
    """An update of an answer as JSON."""
    piece = {"index": ask.index} | columns(news.tokens) | {"finish": news.finish, "stop": news.stop}
    if is_first:
        piece["prompt_tokens"] = len(ask.prompt)
        piece["cached_tokens"] = news.cached_tokens
        if ask.sampling.prompt_logprobs:
            piece["prompt"] = columns(news.prompt)
    return piece


async def whole(generation: GenerateRequest, service: AppState) -> dict[str, Any]:
    """The response, once all answers have ended."""
    usage = Usage(generation.asks, generation.fields.n)
    wholes = await collect(generation.asks, service, usage)
    answers = [
        answer_json(one.news(ask.index), ask, is_first=True) for ask, one in zip(generation.asks, wholes, strict=True)
    ]
    return {"answers": answers, "seed": generation.seed, "usage": usage.to_json()}


async def stream(generation: GenerateRequest, service: AppState, form: Form) -> AsyncGenerator[bytes, None]:
    """A line for each update; the last one has the token counts."""
    usage = Usage(generation.asks, generation.fields.n)
    silent = {ask.index for ask in generation.asks}
    async with aclosing(answers(generation.asks, service)) as pieces:
        async for news in pieces:
            usage.add(news)
            yield event(answer_json(news, generation.asks[news.index], is_first=news.index in silent), form)
            silent.discard(news.index)
    yield event({"seed": generation.seed, "usage": usage.to_json()}, form)
