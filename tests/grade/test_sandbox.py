"""The sandbox's parts: the filter, the command line, what a process may take, and refusals with the mend."""

from __future__ import annotations

import mmap
import os
import re
import signal
import struct
import sys
import tempfile
import threading
import time
from dataclasses import fields, replace
from pathlib import Path

import psutil
import pytest

from boxed import command_lines, needs_bubblewrap
from superstep.errors import ConfigError, Fault
from superstep.grade.config import GradeConfig, check_config
from superstep.grade.sandbox import sandbox as room
from superstep.grade.sandbox.bubblewrap import VisiblePaths, command
from superstep.grade.sandbox.memory import resident_bytes
from superstep.grade.sandbox.process import CommandResult, ProcessLimits, run_bounded
from superstep.grade.sandbox.sandbox import FunctionCall, interpreter, open_sandbox, read_answers
from superstep.grade.sandbox.seccomp import (
    AARCH64,
    ALLOW,
    ERRNO,
    KILL,
    MACHINES,
    X86_64,
    decide,
    filter_bytes,
    filter_program,
)
from superstep.monitor.deadline import ActiveDeadline

HEADERS = {
    X86_64.arch: Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    AARCH64.arch: Path("/usr/include/asm-generic/unistd.h"),
}
KINDS = [pytest.param(machine, id=name) for name, machine in MACHINES.items()]


@pytest.mark.parametrize("machine", KINDS)
def test_numbers_are_those_of_the_kernels_header(machine):
    header = HEADERS[machine.arch]
    if not header.exists():
        pytest.skip(f"{header} is not installed")
    text = header.read_text(encoding="utf-8")
    numbers = {name: int(n) for name, n in re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", text)}
    own = machine.kills | machine.fails | {"clone": machine.clone, "socketpair": machine.socketpair}
    own |= {"clone3": machine.clone3, "ioctl": machine.ioctl, "mmap": machine.mmap}
    assert {name: n for name, n in own.items() if numbers.get(name, n) != n} == {}
    assert len(set(own) & set(numbers)) > 60


@pytest.mark.parametrize("machine", KINDS)
def test_the_filter_ends_who_breaks_out_and_refuses_the_rest(machine):
    program = filter_program(machine)

    def says(number, *arguments, arch=machine.arch):
        return decide(program, arch=arch, number=number, arguments=arguments)

    assert {name for name, number in machine.kills.items() if says(number) != KILL} == set()
    assert {name for name, number in machine.fails.items() if says(number) != ERRNO | 1} == set()
    assert says(0) == ALLOW
    assert says(0, arch=1) == KILL
    assert says(machine.last + 1) == ERRNO | 38
    assert says(machine.clone3) == ERRNO | 38
    assert says(machine.clone, 17) == ALLOW
    assert {bit for bit in (7, 17, 25, 26, 27, 28, 29, 30) if says(machine.clone, 1 << bit | 17) != KILL} == set()
    assert says(machine.clone, (1 << 28) | (5 << 32)) == KILL
    assert says(machine.socketpair, 1) == ALLOW
    assert says(machine.socketpair, 2) == ERRNO | 1
    assert says(machine.mmap, 0, 4096, 3, 0x22) == ALLOW  # private
    assert says(machine.mmap, 0, 4096, 3, 0x01) == ALLOW  # of a file
    assert says(machine.mmap, 0, 4096, 3, 0x21) == ERRNO | 1
    assert says(machine.mmap, 0, 4096, 3, 0x100021) == ERRNO | 1
    assert says(machine.ioctl, 0, 0x5412) == ERRNO | 1
    assert says(machine.ioctl, 0, 0x5401) == ALLOW
    others = set(range(machine.last + 1)) - {*machine.kills.values(), *machine.fails.values(), machine.clone3}
    allowed = {number for number in others if says(number, 1) == ALLOW}
    assert others - allowed == set()


def test_a_call_by_the_third_way_is_no_way_round():
    assert decide(filter_program(X86_64), arch=X86_64.arch, number=0x40000000 | 165) == KILL


@pytest.mark.parametrize("machine", KINDS)
def test_the_filter_is_written_as_the_kernel_reads_it(machine):
    written = filter_bytes(machine)
    assert len(written) % 8 == 0
    assert len(written) // 8 < 4096  # the most that the kernel takes
    assert [struct.unpack_from("=HBBI", written, 8 * k) for k in range(len(written) // 8)] == filter_program(machine)


def test_the_command_line_has_every_protection():
    seen = VisiblePaths(bwrap=Path("/usr/bin/bwrap"), python=Path("/usr/bin/python3"), prefix=Path("/opt/python"))
    words = command(seen, disk_bytes=4096, filter_fd=7, run=("-c", "pass"))
    text = " ".join(words)
    for needed in (
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--die-with-parent",
        "--new-session",
        "--cap-drop ALL",
        "--clearenv",
        "--ro-bind /usr /usr",
        "--ro-bind /opt/python /opt/python",
        "--size 4096 --tmpfs /tmp",
        "--remount-ro / ",
        "--seccomp 7",
    ):
        assert needed in text, needed
    assert not {"--bind", "--proc", "--dev", "--share-net", "--dev-bind-try"} & set(words)
    assert words[words.index("--") + 1] == "/usr/bin/python3"
    # What is bound is bound before the root is closed.
    assert max(k for k, word in enumerate(words) if word == "--ro-bind") < words.index("--remount-ro")


def test_a_machine_without_bubblewrap_is_refused_with_the_mend(monkeypatch):
    monkeypatch.setattr(room.shutil, "which", lambda name, path: None)
    with pytest.raises(ConfigError, match=r'apt install bubblewrap, or write grade\.sandbox = "none"'):
        open_sandbox(GradeConfig())
    open_sandbox(GradeConfig(sandbox="none"))


def test_a_bubblewrap_that_cannot_work_is_refused_with_its_words(monkeypatch, tmp_path):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == broken.owner() and folder != Path("/tmp"):
            folder.chmod(0o755)
        if folder == Path("/tmp"):
            break
    monkeypatch.setattr(room.shutil, "which", lambda name, path: str(broken))
    with pytest.raises(ConfigError, match=r"No permissions to create new namespace\.\); allow user namespaces"):
        open_sandbox(GradeConfig())


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (GradeConfig(timeout_s=0), "grade.timeout_s = 0 must be above 0"),
        (GradeConfig(timeout_s=float("nan")), "grade.timeout_s = nan"),
        (GradeConfig(timeout_s=90), "grade.grader_timeout_s = 60 must be more than grade.timeout_s = 90"),
        (GradeConfig(memory_bytes=1000), "grade.memory_bytes = 1000 must be at least 33554432"),
        (GradeConfig(workers=0), "grade.workers = 0"),
        (GradeConfig(retries=-1), "grade.retries = -1"),
        (GradeConfig(processes=0), "grade.processes = 0"),
    ],
)
def test_numbers_that_cannot_work_are_refused(config, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        check_config(config)


def test_the_page_has_every_limit_and_its_default():
    text = (Path(__file__).parents[2] / "docs" / "howto" / "grade.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `grade\.(\w+)` \| ([^|]*) \|", text, re.MULTILINE))
    named = set(re.findall(r"`grade\.(\w+)`|--grade\.(\w+)", text))
    assert {field.name for field in fields(GradeConfig)} == {one or other for one, other in named}
    units = {"MiB": 1 << 20, "": 1}
    for name, told in rows.items():
        value = getattr(GradeConfig(), name)
        number, _, unit = told.partition(" ")
        assert value == (int(number) * units[unit] if number.isdigit() else None), name
    assert len(rows) == 8


def test_an_interpreter_out_of_reach_is_not_taken(monkeypatch, tmp_path):
    monkeypatch.setattr(room.os, "geteuid", lambda: 0)
    closed = tmp_path / "closed" / "bin"
    closed.mkdir(parents=True)
    (closed / "python3").write_text("")
    closed.parent.chmod(0o700)
    with pytest.raises(ConfigError, match=r"cannot be reached by user 65534"):
        interpreter(str(closed / "python3"))
    with pytest.raises(ConfigError, match=r"is not there; name an interpreter"):
        interpreter(str(closed / "python4"))


def test_a_process_is_held_to_its_bounds():
    python = [sys.executable, "-c"]
    bounds = ProcessLimits(30.0, 1 << 30, 1 << 20)
    ended = run_bounded([*python, "print(input()[::-1])"], b"abc\n", bounds)
    assert (ended.status, ended.limit, ended.stdout) == (0, None, b"cba\n")
    assert run_bounded([*python, "import os; os.close(0)"], b"x" * 10**7, bounds).status == 0
    began = time.monotonic()
    ended = run_bounded([*python, "import time; time.sleep(60)"], b"", replace(bounds, seconds=1.0))
    assert ended.limit == "timeout"
    ended = run_bounded(
        [*python, "import os; os.close(1); os.close(2)\nwhile True: pass"], b"", replace(bounds, seconds=1.0)
    )
    assert ended.limit == "timeout"
    assert time.monotonic() - began < 30
    ended = run_bounded([*python, "while True: print('x' * 10**6)"], b"", bounds)
    assert ended.limit == "output"
    assert len(ended.stdout) < 2 << 20
    ended = run_bounded(
        [*python, "kept = b'x' * (300 << 20)\nimport time; time.sleep(60)"],
        b"",
        replace(bounds, memory_bytes=200 << 20),
    )
    assert ended.limit == "memory"
    ended = run_bounded([*python, "import os; print(dict(os.environ))"], b"", bounds)
    assert b"HOME" not in ended.stdout


def test_time_in_which_the_machine_stood_still_does_not_count():
    now = [100.0]
    patience = ActiveDeadline(10.0, lambda: now[0])
    now[0] += 0.25
    assert patience.left() == 9.75
    now[0] += 3600.0  # it slept
    assert patience.left() == 9.25
    for _ in range(100):
        assert 0 <= patience.step() <= 0.1
        now[0] += 0.125
    assert patience.step() == 0
    assert patience.left() < 0


def test_what_a_process_leaves_in_its_session_is_ended():
    mark = f"left-{os.getpid()}"
    source = f"import subprocess; subprocess.Popen(['{mark}', '600'], executable='/bin/sleep')"
    ended = run_bounded([sys.executable, "-c", source], b"", ProcessLimits(30.0, 1 << 30, 1 << 20))
    assert ended.status == 0
    assert [line for line in command_lines() if mark.encode() in line] == []


def test_the_memory_of_a_process_is_seen():
    before = resident_bytes(os.getpid())
    with mmap.mmap(-1, 64 << 20) as pages:  # of its own: C's library may have as much that was there before
        pages[:] = bytes([1]) * len(pages)
        assert resident_bytes(os.getpid()) - before > 48 << 20
    assert resident_bytes(2**22 - 1) == 0


@pytest.mark.parametrize(
    ("ended", "how"),
    [
        (CommandResult(0, None, b'ready\n{"value": 1}\n', b""), "done"),
        (CommandResult(0, "timeout", b"ready\n", b""), "timeout"),
        (CommandResult(0, "memory", b"ready\n", b""), "memory"),
        (CommandResult(0, "output", b"ready\n", b""), "violation"),
        (CommandResult(159, None, b"ready\n", b""), "violation"),
        (CommandResult(-31, None, b"ready\n", b""), "violation"),
        (CommandResult(0, None, b"ready\n[1]\n", b""), "violation"),
        (CommandResult(0, None, b"ready\n{\n", b""), "violation"),
        (CommandResult(0, None, b"ready\n\xff\n", b""), "violation"),
        (CommandResult(0, None, b"ready\n" + b"[" * 100_000, b""), "violation"),
        (CommandResult(0, None, b'ready\n{"value": ' + b"9" * 5000 + b"}\n", b""), "violation"),
        (CommandResult(0, None, b'ready\n{"raised": "MemoryError: "}\n', b""), "memory"),
        (CommandResult(0, None, b'ready\n{"output": "", "status": -31}\n', b""), "violation"),
    ],
)
def test_how_a_program_ended(ended, how):
    assert read_answers(ended, GradeConfig()).how == how


@pytest.mark.parametrize("limit", [None, "timeout", "memory"])
def test_a_program_that_did_not_begin_is_our_failure(limit):
    with pytest.raises(Fault, match="did not begin"):
        read_answers(CommandResult(1, limit, b"", b"bwrap: cannot"), GradeConfig())


@needs_bubblewrap
def test_the_number_of_processes_is_bounded():
    source = (
        "import os, time\ndef f():\n    count = 0\n    try:\n        while True:\n            if os.fork() == 0:\n"
        "                time.sleep(60)\n            count += 1\n    except BlockingIOError:\n        return count"
    )
    for most in (4, 16):
        answers = open_sandbox(GradeConfig(processes=most)).calls(source, [FunctionCall("f")])
        assert answers.how == "done", answers
        assert most - 2 <= answers.records[0]["value"] <= most


@needs_bubblewrap
def test_packages_are_seen_where_a_folder_of_them_is_named():
    source = "def f():\n    import ours\n    return ours.VALUE"
    with tempfile.TemporaryDirectory(prefix="packages") as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "ours.py").write_text("VALUE = 7\n", encoding="utf-8")
        for sandbox in ("bubblewrap", "none"):
            told = (
                open_sandbox(GradeConfig(packages=folder, sandbox=sandbox)).calls(source, [FunctionCall("f")]).records
            )
            assert told == ({"value": 7},), sandbox
        told = open_sandbox(GradeConfig()).calls(source, [FunctionCall("f")]).records
        assert "ModuleNotFoundError" in told[0]["raised"]
        Path(folder).chmod(0o700)
        if os.geteuid() == 0:
            with pytest.raises(ConfigError, match=r"grade\.packages = '.*' cannot be reached by user 65534"):
                open_sandbox(GradeConfig(packages=folder))
    with pytest.raises(ConfigError, match=r"is no folder; make one with pip install --target"):
        open_sandbox(GradeConfig(packages=folder))


@needs_bubblewrap
def test_the_order_of_a_set_is_the_same_each_time():
    sandbox = open_sandbox(GradeConfig())
    found = [
        sandbox.calls("def f(): return list({'a', 'b', 'c', 'd', 'e'})", [FunctionCall("f")]).records for _ in range(3)
    ]
    assert found[0] == found[1] == found[2]
    assert "value" in found[0][0]


STOPS = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"
SLEEPS = "import time\nprint(1, flush=True)\ntime.sleep(60)"


@needs_bubblewrap
@pytest.mark.parametrize("seconds", [1.0, 30.0], ids=["little time", "time enough"])
def test_a_sandbox_that_somebody_stops_is_no_candidates_timeout(seconds):
    boxed = open_sandbox(GradeConfig(timeout_s=seconds), probe=False)
    over = threading.Event()

    def stop():
        while not over.wait(0.01):
            for child in psutil.Process().children():
                if child.name() == "bwrap" and not over.wait(0.4):  # the program has begun
                    child.send_signal(signal.SIGSTOP)
                    return

    stopping = threading.Thread(target=stop)
    stopping.start()
    try:
        with pytest.raises(Fault, match=r"process \d+ was stopped \(SIGSTOP\) and did not go on"):
            boxed.programs(SLEEPS, [""])
    finally:
        over.set()
        stopping.join()


@needs_bubblewrap
def test_a_program_that_stops_itself_uses_up_its_own_time():
    for kept in ("bubblewrap", "none"):
        config = GradeConfig(timeout_s=1.5, sandbox=kept)
        assert open_sandbox(config, probe=False).programs(STOPS, [""]).how == "timeout"
