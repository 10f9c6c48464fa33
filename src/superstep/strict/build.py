"""Compiles the library of the strict device, once for each version of torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sysconfig
from pathlib import Path

from superstep.errors import ConfigError
from superstep.kernels.compile_cpp import compile_file, folder_of, path_of, reason_of

SOURCES = Path(__file__).parent / "device"
MODULE = "strict_device"


def torch_folder() -> Path:
    """The folder of the installed torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ConfigError("the strict device needs torch; pip install torch==2.13.0.")
    return Path(spec.origin).parent


def build_library() -> Path:
    """The path of the compiled library. Compiling it takes about 25 s of one processor.

    Raises:
        ConfigError: there is no compiler, or torch is a build for GPUs.
    """
    torch = torch_folder()
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise ConfigError("the strict device replaces CUDA, which this build of torch has; install a build for CPUs.")
    sources = [SOURCES / "device.cpp", *sorted(SOURCES.glob("*.h"))]
    flags = [
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        f"-DTORCH_EXTENSION_NAME={MODULE}",
        f'-DTORCH_VERSION="{importlib.metadata.version("torch")}"',
        *(f"-isystem{folder}" for folder in (torch / "include", torch / "include/torch/csrc/api/include")),
        f"-isystem{sysconfig.get_paths()['include']}",
        f"-L{torch / 'lib'}",
        f"-Wl,-rpath,{torch / 'lib'}",
        *("-Wl,--no-as-needed", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
    ]
    folder = folder_of(sources[0])
    library = path_of(sources, flags, folder)
    if not library.is_file():
        try:
            compile_file(sources[0], flags, library)
        except (OSError, subprocess.SubprocessError) as fault:
            why = f"the strict device cannot be built: {reason_of(fault)}; install g++ 11 or newer."
            raise ConfigError(why) from fault
    return library
