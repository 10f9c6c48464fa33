"""Where in an answer the final answer stands: in one place, so that to list every option is no answer."""

from __future__ import annotations

import re
from collections.abc import Iterator

MARKS = re.compile(r"####|(?:final answer|answer)\s*(?:is)?\s*:", re.IGNORECASE)
"""Behind the last of these, as GSM8K and many prompts ask for it."""

BOXED = "\\boxed{"
FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


def final(answer: str) -> str:
    """What is in the last ``\\boxed{}``; or what stands behind the last mark, on its line; or else the whole answer."""
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


def fenced(answer: str) -> str:
    """The inside of the last fenced block; the whole answer where there is none."""
    blocks = FENCE.findall(answer)
    return blocks[-1][1] if blocks else answer
