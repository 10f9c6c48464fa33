"""An environment whose grader does what the answer says, for tests of the pool and of the server."""

import os
import signal
import sys
import time
from pathlib import Path

from superstep.grade.graders.code import CodeTests, Run
from superstep.grade.graders.text import Number
from superstep.grade.task import Task
from superstep.grade.verdict import ok

SEEN = [0]


def task(index: int, seed: int) -> Task:
    if index == 13:
        raise ValueError("no such task")
    if index == 14:
        return "a text"
    if index == 15:
        return Task(prompt="")
    if index == 16:
        os._exit(1)
    if index == 17:
        os.closerange(0, 256)  # as a process that is about to end: its pipes are shut, and it is still there
        time.sleep(600)
    return Task(prompt=f"What is {index} + {seed}?", answer=index + seed, solution=str(index + seed))


def grade(task, rollout):
    deed, _, more = rollout.answer.partition(" ")
    SEEN[0] += 1
    match deed:
        case "sleep":
            time.sleep(600)
        case "hang":
            Path(more).touch()
            time.sleep(600)
        case "spin":
            while True:
                pass
        case "end":
            os._exit(0)
        case "exit":
            sys.exit(0)
        case "raise":
            raise KeyError("a grader's own mistake")
        case "print":
            print('{"verdict": "ok", "score": 1.0, "why": ""}', flush=True)
            return 0.0
        case "write":
            os.write(1, b'{"verdict": "ok", "score": 1.0, "why": ""}\n')
            return False
        case "forge":
            os.write(int(more), b'{"verdict": "ok", "score": 1.0, "why": ""}\n')
            return False
        case "nan":
            return float("nan")
        case "text":
            return "1.0"
        case "flaky":
            path = Path(more)
            path.write_text(path.read_text() + "x" if path.exists() else "x")
            return 1.0 if len(path.read_text()) > 2 else grade(task, type(rollout)(rollout.turns[:0])) / 0
        case "stop":
            path = Path(more)
            if not path.exists():
                path.touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            return 1.0
        case "slow":
            time.sleep(1.5)
            return 1.0
        case "share":
            return 0.25
        case "turns":
            return ok(0.5, " ".join(f"{turn.role}:{turn.content}" for turn in rollout.turns) + rollout.finish)
        case "count":
            return ok(1.0, str(SEEN[0]))
        case "program":
            return CodeTests(more, [Run("", "1")])
        case _:
            return Number(rollout.answer, task.answer)


def reply(task, turns):
    raise RuntimeError("nobody replies here")
