"""The reference of the code, out of its docstrings: a page for each folder of the package. Nothing is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import griffe

NAMED = {
    griffe.DocstringSectionKind.parameters: "Arguments",
    griffe.DocstringSectionKind.attributes: "Attributes",
    griffe.DocstringSectionKind.raises: "Raises",
}
DRAWN = re.compile(r"[─│┌└├╷╵·━▲▼►◄]|  \S+ {2,}")
"""A line of a drawing, or of columns."""
WIDTH = 100
MODULE, OBJECT, MEMBER = "##", "###", "####"


def write_api(source: Path, out: Path) -> None:
    """Write the pages, and ``index.md`` that lists them."""
    package = griffe.load("superstep", search_paths=[source], docstring_parser="google")
    assert isinstance(package, griffe.Module)
    out.mkdir(parents=True)
    rooms = sorted((room for room in _rooms(package) if room is not package), key=_name)
    for room in rooms:
        (out / f"{_name(room)}.md").write_text("\n".join(_page(room)), encoding="utf-8")
    lines = ["# The code", "", "Every public name, by the folder that it is in."]
    lines += ["[The layout](../explanation/layout.md) tells how they hang together.", ""]
    lines += [f"- [`{_name(room)}`]({_name(room)}.md): {_first(room)}" for room in rooms]
    lines += ["", "```{toctree}", ":hidden:", "", *(_name(room) for room in rooms), "```", ""]
    (out / "index.md").write_text("\n".join(lines), encoding="utf-8")


def _rooms(package: griffe.Module) -> Iterator[griffe.Module]:
    """A package and those within it that have modules."""
    modules = [m for m in package.modules.values() if not m.is_alias]
    if any(not m.is_init_module for m in modules):
        yield package
    for module in modules:
        if module.is_init_module:
            yield from _rooms(module)


def _name(room: griffe.Object) -> str:
    return room.path.removeprefix("superstep.")


def _first(room: griffe.Module) -> str:
    """What is in a folder, in the words of its files' names."""
    names = [name for name, module in room.modules.items() if not module.is_init_module and not name.startswith("_")]
    return ", ".join(sorted(names))


def _page(room: griffe.Module) -> Iterator[str]:
    yield from (f"# {_name(room)}", "", *_text(room.docstring))
    for name, module in sorted(room.modules.items()):
        if module.is_init_module or module.is_alias or name.startswith("__"):
            continue
        yield from (f"{MODULE} {room.path.removeprefix('superstep.')}.{name}", "", *_text(module.docstring))
        for member in module.members.values():
            if not member.is_alias and not member.name.startswith("_"):
                yield from _object(member, OBJECT)


def _object(member: griffe.Object | griffe.Alias, level: str) -> Iterator[str]:
    """A class with its methods, a function, or a constant that something is said of."""
    if member.is_function:
        yield from (f"{level} {member.name}", "", *_code(_signature(member)), *_docstring(member))
    elif member.is_class:
        yield from (f"{level} {member.name}", "", *_code(_head(member)), *_docstring(member))
        for each in member.members.values():
            if not each.is_alias and not each.name.startswith("_") and each.is_function and each.has_docstring:
                yield from _object(each, MEMBER)
    elif member.is_attribute and member.has_docstring:
        yield from (f"{level} {member.name}", "", *_docstring(member))


def _signature(function: griffe.Function) -> str:
    said = f"def {function.signature()}"
    if len(said) <= WIDTH:
        return said
    head, _, rest = said.partition("(")
    inner, _, tail = rest.rpartition(")")
    return f"{head}(\n" + "".join(f"    {one},\n" for one in _split(inner)) + f"){tail}"


def _split(inner: str) -> list[str]:
    """Arguments apart, whatever commas their types have."""
    found, depth, at = [], 0, 0
    for here, sign in enumerate(inner):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            found.append(inner[at:here].strip())
            at = here + 1
    return [*found, inner[at:].strip()]


def _head(of: griffe.Class) -> str:
    bases = ", ".join(str(base) for base in of.bases)
    said = f"class {of.name}({bases})" if bases else f"class {of.name}"
    fields = [
        f"    {one.name}: {one.annotation}" + (f" = {one.value}" if one.value is not None else "")
        for one in of.attributes.values()
        if "instance-attribute" not in one.labels or "class-attribute" in one.labels or "dataclass" in of.labels
        if not one.name.startswith("_") and one.annotation is not None
    ]
    return "\n".join([said, *fields])


def _code(text: str) -> list[str]:
    return ["```python", text, "```", ""]


def _docstring(member: griffe.Object | griffe.Alias) -> Iterator[str]:
    if member.docstring is None:
        return
    for section in member.docstring.parse("google", warnings=False):
        match section.kind:
            case griffe.DocstringSectionKind.text:
                yield from _words(section.value)
            case griffe.DocstringSectionKind.returns | griffe.DocstringSectionKind.yields:
                yield from ("Returns", *_told("", [each.description for each in section.value]))
            case kind if kind in NAMED:
                said = [(_subject(each), each.description) for each in section.value]
                yield from (NAMED[kind], *(line for name, text in said for line in _told(name, [text])))
            case _:
                yield from _words(str(section.value))
        yield ""


def _subject(each: object) -> str:
    name = getattr(each, "name", None) or getattr(each, "annotation", "")
    return f"`{name}`: "


def _told(name: str, texts: list[str]) -> list[str]:
    return [f": {name}{_inline(' '.join(text.split()))}\n" for text in texts]


def _text(docstring: griffe.Docstring | None) -> Iterator[str]:
    if docstring is not None:
        yield from (*_words(docstring.value), "")


def _words(text: str) -> Iterator[str]:
    """Paragraphs as they are, and what is drawn or set in columns as it stands there."""
    for block in text.split("\n\n"):
        lines = block.split("\n")
        if lines[0].startswith("    ") or any(DRAWN.search(line) for line in lines):
            yield from ("```text", *lines, "```", "")
        else:
            yield from (*(_inline(line) for line in lines), "")


def _inline(line: str) -> str:
    """A line of prose, none of whose signs is a mark of Markdown's, outside of backticks."""
    parts = re.split(r"(``.+?``|`[^`]+`)", line)
    return "".join(part if n % 2 else re.sub(r"([*_<\[\]{}#|$\\])", r"\\\1", part) for n, part in enumerate(parts))
