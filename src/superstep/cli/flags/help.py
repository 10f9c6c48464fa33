"""The page of --help: every field of a dataclass as a flag, the common ones first."""

from __future__ import annotations

import ast
import inspect
import shutil
import textwrap
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal

from superstep.plan.config_io import alternatives, section_of, table_entry

INDENT = 2
WIDEST = 100
"""Most columns; longer lines are hard to read."""


def write_help(base: object, *, usage: str, description: str, common: Sequence[str] = ()) -> str:
    """The page for the flags of ``base``, as wide as the terminal.

    Args:
        common: dotted names of the most used fields.
    """
    width = max(20, min(shutil.get_terminal_size().columns, WIDEST))
    sections = list(_sections(base, ""))
    every = {name: entry for _, entries in sections for name, entry in entries.items()}
    groups = [("Common flags", {name: every.pop(name) for name in common})]
    groups += [(title, {name: each for name, each in entries.items() if name in every}) for title, entries in sections]
    blocks = [
        _wrap(f"usage: {usage}", width, later=7),
        _wrap(description, width),
        *("\n".join(_group(title, entries, width)) for title, entries in groups if entries),
    ]
    return "\n\n".join(blocks) + "\n"


def page(usage: str, words: Iterable[tuple[str, str]], last: str) -> str:
    """The page of a verb with subcommands, as wide as the terminal.

    Args:
        usage: its first line.
        words: each subcommand, with its description.
        last: its last line.
    """
    columns = max(24, min(shutil.get_terminal_size().columns, WIDEST))
    lines = [
        textwrap.fill(what, columns, initial_indent=f"  {word:8}", subsequent_indent=" " * 10) for word, what in words
    ]
    return "\n".join([textwrap.fill(usage, columns), "", *lines, "", textwrap.fill(last, columns)])


def _sections(base: Any, prefix: str) -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:  # noqa: ANN401
    """A title for each table of fields, and for each field its value's form and its meaning."""
    hints, docs = typing.get_type_hints(type(base)), field_docs(type(base))
    own = {
        f"{prefix}{field.name}": (
            _value(hints[field.name]),
            _meaning(docs.get(field.name, ""), getattr(base, field.name)),
        )
        for field in fields(base)
        if section_of(hints[field.name]) is None
    }
    about = inspect.getdoc(type(base)) or ""
    title = about.partition("\n")[0]
    yield f"{prefix.rstrip('.')}: {title}" if prefix else title, own
    for field in fields(base):
        section = section_of(hints[field.name])
        if section is not None:
            yield from _sections(getattr(base, field.name) or section(), f"{prefix}{field.name}.")


def _group(title: str, entries: dict[str, tuple[str, str]], width: int) -> Iterator[str]:
    yield _wrap(title, width)
    for name, (value, meaning) in entries.items():
        flag = f"--{name.replace('_', '-')}"
        yield _wrap(f"{flag} {value}", width, first=INDENT, later=3 * INDENT)
        if meaning:
            yield _wrap(meaning, width, first=3 * INDENT, later=3 * INDENT)


def _wrap(text: str, width: int, *, first: int = 0, later: int = 0) -> str:
    return textwrap.fill(text, width, initial_indent=" " * first, subsequent_indent=" " * later, break_on_hyphens=False)


def _meaning(doc: str, value: object) -> str:
    """The field's docstring and its default, if it has one."""
    text = " ".join(doc.split())
    match value:
        case None | () | "":
            return text
        case tuple():
            return f"{text} ({' '.join(map(str, value))})".strip()
        case _:
            return f"{text} ({value})".strip()


def _value(hint: object) -> str:
    """The form of the flag's value."""
    option = next(option for option in alternatives(hint) if option is not type(None))
    if (entry := table_entry(option)) is not None:
        return f".KEY {_value(entry)}"
    if typing.get_origin(option) is tuple:
        return f"{_value(typing.get_args(option)[0])} ..."
    if typing.get_origin(option) is Literal:
        return "|".join(map(str, typing.get_args(option)))
    return {int: "INTEGER", float: "NUMBER", bool: "true|false"}.get(option, "TEXT")


def field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field of a dataclass and of its bases."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_dataclass(base):
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(tree, ast.ClassDef)
            for node, below in zip(tree.body, tree.body[1:], strict=False):
                match node, below:
                    case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(doc))):
                        docs[name] = doc
    return docs
