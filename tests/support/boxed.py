"""For tests that need bubblewrap: whether it works here, and what of this machine must not change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from superstep.errors import ConfigError
from superstep.grade.config import GradeConfig
from superstep.grade.sandbox.sandbox import open_sandbox


def why_not() -> str:
    """Why there is no sandbox on this machine; empty where there is one."""
    try:
        open_sandbox(GradeConfig(timeout_s=60, grader_timeout_s=120))
    except ConfigError as error:
        return str(error)
    return ""


WHY_NOT = why_not()
needs_bubblewrap = pytest.mark.skipif(bool(WHY_NOT), reason=f"no sandbox here: {WHY_NOT}")


def command_lines() -> list[bytes]:
    """Of every process of this machine that can be seen."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return found


def names_in(*folders: str) -> set[str]:
    """What lies in some folders."""
    return {os.path.join(folder, name) for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)}
