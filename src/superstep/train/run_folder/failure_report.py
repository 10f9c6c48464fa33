"""Record of a failed run: what every rank did, in its folder, for ``superstep doctor``."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import TypeVar

from superstep.errors import Fault
from superstep.train.run_folder.run_paths import RunFolder, write_whole

T = TypeVar("T")


def leaving_words(folder: RunFolder, launch: Callable[[], T]) -> T:
    """Call ``launch``.

    Raises:
        Fault: as ``launch``; names the record's path if it could be written.
    """
    try:
        return launch()
    except Fault as fault:
        if fault.record and folder.program.is_file():  # a run that has not begun leaves no record
            try:
                write_whole(folder.fault, fault.record)
            except Fault:  # such as a full disk, which then is the original fault
                raise fault from None
            fault.adding(
                f"superstep doctor {shlex.quote(str(folder.root))} shows what every rank did ({folder.fault})."
            )
        raise
