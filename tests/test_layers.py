"""The order of the house: imports point up the list only, and a few things are said in one place alone."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import house
import superstep

ORDER = (
    "errors",
    "plan",
    "program",
    "hardware",
    "cost",
    "planner",
    "scaling",
    "observe",
    "kernels",
    "strict",
    "numerics",
    "model",
    "state",
    "data",
    "monitor",
    "comm",
    "launch",
    "engine",
    "http",
    "serve",
    "train",
    "grade",
    "tune",
    "run",
    "cli",
)
# Planning, checking and simulating run anywhere, at once: without torch.
LIGHT = ORDER[: ORDER.index("observe") + 1]
LIGHT_PACKAGES = sys.stdlib_module_names | {"numpy", "superstep"}
LAWS = "scaling.fit"
"""The one module that may use scipy, for its L-BFGS."""
DISTRIBUTED = "monitor", "comm", "launch", "engine", "strict"
"""The parts that may use torch.distributed: that which runs on it, and that which gives it an emulated NCCL."""
ONLY_CLI = {"os.environ", "os.getenv", "os.putenv", "sys.argv"}
HANDS_ON = "launch.fork_server", "os.environ"
"""The one module that may hand a process's environment on to its ranks, unread."""

PACKAGE = Path(superstep.__file__).parent


def violations(module: str, source: str) -> list[str]:
    """What a module of the package (``plan.config_io``, say) does against the order, each with its line."""
    return _violations(module, list(ast.walk(ast.parse(source))))


def _violations(module: str, nodes: Sequence[ast.AST]) -> list[str]:
    asked = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute | ast.Call)]
    found = [f"line {node.lineno}: {rule}" for node in asked for rule in broken(module, node)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return found + [
        f"line {node.lineno}: superstep is imported inside a function"
        for node in asked
        if any(name.startswith("superstep") for name in imported(node))
        if any(each.lineno <= node.lineno <= (each.end_lineno or 0) for each in functions)
    ]


@functools.cache
def looked_at(path: Path) -> tuple[list[str], frozenset[str]]:
    """What a module of the package does against the order, and the names that it imports; its tree is not kept."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return _violations(module_of(path), nodes), frozenset(name for node in nodes for name in imported(node))


def imported(node: ast.AST) -> list[str]:
    """The dotted names that an import brings: modules, or what is taken from them."""
    match node:
        case ast.Import(names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module, names, level=0):
            return [f"{module}.{alias.name}" for alias in names]
        case _:
            return []


def broken(module: str, node: ast.AST) -> Iterator[str]:
    """The rules that one node of the syntax tree of a module breaks."""
    part = module.split(".")[0]
    if isinstance(node, ast.ImportFrom) and node.level:
        yield "relative import"
    for name in imported(node):
        top, _, rest = name.partition(".")
        other = rest.split(".")[0]
        if top == "superstep" and other in ORDER and ORDER.index(other) > ORDER.index(part):
            yield f"{part} imports {other}, which comes after it"
        if top == "scipy":
            if module != LAWS:
                yield f"{module} imports scipy, which {LAWS} alone may"
        elif part in LIGHT and top not in LIGHT_PACKAGES:
            yield f"{part} imports {top}; it may use the standard library and numpy only"
        if is_distributed(name) and part not in DISTRIBUTED:
            yield f"{part} imports torch.distributed, which comm, launch and engine have"
        if name in ONLY_CLI and part != "cli":
            yield f"{part} imports {name}, which only cli reads"
    match node:
        case ast.Attribute(ast.Name(base), name) if part != "cli" and f"{base}.{name}" in ONLY_CLI:
            if (module, f"{base}.{name}") != HANDS_ON:
                yield f"{part} uses {base}.{name}, which only cli reads"
        case ast.Attribute(ast.Name("torch"), "distributed") if part not in DISTRIBUTED:
            yield f"{part} uses torch.distributed, which comm, launch and engine have"
        case ast.Call(ast.Name("print")) if part != "cli":
            yield f"{part} prints, which only cli does"


def is_distributed(name: str) -> bool:
    return name == "torch.distributed" or name.startswith("torch.distributed.")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem in ORDER)


@pytest.mark.parametrize("path", MODULES, ids=module_of)
def test_a_module_keeps_the_order(path):
    assert looked_at(path)[0] == []


def test_every_part_has_its_place_in_the_order():
    parts = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert parts | modules <= set(ORDER)


def ring(arrows: set[tuple[str, str]]) -> list[str]:
    """Names that import each other in a ring, or none: names that import nothing, or that nothing imports, go first."""
    while loose := {name for _, name in arrows} ^ {name for name, _ in arrows}:
        arrows = {(one, other) for one, other in arrows if not {one, other} & loose}
    return sorted({name for name, _ in arrows})


def arrows() -> set[tuple[str, str]]:
    """Each import of a module of the package by another one."""
    known = {module_of(path) for path in MODULES}
    found = set()
    for path in MODULES:
        for name in looked_at(path)[1]:
            dotted = name.removeprefix("superstep.")
            found |= {(module_of(path), other) for other in (dotted, dotted.rpartition(".")[0]) if other in known}
    return found


def room(module: str) -> str:
    """The inner room that a module is in, or the module itself where it lies directly in its part."""
    return ".".join(module.split(".")[:2])


def test_no_modules_import_each_other_in_a_ring():
    assert ring(arrows()) == []


def test_inner_rooms_import_one_way():
    """Files that lie directly in a part may use its rooms and be used by them; the rooms among each other may not."""
    rooms = {room(module_of(path)) for path in MODULES if module_of(path).count(".") == 2}
    between = {(room(one), room(other)) for one, other in arrows()}
    assert ring({(one, other) for one, other in between if one != other and {one, other} <= rooms}) == []


def test_no_file_imports_more_than_20_others():
    """One that would has a concept without a name: give that a file, with a reason of its own."""
    assert house.wide_files(house.read_package(PACKAGE), "superstep") == {}


def test_a_planted_ring_is_seen():
    assert ring({("a", "b"), ("b", "c"), ("c", "d")}) == []
    assert ring({("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")}) == ["b", "c"]


@pytest.mark.parametrize(
    ("module", "source", "rule"),
    [
        ("plan.mesh", "from superstep.program import check", "plan imports program, which comes after it"),
        ("plan.mesh", "import superstep.cli.main", "plan imports cli, which comes after it"),
        ("program.check", "from superstep import cost", "program imports cost, which comes after it"),
        ("errors", "from superstep.plan.config import RunConfig", "errors imports plan"),
        ("train.loop", "from .batches import batches", "relative import"),
        ("train.loop", "from . import batches", "relative import"),
        ("cost.simulate", "import torch", "the standard library and numpy only"),
        ("scaling.summary", "from scipy.optimize import minimize", "which scaling.fit alone may"),
        ("model.decoder", "import scipy", "which scaling.fit alone may"),
        ("observe.events", "from torch import Tensor", "the standard library and numpy only"),
        (
            "plan.config_io",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
            "line 3: plan",
        ),
        ("state.checkpoint", "import torch.distributed as dist", "which comm, launch and engine have"),
        ("train.loop", "from torch import distributed", "which comm, launch and engine have"),
        ("train.loop", "from torch.distributed import all_reduce", "which comm, launch and engine have"),
        (
            "model.decoder",
            "import torch\ntorch.distributed.barrier()",
            "line 2: model uses torch.distributed",
        ),
        (
            "comm.mesh",
            "def f():\n    from superstep.plan.mesh import MeshShape",
            "line 2: superstep is imported",
        ),
        ("comm.mesh", "import os\nos.environ['RANK']", "comm uses os.environ, which only cli reads"),
        ("comm.mesh", "from os import getenv", "comm imports os.getenv, which only cli reads"),
        ("data.corpus", "import sys\nsys.argv", "data uses sys.argv, which only cli reads"),
        ("train.loop", "print('step')", "train prints, which only cli does"),
    ],
)
def test_a_planted_violation_is_seen(module, source, rule):
    assert any(rule in found for found in violations(module, source)), violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cli.main", "import os, sys\nprint(os.environ, sys.argv)\nfrom superstep.train import loop"),
        ("comm.mesh", "import torch.distributed as dist\nfrom superstep.plan.mesh import MeshShape"),
        ("scaling.fit", "from scipy.optimize import minimize"),
        ("cost.simulate", "import numpy as np\nfrom superstep.cost.catalogue import DEVICES"),
        ("train.loop", "def f():\n    import tomllib"),
    ],
)
def test_what_is_allowed_is_not_refused(module, source):
    assert violations(module, source) == []
