"""The one tree of errors.

    SuperstepError
    ├── UserError             exit status 2: something the user can mend; one line says how
    │   ├── ConfigError       a field of the configuration
    │   ├── DataError         a corpus, a tokenizer, a token file
    │   └── StateError        a run directory or checkpoint that is not what was asked for
    │       └── Damaged       a checkpoint of which something is not what was written: an older one may be whole
    └── Fault                 exit status 1: something broke at run time; names rank, step, instruction
        ├── Lost              a rank is gone, through no fault of what it computed: its state may outlive it
        ├── CollectiveError   a collective that NCCL refuses, or that is not what other ranks call
        └── DiskFault         the system could not write or read a file; what was to be written is in memory still

A broken internal rule is an ``assert``: that is our bug, never the user's.
"""

from __future__ import annotations

import copy
import difflib
import errno
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


class SuperstepError(Exception):
    """The root: everything Superstep raises on purpose."""

    exit_status: int = 1


class UserError(SuperstepError):
    """A mistake that the user can mend. The message names the field, the value, the rule and what would work."""

    exit_status: int = 2


class ConfigError(UserError):
    """A field of the configuration has a value that cannot work."""


class DataError(UserError):
    """A corpus, tokenizer or token file cannot be used."""


class StateError(UserError):
    """A run directory or a checkpoint is not what was asked for."""


class DamagedCheckpoint(StateError):
    """A checkpoint is not what was written. ``why`` says so without the mend, for who goes on from an older one."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; delete it and resume from an older checkpoint.")
        self.why = why

    def __reduce__(self) -> tuple[type[DamagedCheckpoint], tuple[str]]:
        return type(self), (self.why,)


class Fault(SuperstepError):
    """Something broke at run time.

    ``rank`` and ``step`` are -1, ``host`` and ``instruction`` are empty where they are not known.
    """

    exit_status: int = 1

    record: str = ""
    """What every rank did when it was seen, as ``observe.doctor.failure_file`` writes it;
    empty where nobody has looked."""

    saved_in: str = ""
    """Where the state of the run is saved, where its directory was moved or removed; else empty."""

    def __init__(self, message: str, *, rank: int = -1, host: str = "", step: int = -1, instruction: str = "") -> None:
        where = [
            text
            for text, known in (
                (f"rank {rank}", rank >= 0),
                (f"host {host}", bool(host)),
                (f"step {step}", step >= 0),
                (f"instruction {instruction}", bool(instruction)),
            )
            if known
        ]
        super().__init__(f"{', '.join(where)}: {message}" if where else message)
        self.message = message
        self.rank = rank
        self.host = host
        self.step = step
        self.instruction = instruction

    def on(self, rank: int) -> Fault:
        """The same fault, with the rank that it happened on."""
        copied = copy.copy(self)
        Fault.__init__(copied, self.message, rank=rank, host=self.host, step=self.step, instruction=self.instruction)
        return copied

    def of(self, party: str) -> Fault:
        """The same fault, with the party of ranks that it happened in."""
        copied = copy.copy(self)
        Fault.__init__(copied, f"{party}, {self}")
        return copied

    def adding(self, words: str) -> Fault:
        """The same fault, which says something more."""
        end = " " if self.message.endswith(".") else ". "
        self.message = f"{self.message}{end}{words}"
        self.args = (f"{self}{end}{words}",)
        return self


class RankLost(Fault):
    """A rank's process was ended or stopped from outside, or hangs."""

    at_s: float = 0.0
    """When that was seen, in seconds of the host's clock."""


class CollectiveError(Fault, RuntimeError, ValueError):
    """A collective that NCCL refuses, or that is not what other ranks call; of both types that torch raises then."""


class DiskFault(Fault):
    """The system could not write or read a file. What was to be written is in memory still, and may be tried again."""


@dataclass(frozen=True, slots=True)
class ErrorMessage:
    """An error as plain data, for another process.

    Attributes:
        kind: the name of its class; of a class of another module, of the nearest base class here.
        words: its message, the first of ``args``.
        fields: its attributes that are plain data.
    """

    kind: str
    words: str
    fields: Mapping[str, str | int | float]

    @classmethod
    def of(cls, error: SuperstepError) -> ErrorMessage:
        """The message of an error."""
        kind = next(each for each in type(error).__mro__ if each in _SENT)
        fields = {name: value for name, value in vars(error).items() if type(value) in (str, int, float)}
        texts = {name: _valid(value) for name, value in fields.items() if isinstance(value, str)}
        return cls(kind.__name__, _valid(str(error)), fields | texts)

    def error(self) -> SuperstepError:
        """The error, without its cause. Raises ValueError where this version has no such class."""
        kind = next((each for each in _SENT if each.__name__ == self.kind), None)
        if kind is None:
            raise ValueError(f"'{self.kind}' is no error of this version")
        error = kind.__new__(kind, self.words)
        vars(error).update(self.fields)
        return error


_SENT = (
    SuperstepError,
    UserError,
    ConfigError,
    DataError,
    StateError,
    DamagedCheckpoint,
    Fault,
    RankLost,
    CollectiveError,
    DiskFault,
)


def _valid(text: str) -> str:
    """A text as UTF-8 has it: the name of a file may be none."""
    return text.encode(errors="backslashreplace").decode()


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_FIXES = {
    "make room on its disk": _FULL,
    "raise the limit of open files (ulimit -n)": (errno.EMFILE, errno.ENFILE),
    "grant access to it": (errno.EACCES, errno.EPERM),
    "make its file system writable": (errno.EROFS,),
    "see that the folder is there": (errno.ENOENT, errno.ENOTDIR),
    "make memory free": (errno.ENOMEM,),
}


def disk_fault(error: Exception, path: str | Path, *, what: str = "written", step: int = -1) -> Fault:
    """What the user is told of an error of the system's: the path, why, and what would help.

    Args:
        error: what was raised; the file that an OSError names, if any, is told rather than ``path``.
        path: what was worked on.
        what: could not be done to it.
        step: that the run was in, where it is known.

    Returns:
        A DiskFault of an OSError; of any other, which trying again does not mend, a Fault.
    """
    if not isinstance(error, OSError):
        return Fault(f"{path} cannot be {what}: {type(error).__name__}: {error}", step=step)
    # Of a rename the second name is what was to be written; the first is a file of ours beside it.
    named = next((name for name in (error.filename2, error.filename) if isinstance(name, str)), path)
    return DiskFault(f"{named} cannot be {what}: {error.strerror or error}; {disk_fix(error)}.", step=step)


def disk_fix(error: OSError) -> str:
    """What would help against an error of the system's."""
    return next((fix for fix, numbers in _FIXES.items() if error.errno in numbers), "check the disk that it is on")


def is_full(error: OSError) -> bool:
    """Whether the disk, or what this user may have of it, is."""
    return error.errno in _FULL


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the closest known word, else the whole list of choices."""
    choices = list(known)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; choose one of {', '.join(choices)}."
