"""A result as a file: the figures, and where they were measured."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import torch


def machine_facts() -> dict[str, object]:
    """Machine and versions."""
    return {
        "machine": platform.processor() or platform.machine(),
        "cpu": _cpu_told("model name") or "unknown",
        "amx": "amx_bf16" in _cpu_told("flags").split(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write_result(path: Path, **figures: object) -> None:
    """Write figures, beside machine and versions, as JSON."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**machine_facts(), **figures}, indent=1) + "\n", encoding="utf-8")
    print(f"figures in {path}")


def _cpu_told(what: str) -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(what)), "")
