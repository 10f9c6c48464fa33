"""POST /v1/chat/completions: continue a conversation."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from superstep.http.body_validation import read_model, value_or
from superstep.http.limits import read_json
from superstep.http.request_error import RequestError
from superstep.http.sse import DONE, event, respond, stream_response, until_gone
from superstep.serve.api.app_state import AppState
from superstep.serve.api.backend_errors import make_backend_refusal
from superstep.serve.api.collect import CollectedAnswer, Usage, collect
from superstep.serve.api.generation import AnswerRequest, AnswerUpdate, answers, warn_of_cut
from superstep.serve.api.in_thread import aside, check_constraint, encode_chat
from superstep.serve.api.openai.chat_fields import ChatFields, tool_use
from superstep.serve.api.openai.fields import check_common, constraint_of, sampling_of, seed_of, stops_of
from superstep.serve.api.openai.logprobs_format import chat_logprobs, ids, prompt_logprobs
from superstep.serve.api.openai.to_sampling import asks_of, head_of
from superstep.serve.api.text_protocol import AnswerPiece, ToolCallReader, ToolUse
from superstep.serve.scheduling.request import Constraint


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A valid request.

    Attributes:
        asks: the requested answers.
        use: the tools that they may call.
        head: the begin of the response, and of each chunk under another ``object``.
    """

    fields: ChatFields
    asks: list[AnswerRequest]
    use: ToolUse | None
    head: dict[str, Any]


async def chat_completions(request: Request, service: AppState) -> Response:
    chat = await read_request(await read_json(request, service.limits), service)
    if chat.fields.stream:
        response = await stream_response(request, stream(chat, service), make_backend_refusal)
    else:
        response = respond(await until_gone(request, whole(chat, service)))
    return warn_of_cut(response, value_or(chat.fields.max_completion_tokens, chat.fields.max_tokens), chat.asks)


async def read_request(body: dict[str, Any], service: AppState) -> ChatRequest:
    """Read a body; raises RequestError with the field and the rule."""
    fields = read_model(ChatFields, body)
    check_common(fields)
    service.adapter_of(fields.model)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise RequestError("top_logprobs needs logprobs; set logprobs to true.", param="top_logprobs")
    use = tool_use(fields)
    constraint = await _constraint(fields, use, service)
    prompt = await encode_chat(fields.messages, use.tools if use else (), service)
    sampling = sampling_of(
        fields,
        seed=seed_of(fields),
        max_tokens=_max_tokens(fields, service),
        top_logprobs=value_or(fields.top_logprobs, 0),
        limits=service.limits,
        constraint=constraint,
    )
    head = head_of(fields, service, prefix="chatcmpl", kind="chat.completion")
    stop = stops_of(fields, service.limits) + tuple(service.words.chat_stops)
    asks = asks_of(fields, [prompt], sampling, stop, service, names={"prompt": "messages"})
    if use is not None:
        asks = [replace(ask, shows_special=True) for ask in asks]
    return ChatRequest(fields=fields, asks=asks, use=use, head=head)


async def _constraint(fields: ChatFields, use: ToolUse | None, service: AppState) -> Constraint | None:
    param, constraint = constraint_of(fields)
    if use is not None and constraint is not None:
        raise RequestError(
            "tools cannot be called in an answer whose form is given; leave out the form, or set tool_choice to none.",
            param="tools",
        )
    if use is None:
        await check_constraint(constraint, service, param=param)
        return constraint
    forced = await aside(lambda: service.words.tool_constraint(use), param="tools")
    await check_constraint(forced, service, param="tools")
    return forced


def _max_tokens(fields: ChatFields, service: AppState) -> int:
    old, new = fields.max_tokens, fields.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens = {old} and max_completion_tokens = {new} say the same of an answer; give one of them.",
            param="max_tokens",
        )
    return value_or(new, value_or(old, service.backend.info.context_tokens))


class ChatChoice:
    """One answer in OpenAI's form, in pieces."""

    def __init__(self, ask: AnswerRequest, chat: ChatRequest, service: AppState) -> None:
        self._ask, self._fields, self._words = ask, chat.fields, service.words
        self._tools: ToolCallReader | None = service.words.tool_reader(chat.use) if chat.use else None
        self.calls: list[dict[str, Any]] = []

    def read(self, news: AnswerUpdate) -> tuple[str, list[dict[str, Any]]]:
        """The text and the pieces of calls in the next update."""
        if self._tools is None:
            return news.text, []
        pieces = list(self._tools.push(news.text)) if news.text else []
        if news.finish is not None:
            pieces += self._tools.end()
        return "".join(one.content for one in pieces), [self._call(one) for one in pieces if one.call is not None]

    def _call(self, piece: AnswerPiece) -> dict[str, Any]:
        """A piece of a call as a delta; it is also added to its call."""
        assert piece.call is not None
        if piece.call == len(self.calls):
            name = {"name": piece.name, "arguments": ""}
            self.calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": name})
            first = self.calls[piece.call]
            delta = first | {"index": piece.call, "function": {"name": piece.name, "arguments": piece.arguments}}
        else:
            delta = {"index": piece.call, "function": {"arguments": piece.arguments}}
        self.calls[piece.call]["function"]["arguments"] += piece.arguments
        return delta

    def finish(self, news: AnswerUpdate) -> str | None:
        """Why the answer ended, in OpenAI's words."""
        return "tool_calls" if news.finish == "stop" and self.calls else news.finish

    def rest(self, news: AnswerUpdate, *, is_first: bool) -> dict[str, Any]:
        """The fields beside the text."""
        fields = self._fields
        top = value_or(fields.top_logprobs, 0)
        choice: dict[str, Any] = {
            "index": self._ask.index,
            "logprobs": chat_logprobs(news.tokens, top, self._words) if fields.logprobs else None,
            "finish_reason": self.finish(news),
            "stop_reason": news.stop,
        }
        if fields.return_token_ids:
            choice["token_ids"] = ids(news.tokens)
        if fields.prompt_top is not None and is_first:
            choice["prompt_logprobs"] = prompt_logprobs(news.prompt, fields.prompt_top, self._words)
        return choice

    def whole(self, one: CollectedAnswer) -> dict[str, Any]:
        news = one.news(self._ask.index)
        content, _ = self.read(news)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.calls:
            message |= {"content": content or None, "tool_calls": self.calls}
        return {"message": message} | self.rest(news, is_first=True)


async def whole(chat: ChatRequest, service: AppState) -> dict[str, Any]:
    usage = Usage(chat.asks, len(chat.asks))
    wholes = await collect(chat.asks, service, usage)
    choices = [ChatChoice(ask, chat, service).whole(one) for ask, one in zip(chat.asks, wholes, strict=True)]
    return _head(chat) | {"choices": choices, "usage": usage.to_json()}


def _head(chat: ChatRequest) -> dict[str, Any]:
    if not chat.fields.return_token_ids:
        return chat.head
    return chat.head | {"prompt_token_ids": list(chat.asks[0].prompt)}


async def stream(chat: ChatRequest, service: AppState) -> AsyncGenerator[bytes, None]:
    usage = Usage(chat.asks, len(chat.asks))
    choices = [ChatChoice(ask, chat, service) for ask in chat.asks]
    kind = {"object": "chat.completion.chunk"} | ({"usage": None} if chat.fields.has_usage else {})
    silent = set(range(len(choices)))
    async with aclosing(answers(chat.asks, service)) as pieces:
        async for news in pieces:
            usage.add(news)
            head = (_head(chat) if len(silent) == len(choices) else chat.head) | kind
            for chunk in _chunks(choices[news.index], news, is_first=news.index in silent):
                yield event(head | {"choices": [chunk]})
            silent.discard(news.index)
    if chat.fields.has_usage:
        yield event(chat.head | kind | {"choices": [], "usage": usage.to_json()})
    yield DONE


def _chunks(choice: ChatChoice, news: AnswerUpdate, *, is_first: bool) -> list[dict[str, Any]]:
    """One delta for the text, one for each piece of a call; the last has the other fields."""
    content, calls = choice.read(news)
    deltas: list[dict[str, Any]] = []
    if is_first:
        deltas.append({"role": "assistant", "content": content})
    elif content or not calls:
        deltas.append({"content": content} if content else {})
    deltas += [{"tool_calls": [call]} for call in calls]
    plain = {"index": news.index, "logprobs": None, "finish_reason": None}
    chunks = [plain | {"delta": delta} for delta in deltas]
    chunks[-1] |= choice.rest(news, is_first=is_first)
    return chunks
