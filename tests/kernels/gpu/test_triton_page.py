"""The page that teaches to write a kernel: its blocks run, and compare what they compute."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "write-a-gpu-kernel.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_its_code_runs(device):
    if device != "cpu":
        pytest.skip("it computes with tensors of a CPU")
    names: dict[str, object] = {}
    for found in re.finditer(r"^```py\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE):
        # Triton reads a kernel's source where its lines are: on the page.
        first = TEXT[: found.start(1)].count("\n")
        exec(compile("\n" * first + found[1], str(PAGE), "exec"), names)
    assert {"_softmax", "_matmul"} <= names.keys()
