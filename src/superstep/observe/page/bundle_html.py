"""Bundles a page into one file: markup, style, script and data, without any network access.

Data is JSON, deflated and written in base64: a program of a million numbers stays small, and the page unpacks only what
it shows. A user's text, such as a run's name, is data or escaped, never markup.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

_ASSETS = files(__package__)


def pack(value: dict[str, Any]) -> str:
    """JSON, deflated, in base64; the script's ``unpack`` reads it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpack(text: str) -> dict[str, Any]:
    """Read what ``pack`` wrote."""
    data: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return data


def asset(name: str) -> str:
    return _ASSETS.joinpath(name).read_text(encoding="utf-8")


def assemble(
    *,
    markup: str,
    styles: Sequence[str],
    scripts: Sequence[str],
    title: str,
    data: dict[str, Any],
    libraries: Sequence[str] = (),
    body: Mapping[str, str] | None = None,
) -> str:
    """The whole page.

    Args:
        markup: the file name of the body; ``{{title}}`` becomes the title.
        styles: file names, in order.
        scripts: file names; the files are joined into one script with shared declarations.
        data: JSON for the script; strings made by ``pack`` stay packed until they are used. With ``is_live`` the script
        may send requests to its own server, and no other.
        libraries: file names of third-party scripts; each comes before the scripts, in a script element of its own.
        body: markup that replaces ``{{name}}``; users' text in it is escaped.
    """
    text = asset(f"assets/{markup}").replace("{{title}}", html.escape(title))
    for name, part in (body or {}).items():
        text = text.replace(f"{{{{{name}}}}}", part)
    script = "\n".join(asset(f"assets/{name}") for name in scripts)
    head = "\n".join(f"<style>\n{asset(name)}</style>" for name in styles)
    library_scripts = "\n".join(f"<script>\n{_check_library(asset(name))}\n</script>" for name in libraries)
    # Inside a script element "</" could end the element, and "<!--" could start a comment. JSON can escape "<".
    connect = " connect-src 'self';" if data.get("is_live") else ""
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="default-src \'none\';{connect} script-src '
        "'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:\">\n"
        f'<title>{html.escape(title)}</title>\n<link rel="icon" href="data:,">\n{head}\n</head>\n<body>\n'
        f"{text}"
        f'<script type="application/json" id="data">{embedded}</script>\n{library_scripts}\n'
        f'<script>\n"use strict";\n(() => {{\n{script}\n}})();\n</script>\n</body>\n</html>\n'
    )


def _check_library(text: str) -> str:
    assert "</script" not in text, "a library's text would end its script element"
    return text
