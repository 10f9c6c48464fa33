"""superstep tune merge: a run's adapter merged into its base weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from superstep.cli.arguments.tune.tune_merge import read
from superstep.train.weights.weights_folder import weights_of
from superstep.tune.merge import merge


def main(argv: Sequence[str]) -> int:
    """Merge, and print a summary."""
    run, options = read(argv)
    adapter = weights_of(run)
    done = merge(adapter, Path(options.out), Path(options.base) if options.base else None)
    print(f"{options.out}: {done.base} with {done.linears} linears changed by {adapter}")
    return 0
