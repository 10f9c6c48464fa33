"""compile_cpp: compiles this package's C++ on the machine where it runs, at first use. Everything works without it.

It is built for this processor, so a file's name has a digest of the sources and of the processor's features. It appears
complete or not at all: a process that is killed while it compiles leaves nothing that others wait for. The library is
plain C, without torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COMPILERS = ("c++", "g++", "clang++")
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class BuildResult:
    """The result of a build: the library, or None and the reason in a line."""

    library: ctypes.CDLL | None
    why: str = ""


def build(sources: Sequence[Path], flags: Sequence[str], folder: Path) -> BuildResult:
    """A library, compiled if necessary.

    Args:
        sources: the compiled file, and after it those that it includes.
        flags: of the compiler; with ``-fPIC -shared``.
        folder: for compiled files; created if missing.
    """
    library = path_of(sources, flags, folder)
    try:
        if library.is_file():
            with contextlib.suppress(OSError):  # a disk that was full, or a machine that lost power, left half of it
                return BuildResult(ctypes.CDLL(str(library)))
        compile_file(sources[0], flags, library)
        return BuildResult(ctypes.CDLL(str(library)))
    except (OSError, subprocess.SubprocessError) as fault:  # everything works without it too
        return BuildResult(None, f"compiling {sources[0].name} failed: {reason_of(fault)}")


def path_of(sources: Sequence[Path], flags: Sequence[str], folder: Path) -> Path:
    """The path of the compiled library."""
    digest = hashlib.sha256(f"{tuple(flags)} {processor_features()}".encode())
    for source in sources:
        digest.update(source.read_bytes())
    return folder / f"{sources[0].stem}-{digest.hexdigest()[:16]}.so"


def folder_of(source: Path) -> Path:
    """Python's cache folder for a source's folder; the user's cache where that is not writable."""
    beside = Path(importlib.util.cache_from_source(str(source.with_suffix(".py")))).parent
    place = next(folder for folder in (beside, *beside.parents) if folder.exists())
    with contextlib.suppress(RuntimeError):  # there is no home: it is tried there, and said that it failed
        return beside if os.access(place, os.W_OK) else Path.home() / ".cache" / "superstep" / "kernels"
    return beside


def processor_features() -> str:
    """The processor's features, as Linux reports them."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def compile_file(source: Path, flags: Sequence[str], library: Path) -> None:
    """Compile to a temporary file, and move it into place when it is complete."""
    compiler = next((path for path in map(shutil.which, COMPILERS) if path is not None), None)
    if compiler is None:
        raise FileNotFoundError(f"there is no compiler: none of {', '.join(COMPILERS)} is on the path")
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        out = Path(scratch) / library.name
        command = [compiler, *flags, str(source), "-o", str(out)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
        with out.open("rb") as whole:
            os.fsync(whole.fileno())
        out.replace(library)


def reason_of(fault: Exception) -> str:
    """Why a compiler failed, in a line."""
    text = fault.stderr if isinstance(fault, subprocess.CalledProcessError) and fault.stderr else str(fault)
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines()
    return lines[0] if lines else type(fault).__name__
