"""The text around the answer in a task's solution: ``Answer: ``, ``<answer>``, or the fence of a program.

A grader that searches for such a mark never reads an attack without it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from superstep.grade.attacks.answers import options
from superstep.grade.attacks.protocol import Attack
from superstep.grade.graders.final_answer import FENCE, final, last_fence
from superstep.grade.task import Task

PROGRAM = re.compile(r"```(?!json\b)\w|^\s*(?:def |class |import |from \w+ import|print\()", re.MULTILINE)

NUMBER = r"(?<![\w^])\d+"
"""A number, but not that of a unit such as m2 or m^2."""

MOST_CHARS = 500
"""Of a longer solution only the answer's line is the frame: the rest may earn a score without the answer."""


@dataclass(frozen=True, slots=True)
class AnswerFrame:
    before: str
    after: str


def is_program(solution: str) -> bool:
    return PROGRAM.search(solution) is not None


def find_frame(task: Task) -> AnswerFrame | None:
    """The frame of a task's solution, without the answer and all numbers; None where the solution has no frame."""
    solution = task.solution
    if solution is None:
        return None
    answer = "" if task.answer is None else str(task.answer).strip()
    before, after = _around_program(solution) if is_program(solution) else _around_answer(solution, answer)
    frame = AnswerFrame(_without(answer, before), _without(answer, after))
    return frame if f"{frame.before}{frame.after}".strip() else None


def _around_program(solution: str) -> tuple[str, str]:
    """The text before and after the last fence, where that text has no other program."""
    program = last_fence(solution)
    begin = solution.rfind(program)
    before, after = solution[:begin], solution[begin + len(program) :]
    if not before:
        return "", ""
    lead, opening = before[:-1].rpartition("\n")[::2]
    closing, _, rest = after.partition("\n")
    if is_program(lead) or is_program(rest) or FENCE in lead or len(before) + len(after) > MOST_CHARS:
        return f"{opening}\n", closing
    return before, after


def _around_answer(solution: str, answer: str) -> tuple[str, str]:
    text = final(solution)
    begin = solution.rfind(text)
    end = begin + len(text)
    if places := list(re.finditer(rf"(?<!\w){re.escape(answer)}(?!\w)", text)) if answer else []:
        begin, end = begin + places[-1].start(), begin + places[-1].end()
    before, after = solution[:begin], solution[end:]
    if len(before) + len(after) > MOST_CHARS:
        before, after = before.rpartition("\n")[2], after.partition("\n")[0]
    return before, after


def in_frame(attack: Attack) -> Attack:
    """The same attack inside the frame of each task's solution; tasks without a frame are left out."""

    def answer(task: Task) -> str | None:
        frame, text = find_frame(task), attack.answer(task)
        if frame is None or text is None:
            return None
        end = "\n" if frame.after.startswith(FENCE) and not text.endswith("\n") else ""
        return f"{frame.before}{text}{end}{frame.after}"

    return Attack(f"{attack.name}, in the answer's place", answer, attack.is_a_guess)


def every_option_framed(task: Task) -> str | None:
    """Each option on a line of its own, in the last line of the frame before the answer and the first one after it. No
    option stands last, for a grader may read the last line alone.
    """
    frame = find_frame(task)
    if frame is None:
        return None
    before, after = frame.before.rpartition("\n")[2], frame.after.partition("\n")[0]
    return "\n".join(f"{before}{option}{after}" for option in [*options(task).split(), "none of these"])


def _without(answer: str, text: str) -> str:
    parts = [re.escape(answer), NUMBER] if answer else [NUMBER]
    return re.sub("|".join(parts), "", text, flags=re.IGNORECASE)
