"""Saved weights, and their paths.

tinker://MODEL/weights/NAME            root/MODEL/weights/NAME/          a checkpoint: adapter, moments, tinker.json
tinker://MODEL/sampler_weights/NAME    root/MODEL/sampler_weights/NAME/  an adapter in PEFT's format, tinker.json
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from superstep.errors import ConfigError, Fault, StateError
from superstep.state.fsync import make_folder

SCHEME = "tinker://"
ABOUT = "tinker.json"
Kind = Literal["weights", "sampler_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The description beside saved weights.

    Attributes:
        base: the name of the base model.
        version: the digest of the base's weights.
        rank: of the adapter.
        alpha: its strength.
        train_mlp, train_attn, train_unembed: the trained parts.
        seed: of the initial values.
        step: updates so far.
    """

    base: str
    version: str
    rank: int
    alpha: float
    train_mlp: bool
    train_attn: bool
    train_unembed: bool
    seed: int
    step: int

    @property
    def text(self) -> str:
        """The content of the file."""
        return json.dumps(asdict(self), indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class SavedPath:
    """Saved weights, by the parts of their path."""

    model: str
    kind: Kind
    name: str

    @property
    def path(self) -> str:
        """The path for clients."""
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"


def place_of(path: str) -> SavedPath:
    """Parse a path.

    Raises:
        ConfigError: it is invalid.
    """
    model, _, rest = path.removeprefix(SCHEME).partition("/")
    kind, _, name = rest.partition("/")
    known = next((one for one in KINDS if one == kind), None)
    if not path.startswith(SCHEME) or known is None or not all(NAME.fullmatch(part) for part in (model, name)):
        raise ConfigError(
            f"path = '{path}' is none of {SCHEME}MODEL/weights/NAME and {SCHEME}MODEL/sampler_weights/NAME."
        )
    return SavedPath(model, known, name)


class SavedModels:
    """The saved weights in a folder.

    Args:
        root: the folder; created if missing.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def find(self, path: str, kind: Kind) -> tuple[Path, About]:
        """The folder and description of saved weights.

        Raises:
            ConfigError: the path is of another kind, or invalid.
            StateError: they are missing or damaged.
        """
        place = place_of(path)
        if place.kind != kind:
            what = {"weights": "save_state", "sampler_weights": "save_weights_for_sampler"}
            raise ConfigError(f"path = '{path}' is what {what[place.kind]} gave; give what {what[kind]} gave.")
        folder = self._folder(place)
        if not folder.is_dir():
            raise StateError(f"path = '{path}' is not there; save it again, or name another.")
        try:
            about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
            return folder, About(**about)
        except (OSError, ValueError, TypeError) as error:
            raise StateError(f"path = '{path}' is damaged: {ABOUT} cannot be read ({error!r}).") from error

    @contextmanager
    def saving(self, place: SavedPath, *, overwrite: bool = False) -> Iterator[Path]:
        """A temporary folder to write into, which gets its name at the end of the block.

        Raises:
            ConfigError: the name is invalid, or taken.
            Fault: it cannot be written.
        """
        if not NAME.fullmatch(place.name):
            raise ConfigError(f"name = '{place.name}' must be letters, digits, '.', '_' and '-', at most 200 of them.")
        folder = self._folder(place)
        if folder.exists() and not overwrite:
            raise ConfigError(f"name = '{place.name}' is taken; choose another, or save with overwrite=True.")
        new, old = (folder.with_name(f".{end}-{folder.name}") for end in ("new", "old"))
        try:
            shutil.rmtree(new, ignore_errors=True)
            make_folder(new)
            yield new
            if folder.exists():
                shutil.rmtree(old, ignore_errors=True)
                folder.rename(old)
            new.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise Fault(
                f"{folder} cannot be written: {error.strerror or error}; free space there, then save again."
            ) from error
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def list_saved(self, model: str) -> Iterator[dict[str, Any]]:
        """The saved weights of a model for clients, the oldest first."""
        saved = [
            ((path / ABOUT).stat().st_mtime, SavedPath(model, kind, path.name), path)
            for kind in KINDS
            for path in (self._root / model / kind).glob("[!.]*")
            if NAME.fullmatch(model) and (path / ABOUT).is_file()
        ]
        for written_s, place, path in sorted(saved, key=lambda one: one[0]):
            yield {
                "checkpoint_id": f"{place.kind}/{place.name}",
                "checkpoint_type": "training" if place.kind == "weights" else "sampler",
                "time": datetime.fromtimestamp(written_s, UTC).isoformat(),
                "tinker_path": place.path,
                "size_bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
            }

    def delete(self, place: SavedPath) -> None:
        """Delete saved weights.

        Raises:
            StateError: there are none.
        """
        folder = self._folder(place)
        if not folder.is_dir():
            raise StateError(f"path = '{place.path}' is not there.")
        shutil.rmtree(folder)

    def _folder(self, place: SavedPath) -> Path:
        return self._root / place.model / place.kind / place.name
