"""Three tasks that a small model learns in minutes: as conversations for ``superstep tune sft``, and as an environment
for ``superstep tune rl`` and ``superstep grade``.

    python recipes/toy_tasks.py reverse sums form --count 4000 --out toy.jsonl
    superstep tune rl --start runs/tuned --rl.environment recipes/toy_tasks.py

    reverse   letters the other way round       "Reverse: k e p"    ->  "p e k"
    sums      two numbers below a hundred       "Add: 47 + 08"      ->  "055"
    form      an answer in JSON                 "As JSON: sun 7"    ->  '{"word": "sun", "number": 7}'

An example is a function of its task, number and seed alone: others may ask for those that nobody has trained on.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from superstep.grade.task import Rollout, Task

TASKS = ("reverse", "sums", "form")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ("sun", "moon", "tree", "stone", "river", "bird", "cloud", "lamp", "door", "road", "ship", "star")


def example(task: str, number: int, seed: int = 0) -> tuple[str, str]:
    """A question of a task and its answer."""
    draw = random.Random(f"{task}:{seed}:{number}")
    match task:
        case "reverse":
            letters = [draw.choice(LETTERS) for _ in range(draw.randint(3, 5))]
            return f"Reverse: {' '.join(letters)}", " ".join(reversed(letters))
        case "sums":
            first, second = draw.randint(0, 99), draw.randint(0, 99)
            return f"Add: {first:02d} + {second:02d}", f"{first + second:03d}"
        case "form":
            word, count = draw.choice(WORDS), draw.randint(0, 99)
            return f"As JSON: {word} {count}", json.dumps({"word": word, "number": count})
        case _:
            raise ValueError(f"task = '{task}' is none of {', '.join(TASKS)}.")


def conversation(task: str, number: int, seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """The same as a record of messages."""
    question, answer = example(task, number, seed)
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def task(index: int, seed: int) -> Task:
    """A task to be answered, the three of them in turn."""
    question, answer = example(TASKS[index % len(TASKS)], index // len(TASKS), seed)
    return Task(prompt=question, answer=answer, solution=answer, data={"task": TASKS[index % len(TASKS)]})


def grade(task: Task, rollout: Rollout) -> bool:
    """Whether the answer is the expected one; of JSON, whether it says the same."""
    said = rollout.answer.strip()
    if task.data["task"] != "form":
        return said == task.answer
    try:
        return bool(json.loads(said) == json.loads(str(task.answer)))
    except (ValueError, RecursionError):
        return False


def main() -> None:
    """Write a file of records, the tasks in turn."""
    parser = argparse.ArgumentParser(description="Write conversations of toy tasks.")
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--count", type=int, default=4000, help="records in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    records = (
        conversation(options.tasks[k % len(options.tasks)], k // len(options.tasks), options.seed)
        for k in range(options.count)
    )
    options.out.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    main()
