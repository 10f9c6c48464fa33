"""The decoder in C++, compiled on the machine that it runs on, at its first start. Nothing needs it.

It is built for the very processor, so that what one machine built is of no use to another: a file's name holds a digest
of the sources and of the processor's features. It appears whole or not at all: a process that is killed while it
compiles leaves nothing that others wait for. It is plain C to whom calls it, and knows nothing of torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
NAMES = ("decoder.cpp", "attention.h", "exact.h", "low_rank.h", "product.h", "tile.h")
"""What is compiled, and what it includes."""

FLAGS = (
    *("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-fopenmp", "-std=c++20", "-fPIC", "-shared"),
)
"""Without contraction: exact mode rounds a product before its sum wherever torch does."""


NEEDED = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni")
"""Of a processor, as Linux calls them."""

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


def build(folder: Path) -> Built:
    """The decoder, compiled where it has not been.

    Args:
        folder: where compiled files are kept; made where it is not there.
    """
    if platform.machine() != "x86_64":
        return Built(None, f"it is written for x86_64, and this machine is {platform.machine()}")
    features = _features()
    missing = [name for name in NEEDED if name not in features.split()]
    if missing:
        return Built(None, f"this processor has no {missing[0]}")
    digest = hashlib.sha256(f"{FLAGS} {features}".encode())
    for name in NAMES:
        digest.update((SOURCES / name).read_bytes())
    library = folder / f"decoder-{digest.hexdigest()[:16]}.so"
    try:
        if not library.is_file():
            _compile(library)
        return Built(ctypes.CDLL(str(library)))
    except (OSError, subprocess.SubprocessError) as fault:  # a server starts without it too
        return Built(None, f"compiling {NAMES[0]} failed: {_reason(fault)}")


def _compile(library: Path) -> None:
    """Compile beside the place, and move the file there once it is whole."""
    compiler = next((found for found in map(shutil.which, COMPILERS) if found is not None), None)
    if compiler is None:
        raise FileNotFoundError(f"there is no compiler: none of {', '.join(COMPILERS)} is on the path")
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        out = Path(scratch) / library.name
        command = [compiler, *FLAGS, str(SOURCES / NAMES[0]), "-o", str(out)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
        out.replace(library)


def _reason(fault: Exception) -> str:
    said = fault.stderr if isinstance(fault, subprocess.CalledProcessError) and fault.stderr else str(fault)
    lines = [line for line in said.splitlines() if "error" in line] or said.splitlines()
    return lines[0] if lines else type(fault).__name__


def _features() -> str:
    """What the processor can do, as Linux tells it."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text(encoding="utf-8").splitlines() if told.is_file() else []
    return next((line for line in lines if line.startswith("flags")), "")
