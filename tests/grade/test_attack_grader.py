"""grade check: weak graders are found, each by the attack that it is weak against; good ones pass."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from pathlib import Path

import pytest

from boxed import needs_bubblewrap
from superstep.cli.arguments.grade import CheckOptions
from superstep.cli.main import main
from superstep.errors import ConfigError
from superstep.grade.attacks.answers import answers
from superstep.grade.attacks.attack_grader import check
from superstep.grade.attacks.programs import function_names, programs
from superstep.grade.config import GradeConfig
from superstep.grade.environment import load_environment
from superstep.grade.sandbox import sandbox
from superstep.grade.workers.pool import Pool

HERE = Path(__file__).parent
WEAK = HERE / "weak_tasks.py"
GOOD = HERE.parents[1] / "recipes" / "graded_tasks.py"
CONFIG = GradeConfig(sandbox="none", timeout_s=2, grader_timeout_s=3, workers=2, retries=0)

FOUND = {
    "contains": ("scores", "every option"),
    "begins": ("scores", "empty: empty"),
    "within": ("scores", "no number: nan"),
    "forgives": ("scores", "breaking: a zero byte"),
    "long": ("scores", "prompt copied, twice"),
    "keyword": ("scores", "praise: a score"),
    "backtracks": ("breaks", "breaking: a run and a stranger"),
    "raises": ("breaks", "no number: nan"),
    "status": ("scores", "program leaves: sys.exit(0)"),
    "printed": ("scores", "program says so: prints PASS"),
    "equal": ("scores", "program equal to everything"),
    "dumped": ("scores", "program patched json"),
    "beside": ("scores", "program looks at who calls"),
}
"""What each weak grader is found by, among other attacks."""


FEW = ("contains", "long", "raises", "equal")
EACH = pytest.mark.parametrize("names", [FEW, pytest.param(tuple(FOUND), marks=pytest.mark.long)], ids=["few", "all"])


@pytest.fixture(scope="module")
def weak():
    """What is found of a weak grader, by its name."""
    environment = load_environment(WEAK)
    names = [grader.__name__ for grader in environment.make.__globals__["WEAK"]]
    assert set(names) == set(FOUND)
    with Pool(WEAK, CONFIG, is_heard=False) as pool:
        yield functools.cache(lambda name: check(environment, pool, tasks=1, seed=names.index(name)))


@EACH
def test_a_weak_grader_is_found_by_what_it_is_weak_against(weak, names):
    missed = {}
    for name in names:
        seen = {(weakness.flaw, weakness.attack) for weakness in weak(name).weaknesses}
        if FOUND[name] not in seen:
            missed[name] = seen
    assert missed == {}


@EACH
def test_the_right_answer_of_a_weak_grader_is_not_what_is_reported(weak, names):
    """But where it is so: two of them pay for something else. And two have let candidates change their process."""
    refused = {name for name in names if {each.flaw for each in weak(name).weaknesses} & {"refuses", "varies"}}
    assert refused - {"equal", "beside"} == {"long", "keyword"} & set(names)


@needs_bubblewrap
def test_good_graders_pass():
    environment = load_environment(GOOD)
    with Pool(GOOD, GradeConfig(retries=0, timeout_s=5, grader_timeout_s=60)) as pool:
        report = check(environment, pool, tasks=3, seed=1)
    assert report.weaknesses == ()
    said, run = len([*answers()]), len([*programs()])
    assert report.attacks == 2 * said + 3 * run + 4
    assert report.graded == 3 * (said + 2 * run + 3) + 2 * (said + run + 1), "two of the tasks have a frame"
    assert report.has_solutions


YES_OR_NO = """
from superstep.grade.graders.text import Exact
from superstep.grade.task import Task

def task(index, seed):
    answer = {answer}
    return Task(prompt=f"Is {{index}} odd? Say yes or no.", answer=answer, solution={solution})

def grade(task, rollout):
    return Exact(rollout.answer, task.answer)
"""


def report_of(tmp_path, answer, solution, tasks=8):
    path = tmp_path / "tasks.py"
    path.write_text(YES_OR_NO.format(answer=answer, solution=solution), encoding="utf-8")
    with Pool(path, CONFIG) as pool:
        return check(load_environment(path), pool, tasks=tasks, seed=0)


def test_a_guess_may_be_right_now_and_then(tmp_path):
    assert report_of(tmp_path, '"yes" if index % 2 else "no"', "answer").weaknesses == ()


def test_a_task_whose_answer_is_always_the_same_is_weak(tmp_path):
    (weakness,) = report_of(tmp_path, '"yes"', "None").weaknesses
    assert (weakness.attack, weakness.flaw, weakness.tasks) == ("constant: yes", "scores", 8)


def test_a_right_answer_that_is_refused_is_reported(tmp_path):
    report = report_of(tmp_path, '"yes" if index % 2 else "no"', '"maybe"', tasks=2)
    assert [(each.flaw, each.index) for each in report.weaknesses] == [("refuses", 0), ("refuses", 1)]


def test_a_task_that_is_another_each_time_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"task\(0, 0\) gives another task each time; make it of index and seed alone"
    ):
        report_of(tmp_path, "str(__import__('random').random())", "None")


def test_attacks_have_names_of_their_own():
    names = [attack.name for attack in (*answers(), *programs())]
    assert len(names) == len(set(names)) > 80


def test_the_function_that_is_asked_for_is_found():
    assert function_names("Write a function rotate(items, by) in Python.")[0] == "rotate"
    assert function_names("def add(a, b):")[0] == "add"
    assert "area" in function_names("Write `area`, which takes a width.")
    assert function_names("What is 1 + 1?") == ["solution", "solve", "main", "f"]


def test_the_verb_says_what_is_weak_and_exits_with_1(tmp_path, capsys):
    path = tmp_path / "tasks.py"
    path.write_text(YES_OR_NO.format(answer='"yes"', solution="None"), encoding="utf-8")
    argv = ["grade", "check", str(path), "--tasks", "2", "--grade.sandbox", "none"]
    assert main(argv) == 1
    said = capsys.readouterr().out
    assert "WEAK  constant: yes: is paid 1, on 2 of 2 tasks\n      task 0, answered 'yes'\n" in said
    assert f"{path} is WEAK: 1 weakness, " in said
    assert "No task has a solution" in said
    path.write_text(YES_OR_NO.format(answer='"yes" if index % 2 else "no"', solution="answer"), encoding="utf-8")
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert "held: " in said
    assert "\nThe memory of programs is bounded by " in f"\n{said}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "superstep grade has no action '': write superstep grade serve FILE, or superstep grade check FILE."),
        (["chek", "tasks.py"], "superstep grade has no action 'chek'"),
        (["check"], "no file is given; name the file with the tasks: superstep grade check tasks.py."),
        (["check", "none.py"], "'none.py' is not a Python file"),
        (["check", "none.py", "--tasks", "0"], "--tasks = 0 must be from 1 to 1000."),
        (["serve", "none.py", "--port", "70000"], "--port = 70000 must be from 0 to 65535."),
        (["serve", "none.py", "--grade.sandbox", "docker"], "one of 'bubblewrap', 'none'"),
        (["serve", "none.py", "--grade.timeout-s", "100"], "grade.grader_timeout_s = 60 must be more than"),
    ],
)
def test_a_command_that_is_wrong_is_one_line(words, said, capsys):
    assert main(["grade", *words]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_a_machine_without_bubblewrap_is_told_the_mend(capsys, monkeypatch):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name, path: None)
    assert main(["grade", "check", str(GOOD)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert 'apt install bubblewrap, or write grade.sandbox = "none"' in told


@pytest.mark.parametrize("deed", ["serve", "check"])
def test_a_task_that_raises_is_one_line(deed, tmp_path, capsys):
    path = tmp_path / "tasks.py"
    path.write_text("def task(index, seed):\n    return 1 / 0\n\n\ndef grade(task, rollout):\n    return 1\n")
    assert main(["grade", deed, str(path), "--grade.sandbox", "none"]) == 2
    told = capsys.readouterr().err
    assert told == (
        f"superstep: {path}: task(0, 0) fails: ZeroDivisionError: division by zero; it must give a Task for every "
        "index from 0.\n"
    )


def test_a_grader_without_programs_needs_no_bubblewrap(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name, path: None)
    path = tmp_path / "tasks.py"
    path.write_text(YES_OR_NO.format(answer='"yes" if index % 2 else "no"', solution="answer"), encoding="utf-8")
    assert main(["grade", "check", str(path), "--tasks", "2"]) == 0
    assert "\nThe grader runs no program, so the check needed no sandbox" in f"\n{capsys.readouterr().out}"


EVALUATES = """
from superstep.grade.task import Task

def task(index, seed):
    return Task(prompt=f"What is 2 + {index}?", answer=2 + index, solution=str(2 + index))

def grade(task, rollout):
    return float(eval(rollout.answer) == task.answer)
"""


@pytest.mark.parametrize("config", [CONFIG, pytest.param(CheckOptions().grade, marks=pytest.mark.long)])
def test_a_grader_that_evaluates_answers_gets_a_verdict_within_a_minute(config, tmp_path):
    path = tmp_path / "tasks.py"
    path.write_text(EVALUATES, encoding="utf-8")
    began_s = time.monotonic()
    with Pool(path, replace(config, sandbox="none"), is_heard=False) as pool:
        report = check(load_environment(path), pool, tasks=2, seed=0)
    assert time.monotonic() - began_s < 60
    flaws = {weakness.attack: weakness for weakness in report.weaknesses}
    assert flaws["evaluated: the task's answer"].flaw == "scores"
    hung = flaws["huge: a power of a power"]
    assert (hung.flaw, hung.verdict.why) == ("breaks", f"no answer within {config.grader_timeout_s:g} s: killed")


def test_a_check_never_tries_again():
    """So that an answer that breaks the grader is found in one attempt, and a flaky grader is not hidden."""
    from superstep.cli.arguments.grade import read

    _, options = read(["check", "tasks.py"])
    assert options.grade == replace(GradeConfig(), retries=0, grader_timeout_s=15.0)
