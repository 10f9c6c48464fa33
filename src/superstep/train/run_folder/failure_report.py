"""What is left of a run that failed: what every rank did then, in its folder, for ``superstep doctor`` to read."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import TypeVar

from superstep.errors import Fault
from superstep.train.run_folder.run_paths import RunFolder, write_whole

T = TypeVar("T")


def leaving_words(folder: RunFolder, launch: Callable[[], T]) -> T:
    """What ``launch`` returns.

    Raises:
        Fault: as it does; where what every rank did could be written down, it says where.
    """
    try:
        return launch()
    except Fault as fault:
        if fault.said and folder.program.is_file():  # a run that has not begun leaves nothing
            try:
                write_whole(folder.fault, fault.said)
            except Fault:  # the disk is full, say: then that is what was wrong
                raise fault from None
            fault.adding(f"superstep doctor {shlex.quote(str(folder.root))} says what every rank did ({folder.fault}).")
        raise
