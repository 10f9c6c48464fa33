"""A training run for fault injection: ``superstep train`` in a command of its own, with ranks that can hang.

python -m superstep.cli.train.fault_in_run run.toml
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from superstep.cli.main import report, settle
from superstep.launch import fork_server

RANK = "superstep.cli.train.fault_in_rank"


def main(argv: Sequence[str]) -> int:
    """Train the run of a file; the exit status."""
    settle()

    def train() -> int:
        fork_server.begin(RANK)
        status: int = importlib.import_module(RANK).train(Path(argv[0]))
        return status

    return report(train)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
