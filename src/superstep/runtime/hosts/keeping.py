"""Copies of a host's states that the next host keeps."""

from __future__ import annotations

from collections.abc import Sequence

from superstep.runtime.hosts.messages import Fetching, Hello, Message, Orders
from superstep.runtime.hosts.table import Held
from superstep.runtime.hosts.wire import Wire
from superstep.state.snapshot import Memory


class Keeper:
    """What a host keeps."""

    def __init__(self, memories: Sequence[Memory]) -> None:
        self._memories = memories

    def held(self) -> Held:
        """States that are whole here."""
        own = [frozenset((step, 0) for step in memory.whole()) for memory in self._memories]
        return Held(own=frozenset.intersection(*own) if own else frozenset())

    def fetch(self, order: Fetching) -> None:
        """Get a state back."""

    def begin(self, given: Orders) -> None:
        """Ranks start."""

    def rest(self) -> None:
        """They have ended."""

    def progress(self) -> Message:
        """How far its own are."""
        return {}

    def steer(self, told: Message) -> None:
        """What all are to do next."""

    def enters(self, wire: Wire, hello: Hello) -> None:
        """Another host brings copies, or fetches some."""


class Steer:
    """What all hosts are told of copies."""

    def after(self, progress: dict[int, Message]) -> Message:
        """Given how far each is."""
        return {}

    def begin(self) -> None:
        """Ranks start anew."""
