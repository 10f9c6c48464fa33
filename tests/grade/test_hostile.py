"""Hostile programs: none scores, this machine is as it was, no process is left."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from boxed import command_lines, names_in, needs_bubblewrap
from superstep.grade.config import GradeConfig
from superstep.grade.sandbox.memory import tree
from superstep.grade.sandbox.sandbox import FunctionCall, open_sandbox
from superstep.grade.task import answer_rollout
from superstep.grade.workers.pool import Pool

TASKS = Path(__file__).with_name("hidden_tasks.py")


pytestmark = needs_bubblewrap

WRONG = "\ndef double(number):\n    return number\n"


def read_programs(text):
    """Programs by name, and the verdicts of some."""
    programs, verdicts = {}, {}
    for part in text.split("\n=== ")[1:]:
        head, _, source = part.partition("\n")
        name, _, verdict = head.partition(" -> ")
        programs[name] = source if "def double(" in source else source + WRONG
        if verdict:
            verdicts[name] = verdict
    return programs, verdicts


PROGRAMS, VERDICTS = read_programs(Path(__file__).with_name("hostile_programs.txt").read_text(encoding="utf-8"))

CONFIG = GradeConfig(timeout_s=2.5, grader_timeout_s=60, memory_bytes=256 << 20, workers=2, retries=1)
WATCHED = ("/", "/tmp", "/dev", "/dev/shm", "/var/tmp", "/run", "/etc", "/usr", "/usr/bin", "/home")


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """What must not be reached, and a port that listens."""
    mark = f"mark{secrets.token_hex(8)}"
    file = tmp_path_factory.mktemp("host") / "file"
    file.write_text("as it was", encoding="utf-8")
    file.chmod(0o666)
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        port.listen()
        port.settimeout(0)
        yield {
            "HOSTMARK": mark,
            "HOSTFILE": str(file),
            "HOSTTASKS": str(TASKS),
            "HOSTPID": str(os.getpid()),
            "HOSTPORT": str(port.getsockname()[1]),
            "HOSTSECRET": f"secret{mark}",
            "port": port,
        }


def filled(source, host):
    for word, value in host.items():
        source = source.replace(word, value) if isinstance(value, str) else source
    return source


@pytest.fixture(scope="module")
def graded(host):
    """The verdict of each program, all from one pool, and what was there before."""
    before = {
        "names": names_in(*WATCHED),
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "name": os.uname().nodename,
        "processes": set(tree(os.getpid())),  # of other tests, which wait for the next
    }
    os.environ["SUPERSTEP_TEST_SECRET"] = host["HOSTSECRET"]
    try:
        with Pool(TASKS, CONFIG) as pool:
            right = pool.grade(0, 0, answer_rollout("def double(number):\n    return 2 * number"))
            asked = {}
            for name, source in PROGRAMS.items():
                asked[name] = pool.submit(0, 0, answer_rollout(filled(source, host)))
            verdicts = {name: future.result() for name, future in asked.items()}
            again = pool.grade(0, 0, answer_rollout("def double(number):\n    return 2 * number"))
            left = [pid for pid in tree(os.getpid()) if pid not in before["processes"]]
    finally:
        del os.environ["SUPERSTEP_TEST_SECRET"]
    return {"verdicts": verdicts, "right": (right, again), "before": before, "left": left}


def test_there_are_enough_of_them():
    assert len(PROGRAMS) >= 30
    assert len(VERDICTS) >= 20


@pytest.mark.long
def test_none_scores(graded):
    assert {name: verdict for name, verdict in graded["verdicts"].items() if verdict.score} == {}


def test_each_is_decided(graded):
    """No program makes the grader fail: that would be a way not to be judged."""
    assert {name: verdict for name, verdict in graded["verdicts"].items() if not verdict.is_decided} == {}


def test_the_decision_says_what_it_did(graded):
    found = {name: (verdict.kind, verdict.why) for name, verdict in graded["verdicts"].items() if name in VERDICTS}
    assert {name: told for name, told in found.items() if told[0] != VERDICTS[name]} == {}


def test_an_honest_program_passes_before_and_after(graded):
    assert [verdict.score for verdict in graded["right"]] == [1.0, 1.0]


def test_no_secret_comes_out(graded, host):
    said = " ".join(verdict.why for verdict in graded["verdicts"].values())
    assert host["HOSTSECRET"] not in said
    assert "secret-of-the-tests" not in said


PROBE = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)

def connects():
    with socket.socket() as line:
        line.settimeout(1)
        return line.connect_ex(("127.0.0.1", HOSTPORT))

def refused(deed, *args):
    try:
        return deed(*args) != 0
    except OSError:
        return True

def found():
    return {
        "mount": refused(libc.mount, b"none", b"/tmp", b"tmpfs", 0, 0),
        "remount": refused(libc.mount, b"none", b"/usr", None, 32, None),
        "umount": refused(libc.umount2, b"/usr", 2),
        "user namespace": refused(libc.unshare, 0x10000000),
        "network namespace": refused(libc.unshare, 0x40000000),
        "chroot": refused(libc.chroot, b"/tmp"),
        "host name": refused(libc.sethostname, b"HOSTMARK", 8),
        "reboot": refused(libc.reboot, 0),
        "user": refused(os.setuid, 0),
        "device": refused(os.mknod, "/tmp/disk", 0o60600, 0x800),
        "port": refused(connects),
        "abstract socket": refused(socket.socket(socket.AF_UNIX).connect_ex, "\\0HOSTMARK"),
        "processes": sorted(os.listdir("/")) == ["bin", "dev", "etc", "lib", "lib64", "sbin", "tmp", "usr"]
        or not os.path.exists("/proc/1"),
    }
"""


def test_namespaces_hold_without_the_filter_of_calls(host):
    """Each layer is there for itself: what is left then are the namespaces, and the want of capabilities."""
    kept = replace(open_sandbox(CONFIG), filter=None)
    answers = kept.calls(filled(PROBE, host), [FunctionCall("found")])
    assert answers.how == "done", answers
    _, pairs = answers.records[0]["value"]
    assert {name for name, is_refused in pairs if is_refused is not True} == set()
    with pytest.raises(BlockingIOError):
        host["port"].accept()


def test_this_machine_is_as_it_was(graded, host):
    before = graded["before"]
    assert Path(host["HOSTFILE"]).read_text() == "as it was"
    assert {path for path in names_in(*WATCHED) - before["names"] if host["HOSTMARK"] in path} == set()
    assert Path("/proc/self/mountinfo").read_text() == before["mounts"]
    assert os.uname().nodename == before["name"]
    with pytest.raises(BlockingIOError):
        host["port"].accept()


def test_no_process_is_left(graded, host):
    assert [line for line in command_lines() if host["HOSTMARK"].encode() in line] == []
    assert len(graded["left"]) <= CONFIG.workers  # the graders themselves, which wait for the next
    assert [pid for pid in graded["left"] if Path(f"/proc/{pid}").exists()] == []
