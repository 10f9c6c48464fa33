"""Reports unreadable lines of a run's metrics."""

from __future__ import annotations

import sys
from pathlib import Path

from superstep.observe.jsonl import damage


def say_damage(path: Path) -> None:
    """Report the unreadable lines of a metrics.jsonl, if any."""
    if path.is_file() and (text := damage(path)):
        print(f"superstep: {text}", file=sys.stderr, flush=True)
