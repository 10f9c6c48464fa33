"""Operations in C++, compiled on the machine that they run on, at its first start. Nothing needs them.

They are built for the very processor, so that what one machine built is of no use to another: a file's name holds a
digest of the source, of torch and of the processor's features. It appears whole or not at all: a process that is killed
while it compiles leaves nothing that others wait for.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-std=c++20", "-fPIC", "-shared")
"""OpenMP, for torch's ``parallel_for`` is a loop of one thread in what is compiled without."""

COMPILERS = ("c++", "g++", "clang++")
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Built:
    """What came of building.

    Attributes:
        ops: the operations by name; None where there are none.
        why: why there are none, in a line; empty where they are there.
    """

    ops: Any
    why: str = ""


def build(name: str, folder: Path) -> Built:
    """The operations of ``<name>.cpp``, compiled where they have not been.

    Args:
        name: of the source.
        folder: where compiled files are kept; made where it is not there.
    """
    if platform.machine() != "x86_64":
        return Built(None, f"they are written for x86_64, and this machine is {platform.machine()}")
    source = SOURCES / f"{name}.cpp"
    digest = hashlib.sha256(f"{torch.__version__} {FLAGS} {_features()}".encode() + source.read_bytes()).hexdigest()[
        :16
    ]
    library = folder / f"{name}-{digest}.so"
    space = f"superstep_{name}_{digest}"
    try:
        if not library.is_file():
            _compile(source, library, space)
        # A process can take operations in once only, wherever they lie.
        if library.name not in {Path(loaded).name for loaded in torch.ops.loaded_libraries}:
            torch.ops.load_library(str(library))
    except (OSError, subprocess.SubprocessError) as fault:  # a server starts without them too
        return Built(None, f"compiling {source.name} failed: {_reason(fault)}")
    return Built(getattr(torch.ops, space))


def _compile(source: Path, library: Path, space: str) -> None:
    """Compile beside the place, and move the file there once it is whole."""
    compiler = next((found for found in map(shutil.which, COMPILERS) if found is not None), None)
    if compiler is None:
        raise FileNotFoundError(f"there is no compiler: none of {', '.join(COMPILERS)} is on the path")
    library.parent.mkdir(parents=True, exist_ok=True)
    root = Path(torch.__file__).parent
    includes = [f"-I{root / 'include'}", f"-I{root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        out = Path(scratch) / library.name
        links = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
        command = [compiler, *FLAGS, f"-DSUPERSTEP_OPS={space}", *includes, str(source), "-o", str(out), *links]
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
    return next((line for line in lines if line.startswith("flags")), platform.processor())
