"""A browser without a window, told what to do over two pipes: Debian's chromium, where there is one.

https://chromedevtools.github.io/devtools-protocol/ tells the methods; messages are JSON that ends with a NUL.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATH = next(filter(None, map(shutil.which, NAMES)), None)

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--no-proxy-server",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
)  # fmt: skip

AS_3_AND_4 = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads from 3 and writes to 4, whatever these are here."""

WAIT_S = 30.0


class Page:
    """A tab of the browser."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.told: list[dict[str, Any]] = []
        """What the browser told of itself, of the domains that were enabled."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What a method of the protocol returns."""
        number = next(self._numbers)
        told = {"id": number, "method": method, "params": params}
        if self._session is not None:
            told["sessionId"] = self._session
        os.write(self._writes, json.dumps(told).encode() + b"\0")
        while True:
            found = self._next()
            if "method" in found:
                self.told.append(found)
            if found.get("id") == number:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reads], [], [], WAIT_S)
            assert ready, "the browser is silent"
            came = os.read(self._reads, 1 << 16)
            assert came, "the browser has ended"
            self._rest += came
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        """Go somewhere."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, script: str) -> Any:
        """What an expression is on the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Until an expression holds."""
        deadline = time.monotonic() + WAIT_S
        while not self.value(script):
            assert time.monotonic() < deadline, f"{script} does not hold; the page is:\n{self.value(SHOWN)}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """As a keyboard would, into what has the focus."""
        self.call("Input.insertText", text=text)

    def press_enter(self, *, shift: bool = False) -> None:
        """The key, down and up."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def press(self, key: str, *, text: str = "") -> None:
        """Any key by its name, down and up; ``text`` is what it would write."""
        told = {"key": key, **({"text": text} if text else {})}
        self.call("Input.dispatchKeyEvent", type="keyDown", **told)
        self.call("Input.dispatchKeyEvent", type="keyUp", **told)

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False, scale: float = 1) -> None:
        """The window's size, and whether its owner likes it dark."""
        is_phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=is_phone
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])

    def picture(self, *, whole: bool = False) -> bytes:
        """What is seen, as PNG; ``whole`` has what lies below as well."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(taken["data"])

    def hover(self, x: float, y: float) -> None:
        """The mouse, without a button."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """With the mouse, in its middle."""
        box = f"(({json.dumps(selector)}, document.querySelector({json.dumps(selector)})).getBoundingClientRect())"
        x, y = (self.value(f"{box}.{at} + {box}.{size} / 2") for at, size in (("left", "width"), ("top", "height")))
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


SHOWN = "document.body.innerText"


@contextmanager
def browser() -> Iterator[Page]:
    """A page of a browser of its own, until the block ends."""
    assert PATH is not None, "there is a browser"
    theirs, our_writes = os.pipe()
    our_reads, theirs_too = os.pipe()
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as folder:
        command = [PATH, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(
            [sys.executable, "-c", AS_3_AND_4, str(theirs), str(theirs_too), *command],
            pass_fds=(theirs, theirs_too),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(theirs_too)
        try:
            page = Page(our_reads, our_writes)
            yield page
        finally:
            os.close(our_writes)  # it ends when nobody can tell it anything
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(our_reads)
