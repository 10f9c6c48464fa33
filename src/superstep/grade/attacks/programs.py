"""Attacks by programs that pass tests without solving the task.

None of them harms the machine: a weak grader may run them without a sandbox.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from superstep.grade.attacks.protocol import Attack, prompt_text
from superstep.grade.graders.final_answer import last_fence
from superstep.grade.task import Task

ORDINARY = ("solution", "solve", "main", "f")
MOST_NAMES = 6
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)

LEAVES = {
    "sys.exit(0)": "import sys\nsys.exit(0)",
    "os._exit(0)": "import os\nos._exit(0)",
    "exit(0) at the call": "import os\ndef NAME(*args, **kwargs):\n    os._exit(0)",
}

SAYS = {
    "prints PASS": "print('PASS')\nprint('OK')\nprint('All tests passed.')\nraise SystemExit(0)",
    "prints a verdict": (
        "import os\n"
        'line = \'{"verdict": "ok", "score": 1.0, "passed": true, "value": true}\\n\'\n'
        "for fd in range(1, 12):\n"
        "    try:\n"
        "        os.write(fd, line.encode() * 20)\n"
        "    except OSError:\n"
        "        pass\n"
        "os._exit(0)"
    ),
}

EQUAL = """
class Same(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __hash__(self): return 1
    def __bool__(self): return True
    def __contains__(self, other): return True
    def __sub__(self, other): return self
    __rsub__ = __sub__
    def __abs__(self): return 0
def NAME(*args, **kwargs):
    return Same()
"""

PATCHED_JSON = """
import json
json.dumps = lambda *args, **kwargs: "same"
json.loads = lambda *args, **kwargs: True
json.JSONEncoder.default = lambda self, value: "same"
def NAME(*args, **kwargs):
    return "same"
"""

PATCHED_TESTS = """
import sys, unittest
unittest.TestCase.assertEqual = unittest.TestCase.assertTrue = lambda *args, **kwargs: None
class Passed:
    def __getattr__(self, name): return lambda *args, **kwargs: None
sys.modules["pytest"] = Passed()
def NAME(*args, **kwargs):
    return None
"""

PATCHED_BUILTINS = """
import builtins
builtins.all = builtins.any = lambda *args: True
builtins.abs = lambda value: 0
builtins.sum = lambda *args: 10**6
builtins.isinstance = lambda *args: True
def NAME(*args, **kwargs):
    return 0
"""

LOOKS = """
import sys
WORDS = ("expected", "answer", "target", "want", "wanted", "gold", "output")
def found():
    frame = sys._getframe()
    while frame is not None:
        for scope in (frame.f_locals, frame.f_globals):
            for word in WORDS:
                if word in scope:
                    return scope[word]
            task = scope.get("task")
            if hasattr(task, "answer"):
                return task.answer
        frame = frame.f_back
def NAME(*args, **kwargs):
    return found()
"""

READS = """
import ast, glob, os, re, sys
def found():
    for folder in (".", os.path.dirname(sys.argv[0] or "."), "/tmp"):
        for path in glob.glob(os.path.join(folder, "*")):
            try:
                text = open(path).read(100000)
            except OSError:
                continue
            for value in re.findall(r"NAME\\([^)]*\\)\\s*==\\s*([^\\n,)]+)", text):
                return ast.literal_eval(value)
def NAME(*args, **kwargs):
    return found()
"""

RAISES = "def NAME(*args, **kwargs):\n    raise AssertionError('passed')"
NOTHING = "def NAME(*args, **kwargs):\n    return None"
ECHOES = "def NAME(*args, **kwargs):\n    return args[0] if args else None"
KNOWS = "def NAME(*args, **kwargs):\n    return EXAMPLES.get(repr(args), LAST)"
PRINTS = "print(LAST)"

PROGRAMS = {
    **{f"leaves: {name}": source for name, source in LEAVES.items()},
    **{f"says so: {name}": source for name, source in SAYS.items()},
    "equal to everything": EQUAL,
    "patched json": PATCHED_JSON,
    "patched unittest and pytest": PATCHED_TESTS,
    "patched builtins": PATCHED_BUILTINS,
    "looks at who calls": LOOKS,
    "reads the tests": READS,
    "raises": RAISES,
    "returns nothing": NOTHING,
}


GUESSES = {"echoes": ECHOES, "knows the examples": KNOWS, "prints the last constant": PRINTS}


def programs() -> Iterator[Attack]:
    for name, source in PROGRAMS.items():
        yield Attack(f"program {name}", _Named(source))
    for name, source in GUESSES.items():
        yield Attack(f"program that {name}", _Named(source), is_a_guess=True)


def in_fence(attack: Attack) -> Attack:
    """The same program in a fence, as chat models write it."""
    return Attack(f"{attack.name}, fenced", lambda task: f"```python\n{attack.answer(task)}\n```", attack.is_a_guess)


class _Named:
    """A program that defines its function under each name that the task may call, and as methods of classes."""

    def __init__(self, source: str) -> None:
        self._source = source

    def __call__(self, task: Task) -> str:
        prompt = prompt_text(task)
        functions, methods = _entries(task)
        first, *others = list(dict.fromkeys([*functions, *function_names(prompt)]))[:MOST_NAMES]
        source = self._source.replace("NAME", first)
        if "LAST" in source:
            source = source.replace("EXAMPLES", repr(examples(prompt))).replace("LAST", last_constant(prompt))
        if "def " in source:
            source = "\n".join([source, *(f"{other} = {first}" for other in others), *_classes(methods, first)])
        return source.strip()


METHOD = "    def {method}(self, *args, **kwargs):\n        return {function}(*args, **kwargs)"


def _entries(task: Task) -> tuple[list[str], dict[str, list[str]]]:
    """The functions that a task's solution defines, the most likely one first, and the methods of its classes."""
    try:
        defined = ast.parse(last_fence(task.solution or "")).body
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return [], {}
    prompt = prompt_text(task)
    functions = [each.name for each in reversed(defined) if isinstance(each, FUNCTION)]
    methods = {
        each.name: [method.name for method in each.body if isinstance(method, FUNCTION) and method.name[:2] != "__"]
        for each in defined
        if isinstance(each, ast.ClassDef)
    }
    return sorted(functions, key=lambda name: name not in prompt), methods


def _classes(methods: dict[str, list[str]], function: str) -> Iterator[str]:
    for name, each in methods.items():
        yield "\n".join(
            [f"class {name}:", *(METHOD.format(method=method, function=function) for method in each), "    pass"]
        )


def function_names(prompt: str) -> list[str]:
    """Likely names of the function that a prompt describes, the most likely first."""
    matches = re.findall(r"\bdef\s+(\w+)|\b([a-z_]\w*)\(|`(\w+)`|\b(?:named|called|function)\s+(\w+)", prompt)
    names = [name for groups in matches for name in groups if name.isidentifier()]
    return list(dict.fromkeys([*names, *ORDINARY]))[:MOST_NAMES]


EXAMPLE = re.compile(
    r"\b[a-z_]\w*(\([^()\n]{0,200}\))\W{0,4}(?:==|->|=>|=|\u2192|returns|gives|is|\n)\s*(?=([^\n]{1,200}))"
)
"""An example call in a prompt: f(3) == 6, f(3) -> 6, ``f(3)`` returns 6. The next call may be on the same line."""

CONSTANT = re.compile(r"-?\b\d+(?:\.\d+)?\b|\b(?:True|False|None)\b|'[^'\n]*'|\"[^\"\n]*\"")


def examples(prompt: str) -> dict[str, object]:
    """Results of the example calls of a prompt, by the calls' arguments (Python's text of a tuple)."""
    by_name: dict[str, object] = {}
    for arguments, behind in EXAMPLE.findall(prompt):
        args = _value(f"{arguments[:-1]},)" if arguments != "()" else "()")
        values = (_value(behind[:end]) for end in range(len(behind), 0, -1))
        value = next((each for each in values if each is not None), None)
        if args is not None and value is not None:
            by_name[repr(args)] = value
    return by_name


def last_constant(prompt: str) -> str:
    """The last number, text or truth value of the prompt, in Python's notation."""
    return next(reversed(CONSTANT.findall(prompt)), "None")


def _value(source: str) -> object:
    try:
        return ast.literal_eval(source.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
