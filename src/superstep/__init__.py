"""Superstep: a training engine for foundation models.

``train``, ``tune_sft``, ``tune_dpo``, ``tune_rl``, ``serve``, ``prove`` and ``plan`` do from Python what the commands
of these names do. Nothing of them is imported before one is called: this module brings no torch.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from superstep.errors import UserError

__version__ = "0.1.0"

FUNCTIONS = {
    "train": "superstep.run.api.functions",
    "tune_sft": "superstep.run.api.functions",
    "tune_dpo": "superstep.run.api.functions",
    "tune_rl": "superstep.run.api.functions",
    "serve": "superstep.run.api.serve",
    "prove": "superstep.run.api.proof",
    "plan": "superstep.planner.ranking.rank_layouts",
}
"""The module of each function."""


EXTRAS = {"serve": "serve"}
"""The extra of the package that a function needs."""


def __getattr__(name: str) -> Any:  # noqa: ANN401 - functions of several types
    """A function of the package, imported when it is first asked for. Raises UserError where its extra is missing."""
    if name not in FUNCTIONS:
        raise AttributeError(f"module 'superstep' has no attribute '{name}'")
    try:
        return getattr(importlib.import_module(FUNCTIONS[name]), name)
    except ModuleNotFoundError as error:
        if name not in EXTRAS or (error.name or "").startswith("superstep"):
            raise
        raise UserError(
            f"superstep.{name} needs {error.name}, which is not installed: pip install 'superstep[{EXTRAS[name]}]'."
        ) from error


class _CallablePart(ModuleType):
    """A part of the package that has the name of a function: called, it is the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return __getattr__(self.__name__.rpartition(".")[2])(*args, **kwargs)


# Importing anything of such a part makes it an attribute here, whatever __getattr__ or an assignment has put there, and
# ``import superstep.train.loop`` must go on to find its own parts in it. So the part itself must be callable, for which
# a module's class is all that Python looks at.
for part in ("train", "plan", "serve"):
    importlib.import_module(f"superstep.{part}").__class__ = _CallablePart
