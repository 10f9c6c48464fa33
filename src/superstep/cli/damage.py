"""Says which lines of a run's metrics cannot be read."""

from __future__ import annotations

import sys
from pathlib import Path

from superstep.observe.jsonl import damage


def say_damage(path: Path) -> None:
    """Say which lines of a metrics.jsonl cannot be read, where some cannot."""
    if path.is_file() and (text := damage(path)):
        print(f"superstep: {text}", file=sys.stderr, flush=True)
