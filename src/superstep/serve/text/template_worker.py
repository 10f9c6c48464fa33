"""A chat template, rendered in a process of its own: run as ``python -P template_worker.py``, one JSON line in, one
out.

A template comes with a model from anywhere, and Jinja's sandbox keeps it from attributes, not from work without end. So
this process has little time for each text and little memory, both kept by the system, and no module of ours.

The first line is ``{"source", "seconds", "bytes", "chars"}``, each later one ``{"variables"}``, a list: those of some
texts. An answer is ``{"texts"}`` or ``{"error"}``, with the line's ``number``. Where the time for one text runs out,
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
"""Characters from here on are the caller's marks; JSON keeps them as they are."""


class Generation(Extension):
    """``{% generation %}`` marks what the model wrote, for training; here it changes nothing."""

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
    """What Hugging Face's templates expect of Jinja."""
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
    """JSON without the escapes for HTML that Jinja's own filter makes."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if not ensure_ascii:
        return text
    return "".join(c if ord(c) < 128 or ord(c) >= PRIVATE else json.dumps(c)[1:-1] for c in text)


def raise_exception(message: str) -> NoReturn:
    """A template's own refusal of some messages."""
    raise TemplateError(message)


def strftime_now(pattern: str) -> str:
    """Today's date, as a template likes it."""
    return datetime.now().strftime(pattern)


def render(template: jinja2.Template, variables: Mapping[str, Any], most_chars: int) -> str:
    """The text, or a ``ValueError`` as soon as it is longer than that."""
    pieces, chars = [], 0
    for piece in template.generate(**variables):
        chars += len(piece)
        if chars > most_chars:
            raise ValueError(f"its text is longer than {most_chars} characters")
        pieces.append(piece)
    return "".join(pieces)


def reason(error: Exception) -> str:
    """One line for what a template did wrong."""
    if isinstance(error, MemoryError):
        return "it asks for too much memory"
    if isinstance(error, RecursionError):
        return "it calls itself without end"
    line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    text = str(error).partition("\n")[0][:300] or type(error).__name__
    return text + line


def allow(seconds: float) -> None:
    """So much of the processor's time from now on; 0 for any. The system ends the process then, whatever it does."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def answer(request: Mapping[str, object], reply: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps({**reply, "number": request["number"]}) + "\n")
    sys.stdout.flush()


def serve() -> None:
    """Renders until its input ends."""
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
