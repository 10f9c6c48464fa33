"""Frame: what a task's solution has around the answer; it never has the answer itself, or a number of the working."""

from __future__ import annotations

import pytest

from superstep.grade.attacks.frame import AnswerFrame, find_frame, in_frame
from superstep.grade.attacks.programs import examples, last_constant
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
        ("```python\ndef two():\n    return 2\n```", 2, None),
        ("print(2)", 2, None),
        (None, 2, None),
    ],
)
def test_the_frame_of_a_solution(solution, answer, frame):
    task = Task(prompt="?", answer=answer, solution=solution)
    assert find_frame(task) == frame
    expected = None if frame is None else f"{frame.before}nan{frame.after}"
    assert in_frame(always("no number", "nan")).answer(task) == expected


def test_what_a_prompt_says_that_calls_give():
    prompt = "double(3) == 6 and double(-7) -> -14.\n>>> turn([1, 2], 1)\n[2, 1]\n`upper('a')` returns 'A'. f(x) = 3"
    assert examples(prompt) == {"(3,)": 6, "(-7,)": -14, "([1, 2], 1)": [2, 1], "('a',)": "A"}
    assert (last_constant(prompt), last_constant("Say True or 'no'"), last_constant("none")) == ("3", "'no'", "None")
