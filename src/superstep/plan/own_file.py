"""A user's own Python file, run as a module of its own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def run_file(path: Path, name: str) -> ModuleType:
    """What a file defines; whatever it raises comes out as it is.

    Args:
        path: of the file.
        name: that its module has.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where a dataclass of the file looks its annotations up, and pickle its classes.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
