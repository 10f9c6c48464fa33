"""What the paths of whoever runs the server see of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from superstep.serve.messages import Change, Deed, Standing


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


class Several:
    """Several engines of one model that are told the same, as one.

    Args:
        engines: at least one.
    """

    def __init__(self, engines: Sequence[Steered]) -> None:
        self._engines = engines

    @property
    def standing(self) -> Standing:
        """Of the first that does not serve, else of the first."""
        every = [engine.standing for engine in self._engines]
        return next((one for one in every if one.state != "serving"), every[0])

    async def do(self, deed: Deed) -> Standing:
        """Do something to all; see ``Steered``. Where one cannot take weights, none keeps them."""
        before = [engine.standing for engine in self._engines]
        found = await asyncio.gather(*(engine.do(deed) for engine in self._engines), return_exceptions=True)
        failed = [one for one in found if isinstance(one, BaseException)]
        if not failed:
            return self.standing
        if isinstance(deed, Change):
            back = [
                engine.do(Change(stood.path, deed.requests))
                for engine, stood, one in zip(self._engines, before, found, strict=True)
                if not isinstance(one, BaseException)
            ]
            await asyncio.gather(*back)
        raise failed[0]
