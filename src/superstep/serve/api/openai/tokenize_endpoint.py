"""POST /tokenize and /detokenize: text to tokens and back, under vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from superstep.http.body_validation import StrictBody, read_model, value_or
from superstep.http.limits import read_json
from superstep.http.request_error import RequestError
from superstep.http.sse import respond
from superstep.serve.api.app_state import AppState
from superstep.serve.api.in_thread import encode, encode_chat
from superstep.serve.api.openai.chat_fields import Tool
from superstep.serve.api.openai.logprobs_format import token_text


class TokenizeFields(StrictBody):
    """A text to tokenize, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(StrictBody):
    model: str | None = None
    tokens: list[int]


async def tokenize(request: Request, service: AppState) -> Response:
    """The tokens of a prompt."""
    fields = read_model(TokenizeFields, await read_json(request, service.limits))
    service.adapter_of(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise RequestError("prompt and messages are both given or both missing; give one of them.", param="prompt")
    if fields.messages is not None:
        tools = [tool.model_dump(exclude_none=True) for tool in value_or(fields.tools, [])]
        tokens = await encode_chat(fields.messages, tools, service)
    else:
        tokens = await encode(fields.prompt or "", service)
    body = {"tokens": tokens, "count": len(tokens), "max_model_len": service.backend.info.context_tokens}
    if fields.return_token_strs:
        body["token_strs"] = [token_text(token, service.words) for token in tokens]
    return respond(body)


async def detokenize(request: Request, service: AppState) -> Response:
    fields = read_model(DetokenizeFields, await read_json(request, service.limits))
    service.adapter_of(fields.model)
    vocab = service.backend.info.vocab
    strange = next((token for token in fields.tokens if not 0 <= token < vocab), None)
    if strange is not None:
        raise RequestError(
            f"tokens holds token {strange}; token ids of this model are 0 to {vocab - 1}.",
            param="tokens",
            code="invalid_value",
        )
    return respond({"prompt": service.words.decode(fields.tokens)})
