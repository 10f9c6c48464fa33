"""How a side is asked: a line of JSON for each job on its standard input, a line of JSON for each answer.

The standard library alone is used here, so that a side runs in any environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

Answers = list[list[int]]
Side = Callable[[list[list[int]], list[int]], Answers]
"""(prompts, tokens wanted of each) to the tokens drawn, greedily, the end of text ignored."""


def answer_jobs(load: Callable[[dict], tuple[Side, dict]]) -> None:
    """Load what the first line asks for, say its versions, and then answer jobs until the input ends.

    What libraries print goes to the standard error, for the standard output is the answers' own.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(found: dict) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    side, versions = load(json.loads(sys.stdin.readline()))
    tell({"versions": versions})
    for line in sys.stdin:
        job = json.loads(line)
        began = time.perf_counter()
        tokens = side(job["prompts"], job["tokens"])
        seconds = time.perf_counter() - began
        assert [len(row) for row in tokens] == job["tokens"], [len(row) for row in tokens]
        tell({"seconds": seconds, "tokens": tokens})
