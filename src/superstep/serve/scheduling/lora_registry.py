"""The LoRA adapters of an engine: by name, with reference counts.

    load "tone"   ──► number 1 ──► every rank reads the folder in the background, and adds it between two steps
    load "tone"   ──► number 2: new requests use it; number 1 is dropped when its last request has ended
    unload "tone" ──► no new request; number 2 is dropped in the same way

Numbers are not reused, so that an adapter's keys are never taken for another's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from superstep.errors import ConfigError, did_you_mean
from superstep.model.files.peft_config import CONFIG
from superstep.serve.scheduling.request import AdapterInfo

WAIT_S = 1.0
"""Longest single wait for an adapter, in seconds."""


class AdapterHolder(Protocol):
    """The ranks' operations on adapters."""

    def read_adapter(self, folder: Path) -> None:
        """Start to read an adapter on every rank.

        Raises:
            ConfigError: the model supports no adapters.
        """

    def is_adapter_read(self, most_s: float) -> bool:
        """Whether reading has ended on every rank; waits at most ``most_s``."""

    def hold_adapter(self, number: int) -> str:
        """Add the adapter that was read, on every rank or none; its version.

        Raises:
            UserError: it cannot be used.
        """

    def drop_adapter(self, number: int) -> None: ...


@dataclass(frozen=True, slots=True)
class ChosenAdapter:
    """The adapter of a request.

    Attributes:
        number: on the ranks; 0 is none.
        version: a digest of its content; empty without one.
    """

    number: int = 0
    version: str = ""

    def version_with(self, weights: str) -> str:
        """The version of a token: weights and adapter."""
        return f"{weights}+{self.version}" if self.version else weights


NONE = ChosenAdapter()


class LoraRegistry:
    """Adapters by name.

    Args:
        holder: the ranks.
    """

    def __init__(self, holder: AdapterHolder) -> None:
        self._holder = holder
        self._named: dict[str, ChosenAdapter] = {}
        self._users: Counter[int] = Counter()
        self._last = 0
        self._reading = ""

    @property
    def all(self) -> tuple[AdapterInfo, ...]:
        """Available adapters."""
        return tuple(AdapterInfo(name=name, version=chosen.version) for name, chosen in self._named.items())

    def load(self, name: str, folder: Path) -> AdapterInfo:
        """``read``, wait, and ``hold``.

        Raises:
            UserError: it cannot be used. An earlier adapter of the name stays.
        """
        self.read(name, folder)
        while not self.is_read(WAIT_S):
            pass
        return self.hold()

    @property
    def is_reading(self) -> bool:
        """Whether an adapter is being read, or waits for ``hold``."""
        return bool(self._reading)

    def read(self, name: str, folder: Path) -> None:
        """Start to read an adapter.

        Raises:
            ConfigError: it has no name, or the model supports none.
        """
        if not name:
            raise ConfigError(f"adapter '{folder}' has no name; give it one.")
        self._holder.read_adapter(folder)
        self._reading = name

    def is_read(self, most_s: float) -> bool:
        """Whether reading has ended; waits at most ``most_s``."""
        return self._holder.is_adapter_read(most_s)

    def hold(self) -> AdapterInfo:
        """Add the adapter that was read, in place of one with the same name. Running requests keep theirs.

        Raises:
            UserError: it cannot be used. An earlier adapter of the name stays.
        """
        name, self._reading = self._reading, ""
        self._last += 1
        made = ChosenAdapter(self._last, self._holder.hold_adapter(self._last))
        before = self._named.get(name)
        self._named[name] = made
        self._drop_unused(before)
        return AdapterInfo(name=name, version=made.version)

    def unload(self, name: str) -> None:
        """Remove an adapter. Running requests keep it.

        Raises:
            ConfigError: no adapter has this name.
        """
        chosen = self._find(name)
        del self._named[name]
        self._drop_unused(chosen)

    def begin(self, name: str) -> ChosenAdapter:
        """Count one more request of an adapter; no adapter for an empty name.

        Raises:
            ConfigError: no adapter has this name.
        """
        chosen = self._find(name) if name else NONE
        self._users[chosen.number] += 1
        return chosen

    def end(self, chosen: ChosenAdapter) -> None:
        """Count one request less."""
        self._users[chosen.number] -= 1
        assert self._users[chosen.number] >= 0, f"adapter {chosen.number} is let go of too often"
        self._drop_unused(chosen)

    def _find(self, name: str) -> ChosenAdapter:
        if name not in self._named:
            hint = did_you_mean(name, self._named) if self._named else "; none is."
            raise ConfigError(f"adapter = '{name}' is not loaded{hint}")
        return self._named[name]

    def _drop_unused(self, chosen: ChosenAdapter | None) -> None:
        if chosen and chosen.number and not self._users[chosen.number] and chosen not in self._named.values():
            self._holder.drop_adapter(chosen.number)
            del self._users[chosen.number]


def folders_of(text: str) -> tuple[tuple[str, Path], ...]:
    """Names and folders of adapters, from comma-separated ``NAME=FOLDER`` or folders. A folder that is no adapter
    itself stands for all adapters in it, named after their folders.

    Raises:
        ConfigError: a folder is missing or holds no adapter, or a name is given twice.
    """
    folders: list[tuple[str, Path]] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, place = part.rpartition("=")
        folder = Path(place).expanduser()
        inner = [folder] if (folder / CONFIG).is_file() else sorted(file.parent for file in folder.glob(f"*/{CONFIG}"))
        if not inner or (equals and (inner != [folder] or not name)):
            raise ConfigError(
                f"serve.adapters names '{part}', and '{folder}' holds no {CONFIG}; name an adapter as peft writes it, "
                "NAME=FOLDER, or a folder of such folders."
            )
        folders += [(name or one.resolve().name, one.resolve()) for one in inner]
    twice = [name for name, count in Counter(name for name, _ in folders).items() if count > 1]
    if twice:
        raise ConfigError(f"serve.adapters has two adapters called '{twice[0]}'; give one another name: NAME=FOLDER.")
    return tuple(folders)


def check_names(model: str, names: Sequence[str]) -> None:
    """Check that no adapter has the model's name.

    Raises:
        ConfigError: one has.
    """
    if model in names:
        raise ConfigError(f"adapter '{model}' has the name of the model; give one of them another.")
