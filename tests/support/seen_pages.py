"""Pages opened from files in a browser: what they ask for, what they show, whether they are accessible.

With SUPERSTEP_PICTURES in the environment (make pictures) what is seen is kept under docs/pictures.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
READY = "document.documentElement && document.documentElement.dataset.ready"


class Seen:
    """One tab, and the pages that it opens from files."""

    def __init__(self, tab, folder):
        self.tab, self.folder, self._opened = tab, folder, 0
        for domain in ("Runtime", "Log", "Network", "Page"):
            tab.call(f"{domain}.enable")

    def open(self, page, **look):
        self._opened += 1
        path = self.folder / f"{self._opened}.html"
        path.write_text(page, encoding="utf-8")
        self.tab.told.clear()
        self.tab.look(**look)
        self.tab.call("Page.navigate", url=path.as_uri())
        self.tab.wait_for(f"location.href === {json.dumps(path.as_uri())} && {READY}")
        self.url = path.as_uri()

    def __call__(self, script):
        return self.tab.value(script)

    def until(self, script):
        self.tab.wait_for(script)

    def shows_no_fault(self):
        """Nothing was asked of any network, and no script failed."""
        asked = [m["params"]["request"]["url"] for m in self.tab.told if m["method"] == "Network.requestWillBeSent"]
        assert [url for url in asked if not url.startswith(("data:", "blob:"))] == [self.url]
        faults = [m for m in self.tab.told if m["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
        assert faults == []

    def is_accessible(self):
        """axe-core has nothing serious against what is shown."""
        if find_spec("axe_core_python") is None:
            pytest.skip("axe-core-python is not installed: make setup")
        source = Path(find_spec("axe_core_python").origin).with_name("axe.min.js").read_text(encoding="utf-8")
        self("window.axe || (() => {" + source + "})(); 0")
        found = self("axe.run().then((r) => r.violations.map((v) => [v.impact, v.id, v.nodes.map((n) => n.html)]))")
        assert [one for one in found if one[0] in ("serious", "critical")] == []

    def keep(self, name):
        """A picture for the pages of docs/, where they are asked for; that there is one to take is seen always."""
        self("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        taken = self.tab.picture()
        assert len(taken) > 10_000
        if "SUPERSTEP_PICTURES" in os.environ:
            PICTURES.mkdir(exist_ok=True)
            (PICTURES / f"{name}.png").write_bytes(taken)

    def fits(self):
        assert self("document.documentElement.scrollWidth <= innerWidth")
