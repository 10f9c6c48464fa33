"""Whatever reads an answer of a model's takes time in proportion to its length, however hostile its shape."""

from __future__ import annotations

import re
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superstep.grade import graders
from superstep.grade.graders.code import Case, CodeTests
from superstep.grade.graders.final_answer import final, last_fence
from superstep.grade.graders.llm_judge import JudgeError, read_score
from superstep.grade.graders.maths import Maths
from superstep.grade.graders.schema import Json
from superstep.grade.graders.text import Exact, Number
from superstep.grade.sandbox.sandbox import ProgramResult
from superstep.grade.verdict import line
from superstep.serve.text.stop_strings import StopFinder
from superstep.serve.text.tool_call_parser import OPENERS, CallParser

CHARS = 10_000
MOST_TIMES = 2.5
"""How much more an answer of twice the length may take."""

SLACK_S = 0.02
"""Of what is linear, 20,000 characters take less; of what is quadratic in C, tenths of seconds."""

TRIES = 10
"""Of a comparison of times, on a machine that is busy with something else."""

SHAPES = {
    "fences": "```python\nx = 1\n```\n",
    "fences that open": "```python\n",
    "fences that close": "\n```",
    "indented fences": "\t ``` \n",
    "fences in a line": "```x`",
    "backticks": "`",
    "brackets": "[",
    "braces": "{",
    "parentheses": "(",
    "closing braces": "}",
    "backslashes": "\\",
    "open boxes": "\\boxed{",
    "boxes": "\\boxed{1}",
    "quotes": '"',
    "digits": "1",
    "digits with commas": "1,111",
    "spaces": " ",
    "lines": "\n",
    "spaces and lines": " \n\t",
    "marks": "#### ",
    "answers": "answer is ",
    "final answers": "final answer : ",
    "objects": '{"a":',
    "objects in lines": '\n{"name": "f", ',
    "escapes": '"\\u',
    "tool calls": '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "open tool calls": "<tool_call>",
    "tool calls in texts": '<tool_call>{"x',
    "lists of calls": '[TOOL_CALLS][{"name": "f"}',
    "beginnings of a stop text": "ENDEN",
}
HEADS = ("", "answer", "```", "\\boxed{", '{"a": "', '"', "<tool_call>{", "[TOOL_CALLS][", "\n{")
"""What may stand before a shape that is repeated: a reader begins there and does not come to its end."""

TAILS = ("\n", "x", "\n```", "}", '"}')


class _Programs:
    """A sandbox that runs nothing: how long a program takes is not its reader's time."""

    def calls(self, source, calls):
        return ProgramResult("done", ())


class _Formulas:
    def compare(self, expected, given):
        return "other"


class _Tools:
    sandbox, maths = _Programs(), _Formulas()


def judged(make):
    return lambda answer: make(answer).verdict(_Tools())


def scored(answer):
    with suppress(JudgeError):
        read_score(answer)


def parsed(form):
    def read(answer):
        parser = CallParser(form, ["f"])
        parser.push(answer)
        parser.end()

    return read


def stopped(answer):
    finder = StopFinder(["ENDEND", "\n\n\n1", "`" * 100 + "x"])
    finder.push(answer)


READERS = {
    "final": final,
    "fenced": last_fence,
    "Exact": judged(lambda answer: Exact(answer, "x")),
    "Number": judged(lambda answer: Number(answer, 7)),
    "Maths": judged(lambda answer: Maths(answer, "7")),
    "Json": judged(lambda answer: Json(answer, {"type": "object"}, {"a": 1})),
    "CodeTests": judged(lambda answer: CodeTests(answer, [Case("f", (), 1)])),
    "judge": scored,
    "line": line,
    "stop texts": stopped,
    **{f"tool calls of {form}": parsed(form) for form in OPENERS},
}

IN_C = ("final", "fenced", "Exact", "Number", "Json", "judge", "line")
"""Of whose work much is done by patterns, methods of texts and the reader of JSON. The rest is lines of Python."""


def counted_lines(read, answer):
    """Lines of Python that are run: the same number each time."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        read(answer)
    finally:
        sys.settrace(before)
    return count


def seconds(read, answer):
    """Of a processor."""
    begin_s = time.process_time()
    read(answer)
    return time.process_time() - begin_s


def answers(shape, chars):
    for head, tail in [*((head, "") for head in HEADS), *(("", tail) for tail in TAILS)]:
        yield head + shape * (chars // len(shape)) + tail


def is_slow(read, one, twice):
    """Whether twice the length takes more than twice the time, however often it is tried."""
    least = most = float("inf")
    for _ in range(TRIES):
        most = min(most, seconds(read, twice))
        if most <= SLACK_S:
            return False
        least = min(least, seconds(read, one))
        if most <= MOST_TIMES * least:
            return False
    return True


@pytest.mark.parametrize("reader", IN_C)
def test_twice_the_length_takes_twice_the_time(reader):
    read, slow = READERS[reader], []
    read("warm up")
    for name, shape in SHAPES.items():
        for one, twice in zip(answers(shape, CHARS), answers(shape, 2 * CHARS), strict=True):
            if is_slow(read, one, twice):
                slow.append((name, twice[:8], twice[-4:]))
                break
    assert slow == []


@pytest.mark.parametrize("reader", READERS)
def test_twice_the_length_takes_twice_the_lines_of_python(reader):
    read, slow = READERS[reader], {}
    for name, shape in SHAPES.items():
        for one, twice in zip(answers(shape, 300), answers(shape, 600), strict=True):
            least, took = counted_lines(read, one), counted_lines(read, twice)
            if took > MOST_TIMES * least + 60:
                slow[name, twice[:8], twice[-4:]] = least, took
    assert slow == {}


def test_every_grader_is_among_the_readers():
    known = {
        "check",
        "code",
        "final_answer",
        "llm_judge",
        "literals",
        "maths",
        "maths_child",
        "maths_process",
        "schema",
        "text",
    }
    assert {path.stem for path in Path(graders.__file__).parent.glob("[a-z]*.py")} == known


BLOCK = re.compile(r"^[ \t]*```[ \t]*[\w+-]*[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
"""A fenced block in one pattern, which says what is meant and is quadratic."""


@given(st.lists(st.sampled_from(["```", "`", "\n", " ", "\t", "x", "py", "\r", "```\n", "\n```\n"]), max_size=40))
def test_the_fenced_block_is_that_of_the_pattern(parts):
    answer = "".join(parts)
    blocks = BLOCK.findall(answer)
    assert last_fence(answer) == (blocks[-1] if blocks else answer)
