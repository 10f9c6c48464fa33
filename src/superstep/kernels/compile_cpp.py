"""C++ of this package, compiled on the machine that it runs on, when it is first needed. Nothing works only with it.

It is built for the very processor, so that what one machine built is of no use to another: a file's name holds a digest
of the sources and of the processor's features. It appears whole or not at all: a process that is killed while it
compiles leaves nothing that others wait for. It is plain C to whom calls it, and knows nothing of torch.
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
class Built:
    """What came of building.

    Attributes:
        library: what was compiled; None where there is nothing.
        why: why there is nothing, in a line; empty where there is.
    """

    library: ctypes.CDLL | None
    why: str = ""


def build(sources: Sequence[Path], flags: Sequence[str], folder: Path) -> Built:
    """A library, compiled where it has not been.

    Args:
        sources: what is compiled, and behind it what that includes.
        flags: of the compiler; ``-fPIC -shared`` among them.
        folder: where compiled files are kept; made where it is not there.
    """
    library = path_of(sources, flags, folder)
    try:
        if library.is_file():
            with contextlib.suppress(OSError):  # a disk that was full, or a machine that lost power, left half of it
                return Built(ctypes.CDLL(str(library)))
        compile_file(sources[0], flags, library)
        return Built(ctypes.CDLL(str(library)))
    except (OSError, subprocess.SubprocessError) as fault:  # everything works without it too
        return Built(None, f"compiling {sources[0].name} failed: {reason_of(fault)}")


def path_of(sources: Sequence[Path], flags: Sequence[str], folder: Path) -> Path:
    """Where the compiled library lies, or will."""
    digest = hashlib.sha256(f"{tuple(flags)} {processor_features()}".encode())
    for source in sources:
        digest.update(source.read_bytes())
    return folder / f"{sources[0].stem}-{digest.hexdigest()[:16]}.so"


def folder_of(source: Path) -> Path:
    """Where Python keeps what it compiles of a source's folder; that of the user where it may not write there."""
    beside = Path(importlib.util.cache_from_source(str(source.with_suffix(".py")))).parent
    place = next(folder for folder in (beside, *beside.parents) if folder.exists())
    with contextlib.suppress(RuntimeError):  # there is no home: it is tried there, and said that it failed
        return beside if os.access(place, os.W_OK) else Path.home() / ".cache" / "superstep" / "kernels"
    return beside


def processor_features() -> str:
    """What the processor can do, as Linux tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def compile_file(source: Path, flags: Sequence[str], library: Path) -> None:
    """Compile beside the place, and move the file there once it is whole."""
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
