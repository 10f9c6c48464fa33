"""load_units: the units that a user's own Python file lists.

The file is one as for a single device, and has a function ``units(config)``. It is run as a module of its own; nothing
else of it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from superstep.errors import ConfigError
from superstep.model.unit import UnitSpec
from superstep.plan.config import RunConfig
from superstep.plan.user_file import first_line, load_functions, place_in

UNITS = "units(config)"


def load_units(config: RunConfig) -> Sequence[UnitSpec]:
    """What the function ``units`` of the file ``model.source`` gives for a run.

    Raises:
        ConfigError: the file cannot be read or run, has no such function, or gives no list of units.
    """
    source = config.model.source
    assert source is not None
    function = load_functions(source, {"units": UNITS}, kind="model", field="model.source")["units"]
    try:
        units = function(config)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        place = place_in(Path(source), error)
        raise ConfigError(f"model.source: {place}: {UNITS} fails: {first_line(error)}.") from error
    if not isinstance(units, Sequence) or isinstance(units, str):
        raise ConfigError(f"model.source: {source}: {UNITS} gives {type(units).__name__}; return a list of UnitSpec.")
    return units
