"""load_units: the units of a user's own Python file.

The file is written for a single device, and has a function ``units(config)``. It runs as a module of its own; nothing
else of it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from superstep.errors import ConfigError
from superstep.model.custom.sample_groups import set_groups
from superstep.model.unit import UnitSpec
from superstep.plan.config import RunConfig
from superstep.plan.user_file import first_line, load_functions, place_in

UNITS = "units(config)"


def load_units(config: RunConfig) -> Sequence[UnitSpec]:
    """The result of the function ``units`` in the file ``model.source``.

    Raises:
        ConfigError: the file cannot be read or run, has no such function, or returns no list of units; or
            ``model.norm_group`` is set and no unit has a batch norm.
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
    group = config.model.norm_group
    return units if group is None else set_groups(units, group, config.model.label)
