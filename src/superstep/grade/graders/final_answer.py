"""Finds the final answer in one place of the text, so that listing every option earns nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

MARKS = re.compile(r"####|(?:final answer|answer)\s*(?:is\s*)?:", re.IGNORECASE)
"""The final answer follows the last of these marks, as in GSM8K. No white space may match two parts of the pattern: a
long run of it would make matching quadratic.
"""

BOXED = "\\boxed{"
FENCE = "```"
SPACE = " \t"


def final(answer: str) -> str:
    """The content of the last ``\\boxed{}``; else the rest of the line after the last mark; else the whole answer."""
    boxed = list(_boxes(answer))
    if boxed:
        return boxed[-1].strip()
    marks = list(MARKS.finditer(answer))
    if marks:
        return answer[marks[-1].end() :].strip().partition("\n")[0].strip()
    return answer.strip()


def _boxes(answer: str) -> Iterator[str]:
    at = answer.find(BOXED)
    while at >= 0:
        begin, depth = at + len(BOXED), 1
        for k in range(begin, len(answer)):
            depth += {"{": 1, "}": -1}.get(answer[k], 0)
            if depth == 0:
                yield answer[begin:k]
                break
        else:
            return
        at = answer.find(BOXED, k)


def last_fence(answer: str) -> str:
    """The content of the last closed fenced block; the whole answer where there is none."""
    lines = answer.split("\n")
    block: list[str] | None = None
    begin: int | None = None
    for number, line in enumerate(lines):
        if begin is None:
            begin = number + 1 if _opens(line) else None
        elif line.strip(SPACE) == FENCE:
            block, begin = lines[begin:number], None
    return answer if block is None else "".join(f"{line}\n" for line in block)


def _opens(line: str) -> bool:
    """Whether a block may begin after this line: a fence and a language, but no text within backticks."""
    mark = line.lstrip(SPACE)
    return mark.startswith(FENCE) and "`" not in mark.removeprefix(FENCE)
