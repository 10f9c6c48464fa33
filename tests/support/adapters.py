"""Units with adapters, both factors of which have a gradient."""

from dataclasses import replace

from superstep.model.unit import initial
from superstep.train.weights.model import units_of


def both_at_work(run, units=()):
    """The run's units, or those given, whose B starts with other values than zeros: else A has no gradient."""
    found = []
    for unit in units or units_of(run):
        params = dict(unit.params)
        for local, param in params.items():
            if param.factor == "b":
                shape = next(p.dims for u in run.outline.units for p in u.parameters if p.name == param.name)
                params[local] = replace(param, values=initial(replace(param, std=0.3), shape, 1))
        found.append(replace(unit, params=params))
    return found
