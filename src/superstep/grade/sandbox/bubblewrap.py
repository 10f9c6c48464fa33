"""The bubblewrap command: which files and devices a candidate's program sees.

The program has its own namespaces (processes, network, IPC, mounts, users, names), no capability, and may make no
further user namespace. Its files are the system's programs and the interpreter, read-only, and one folder of its own in
memory, of limited size. There is no /proc, no /sys, and only four harmless devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

UID = 65534
"""The user of candidates, inside and, where root starts the sandbox, outside: the kernel does not limit root's
processes.
"""

FOLDER = "/tmp"
"""The program's own folder."""

PACKAGES = "/packages"
"""Where programs see the packages that they may import."""

DEVICES = ("null", "full", "random", "urandom")
"""/dev/zero is left out: shared mappings of it are memory that cannot be counted from outside."""
MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Folders at the root that most systems have as links into /usr."""

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
"""No site-packages, no current folder in the path, no compiled files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisiblePaths:
    """Paths of this machine that programs need inside. ``prefix``: the interpreter's folder where it is not
    below /usr.
    """

    bwrap: Path
    python: Path
    prefix: Path | None = None
    packages: Path | None = None


def command(paths: VisiblePaths, *, disk_bytes: int, filter_fd: int | None, run: Sequence[str]) -> list[str]:
    """The command that runs ``run`` in a sandbox.

    Args:
        disk_bytes: size of the program's folder.
        filter_fd: an open file with the seccomp filter; None on processors without a list of calls.
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
