"""superstep tune: post-training, one word for each kind of it."""

from __future__ import annotations

from collections.abc import Sequence

from superstep.cli.arguments.tune import MERGE, read
from superstep.cli.tune import learn, merge


def main(argv: Sequence[str]) -> int:
    """Do what the first word says."""
    if list(argv[:1]) == [MERGE]:
        return merge.main(argv[1:])
    return learn.run(lambda: read(argv))
