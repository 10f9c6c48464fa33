"""Tasks and replies of a user's file, asked of a process that is ended where it is late, stopped or gone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from superstep.errors import ConfigError, Fault
from superstep.grade.environment import load_environment
from superstep.grade.task import Done, Message, Observation
from superstep.grade.workers.environment_process import EnvironmentProcess

TASKS = """
import itertools, os, signal, time
from pathlib import Path
from superstep.grade.task import Done, Message, Observation, Task

CALLS = itertools.count()

def task(index, seed):
    if index == 1:
        raise ValueError("no such task")
    if index == 2:
        time.sleep(600)
    if index >= 6:
        tries = Path(__file__).with_name("tries")
        tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
        if len(tries.read_text()) <= index - 6:
            os.kill(os.getpid(), signal.SIGKILL)
    return Task(prompt=f"task {index} {seed} {next(CALLS) if index == 3 else ''}", answer=index, data={"turns": 3})

def grade(task, rollout):
    return 1.0

def reply(task, turns):
    said = turns[-1].content
    if said == "slow":
        time.sleep(1.5)
    if said == "hang":
        time.sleep(600)
    if said == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if said == "end":
        os._exit(0)
    if said == "wrong":
        return said
    print("heard", said)
    return Observation((Message("tool", f"{said} of {task.answer}"),)) if len(turns) < task.data["turns"] else Done()
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "tasks.py").write_text(TASKS)
    return tmp_path / "tasks.py"


def said(*texts):
    return tuple(Message("assistant", text) for text in texts)


def test_a_process_answers_as_the_file_itself(path):
    with EnvironmentProcess(path, 60.0) as asked:
        itself = load_environment(path)
        task, known = asked.task(5, 7), itself.task(5, 7)
        assert task.messages == known.messages
        assert task.answer is None, "what is expected stays in the process"
        for turns in (said("a"), said("a", "b"), said("a", "b", "c")):
            assert asked.reply(task, turns) == itself.reply(known, turns)
        assert asked.reply(task, said("a")) == Observation((Message("tool", "a of 5"),))
        assert (asked.is_pure(5, 7), asked.is_pure(3, 7)) == (True, False)
        with pytest.raises(ConfigError, match=r"tasks.py: task\(1, 7\) fails: ValueError: no such task; it must give"):
            asked.task(1, 7)
        with pytest.raises(ConfigError, match=r"reply\(task, turns\) gives str; return an Observation or Done\(\)"):
            asked.reply(task, said("wrong"))


def test_a_file_without_replies_is_one_turn_and_one_that_is_none_is_refused(path):
    path.write_text(TASKS.partition("def reply")[0])
    with EnvironmentProcess(path, 60.0) as asked:
        assert asked.reply(asked.task(0, 0), said("a")) == Done()
    with (
        pytest.raises(ConfigError, match="not a Python file; name one that has task"),
        EnvironmentProcess("nothing.py", 60.0) as asked,
    ):
        asked.open()


@pytest.mark.parametrize(
    ("deed", "seconds", "why"),
    [
        ("hang", 2.0, r"no answer within 2 s: killed; make it faster, or set rollout.reply_timeout_s higher"),
        ("stop", 60.0, r"its process \d+ was stopped \(SIGSTOP\) and did not go on: killed"),
    ],
)
def test_who_does_not_reply_is_named_with_task_and_turn_and_a_slow_one_is_waited_for(path, deed, seconds, why):
    with EnvironmentProcess(path, seconds) as asked:
        task = asked.task(4, 0)
        if deed == "hang":
            assert asked.reply(task, said("slow")) == Observation((Message("tool", "slow of 4"),))
        with pytest.raises(Fault, match=rf"tasks.py: reply\(\) to turn 2 of task 4: {why}\.$"):
            asked.reply(task, said("a", deed))


def test_turns_that_end_the_process_each_time_are_a_violation(path):
    """If the task alone does not end it; the next question finds a process."""
    with EnvironmentProcess(path, 60.0) as asked:
        task = asked.task(4, 0)
        violation = "reply() to turn 2 of task 4: its process ended 3 times, and not without this answer"
        assert asked.reply(task, said("a", "end")) == Done(violation)
        assert asked.reply(task, said("a")) == Observation((Message("tool", "a of 4"),))
        ends_it = replace(task, index=99)
        with pytest.raises(Fault, match=r"reply\(\) to turn 1 of task 99, asked 3 times: its process ended\.$"):
            asked.reply(ends_it, said("a"))


def test_a_task_that_does_not_come_is_named(path):
    with EnvironmentProcess(path, 0.5) as asked, pytest.raises(Fault, match=r"task\(2, 0\): no answer within 0.5 s"):
        asked.task(2, 0)


def test_a_process_that_is_killed_in_a_task_is_started_and_asked_again(path):
    with EnvironmentProcess(path, 60.0) as asked:
        assert asked.task(7, 0).messages[0].content.startswith("task 7 0"), "it was killed once"
        assert asked.reply(asked.task(5, 0), said("a")) == Observation((Message("tool", "a of 5"),))
    path.with_name("tries").unlink()
    with (
        EnvironmentProcess(path, 60.0) as asked,
        pytest.raises(Fault, match=r"task\(99, 0\), asked 3 times: its process ended\.$"),
    ):
        asked.task(99, 0)
    assert path.with_name("tries").read_text() == "xxx"
