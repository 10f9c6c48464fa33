"""Sandbox: runs candidates' programs on inputs, and returns their answers as data."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from superstep.errors import ConfigError, Fault
from superstep.grade.config import GradeConfig
from superstep.grade.sandbox.bubblewrap import FOLDER, PACKAGES, PYTHON_FLAGS, UID, VisiblePaths, command
from superstep.grade.sandbox.cgroup import Cgroup, make_group
from superstep.grade.sandbox.orphans import adopt_orphans
from superstep.grade.sandbox.process import CommandResult, ProcessLimits, StillThereError, StoppedError, run_bounded
from superstep.grade.sandbox.seccomp import MACHINES, filter_bytes
from superstep.grade.verdict import line

How = Literal["done", "timeout", "memory", "violation"]
MemoryBound = Literal["cgroup", "watched"]
"""The kernel counts a program's memory (cgroup), or we poll it many times a second (watched)."""

INSIDE = Path(__file__).with_name("child.py")
PAUSES_S = (0.3, 1.0)
"""Seconds before each new try of a sandbox that did not start: the machine may be short of memory or processes for a
moment.
"""

READY = b"ready\n"

SIGSYS = 31
SHELL_SIGNAL = 128
"""If a signal ended a process, shells and bubblewrap report this number plus the signal's as its status."""

OPEN_FILES = 64
WAITING_SIGNALS = 256
"""Limit of queued signals and timers, because each takes kernel memory."""

SOURCE_BYTES = 1 << 20
"""The longest program that is run."""

PROBE_S = 30.0


class SandboxMissingError(ConfigError):
    """No sandbox can be made here."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of the candidate's function with data."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The result of a candidate's program.

    Attributes:
        how: whether the program finished, or what ended it.
        records: one record for each call or input; fewer if the program ended early. The candidate writes them: do not
            trust them.
        why: why the program was ended, or its stderr.
    """

    how: How
    records: tuple[dict[str, Any], ...]
    why: str = ""


class Sandbox(Protocol):
    """Runs candidates' programs, one at a time."""

    @property
    def memory_bound(self) -> MemoryBound:
        """How the memory limit of programs is enforced."""
        ...

    def calls(self, source: str, calls: Sequence[FunctionCall]) -> ProgramResult:
        """Run a source and then call its functions; each record is ``{"value"}`` or ``{"raised"}``."""
        ...

    def programs(self, source: str, inputs: Sequence[str]) -> ProgramResult:
        """Run a source as a program for each input; each record is ``{"output", "status"}``."""
        ...


def open_sandbox(config: GradeConfig, *, probe: bool = True, adopts: bool = False) -> Sandbox:
    """Open the sandbox that the config names.

    Args:
        probe: check that it works.
        adopts: this process does nothing but grade, and adopts the processes that programs leave.

    Raises:
        SandboxMissingError: bubblewrap is not installed, or cannot work here.
        ConfigError: the config names packages or an interpreter that cannot be used.
    """
    packages = _packages(config)
    if adopts:
        adopt_orphans()
    if config.sandbox == "none":
        python = Path(config.python) if config.python else Path(sys.executable)
        group = make_group(config.memory_bytes, config.processes, None)
        return BubblewrapSandbox(config, None, python, group=group, adopts=adopts)
    bwrap = shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")
    if bwrap is None:
        raise SandboxMissingError(
            "bubblewrap, which isolates candidates' programs, is not installed; apt install bubblewrap, or write "
            'grade.sandbox = "none" to run them unprotected.'
        )
    python, prefix = interpreter(config.python)
    machine = MACHINES.get(platform.machine())
    calls = None if machine is None else filter_bytes(machine)
    paths = VisiblePaths(bwrap=Path(bwrap), python=python, prefix=prefix, packages=packages)
    group = make_group(config.memory_bytes + config.disk_bytes, config.processes, _uid())
    kept = BubblewrapSandbox(config, paths, python, calls, group, adopts)
    if probe:
        kept.probe()
    return kept


@dataclass(frozen=True, slots=True)
class MissingSandbox:
    """In the place of a sandbox that cannot be made, for graders that may run no program."""

    reason: str
    memory_bound: MemoryBound = "watched"

    def calls(self, source: str, calls: Sequence[FunctionCall]) -> ProgramResult:
        raise SandboxMissingError(self.reason)

    def programs(self, source: str, inputs: Sequence[str]) -> ProgramResult:
        raise SandboxMissingError(self.reason)


@dataclass(frozen=True, slots=True)
class BubblewrapSandbox:
    """Runs programs in bubblewrap; if ``visible_paths`` is None, unprotected in a plain process.

    Attributes:
        visible_paths: the paths that programs see.
        filter: the seccomp filter; None on processors without a list of calls.
        group: the cgroup that limits memory; None if none can be created.
        adopts: see ``ProcessLimits``.
    """

    config: GradeConfig
    visible_paths: VisiblePaths | None
    python: Path
    filter: bytes | None = None
    group: Cgroup | None = None
    adopts: bool = False

    @property
    def memory_bound(self) -> MemoryBound:
        return "watched" if self.group is None else "cgroup"

    def calls(self, source: str, calls: Sequence[FunctionCall]) -> ProgramResult:
        return self._run(source, {"calls": [asdict(call) for call in calls]})

    def programs(self, source: str, inputs: Sequence[str]) -> ProgramResult:
        return self._run(source, {"inputs": list(inputs)})

    def probe(self) -> None:
        """Run an empty program. Raises ConfigError if it fails; the message has bubblewrap's stderr."""
        try:
            answers = self._run("", {"inputs": [""]})
        except (Fault, OSError) as error:
            raise SandboxMissingError(
                f"bubblewrap cannot make a sandbox here ({line(str(error))}); allow user namespaces, use bubblewrap "
                '0.8 or newer, or write grade.sandbox = "none" to run candidates unprotected.'
            ) from error
        if answers.how != "done" or len(answers.records) != 1 or answers.records[0].get("status") != 0:
            raise ConfigError(
                f"{self.python} runs no program in the sandbox ({answers.how}: {line(answers.why)}); set "
                "grade.python to another interpreter, or give more grade.memory_bytes."
            )

    def _run(self, source: str, request: dict[str, Any]) -> ProgramResult:
        if len(source) > SOURCE_BYTES:
            return ProgramResult("violation", (), f"a program of {len(source)} characters; {SOURCE_BYTES} are read")
        config = self.config
        job = request | {
            "source": source,
            "packages": []
            if config.packages is None
            else [PACKAGES if self.visible_paths is not None else str(Path(config.packages).resolve())],
            "output_bytes": config.output_bytes,
            "alone": self.visible_paths is not None,
            "limits": self._limits(),
        }
        given = json.dumps(job).encode()
        bounds = ProcessLimits(config.timeout_s, config.memory_bytes, config.output_bytes, self.group, self.adopts)
        for pause_s in (*PAUSES_S, None):
            ended = self._run_to_end(given, bounds)
            if ended.stdout.startswith(READY) or pause_s is None:
                break
            time.sleep(pause_s)
        return read_answers(ended, config)

    def _run_to_end(self, given: bytes, bounds: ProcessLimits) -> CommandResult:
        try:
            return self._in_bubblewrap(given, bounds) if self.visible_paths is not None else self._beside(given, bounds)
        except (StillThereError, StoppedError) as error:
            raise Fault(f"{error}.") from error

    def _limits(self) -> dict[str, int]:
        """Kernel limits of each process."""
        limits = {
            "cpu_s": math.ceil(self.config.timeout_s) * (os.cpu_count() or 1) + 1,  # of all its threads
            "memory_bytes": self.config.memory_bytes,
            "file_bytes": self.config.disk_bytes,
            "files": OPEN_FILES,
            "core_bytes": 0,
            "locked_bytes": 0,
            "queue_bytes": 0,
            "signals": WAITING_SIGNALS,
        }
        # In its own user namespace this limit counts the program's processes; elsewhere it counts all of the user's.
        return limits | ({} if self.visible_paths is None else {"processes": self.config.processes + 1})

    def _in_bubblewrap(self, given: bytes, bounds: ProcessLimits) -> CommandResult:
        assert self.visible_paths is not None
        fd = None if self.filter is None else _memory_file(self.filter)
        run = ("-c", INSIDE.read_text(encoding="utf-8"))
        argv = command(self.visible_paths, disk_bytes=self.config.disk_bytes, filter_fd=fd, run=run)
        try:
            return run_bounded(
                argv,
                given,
                bounds,
                uid=_uid(),
                fds=() if fd is None else (fd,),
                inside=FOLDER,
            )
        finally:
            if fd is not None:
                os.close(fd)

    def _beside(self, given: bytes, bounds: ProcessLimits) -> CommandResult:
        run = [str(self.python), *PYTHON_FLAGS, "-c", INSIDE.read_text(encoding="utf-8")]
        with tempfile.TemporaryDirectory(prefix="superstep-grade-", ignore_cleanup_errors=True) as folder:
            return run_bounded(run, given, bounds, folder=Path(folder))


def read_answers(ended: CommandResult, config: GradeConfig) -> ProgramResult:
    """Read the answers of a process that has ended. Raises Fault if the candidate's program did not start: the
    candidate is not to blame.
    """
    complaint = line(ended.stderr.decode("utf-8", "replace"))
    if not ended.stdout.startswith(READY):
        raise Fault(f"the sandbox did not begin: {complaint or ended.limit or f'status {ended.status}'}.")
    if ended.limit is not None:
        return ProgramResult(*_limit_verdict(ended.limit, config))
    if ended.status in (-SIGSYS, SHELL_SIGNAL + SIGSYS):
        return ProgramResult("violation", (), "a system call that is not allowed")
    try:
        replies = tuple(json.loads(one) for one in ended.stdout[len(READY) :].splitlines())
    except (ValueError, RecursionError) as error:  # also lone surrogates, and numbers of ten thousand digits
        return ProgramResult("violation", (), f"its output is no JSON: {error}")
    if not all(isinstance(one, dict) for one in replies):
        return ProgramResult("violation", (), "its output is no record")
    if any(one.get("status") == -SIGSYS for one in replies):
        return ProgramResult("violation", (), "a system call that is not allowed")
    if any(str(one.get("raised", "")).startswith("MemoryError") for one in replies):
        return ProgramResult("memory", (), f"more than {config.memory_bytes >> 20} MiB")
    return ProgramResult("done", replies, complaint)


def _limit_verdict(limit: Literal["timeout", "memory", "output"], config: GradeConfig) -> tuple[How, tuple[()], str]:
    match limit:
        case "timeout":
            return "timeout", (), f"longer than {config.timeout_s:g} s"
        case "memory":
            return "memory", (), f"more than {config.memory_bytes >> 20} MiB"
        case "output":
            return "violation", (), f"more than {config.output_bytes} bytes of output"


def _uid() -> int | None:
    """The user id that starts the sandbox, if it differs from ours."""
    return UID if os.geteuid() == 0 else None


def _memory_file(data: bytes) -> int:
    """An open anonymous file with these bytes."""
    fd = os.memfd_create("filter", 0)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def interpreter(wanted: str | None) -> tuple[Path, Path | None]:
    """The interpreter for candidates, and its folder if that is not below /usr.

    It is our interpreter if the candidates' user can read it, else the system's: that user cannot enter root's home.

    Raises:
        ConfigError: no interpreter can be reached.
    """
    if wanted is not None:
        path = Path(wanted)
        if not path.is_file():
            raise ConfigError(f"grade.python = '{wanted}' is not there; name an interpreter, such as /usr/bin/python3.")
        paths = [path.resolve()]
    else:
        name = f"python{sys.version_info.major}.{sys.version_info.minor}"
        paths = [
            Path(sys.base_prefix).resolve() / "bin" / name,
            Path("/usr/bin/python3"),
            Path("/usr/local/bin/python3"),
        ]
    for path in paths:
        real = path.resolve()
        if real.is_file() and (os.geteuid() != 0 or _is_open(real)):
            prefix = real.parents[1]
            return real, None if real.is_relative_to("/usr") else prefix
    raise ConfigError(
        f"{' and '.join(map(str, paths))} cannot be reached by user {UID}, as whom candidates run; apt install "
        "python3, or set grade.python to an interpreter in a folder that everybody may enter."
    )


def _packages(config: GradeConfig) -> Path | None:
    """The folder of packages; raises ConfigError if it is missing or candidates cannot enter it."""
    if config.packages is None:
        return None
    folder = Path(config.packages).resolve()
    if not folder.is_dir():
        raise ConfigError(f"grade.packages = '{config.packages}' is no folder; make one with pip install --target.")
    if config.sandbox != "none" and os.geteuid() == 0 and not _is_open(folder / "package"):
        raise ConfigError(
            f"grade.packages = '{config.packages}' cannot be reached by user {UID}, as whom candidates run; name a "
            "folder that everybody may enter."
        )
    return folder


def _is_open(path: Path) -> bool:
    """Whether everybody may enter each folder above."""
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)
