"""The ranks that a process has launched, among the processes below it."""

import psutil

SEED = "multiprocessing.forkserver"


def _is_of_seed(process):
    return SEED in " ".join(process.cmdline())


def ranks_below(process):
    """In the order of their start: forks of the seed that do as it says, and are not the seed."""
    found = []
    for one in process.children(recursive=True):
        try:
            if _is_of_seed(one) and _is_of_seed(one.parent()):
                found.append(one)
        except (psutil.NoSuchProcess, AttributeError):  # it, or its parent, has ended
            continue
    return sorted(found, key=lambda one: (one.create_time(), one.pid))
