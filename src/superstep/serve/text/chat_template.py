"""Chat templates: chats to prompts, by the model's template.

A model without one gets ``DEFAULT``: each message as ``Role: text``, an empty line between them, and ``Assistant:`` at
the end. It needs no special tokens, so that a model fresh from training can chat; ``"\n\nUser:"`` then ends its
answers.

``chat_tokens.py`` encodes a prompt's text as token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from superstep.errors import ConfigError
from superstep.serve.text.chat_messages import check_value, plain_messages
from superstep.serve.text.control_token_guard import Marks, marks_for
from superstep.serve.text.template_process import TemplateProcess

DEFAULT = (
    "{% for message in messages %}"
    "{{ message.role | capitalize }}: {{ message.content }}\n\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
DEFAULT_STOPS = ("\n\nUser:",)

MOST_SOURCE = 1_000_000
"""Characters of a template; the longest ones have 20,000."""

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Variables of templates for special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A chat to be rendered.

    Attributes:
        messages: as in OpenAI's chat completions.
        tools: that the model may call, as OpenAI's API describes them.
        add_generation_prompt: the prompt ends where the assistant's answer begins.
        continue_final_message: the prompt ends with the last message's text, which the model continues.
        extra: further variables of the template, such as ``enable_thinking``.
        parts: sorts of parts beside text that content may have; a template shows such content part by part.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatPrefix:
    """A prefix of a chat: its number of messages, and whether the start of an answer follows them."""

    messages: int
    is_open: bool


class ChatTemplate:
    """A model's template or templates: ``tool_use`` for chats with tools, ``default`` for others.

    Args:
        sources: Jinja texts by name; at least ``default``.
        special: values of ``bos_token`` and others.
        stops: texts that end an answer, where no token does.

    Attributes:
        sources, special, stops: the arguments.
    """

    def __init__(
        self, sources: Mapping[str, str], special: Mapping[str, str] | None = None, stops: tuple[str, ...] = ()
    ) -> None:
        self.sources = dict(sources)
        self.stops = stops
        self.special = dict(special or {})
        self._processes = {name: TemplateProcess(source) for name, source in self.sources.items()}

    def source(self, *, has_tools: bool = False) -> str:
        """The Jinja text of a chat with or without tools."""
        return self.sources[self._name(has_tools=has_tools)]

    def check(self) -> None:
        """Compile each template.

        Raises:
            ConfigError: names the line with the error.
        """
        for process in self._processes.values():
            process.check()

    def close(self) -> None:
        """End the rendering processes; another chat starts them again."""
        for process in self._processes.values():
            process.close()

    def render(self, chat: Chat) -> str:
        """The prompt's text.

        Raises:
            ConfigError: messages are invalid, the template refuses them or fails, or it exceeds its limits.
        """
        return self.render_marked(chat, ())[0]

    def render_marked(self, chat: Chat, control: Sequence[str], plain: Sequence[str] = ()) -> tuple[str, Marks]:
        """The prompt's text, with marks around the client's spellings of control tokens.

        Args:
            chat: the chat.
            control: spellings of control tokens.
            plain: of added tokens that are control tokens only where the template spells them.

        Raises:
            ConfigError: as ``render``.
        """
        name = self._name(has_tools=bool(chat.tools))
        variables = self._variables(chat, self.sources[name])
        marks = marks_for(variables, control, self.sources[name], plain)
        marked = marks.put(variables)
        marked.update(self.special, add_generation_prompt=chat.add_generation_prompt)
        if not chat.continue_final_message:
            return self._processes[name].render(marked), marks
        if chat.add_generation_prompt:
            raise ConfigError(
                "continue_final_message = true goes on with the last message, and add_generation_prompt = true begins "
                "a new one; set one of them to false."
            )
        last = marked["messages"][-1]
        last["content"] += marks.end + " "
        return _cut(self._processes[name].render(marked), marks.end), marks

    def render_many(
        self, chats: Sequence[tuple[Chat, Sequence[ChatPrefix]]], control: Sequence[str], plain: Sequence[str] = ()
    ) -> list[tuple[list[str], Marks]]:
        """The texts of each chat's prefixes, all with the same marks; a template renders all in one call.

        Args:
            chats: complete chats, with their prefixes; opening or continuing an answer is ignored.
            control: spellings of control tokens.
            plain: of added tokens that are control tokens only where the template spells them.

        Raises:
            ConfigError: as ``render``, for one of the chats.
        """
        rendered: list[list[str]] = [[] for _ in chats]
        every: list[Marks] = []
        wanted: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        for number, (chat, turns) in enumerate(chats):
            name = self._name(has_tools=bool(chat.tools))
            variables = self._variables(chat, self.sources[name])
            every.append(marks_for(variables, control, self.sources[name], plain))
            marked = every[-1].put(variables) | self.special
            for turn in turns:
                given = {"messages": marked["messages"][: turn.messages], "add_generation_prompt": turn.is_open}
                wanted.setdefault(name, []).append((number, marked | given))
        for name, each in wanted.items():
            texts = self._processes[name].render_all([variables for _, variables in each])
            for (number, _), text in zip(each, texts, strict=True):
                rendered[number].append(text)
        return list(zip(rendered, every, strict=True))

    def _name(self, *, has_tools: bool) -> str:
        return "tool_use" if has_tools and "tool_use" in self.sources else "default"

    def _variables(self, chat: Chat, source: str) -> dict[str, Any]:
        messages = plain_messages(chat.messages, chat.parts)
        if "developer" not in source:  # a newer name of the same role
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        check_value(chat.tools, "tools")
        check_value(chat.extra, "chat_template_kwargs")
        ours = {"messages", "tools", "documents", "add_generation_prompt", *self.special} & set(chat.extra)
        if ours:
            raise ConfigError(f"chat_template_kwargs.{min(ours)} is given by the server; leave it out.")
        tools = [dict(tool) for tool in chat.tools] or None
        return {"documents": None, **chat.extra, "messages": messages, "tools": tools}


def load_chat_template(folder: Path) -> ChatTemplate:
    """The template of a model's folder: ``chat_template.jinja`` and ``additional_chat_templates``, else the one in
    ``tokenizer_config.json``, else ``DEFAULT``.

    Raises:
        ConfigError: files cannot be read, or a template cannot be compiled.
    """
    config = _json(folder / "tokenizer_config.json")
    names = {**_json(folder / "special_tokens_map.json"), **config}
    special = {name: text for name in SPECIAL if (text := _token(names.get(name)))}
    sources = _sources(config.get("chat_template"))
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = _text(path)
    if (folder / "chat_template.jinja").is_file():
        sources["default"] = _text(folder / "chat_template.jinja")
    if not sources:
        return ChatTemplate({"default": DEFAULT}, special, DEFAULT_STOPS)
    sources.setdefault("default", next(iter(sources.values())))
    template = ChatTemplate(sources, special)
    template.check()
    return template


def _sources(held: Any) -> dict[str, str]:  # noqa: ANN401 - any JSON
    match held:
        case None:
            return {}
        case str():
            sources = {"default": held}
        case [*named] if all(isinstance(one, dict) and isinstance(one.get("template"), str) for one in named):
            sources = {str(one.get("name", "default")): one["template"] for one in named}
        case _:
            raise ConfigError(
                f"chat_template of tokenizer_config.json is of type {type(held).__name__}; it must be a text, "
                "or a list of objects with name and template."
            )
    for source in sources.values():
        _check_size(source)
    return sources


def _check_size(source: str) -> None:
    if len(source) > MOST_SOURCE:
        raise ConfigError(f"chat_template has {len(source)} characters; at most {MOST_SOURCE} are read.")


def _text(path: Path) -> str:
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{path}' cannot be read ({error}); it must be a Jinja template in UTF-8.") from None
    _check_size(source)
    return source


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"'{path}' cannot be read ({error}); it must be a JSON object.") from None
    if not isinstance(held, dict):
        raise ConfigError(f"'{path}' holds a {type(held).__name__}; it must be a JSON object.")
    return held


def _token(held: object) -> str:
    """A special token, given as text or as an object."""
    text = held.get("content") if isinstance(held, dict) else held
    return text if isinstance(text, str) else ""


def _cut(text: str, end: str) -> str:
    """The text up to the end of the last message, without the white space that the template strips there."""
    place = text.rfind(end)
    if place < 0:
        raise ConfigError(
            "continue_final_message = true, and the chat template does not show the last message as it is; "
            "set it to false for this model."
        )
    before = text[:place]
    return before if text.startswith(end + " ", place) else before.rstrip()
