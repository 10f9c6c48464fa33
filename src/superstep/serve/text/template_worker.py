"""Renders a chat template in a process of its own: ``python -P template_worker.py``, one JSON line in, one out.

A template comes with a model from anywhere, and Jinja's sandbox protects attributes, but does not stop endless work. So
the system limits this process's time for each text and its memory, and it imports none of our modules.

The first line is ``{"source", "seconds", "bytes", "chars"}``, each later one ``{"variables"}``, a list: one set for
each text. An answer is ``{"texts"}`` or ``{"error"}``, with the line's ``number``. When the time of one text runs out,
the process ends without an answer.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

PRIVATE = 0xF0000
"""Characters from here on are the caller's marks; JSON does not escape them."""


class Generation(Extension):
    """``{% generation %}`` marks the model's text, for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - as the library declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class PlainNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore: they lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - so that `self` may be a name
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:  # noqa: ANN401 - any value of a template's
        _refuse_private(name)
        Namespace.__setitem__(self, name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not have the name '{name}'")


def environment() -> ImmutableSandboxedEnvironment:
    """Jinja with the settings that Hugging Face's templates need."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, Generation]
    )
    made.filters["tojson"] = tojson
    made.globals.update(raise_exception=raise_exception, strftime_now=strftime_now, namespace=PlainNamespace)
    return made


def tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if not ensure_ascii:
        return text
    return "".join(c if ord(c) < 128 or ord(c) >= PRIVATE else json.dumps(c)[1:-1] for c in text)


def raise_exception(message: str) -> NoReturn:
    """A template's own refusal of messages."""
    raise TemplateError(message)


def strftime_now(pattern: str) -> str:
    """The current date, formatted."""
    return datetime.now().strftime(pattern)


def render(template: jinja2.Template, variables: Mapping[str, Any], most_chars: int) -> str:
    """The text.

    Raises:
        ValueError: it becomes too long.
    """
    pieces, chars = [], 0
    for piece in template.generate(**variables):
        chars += len(piece)
        if chars > most_chars:
            raise ValueError(f"its text is longer than {most_chars} characters")
        pieces.append(piece)
    return "".join(pieces)


def reason(error: Exception) -> str:
    """A template's error in one line."""
    if isinstance(error, MemoryError):
        return "it asks for too much memory"
    if isinstance(error, RecursionError):
        return "it calls itself without end"
    line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    text = str(error).partition("\n")[0][:300] or type(error).__name__
    return text + line


def allow(seconds: float) -> None:
    """Limit the CPU time from now on; 0 removes the limit. The system then ends the process."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def answer(request: Mapping[str, object], reply: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps({**reply, "number": request["number"]}) + "\n")
    sys.stdout.flush()


def serve() -> None:
    """Render until the input ends."""
    task = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (task["bytes"], task["bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    allow(task["seconds"])
    try:
        template = environment().from_string(task["source"])
    except Exception as error:  # noqa: BLE001 - whatever a template raises is its own fault
        answer(task, {"error": reason(error)})
        return
    answer(task, {"texts": []})
    allow(0)
    for line in sys.stdin:
        texts: list[str] = []
        reply: dict[str, object] = {"texts": texts}
        request = json.loads(line)
        for variables in request["variables"]:
            allow(task["seconds"])
            try:
                texts.append(render(template, variables, task["chars"] - sum(map(len, texts))))
            except Exception as error:  # noqa: BLE001
                reply = {"error": reason(error)}
                break
        allow(0)
        answer(request, reply)


if __name__ == "__main__":
    serve()
