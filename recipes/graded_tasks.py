"""Tasks with graders that are hard to cheat: a sum, an answer in JSON, and a function that must pass tests.

superstep grade check recipes/graded_tasks.py
superstep grade serve recipes/graded_tasks.py
"""

from __future__ import annotations

import json
import random

from superstep.grade.graders.check import Check
from superstep.grade.graders.code import Case, CodeTests
from superstep.grade.graders.schema import Json
from superstep.grade.graders.text import Number
from superstep.grade.task import Rollout, Task

FORM = {
    "type": "object",
    "properties": {"largest": {"type": "integer"}, "count": {"type": "integer"}},
    "required": ["largest", "count"],
    "additionalProperties": False,
}

ROTATED = """```python
def rotate(items, by):
    by = by % len(items) if items else 0
    return items[by:] + items[:by]
```"""


def task(index: int, seed: int) -> Task:
    """The kinds take turns. All chance comes from the two numbers."""
    draw = random.Random(f"{seed} {index}")
    return (a_sum, a_form, a_function)[index % 3](draw)


def a_sum(draw: random.Random) -> Task:
    one, other = draw.randint(10, 99), draw.randint(10, 99)
    answer = one + other
    return Task(
        prompt=f"What is {one} + {other}? End with a line 'Answer: N'.", answer=answer, solution=f"Answer: {answer}"
    )


def a_form(draw: random.Random) -> Task:
    numbers = draw.sample(range(100, 1000), draw.randint(3, 6))
    answer = {"largest": max(numbers), "count": len(numbers)}
    prompt = f'Of {numbers}: reply with JSON alone, {{"largest": N, "count": N}}.'
    return Task(prompt=prompt, answer=answer, solution=json.dumps(answer))


def a_function(draw: random.Random) -> Task:
    tests = []
    for _ in range(6):
        items = [draw.randint(0, 99) for _ in range(draw.randint(2, 8))]
        by = draw.randint(1, 20)
        tests.append(Case("rotate", (items, by), items[by % len(items) :] + items[: by % len(items)]))
    prompt = "Write a Python function rotate(items, by) that moves a list's first `by` items to its end, in a fence."
    return Task(prompt=prompt, answer=tests, solution=ROTATED)


def grade(task: Task, rollout: Rollout) -> Check:
    """What is to be decided; the worker carries it out."""
    match task.answer:
        case int():
            return Number(rollout.answer, task.answer)
        case dict():
            return Json(rollout.answer, FORM, task.answer)
        case list():
            return CodeTests(rollout.answer, task.answer)
        case _:
            raise TypeError("no such task")
