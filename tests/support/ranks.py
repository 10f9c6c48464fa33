"""The ranks that a process has launched, among the processes below it."""

import contextlib

import psutil


def ranks_below(process):
    """In the order of their start: the forks of its seed, who alone of its children has some."""
    found = []
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            found += child.children()
    return sorted(found, key=lambda one: (one.create_time(), one.pid))
