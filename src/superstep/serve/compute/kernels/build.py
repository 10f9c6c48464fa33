"""Build the C++ decoder, on processors that it supports."""

from __future__ import annotations

import platform
from pathlib import Path

from superstep.kernels import compile_cpp
from superstep.kernels.compile_cpp import BuildResult, processor_features

SOURCES = Path(__file__).parent
NAMES = (
    "decoder.cpp",
    "attention.h",
    "exact.h",
    "forward.h",
    "low_rank.h",
    "product.h",
    "short.h",
    "tile.h",
    "totals.h",
    "weight.h",
)
"""Source files, and the headers that they include."""

FLAGS = (
    *("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-fopenmp", "-std=c++20", "-fPIC", "-shared"),
)
"""No contraction: exact mode rounds a product before its sum wherever torch does."""

NEEDED = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni")
"""Required processor features, by Linux's names."""


def build(folder: Path) -> BuildResult:
    """The compiled decoder; compiled only once.

    Args:
        folder: for compiled files; created if missing.
    """
    if platform.machine() != "x86_64":
        return BuildResult(None, f"it is written for x86_64, and this machine is {platform.machine()}")
    features = processor_features().split()
    missing = [name for name in NEEDED if name not in features]
    if missing:
        return BuildResult(None, f"this processor has no {missing[0]}")
    return compile_cpp.build([SOURCES / name for name in NAMES], FLAGS, folder)
