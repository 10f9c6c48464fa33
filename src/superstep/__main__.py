"""The start of a process: superstep ..., python -m superstep ..., and torchrun ... -m superstep ..."""

from __future__ import annotations

import importlib
import signal


def entry() -> None:
    """Run the command line. Torch takes seconds to import: until then, Ctrl-C ends the process without a word."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    main = importlib.import_module("superstep.cli.main")
    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main.entry()


if __name__ == "__main__":
    entry()
