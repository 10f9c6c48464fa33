"""The command line of bubblewrap: what a candidate's program sees, and what it does not.

It has namespaces of its own (processes, network, IPC, mounts, users, names), no capability, and may make no further
user namespace. Its files are the system's programs and the interpreter, read-only, and one folder of its own, in
memory and of limited size. There is no /proc and no /sys, no device but four harmless ones, and no environment but what
stands here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

UID = 65534
"""Who candidates are inside; outside too, where root starts the sandbox: of root the kernel counts no processes."""

FOLDER = "/tmp"
"""The program's own folder."""

PACKAGES = "/packages"
"""Where packages that candidates may import are seen."""

DEVICES = ("null", "full", "random", "urandom")
"""Not zero: what is mapped of it is memory that processes share, which outlives what is seen of it."""
MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Folders at the root, which most systems have as links into /usr."""

DEVICE_BYTES = 1 << 16

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": FOLDER,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the order of a set is the same each time, and so is a grade
    "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

PYTHON_FLAGS = ("-s", "-S", "-P", "-B")
"""No site-packages, no current folder among the paths, no files written beside modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisiblePaths:
    """What of this machine is seen inside.

    Attributes:
        bwrap: the program bubblewrap.
        python: the interpreter.
        prefix: the interpreter's folder where it is not below /usr.
        packages: a folder of packages.
    """

    bwrap: Path
    python: Path
    prefix: Path | None = None
    packages: Path | None = None


def command(paths: VisiblePaths, *, disk_bytes: int, filter_fd: int | None, run: Sequence[str]) -> list[str]:
    """The command that runs ``run`` in a sandbox.

    Args:
        paths: what is seen inside.
        disk_bytes: the room of the program's folder.
        filter_fd: an open file with the filter of system calls; None on a machine that has no list of them.
        run: arguments of the interpreter.
    """
    words = [str(paths.bwrap), "--unshare-all", "--unshare-user", "--disable-userns"]
    words += ["--uid", str(UID), "--gid", str(UID), "--hostname", "sandbox"]
    words += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        words += ["--setenv", name, value]
    words += ["--ro-bind", "/usr", "/usr", *_merge_links(Path("/"))]
    words += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for folder, inside in ((paths.prefix, str(paths.prefix)), (paths.packages, PACKAGES)):
        if folder is not None:
            words += ["--ro-bind", str(folder), inside]
    words += ["--size", str(DEVICE_BYTES), "--tmpfs", "/dev"]
    for device in DEVICES:
        words += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    words += ["--size", str(disk_bytes), "--tmpfs", FOLDER, "--chdir", FOLDER]
    # Last: what is mounted above is made in them. The root is memory without a limit, were it writable.
    words += ["--remount-ro", "/dev", "--remount-ro", "/"]
    if filter_fd is not None:
        words += ["--seccomp", str(filter_fd)]
    return [*words, "--", str(paths.python), *PYTHON_FLAGS, *run]


def _merge_links(root: Path) -> list[str]:
    words: list[str] = []
    for name in MERGED:
        path = root / name
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), f"/{name}"]
        elif path.is_dir():
            words += ["--ro-bind", str(path), f"/{name}"]
    return words
