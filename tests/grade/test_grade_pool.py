"""Graders in processes of their own: what hangs is killed, what fails is tried again, and neither is a reward."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from boxed import command_lines, needs_bubblewrap
from superstep.errors import ConfigError
from superstep.grade.config import GradeConfig
from superstep.grade.environment import load_environment
from superstep.grade.task import Message, Rollout, answer_rollout
from superstep.grade.workers.pool import Pool

TASKS = Path(__file__).with_name("trying_tasks.py")
CONFIG = GradeConfig(sandbox="none", timeout_s=2, grader_timeout_s=3, workers=2, retries=1)


@pytest.fixture(scope="module")
def retried():
    return []


@pytest.fixture(scope="module")
def pool(retried):
    with Pool(TASKS, CONFIG, retried=retried.append) as made:
        yield made


def test_an_answer_is_graded_by_its_task(pool):
    assert pool.grade(3, 4, answer_rollout("7")).score == 1.0
    assert pool.grade(3, 5, answer_rollout("7")).kind == "wrong"
    assert pool.grade(0, 0, answer_rollout("share")).score == 0.25
    turns = (Message("assistant", "a"), Message("tool", "b"), Message("assistant", "turns"))
    assert pool.grade(0, 0, Rollout(turns, "length")).why == "assistant:a tool:b assistant:turnslength"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("raise", "grade() fails: KeyError"),
        ("exit", "grade() fails: SystemExit"),
        ("nan", "a score is from 0 to 1"),
        ("text", "grade() gave str"),
    ],
)
def test_a_grader_that_fails_is_tried_again_and_is_no_reward(answer, why, pool, retried):
    del retried[:]
    verdict = pool.grade(0, 0, answer_rollout(answer))
    assert verdict.kind == "grader_error"
    assert why in verdict.why
    assert [one.kind for one in retried] == ["grader_error"]
    assert verdict.to_json()["score"] is None
    assert pool.grade(3, 4, answer_rollout("7")).score == 1.0


def test_a_rollout_that_ended_the_process_that_replies_is_graded_by_rule(pool):
    verdict = pool.grade(3, 4, Rollout(answer_rollout("7").turns, violation="its process ended 3 times"))
    assert (verdict.kind, verdict.score, verdict.why) == ("violation", 0.0, "its process ended 3 times")
    assert pool.grade(3, 4, answer_rollout("7")).score == 1.0


def test_an_answer_that_ends_its_grader_each_time_is_graded_by_rule_and_told(pool, retried):
    del retried[:]
    verdict = pool.grade(0, 0, answer_rollout("end"))
    assert (verdict.kind, verdict.score) == ("violation", 0.0)
    assert verdict.why == "its grader's process ended 2 times, and not without this answer"
    assert [one.why for one in retried] == ["its process ended"]
    assert pool.grade(3, 4, answer_rollout("7")).score == 1.0


def test_a_task_that_ends_its_grader_is_no_fault_of_an_answer(pool):
    verdict = pool.grade(16, 0, answer_rollout("16"))
    assert (verdict.kind, verdict.why) == ("grader_error", "its process ended")


def test_a_grader_that_is_about_to_end_is_asked_nothing_more(pool, retried):
    assert pool.grade(17, 0, answer_rollout("17")).kind == "grader_error"
    del retried[:]
    assert pool.grade(3, 4, answer_rollout("7")).score == 1.0
    assert retried == []


@pytest.mark.parametrize("answer", ["sleep", pytest.param("spin", marks=pytest.mark.long)])
def test_a_grader_that_hangs_is_killed_at_its_deadline(answer, pool):
    began = time.monotonic()
    verdict = pool.grade(0, 0, answer_rollout(answer))
    assert verdict.kind == "grader_error"
    assert verdict.why == "no answer within 3 s: killed"
    assert time.monotonic() - began >= 2 * CONFIG.grader_timeout_s
    assert pool.grade(3, 4, answer_rollout("7")).score == 1.0


def test_a_grader_that_a_signal_stops_is_named_and_another_one_grades(pool, retried, tmp_path):
    del retried[:]
    assert pool.grade(0, 0, answer_rollout(f"stop {tmp_path / 'once'}")).score == 1.0
    (verdict,) = retried
    assert re.fullmatch(r"its process \d+ was stopped \(SIGSTOP\) and did not go on: killed", verdict.why)
    assert pool.grade(0, 0, answer_rollout("slow")).score == 1.0
    assert len(retried) == 1, "a slow grader is no stopped one"


def test_a_grader_that_fails_once_is_believed_the_next_time(tmp_path):
    with Pool(TASKS, GradeConfig(sandbox="none", workers=1, retries=2)) as pool:
        assert pool.grade(0, 0, answer_rollout(f"flaky {tmp_path / 'tries'}")).score == 1.0


def test_what_a_grader_prints_is_no_answer(pool):
    for answer in ("print", "write"):
        assert pool.grade(0, 0, answer_rollout(answer)).kind == "wrong"


def test_an_answer_without_the_number_of_its_question_is_none(pool):
    kinds = {pool.grade(0, 0, answer_rollout(f"forge {fd}")).kind for fd in range(3, 8)}
    assert kinds == {"grader_error"}


def test_graders_work_at_the_same_time_and_each_answer_is_its_own(pool):
    asked = [
        (index, pool.submit(index, 1, answer_rollout(str(index + 1 + index % 2))))
        for index in range(60)
        if index not in (13, 14, 15, 16)
    ]
    assert [future.result().score == 1.0 for _, future in asked] == [index % 2 == 0 for index, _ in asked]
    # Two processes shared the work: neither has seen all of it.
    counts = Counter(pool.submit(0, 0, answer_rollout("count")).result().why for _ in range(20))
    assert counts


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (13, r"trying_tasks\.py: task\(13, 0\) fails: ValueError: no such task; it must give a Task for every index"),
        (14, r"task\(14, 0\) gives str; return a superstep\.grade\.task\.Task\."),
        (15, r"task\(15, 0\) has an empty prompt; give what the model is to be told\."),
    ],
)
def test_a_task_that_cannot_be_made_is_an_error_of_the_file(index, said, pool):
    with pytest.raises(ConfigError, match=said):
        pool.grade(index, 0, answer_rollout("1"))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "is not a Python file; name one that has task(index, seed), such as my_tasks.py."),
        ("def task(index, seed): pass", "has no function 'grade(task, rollout)'"),
        ("def tasks(index, seed): pass\ndef grade(task, rollout): pass", "did you mean 'tasks'?"),
        ("1 / 0", "cannot be run: ZeroDivisionError: division by zero."),
        ("import sys; sys.exit(3)", "cannot be run: SystemExit: 3."),
        ("def (", "cannot be run: SyntaxError"),
        ("def task(i, s): pass\ndef grade(t, r): pass\nreply = 3", "reply is no function"),
    ],
)
def test_a_file_that_is_no_environment_is_refused(source, said, tmp_path):
    path = tmp_path / "tasks.py"
    if source is not None:
        path.write_text(source, encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_environment(path)
    with pytest.raises(ConfigError, match=re.escape(said)):
        Pool(path, CONFIG)


def test_a_reply_that_fails_is_an_error_of_the_file():
    environment = load_environment(TASKS)
    with pytest.raises(ConfigError, match=r"reply\(task, turns\) fails: RuntimeError: nobody replies here"):
        environment.reply(environment.task(0, 0), ())


def test_a_worker_that_somebody_kills_is_replaced(pool):
    for worker in pool._all:
        worker.ensure_started().kill()
    assert pool.grade(3, 4, answer_rollout("7")).score == 1.0


def test_a_pool_that_is_closed_leaves_nobody_waiting():
    pool = Pool(TASKS, GradeConfig(sandbox="none", workers=1, retries=0, grader_timeout_s=600))
    future = pool.submit(0, 0, answer_rollout("sleep"))
    waiting = pool.submit(0, 0, answer_rollout("7"))
    threading.Timer(0.5, pool.close).start()
    began = time.monotonic()
    assert future.result(timeout=60).kind == "grader_error"
    assert waiting.cancelled() or waiting.result(timeout=60).kind == "grader_error"
    assert time.monotonic() - began < 60


OWNER = """
import sys, threading
from superstep.grade.config import GradeConfig
from superstep.grade.workers.pool import Pool
from superstep.grade.task import answer_rollout

pool = Pool(sys.argv[1], GradeConfig(timeout_s=300, grader_timeout_s=600, workers=2))
program = "import os\\nos.fork()\\nos.execv('/bin/sleep', [%r, '300'])" % sys.argv[2]
futures = [pool.submit(0, 0, answer_rollout("program " + program)), pool.submit(0, 0, answer_rollout("spin"))]
print("begun", flush=True)
threading.Event().wait()
"""


@needs_bubblewrap
def test_nothing_outlives_a_pool_whose_process_is_killed():
    mark = f"outlives-{os.getpid()}"
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER), str(TASKS), mark], stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout.readline() == "begun\n"
        assert until(lambda: sum(line.startswith(mark.encode()) for line in command_lines()) >= 2)
        workers = [int(path.parts[2]) for path in Path("/proc").glob("[0-9]*/status") if parent_of(path) == owner.pid]
        assert len(workers) == 2
        owner.send_signal(signal.SIGKILL)
    assert until(lambda: not any(line.startswith(mark.encode()) for line in command_lines()))
    assert until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in workers))


def parent_of(path):
    try:
        return int(re.search(r"^PPid:\t(\d+)", path.read_text(), re.MULTILINE)[1])
    except OSError:
        return -1


def until(holds):
    """Whether it holds within a minute."""
    for _ in range(600):
        if holds():
            return True
        time.sleep(0.1)
    return False


def test_graders_need_neither_torch_nor_the_trainer():
    parts = ("workers.grader_worker", "workers.pool", "attacks.attack_grader", "api.app")
    source = "\n".join(f"import superstep.grade.{part}" for part in parts)
    source += (
        "\nimport sys\nprint([n for n in sys.modules if n.startswith(('torch', 'superstep.train.', 'superstep.tune'))])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
