"""Sort words: the reward is the share of the words that are in place. For rl.environment."""

import random

from superstep.grade.task import Rollout, Task

WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "islet", "jetty")


def task(index: int, seed: int) -> Task:
    """A task; all chance comes from the two numbers."""
    words = random.Random(f"{seed} {index}").sample(WORDS, 4)
    answer = " ".join(sorted(words))
    return Task(prompt=f"Sort by the alphabet: {' '.join(words)}", answer=answer, solution=answer)


def grade(task: Task, rollout: Rollout) -> float:
    """From 0 to 1; other words than the task's earn nothing."""
    wanted, given = task.answer.split(), rollout.answer.split()
    if sorted(given) != wanted:
        return 0.0
    return sum(one == other for one, other in zip(given, wanted, strict=True)) / len(wanted)
