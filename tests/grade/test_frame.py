"""Frame: what a task's solution has around the answer; it never has the answer itself, or a number of the working."""

from __future__ import annotations

import pytest

from superstep.grade.attacks.frame import AnswerFrame, find_frame, in_frame
from superstep.grade.attacks.programs import examples, last_constant, programs
from superstep.grade.attacks.protocol import always
from superstep.grade.task import Task


@pytest.mark.parametrize(
    ("solution", "answer", "frame"),
    [
        ("Answer: 12", 12, AnswerFrame("Answer: ", "")),
        ("#### 1,200", 1200, AnswerFrame("#### ", "")),
        ("12 km^2", 12, AnswerFrame("", " km^2")),
        ("It is \\boxed{\\frac{1}{2}}.", "1/2", AnswerFrame("It is \\boxed{", "}.")),
        ('{"city": "Paris"}', "Paris", AnswerFrame('{"city": "', '"}')),
        ("Yes, it is.\nAnswer: yes", "yes", AnswerFrame(", it is.\nAnswer: ", "")),
        (
            "<think>17 - 5 = 12</think>\n<answer>\n12\n</answer>",
            12,
            AnswerFrame("<think> -  = </think>\n<answer>\n", "\n</answer>"),
        ),
        ("Words. " * 100 + "\nAnswer: 12\n" + "More. " * 100, 12, AnswerFrame("Answer: ", "")),
        ("12", 12, None),
        ("twelve", 12, None),
        ("```python\ndef two():\n    return 2\n```", 2, AnswerFrame("```python\n", "```")),
        (
            "<answer>\nIn 2 lines:\n```py\ndef two():\n    return 2\n```\n</answer>",
            None,
            AnswerFrame("<answer>\nIn  lines:\n```py\n", "```\n</answer>"),
        ),
        ("```py\nprint(1)\n```\nOr:\n```py\nprint(2)\n```\nDone.", None, AnswerFrame("```py\n", "```")),
        ("Words. " * 100 + "\n```py\nprint(2)\n```\nDone.", None, AnswerFrame("```py\n", "```")),
        ("print(2)", 2, None),
        (None, 2, None),
    ],
)
def test_the_frame_of_a_solution(solution, answer, frame):
    task = Task(prompt="?", answer=answer, solution=solution)
    assert find_frame(task) == frame
    line = "\n" if frame is not None and frame.after.startswith("```") else ""
    expected = None if frame is None else f"{frame.before}nan{line}{frame.after}"
    assert in_frame(always("no number", "nan")).answer(task) == expected


def test_what_a_prompt_says_that_calls_give():
    prompt = "double(3) == 6 and double(-7) -> -14.\n>>> turn([1, 2], 1)\n[2, 1]\n`upper('a')` returns 'A'. f(x) = 3"
    assert examples(prompt) == {"(3,)": 6, "(-7,)": -14, "([1, 2], 1)": [2, 1], "('a',)": "A"}
    assert (last_constant(prompt), last_constant("Say True or 'no'"), last_constant("none")) == ("3", "'no'", "None")


def test_a_program_is_called_what_the_solution_of_its_task_is_called():
    source = "def plus(a, b):\n    return a + b\n\n\ndef twice(n):\n    return plus(n, n)\n\n\n"
    source += "class Solution:\n    def __init__(self): pass\n    def thrice(self, n):\n        return 3 * n\n"
    task = Task(prompt="Double a number.", solution=f"```python\n{source}```")
    (nothing,) = (attack for attack in programs() if attack.name == "program returns nothing")
    names: dict = {}
    exec(nothing.answer(task), names)
    assert [names["twice"](1), names["plus"](1, 2), names["Solution"]().thrice(3)] == [None, None, None]
    assert names["twice"].__name__ == "twice", "what is defined last is the likeliest to be called"
