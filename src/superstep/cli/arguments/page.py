"""The page of a verb that has words of its own: what each of them does, as wide as the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable


def page(usage: str, words: Iterable[tuple[str, str]], last: str) -> str:
    """The page.

    Args:
        usage: its first line.
        words: each, and what it does.
        last: its last line.
    """
    columns = max(24, min(shutil.get_terminal_size().columns, 100))
    lines = [
        textwrap.fill(what, columns, initial_indent=f"  {word:8}", subsequent_indent=" " * 10) for word, what in words
    ]
    return "\n".join([textwrap.fill(usage, columns), "", *lines, "", textwrap.fill(last, columns)])
