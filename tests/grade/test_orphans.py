"""What a program leaves behind is gone before the next one starts, whoever is the machine's first process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from boxed import needs_bubblewrap

LEAVES = """
import os
for _ in range(2):
    if os.fork() == 0:
        for fd in range(20):
            try:
                os.close(fd)
            except OSError:
                pass
        os.setsid()
        held = [bytearray(b"x") * (1 << 22) for _ in range(8)]
        while True:
            pass
os._exit(0)
"""

GRADER = """
import json, sys
from dataclasses import replace
from superstep.grade.config import GradeConfig
from superstep.grade.sandbox import sandbox as module
from superstep.grade.sandbox.orphans import children
from superstep.grade.sandbox.sandbox import open_sandbox

kind, has_group, leaves = sys.argv[1:]
module.PAUSES_S = ()
kept = open_sandbox(GradeConfig(sandbox=kind, memory_bytes=128 << 20, processes=8, timeout_s=20), adopts=True)
if has_group == "False":
    kept = replace(kept, group=None)
folders = () if kept.group is None else kept.group.folders
files = [folder / name for folder in folders for name in ("cgroup.procs", "pids.current")]
for k in range(16):
    found = kept.programs(leaves if k % 4 == 0 else "print(1)", [""])
    left = [file.read_text().strip() for file in files if file.exists()]
    print(json.dumps([found.how, found.why, len(children()), sorted(set(left) - {"", "0"})]))
"""


@needs_bubblewrap
@pytest.mark.parametrize(
    ("kind", "has_group"),
    [("bubblewrap", True), ("bubblewrap", False), ("none", True)],
    ids=["cgroup", "watched", "bare"],
)
def test_nothing_of_a_program_is_left_when_the_next_one_starts(kind, has_group):
    """In a process of its own, for one that adopts has what others leave for its children too."""
    command = [sys.executable, "-c", GRADER, kind, str(has_group), LEAVES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found == [["done", "", 0, []]] * 16
