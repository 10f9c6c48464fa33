"""The kernels for GPUs where there is none: run by Triton's interpreter, and compiled for a GPU that is not there."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import superstep
from longer import longer

PACKAGE = Path(superstep.__file__).parent
TESTS = Path(__file__).parent / "gpu"
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(
    not HAS_TRITON, reason="Triton is not installed: pip install triton (198 MB; the dev extra has it on Linux)"
)


@needs_triton
@pytest.mark.parametrize("part", longer(["not long", "long"], lambda part: part == "long"))
def test_kernels_compute_the_same_in_the_interpreter(part):
    """In a process of its own, as Triton asks once whether it interprets; their tests are in ``gpu``."""
    which = ["-m", f"not gpu and {part}", "-p", "no:cacheprovider", str(TESTS)]
    asked = [sys.executable, "-m", "pytest", "-q", "-x", *which]
    done = subprocess.run(
        asked, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@functools.cache
def imported(path):
    """The modules that a file imports, and those that it imports names from."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names]
        if isinstance(node, ast.ImportFrom):
            found += [node.module or "", *(f"{node.module}.{each.name}" for each in node.names)]
    return found


@pytest.mark.parametrize(
    ("name", "folders"), [("triton", {"kernels/gpu", "strict/triton"}), ("superstep.kernels.gpu", {"kernels/gpu"})]
)
def test_a_run_on_a_cpu_imports_neither_triton_nor_kernels_of_it(name, folders):
    """Files of these folders import them, and are imported by name where a GPU computes or is emulated."""
    found = {
        path.parent
        for path in PACKAGE.rglob("*.py")
        if any(f"{module}.".startswith(f"{name}.") for module in imported(path))
    }
    assert found == {PACKAGE / folder for folder in folders}
