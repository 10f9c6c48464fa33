"""Python imports this file when it starts, if its folder is on PYTHONPATH: it notes which functions of the package are
called, and when, in this process and in those that it starts.

Its environment: WALK_ROOT, the package; WALK_OUT, a file for lines of nanoseconds, file and function, one for each
function that a process calls, at its first call; WALK_FROM, ``file:function``, the call that begins the notes in all
processes; WALK_FLAG, a file of one byte that is 1 from then on.
"""

import mmap
import os
import sys
import threading
import time


def _watch() -> None:
    root, first = os.environ["WALK_ROOT"] + os.sep, os.environ["WALK_FROM"]
    out = os.open(os.environ["WALK_OUT"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    flag = mmap.mmap(os.open(os.environ["WALK_FLAG"], os.O_RDWR), 1)
    noted = set()
    places = {}

    def note(frame, event, _):
        if event != "call":
            return
        code = frame.f_code
        if code in noted:
            return
        place = places.get(code)
        if place is None:
            name = code.co_filename
            function = code.co_qualname.replace("<locals>.", "")
            place = places[code] = f"{name[len(root) :]}:{function}" if name.startswith(root) else ""
        if not place:
            noted.add(code)
        elif flag[0] or place == first:
            flag[0] = 1
            noted.add(code)
            os.write(out, f"{time.monotonic_ns()} {os.getpid()} {place}\n".encode())

    threading.setprofile(note)
    sys.setprofile(note)
    os.register_at_fork(after_in_child=noted.clear)


if "WALK_OUT" in os.environ:
    _watch()
