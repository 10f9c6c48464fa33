"""How soon is a stopped part of a run of reinforcement learning named? And is a loaded machine ever an alarm?

    python -m bench.stopped [--rounds 3] [--minutes 2]

A run of two ranks on answers that are graded slowly. In each round SIGSTOP goes to a rank, to a grader, or to the
process that has the environment; the seconds are those until the run ends with a line that names it, or until a line of
its metrics does. Then a run goes on undisturbed beside busy loops, and nothing may be named.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from bench.machine import write_result

RESULT = Path(__file__).parent / "results" / "stopped.json"
TASKS = """
import time
from superstep.grade.task import Message, Observation, Task

def task(index, seed):
    return Task(prompt=f"to be {index}")

def reply(task, turns):
    time.sleep(0.05)
    return Observation((Message("user", "or"),))

def grade(task, rollout):
    time.sleep(0.3)
    return sum(map(ord, rollout.answer)) % 2
"""
PARTS = ("rank", "grader", "environment")
LONGEST_S = 120.0


def flags(folder: Path, root: Path) -> list[str]:
    """Of a run that would not end by itself while it is looked at."""
    told = {
        "start": folder / "start",
        "rl.environment": folder / "tasks.py",
        "rl.group": 2,
        "rl.groups": 2,
        "rl.overlong": "none",
        "rollout.max-tokens": 8,
        "rollout.turns": 2,
        "rollout.pages": 64,
        "data.sequence-tokens": 256,
        "train.steps": 1000,
        "plan.dp": 2,
        "plan.microbatch": 1,
        "grade.sandbox": "none",
        "grade.workers": 2,
        "observe.tensorboard": "false",
        "state.save-every": 500,
        "state.dir": root,
    }
    return [word for name, value in told.items() for word in (f"--{name}", str(value))]


@contextlib.contextmanager
def begun(folder: Path, root: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that has done its first steps."""
    command = [sys.executable, "-m", "superstep", "tune", "rl", *flags(folder, root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            until_s = time.monotonic() + LONGEST_S
            while process.poll() is None and len(told(root, "rolled")) < 2 and time.monotonic() < until_s:
                time.sleep(0.05)
            yield process
        finally:
            process.terminate()


def told(root: Path, event: str) -> list[dict[str, object]]:
    """Lines of the metrics."""
    path = root / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [found for found in map(json.loads, lines) if found["event"] == event]


def parts(launcher: int) -> dict[str, list[psutil.Process]]:
    """The processes of a run, by what they are."""
    found: dict[str, list[psutil.Process]] = {"rank": [], "grader": [], "environment": []}
    for rank in [below for child in psutil.Process(launcher).children() for below in child.children()]:
        workers = [one for one in rank.children() if "superstep.grade.workers.grader_worker" in one.cmdline()]
        if workers:  # a rank's first is its environment's; the others grade
            found["rank"].append(rank)
            workers.sort(key=lambda one: (one.create_time(), one.pid))
            found["environment"].append(workers[0])
            found["grader"] += workers[1:]
    return found


def named(folder: Path, part: str, nth: int, draw: random.Random) -> dict[str, object]:
    """One round: the seconds from the signal to the name, and what was said."""
    root = folder / f"{part}-{nth}"
    with begun(folder, root) as process:
        below = parts(process.pid)
        everything = psutil.Process(process.pid).children(recursive=True)
        one = draw.choice(below[part])
        time.sleep(draw.random())
        one.send_signal(signal.SIGSTOP)
        begin_s = time.monotonic()
        if part == "grader":
            while not told(root, "retried") and time.monotonic() - begin_s < LONGEST_S:
                time.sleep(0.02)
            seconds, said, status = time.monotonic() - begin_s, str(told(root, "retried")), None
            process.terminate()
            process.communicate()
        else:
            said = process.communicate(timeout=LONGEST_S)[0].strip().splitlines()[-1]
            seconds, status = time.monotonic() - begin_s, process.returncode
        _, left = psutil.wait_procs(everything, timeout=10.0)
        is_named = f"its process {one.pid} was stopped" in said
    return {"seconds": seconds, "is_named": is_named, "status": status, "left": len(left)}


def undisturbed(folder: Path, minutes: float) -> dict[str, object]:
    """Steps of a run beside two busy loops, and what it named in vain."""
    root = folder / "undisturbed"
    loops = [subprocess.Popen([sys.executable, "-Sc", "while True: pass"]) for _ in range(2)]
    try:
        with begun(folder, root) as process:
            time.sleep(60.0 * minutes)
            is_there = process.poll() is None
            alarms = len(told(root, "retried")) + (not is_there)
            process.terminate()
            process.communicate()
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    return {"minutes": minutes, "steps": len(told(root, "rolled")), "alarms": alarms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=2.0)
    options = parser.parse_args()
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tasks.py").write_text(TASKS, encoding="utf-8")
        small = ("--model.name", "tiny", "--train.steps", "1", "--plan.dp", "1", "--plan.zero", "0")
        start = ("--state.dir", str(folder / "start"), "--observe.tensorboard", "false")
        subprocess.run([sys.executable, "-m", "superstep", "train", *small, *start], check=True)
        found = {part: [named(folder, part, nth, draw) for nth in range(options.rounds)] for part in PARTS}
        calm = undisturbed(folder, options.minutes)
    slowest_s = max(float(str(one["seconds"])) for rounds in found.values() for one in rounds)
    write_result(RESULT, slowest_s=slowest_s, parts=found, undisturbed=calm)


if __name__ == "__main__":
    main()
