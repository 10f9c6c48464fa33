"""Hooks on modules, run right after their import."""

from __future__ import annotations

import importlib.machinery
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class ImportHook(MetaPathFinder):
    """A finder for ``sys.meta_path``.

    Args:
        actions: by the module's name.
    """

    def __init__(self, actions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec with the action after its import; None for other modules."""
        action = self._actions.get(fullname)
        spec = None if action is None else PathFinder.find_spec(fullname, path, target)
        if action is None or spec is None:
            return None
        loader = spec.loader
        assert isinstance(loader, importlib.machinery.SourceFileLoader)
        execute = loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            action(module)

        loader.exec_module = execute_and_act
        return spec
