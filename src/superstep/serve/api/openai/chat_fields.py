"""The fields of a chat, and the meaning of its tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from superstep.http.body_validation import StrictBody
from superstep.http.request_error import RequestError, show
from superstep.serve.api.openai.fields import Common
from superstep.serve.api.text_protocol import ToolUse
from superstep.serve.scheduling.request import MOST_TOP

NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
MOST_TOOLS = 128


class Function(StrictBody):
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictBody):
    type: Literal["function"]
    function: Function


class ChosenFunction(StrictBody):
    name: str


class ChosenTool(StrictBody):
    type: Literal["function"]
    function: ChosenFunction


class ChatFields(Common):
    """The body of a chat request."""

    # Messages are read by the text part, which knows what a template can show.
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None


def tool_use(fields: ChatFields) -> ToolUse | None:
    """The tools that the answer may call, or None.

    Raises:
        RequestError: the chosen tool does not exist, or there is none to choose from.
    """
    choice, tools = fields.tool_choice, fields.tools or []
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice asks for a call, and tools is empty; give tools.", param="tool_choice")
        return None
    if choice == "none":
        return None
    names = [tool.function.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"tools has two functions of the name {show(twice)}; rename one.", param="tools")
    only = choice.function.name if isinstance(choice, ChosenTool) else ""
    if only and only not in names:
        raise RequestError(
            f"tool_choice.function.name = {show(only)} is none of tools; choose one of {', '.join(names)}.",
            param="tool_choice.function.name",
        )
    return ToolUse(
        tools=tuple(tool.model_dump(exclude_none=True) for tool in tools),
        is_required=choice == "required" or bool(only),
        only=only,
        is_parallel=fields.parallel_tool_calls is not False and not only,
    )
