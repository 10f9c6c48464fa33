"""The bound of memory holds however a program keeps it: by a cgroup, or by looks and refused calls alone.

Each route gives a right answer while it keeps what a look at its processes' own pages does not see.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from boxed import needs_bubblewrap
from superstep.errors import ConfigError
from superstep.grade.config import GradeConfig
from superstep.grade.sandbox.cgroup import (
    EXTRA_BYTES,
    PREFIX,
    V1,
    V2,
    Cgroup,
    CgroupParent,
    find_place,
    make_group,
    remove_left_groups,
)
from superstep.grade.sandbox.sandbox import FunctionCall, open_sandbox

MEMORY_BYTES = 192 << 20
DISK_BYTES = 4 << 20
MARGIN_BYTES = 192 << 20
"""What two busy cores fill between two looks, and the interpreter's own files."""

CONFIG = GradeConfig(memory_bytes=MEMORY_BYTES, disk_bytes=DISK_BYTES, timeout_s=4, grader_timeout_s=60)

RIGHT = """
def double(number):
    return 2 * number
"""

ROUTES = {
    "shared pages, given back": """
import mmap, os, time
for k in range(12):
    if k == 11 or os.fork() == 0:
        page = mmap.mmap(-1, 96 << 20)
        for at in range(0, len(page), 4096):
            page[at] = 1
        page.madvise(mmap.MADV_DONTNEED)
        time.sleep(1.5 if k == 11 else 60)
        break
""",
    "shared pages of a child that sleeps": """
import mmap, os, time
for k in range(12):
    page = mmap.mmap(-1, 96 << 20)
    for at in range(0, len(page), 4096):
        page[at] = 1
    if os.fork() == 0:
        time.sleep(60)
    page.close()
""",
    "shared pages of a device": """
import mmap, os, time
for k in range(12):
    with open('/dev/zero', 'r+b') as zero:
        page = mmap.mmap(zero.fileno(), 96 << 20)
    for at in range(0, len(page), 4096):
        page[at] = 1
    if os.fork() == 0:
        time.sleep(60)
    page.close()
""",
    "attributes of files": """
import os
for k in range(20000):
    name = f'/tmp/{k // 100}'
    open(name, 'a').close()
    os.setxattr(name, f'user.{k}', bytes(60000))
""",
    "sockets": """
import os, socket, time
def fill():
    kept = []
    while True:
        kept.append(socket.socketpair())
        for one in kept[-1]:
            one.setblocking(False)
            try:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
            except OSError:
                pass
            try:
                while True:
                    one.send(bytes(100000))
            except BlockingIOError:
                pass
for k in range(28):
    if os.fork() == 0:
        try:
            fill()
        except OSError:
            time.sleep(60)
time.sleep(2)
""",
    "names": """
import os
os.chdir('/tmp')
for k in range(1_000_000):
    os.mknod(f'{k}' + 'x' * 200)
""",
    "threads whose process has ended": """
import ctypes, os, threading, time
EXIT = {'x86_64': 60, 'aarch64': 93}[os.uname().machine]
for k in range(12):
    if os.fork() == 0:
        kept = []
        def keep():
            time.sleep(0.3)
            kept.append(bytearray(60 << 20))
            for at in range(0, 60 << 20, 4096):
                kept[0][at] = 1
            time.sleep(60)
        threading.Thread(target=keep).start()
        ctypes.CDLL(None).syscall(EXIT, 0)
time.sleep(3)
""",
}

SOUND = {
    "asyncio": """
import asyncio
async def doubled(number):
    await asyncio.sleep(0)
    return 2 * number
def double(number):
    return asyncio.run(doubled(number))
""",
    "a process and a pipe": """
import multiprocessing
def work(end, number):
    end.send(2 * number)
def double(number):
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context('fork').Process(target=work, args=(theirs, number))
    process.start()
    found = ours.recv()
    process.join()
    return found
""",
    "threads": """
from concurrent.futures import ThreadPoolExecutor
def double(number):
    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(lambda _: number, range(2)))
""",
    "a mapped file": """
import mmap
def double(number):
    with open('/tmp/file', 'w+b') as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096) as page:
            page[0] = number
            return 2 * page[0]
""",
    "much of its own memory": """
def double(number):
    kept = bytearray(b'x') * (100 << 20)
    return kept.count(b'x') // (50 << 20) * number
""",
    "a program of the system's": """
import subprocess
def double(number):
    return int(subprocess.run(['expr', '2', '*', str(number)], capture_output=True, text=True).stdout)
""",
}

REFUSED = """
import mmap
def double(number):
    mmap.mmap(-1, 4096)
    return 2 * number
"""


def own_group(memory_bytes=8 << 30):
    return make_group(memory_bytes, 64, None)


needs_cgroup = pytest.mark.skipif(own_group() is None, reason="no cgroup can be made here")


def peak_bytes(group):
    folder = group.folders[0]
    paths = (folder / "memory.peak", folder / "memory.max_usage_in_bytes")
    return int(next(path for path in paths if path.exists()).read_text())


def is_right(answers):
    return answers.how == "done" and answers.records == ({"value": 6},)


@needs_bubblewrap
@needs_cgroup
@pytest.mark.parametrize("route", ROUTES)
def test_looks_and_refused_calls_hold_a_program_where_there_is_no_cgroup(route):
    group = own_group()  # so large that it only measures
    boxed = replace(open_sandbox(CONFIG, probe=False), group=group)
    answers = boxed.calls(ROUTES[route] + RIGHT, [FunctionCall("double", (3,))])
    assert not is_right(answers)
    assert peak_bytes(group) < MEMORY_BYTES + DISK_BYTES + MARGIN_BYTES


@needs_bubblewrap
@needs_cgroup
@pytest.mark.parametrize("route", ROUTES)
def test_a_cgroup_holds_a_program_without_the_filter_of_calls(route):
    boxed = replace(open_sandbox(CONFIG, probe=False), filter=None)
    answers = boxed.calls(ROUTES[route] + RIGHT, [FunctionCall("double", (3,))])
    assert not is_right(answers)
    assert answers.how == "memory" or "device" in route
    assert peak_bytes(boxed.group) <= MEMORY_BYTES + DISK_BYTES + EXTRA_BYTES
    assert is_right(boxed.calls(RIGHT, [FunctionCall("double", (3,))])), "the next program is another one"


@needs_bubblewrap
@pytest.mark.parametrize("has_group", [True, False], ids=["cgroup", "watched"])
def test_a_sound_program_is_right(has_group):
    boxed = open_sandbox(CONFIG, probe=False)
    if not has_group:
        boxed = replace(boxed, group=None)
    found = {name: boxed.calls(source, [FunctionCall("double", (3,))]) for name, source in SOUND.items()}
    assert {name: answers for name, answers in found.items() if not is_right(answers)} == {}
    told = boxed.calls(REFUSED, [FunctionCall("double", (3,))]).records
    assert told == ({"raised": "PermissionError: [Errno 1] Operation not permitted"},)


NUMPY = """
import numpy
def double(number):
    return int((numpy.ones((300, 300)) @ numpy.ones((300, 300)))[0, 0]) // 150 * number
"""


@needs_bubblewrap
def test_numpy_can_be_imported():
    try:
        config = GradeConfig(packages=str(Path(numpy.__file__).parents[1]), timeout_s=60, grader_timeout_s=120)
        boxed = open_sandbox(config, probe=False)
    except ConfigError as error:
        pytest.skip(str(error))
    if f"python{sys.version_info.major}.{sys.version_info.minor}" != boxed.python.name:
        pytest.skip(f"{boxed.python} cannot import this numpy")
    answers = boxed.calls(NUMPY, [FunctionCall("double", (3,))])
    assert is_right(answers), answers


@needs_cgroup
def test_a_group_goes_with_its_owner_and_one_that_is_left_is_removed():
    group = own_group()
    folders = group.folders
    assert all(folder.is_dir() and folder.name.startswith(PREFIX) for folder in folders)
    remove_left_groups()
    assert all(folder.is_dir() for folder in folders), "its owner is there"
    del group
    gc.collect()
    assert not any(folder.exists() for folder in folders)
    source = "import os\nfrom superstep.grade.sandbox.cgroup import make_group\ngroup = make_group(1 << 30, 8, None)\n"
    source += "print(*group.folders, flush=True)\nos._exit(0)"
    left = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout.split()
    assert all(map(os.path.isdir, left))
    remove_left_groups()
    assert not any(map(os.path.isdir, left))


def test_a_kernel_that_counts_no_kills_has_none(tmp_path):
    (tmp_path / "cgroup.procs").touch()
    events = tmp_path / "memory.oom_control"
    group = Cgroup([tmp_path], [], V1)
    for text, kills in (("oom_kill_disable 0\nunder_oom 0\n", 0), ("under_oom 0\noom_kill 3\n", 3)):
        events.write_text(text)
        assert group.kills() == kills


def test_a_group_that_cannot_be_joined_leaves_no_open_file(tmp_path):
    folders = [tmp_path / "memory", tmp_path / "pids"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "cgroup.procs").touch()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        Cgroup(folders, [], V1)
    assert os.listdir("/proc/self/fd") == before


UNIFIED = "30 1 0:1 / {root} rw - cgroup2 cgroup2 rw\n"
SPLIT = "31 1 0:2 /box {root}/memory rw - cgroup cgroup rw,memory\n32 1 0:3 / {root}/pids rw - cgroup cgroup rw,pids\n"


def machine(folder, mounts, own, files):
    """A machine's cgroups as files, and the place where a group would be made there."""
    (folder / "mountinfo").write_text(mounts.format(root=folder / "sys"))
    (folder / "cgroup").write_text(own)
    for name, text in files.items():
        path = folder / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return find_place(folder)


def test_version_2_is_asked_above_our_own_group(tmp_path):
    """Our own has processes in it, and so gives no memory to those below."""
    files = {f"user/app/run/cgroup.{file}": "" for file in ("procs", "subtree_control")}
    files |= {"user/app/cgroup.procs": "", "user/app/cgroup.subtree_control": "cpu memory pids"}
    assert machine(tmp_path, UNIFIED, "0::/user/app/run\n", files) == CgroupParent((tmp_path / "sys/user/app",), V2)


def test_version_1_is_asked_below_our_own_group(tmp_path):
    files = {"memory/mine/cgroup.procs": "", "pids/cgroup.procs": ""}
    own = "3:memory:/box/mine\n2:pids:/\n0::/\n"
    folders = (tmp_path / "sys/memory/mine", tmp_path / "sys/pids")
    assert machine(tmp_path, SPLIT, own, files) == CgroupParent(folders, V1)


@pytest.mark.parametrize("given", ["", "cpu", "memory"])
def test_a_machine_that_gives_none_has_no_place(given, tmp_path):
    files = {"run/cgroup.procs": "", "run/cgroup.subtree_control": given}
    assert machine(tmp_path, UNIFIED, "0::/run\n", files) is None
