"""What the paths of whoever runs the server see of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from superstep.serve.messages import Deed, Standing


class Steered(Protocol):
    """An engine that can be told what to do, seen from the event loop."""

    @property
    def standing(self) -> Standing:
        """How it stands."""
        ...

    async def do(self, deed: Deed) -> Standing:
        """Do something; how it stands then.

        Raises:
            ConfigError, StateError: it cannot be done; nothing has changed.
            Away: the engine is not there, or was lost on the way.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Admin:
    """What the paths under /admin need.

    Attributes:
        key: that a client must know.
        folders: that weights may be taken from.
        engine: that is told.
    """

    key: str
    folders: Sequence[Path]
    engine: Steered
