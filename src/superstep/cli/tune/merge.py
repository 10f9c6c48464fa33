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
    done = merge(adapter, Path(options.out), Path(options.base) if options.base else None, onto=options.onto)
    print(f"{options.out}: {done.base} with {done.linears} linears changed by {adapter}")
    if done.block_format is not None:
        print(
            f"onto {options.onto} weights: training had them in {done.block_format}, which changes them by "
            f"{done.difference:.2%} (root mean square)"
        )
    return 0
