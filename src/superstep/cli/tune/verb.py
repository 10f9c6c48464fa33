"""superstep tune: post-training, one word for each kind of it."""

from __future__ import annotations

from collections.abc import Sequence

from superstep.cli.arguments.tune import read
from superstep.cli.tune import learn


def main(argv: Sequence[str]) -> int:
    """Do what the first word says."""
    return learn.run(lambda: read(argv))
