"""What a step frees is there for the next one, and is not found anew page by page."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from superstep.engine import malloc_tuning

PROGRAM = """
import ctypes, resource, sys
from superstep.engine.malloc_tuning import keep_what_is_freed
assert sys.argv[1] == "plain" or keep_what_is_freed()
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
c.free.argtypes = [ctypes.c_void_p]
c.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
size = 20 * 2**20
for turn in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pieces = [c.malloc(size) for _ in range(3)]
    for piece in pieces:
        c.memset(piece, 1, size)
    for piece in pieces:
        c.free(piece)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how):
    """Pages that the last of six turns found anew, of 15,360 that it wrote."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_pages_are_found_once():
    assert faults("plain") > 1000
    assert faults("kept") < 100


def test_another_library_goes_on_as_it_does(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not malloc_tuning.keep_what_is_freed()
