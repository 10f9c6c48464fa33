"""A user's own Python file: loaded as a module of its own, with the functions that it must have."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from superstep.errors import ConfigError, did_you_mean
from superstep.plan.renamed import new_name


def load_functions(
    source: str | Path, forms: Mapping[str, str], *, kind: str, field: str = "", advice: str = "write one"
) -> Mapping[str, Any]:
    """All names that a file defines, with the functions that it must have.

    Args:
        source: the file, as the user named it.
        forms: how each function is called, by its name: ``{"loss": "loss(logp)"}``.
        kind: of the file; a part of its module's name.
        field: of the configuration that names the file; empty where none does.
        advice: what to do where the function is missing.

    Raises:
        ConfigError: the file is not Python, cannot be run, or lacks a function.
    """
    path, about, first = Path(source), f"{field}: " if field else "", next(iter(forms.values()))
    if not path.is_file() or path.suffix != ".py":
        named = f"{field} = '{source}'" if field else f"'{source}'"
        raise ConfigError(f"{named} is not a Python file; name one that has {first}, such as my_{kind}.py.")
    try:
        names = vars(run_file(path, f"superstep_{kind}_{path.stem}"))
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{about}{place_in(path, error)} cannot be run: {first_line(error)}{new_name(error)}."
        ) from error
    for name, form in forms.items():
        if not callable(names.get(name)):
            known = [word for word, value in names.items() if callable(value) and not word.startswith("_")]
            hint = did_you_mean(name, known) if known else f"; {advice}."
            raise ConfigError(f"{about}{path} has no function '{form}'{hint}")
    return names


def run_file(path: Path, name: str) -> ModuleType:
    """Run a file as a module of this name; its errors are not caught."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where a dataclass of the file looks its annotations up, and pickle its classes.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def place_in(path: Path, error: BaseException) -> str:
    """The file, and the line where an error was raised, if known."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"{path}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    return f"{path}:{lines[-1]}" if lines else str(path)


def first_line(error: BaseException) -> str:
    """The kind of an error, and the first line of its text."""
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}".rstrip(": .")
