"""Graders: what is right scores however it is written, and what is not does not."""

from __future__ import annotations

import json
import math
import os
import signal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxed import needs_bubblewrap
from superstep.errors import ConfigError, Fault
from superstep.grade.config import GradeConfig
from superstep.grade.graders.check import Check, Tools
from superstep.grade.graders.code import Case, CodeTests, Run
from superstep.grade.graders.final_answer import final, last_fence
from superstep.grade.graders.literals import decode, same
from superstep.grade.graders.maths import Maths
from superstep.grade.graders.maths_process import MathsProcess
from superstep.grade.graders.schema import Json
from superstep.grade.graders.text import Exact, Number, number
from superstep.grade.sandbox.child import plain
from superstep.grade.sandbox.sandbox import open_sandbox
from superstep.grade.verdict import ok


@pytest.fixture(scope="module")
def tools():
    config = GradeConfig(timeout_s=20, sandbox="none")
    maths = MathsProcess(3.0)
    yield Tools(config, open_sandbox(config), maths)
    maths.close()


@pytest.fixture(scope="module")
def boxed(tools):
    config = GradeConfig(timeout_s=20)
    return Tools(config, open_sandbox(config), tools.maths)


def test_the_final_answer_stands_in_one_place():
    assert final("so \\boxed{1} or \\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert final("Answer: 4\nno, Answer: 5 \nas I said") == "5"
    assert final("work #### 72") == "72"
    assert final("the final answer is: 3") == "3"
    assert final("  7\n") == "7"
    assert final("\\boxed{" * 5000) == "\\boxed{" * 5000
    assert last_fence("a\n```python\nx = 1\n```\nb\n```\ny = 2\n```") == "y = 2\n"
    assert last_fence("x = 1") == "x = 1"


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("-3.5", -3.5), ("+4.", 4), ("1,200", 1200), ("6e-3", 0.006), ("3/4", 0.75), ("$5", 5), (".5", 0.5)],
)
def test_a_number_is_read_in_the_forms_that_people_write(text, value):
    assert float(number(text)) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nan",
        "inf",
        "1e999999999",
        "9" * 5000,
        "1 2",
        "12,34",
        "1/0",
        "\u0661\u0662",
        "\uff11",
        "0x10",
        "1_000",
        "5 or 6",
    ],
)
def test_what_is_not_one_number_is_none(text):
    assert number(text) is None


@pytest.mark.parametrize(
    ("check", "kind"),
    [
        (Number("Answer: 12", 12), "ok"),
        (Number("\\boxed{12.0}", 12), "ok"),
        (Number("12", "12"), "ok"),
        (Number("0.1", "0.1"), "ok"),
        (Number("0.3333", "1/3", tolerance=1e-3), "ok"),
        (Number("11 12 13", 12), "wrong"),
        (Number("Answer: 13", 12), "wrong"),
        (Number("nan", 12), "wrong"),
        (Exact("Answer: Paris ", "Paris"), "ok"),
        (Exact("paris", "Paris"), "wrong"),
        (Exact("paris", "Paris", casefold=True), "ok"),
        (Exact("Paris, London", "Paris"), "wrong"),
        (Exact("Answer: Paris", "Paris", whole=True), "wrong"),
        (Json('{"a": 1}', {"type": "object", "required": ["a"]}), "ok"),
        (Json('```json\n{"a": 1}\n```', {"type": "object"}, {"a": 1}), "ok"),
        (Json('{"a": 1.0}', {"type": "object"}, {"a": 1}), "ok"),
        (Json('{"a": true}', {"type": "object"}, {"a": 1}), "wrong"),
        (Json('{"a": 1, "a": 2}', {"type": "object"}), "wrong"),
        (Json("[NaN]", {"type": "array"}), "wrong"),
        (Json("[" * 100_000, {}), "wrong"),
        (Json('{"b": 1}', {"type": "object", "required": ["a"]}), "wrong"),
        (Json("it is {}", {"type": "object"}), "wrong"),
    ],
)
def test_texts_numbers_and_forms(check, kind, tools):
    assert isinstance(check, Check)
    assert check.verdict(tools).kind == kind


@pytest.mark.parametrize(
    "check",
    [
        Exact("", ""),
        Number("1", "one"),
        Json("1", {"type": "nonsense"}),
        CodeTests("def f(): return 1", []),
        CodeTests("def f(): return 1", [Case("f", (), object())]),
        CodeTests("def f(): return 1", [Case("f", (), 1), Run("", "")]),
    ],
)
def test_a_check_that_cannot_decide_raises(check, tools):
    """Which is a grader_error, and not a score."""
    with pytest.raises(Exception, match=r".") as raised:
        check.verdict(tools)
    assert not isinstance(raised.value, AssertionError)


def test_formulas_are_compared_by_what_they_mean(tools):
    for answer, expected, kind in [
        ("\\boxed{\\frac{1}{2}}", "0.5", "ok"),
        ("so $x^2 + 2x + 1$ it is.\n\\boxed{(x+1)^2}", "x^2+2x+1", "ok"),
        ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}", "ok"),
        ("\\boxed{2}", "3", "wrong"),
        ("\\boxed{1, 2, 3, 4}", "3", "wrong"),
        ("\\boxed{}", "3", "wrong"),
        ("\\boxed{" + "(" * 900 + "}", "3", "timeout"),  # its reader takes exponential time
        ("\\boxed{__import__('os').getpid()}", "3", "wrong"),
    ]:
        verdict = Maths(answer, expected).verdict(tools)
        assert verdict.kind == kind, (answer, verdict)
    with pytest.raises(ConfigError, match=r"cannot be read; write it in LaTeX"):
        Maths("\\boxed{1}", "").verdict(tools)


def test_a_formula_without_end_is_ended_and_the_next_one_read(tools):
    began = time.monotonic()
    verdict = Maths("\\boxed{10^{10^{10^{10}}}}", "10^{10^{10^{10}}} + 1").verdict(tools)
    assert verdict.score == 0
    verdict = Maths("\\boxed{" + "9" * 9 + "!}", "1").verdict(tools)
    assert verdict.kind in ("timeout", "memory", "wrong")
    assert time.monotonic() - began < 60
    assert Maths("\\boxed{4}", "4").verdict(tools) == ok()


DATA = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.integers(), st.text(max_size=3)), inner, max_size=3),
        st.sets(st.integers(), max_size=3),
    ),
    max_leaves=8,
)


def over_the_wire(value):
    return decode(json.loads(json.dumps(plain(value))))


@given(DATA)
def test_data_is_the_same_after_the_wire(value):
    assert same(value, over_the_wire(value))


@given(DATA, DATA)
def test_other_data_is_not_the_same(one, other):
    """Against Python's own ``==``, where it is as strict: no truth values, no NaN, lists for tuples."""
    if "True" in f"{one}{other}" or "False" in f"{one}{other}" or "nan" in f"{one}{other}":
        return
    as_lists = [json.dumps(plain(each), sort_keys=True).replace('"tuple"', '"list"') for each in (one, other)]
    if as_lists[0] == as_lists[1]:
        assert same(one, over_the_wire(other))
    elif one != other and not any(isinstance(each, dict | set | list | tuple) for each in (one, other)):
        assert not same(one, over_the_wire(other))


def test_kinds_are_kept_apart():
    for expected, given_ in [
        (1, True),
        (True, 1),
        (0, False),
        (0, None),
        ("1", 1),
        ([1], {1}),
        ({1: 2}, [[1, 2]]),
        ([], {}),
    ]:
        assert not same(expected, over_the_wire(given_)), (expected, given_)
    assert same(3, 3.0)
    assert same(math.nan, math.nan)
    assert not same(1.0, math.nan)
    assert not same(1.0, math.inf, tolerance=1.0)
    assert same(100.0, 100.4, tolerance=0.005)
    assert not same([1, [2]], over_the_wire([1, [3]]))


@pytest.mark.parametrize("value", [["list"], ["list", 1], ["dict", [[1]]], ["other", []], {"a": 1}])
def test_a_record_that_is_no_data_is_refused(value):
    with pytest.raises(ValueError, match="no data"):
        decode(value)


@needs_bubblewrap
@pytest.mark.parametrize(
    ("source", "tests", "kind", "score"),
    [
        ("def f(x): return x + 1", [Case("f", (1,), 2), Case("f", (2,), 3)], "ok", 1.0),
        ("def f(x): return (x, {x: [x]}, {x})", [Case("f", (1,), [1, {1: [1]}, {1}])], "ok", 1.0),
        ("def f(x): return 2", [Case("f", (1,), 2), Case("f", (2,), 3)], "wrong", 0.0),
        ("def f(x): return g(x)", [Case("f", (1,), 2)], "wrong", 0.0),
        ("def f(x", [Case("f", (1,), 2)], "wrong", 0.0),
        ("", [Case("f", (1,), 2)], "wrong", 0.0),
        ("import asyncio\ndef f(x):\n    return asyncio.run(asyncio.sleep(0, x))", [Case("f", (1,), 1)], "ok", 1.0),
        ("from threading import *\ndef f(): return Thread(target=print).start()", [Case("f", (), None)], "ok", 1.0),
        ("print(int(input()) + 1)", [Run("1\n", "2\n"), Run("5", "6")], "ok", 1.0),
        ("import sys\nfor line in sys.stdin: print(line.strip()[::-1])", [Run("ab\ncd\n", "ba\ndc")], "ok", 1.0),
        ("print(2)", [Run("1", "2"), Run("5", "6")], "wrong", 0.0),
        ("print(2)\nraise SystemExit(3)", [Run("1", "2")], "wrong", 0.0),
        ("open('seen', 'a').write('x')\nprint(len(open('seen').read()))", [Run("", "1")], "ok", 1.0),
        ("print(", [Run("1", "2")], "wrong", 0.0),
        ("import os, time\nif os.fork() == 0: time.sleep(60)\nprint(1)", [Run("", "1"), Run("", "1")], "ok", 1.0),
        ("while True: print('x' * 1000)", [Run("", "1")], "violation", 0.0),
    ],
)  # fmt: skip
def test_programs(source, tests, kind, score, boxed):
    verdict = CodeTests(source, tests).verdict(boxed)
    assert (verdict.kind, verdict.score) == (kind, score), verdict


@needs_bubblewrap
def test_a_share_of_the_tests_earns_a_share_of_the_score_where_that_is_asked_for(boxed):
    tests = [Case("f", (k,), k) for k in (0, 1, 2, 3)]
    assert CodeTests("def f(x): return x % 3", tests, partial=True).verdict(boxed).score == 0.75
    assert CodeTests("def f(x): return None", tests, partial=True).verdict(boxed).kind == "wrong"


def test_programs_run_without_a_sandbox_where_that_is_written(tools):
    assert CodeTests("def f(x): return x", [Case("f", (1,), 1)]).verdict(tools) == ok(1.0, "1 of 1 tests pass")
    assert CodeTests("print(1)", [Run("", "1")]).verdict(tools).score == 1.0


def test_a_comparison_of_formulas_that_a_signal_has_stopped_is_no_late_one(tools):
    """A late one is the answer's fault, and costs it its score."""
    os.kill(tools.maths._start().pid, signal.SIGSTOP)
    with pytest.raises(Fault, match=r"comparison of formulas: its process \d+ was stopped \(SIGSTOP\)"):
        tools.maths.compare("1/2", "0.5")
    assert tools.maths.compare("1/2", "0.5") == "same"
