"""The task that hostile programs are given. secret-of-the-tests: what is expected stands here, outside the sandbox."""

from superstep.grade.graders.code import Case, CodeTests
from superstep.grade.task import Task


def task(index: int, seed: int) -> Task:
    return Task(prompt="Write double(number).", answer=[Case("double", (k,), 2 * k) for k in (3, 4, 5)])


def grade(task, rollout):
    return CodeTests(rollout.answer, task.answer)
