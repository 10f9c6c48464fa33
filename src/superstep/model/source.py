"""load_units: the units that a user's own Python file lists.

The file is one as for a single device, and has a function ``units(config)``. It is run as a module of its own; nothing
else of it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from superstep.errors import ConfigError, did_you_mean
from superstep.model.unit import UnitSpec
from superstep.plan.config import RunConfig
from superstep.plan.own_file import run_file

FUNCTION = "units"


def load_units(config: RunConfig) -> Sequence[UnitSpec]:
    """What the function ``units`` of the file ``model.source`` gives for a run.

    Raises:
        ConfigError: the file cannot be read or run, has no such function, or gives no list of units.
    """
    source = config.model.source
    assert source is not None
    path = Path(source)
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(f"model.source = '{source}' is no Python file; name one, such as my_model.py.")
    try:
        module = run_file(path, f"superstep_source_{path.stem}")
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{source} cannot be run: {_told(error)}") from error
    function = getattr(module, FUNCTION, None)
    if not callable(function):
        known = [word for word in vars(module) if callable(vars(module)[word]) and not word.startswith("_")]
        hint = did_you_mean(FUNCTION, known) if known else "; write one."
        raise ConfigError(f"{source} has no function '{FUNCTION}(config)' that lists the units{hint}")
    try:
        found = function(config)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{source}: {FUNCTION}(config) fails: {_told(error)}") from error
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise ConfigError(f"{source}: {FUNCTION}(config) gives {type(found).__name__}; return a list of UnitSpec.")
    return found


def _told(error: BaseException) -> str:
    """The kind of an error and its first line; where in a file that is known, that too."""
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}".rstrip(": ") + "."
