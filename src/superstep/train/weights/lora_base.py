"""Base weights of adapters: read, never written, and the same whenever the run resumes.

A checkpoint of such a run has the adapter alone, as a PEFT folder. A file beside it names its base weights, with a
digest of their content (``base_file``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from superstep.engine.engine import Engine
from superstep.errors import StateError, SuperstepError
from superstep.model.files.hf import open_weights
from superstep.model.files.peft_adapter import config_text
from superstep.model.files.peft_config import CONFIG
from superstep.plan.resolution.lora import targets_of
from superstep.plan.resolution.resolve import Resolved
from superstep.serve.files.weights import digests, version_of
from superstep.state.all_or_none import Peers, together
from superstep.state.load_weights import fill
from superstep.train.weights.base_file import BASE, BaseWeights, read_base
from superstep.train.weights.fill_packed import fill_packed
from superstep.train.weights.model import shapes_of
from superstep.train.weights.weights_folder import weights_of


def draw_base(run: Resolved) -> BaseWeights:
    """The base of a run without given weights."""
    return BaseWeights(None, f"train.seed = {run.config.train.seed}")


def begin_base(run: Resolved, engine: Engine, peers: Peers, folder: Path) -> BaseWeights:
    """Read the frozen weights from a folder. Every rank calls this together.

    Raises:
        StateError: they belong to another model, or cannot be read: on every rank the same.
    """
    fill(folder, engine.frozen_pieces(), shapes_of(run), peers)
    fill_packed(folder, engine.list_packed(), peers)
    return BaseWeights(folder.resolve(), _version(folder, peers))


def resume_base(run: Resolved, engine: Engine, peers: Peers, checkpoint: Path) -> BaseWeights:
    """Read the frozen weights of a checkpoint again; from ``model.weights`` if they have moved.

    Raises:
        StateError: they are gone, or have changed: on every rank the same.
    """

    def look() -> tuple[BaseWeights, Path | None] | None:
        if peers.rank:  # one rank decides: another run may be writing the next checkpoint
            return None
        base, named = read_base(checkpoint), run.config.model.weights
        is_there = base.folder is None or base.folder.exists()
        return base, base.folder if is_there or named is None else weights_of(Path(named))

    paths = together(peers, look, _unreadable(checkpoint / BASE), tuple[BaseWeights, Path | None] | None)[0]
    assert paths is not None
    base, folder = paths
    resumed = draw_base(run) if folder is None else begin_base(run, engine, peers, folder)
    require_same(base, resumed, checkpoint)
    return resumed


def require_same(base: BaseWeights, current: BaseWeights, adapter: Path) -> None:
    """Check that weights are an adapter's base.

    Raises:
        StateError: they are not.
    """
    if current.version != base.version:
        raise StateError(
            f"'{adapter}' adds to weights of digest {base.version}, and those of '{current.folder or 'the run'}' have "
            f"{current.version}; restore the weights of the start of training."
        )


def files_of(run: Resolved, base: BaseWeights) -> dict[str, str]:
    """Files that make a checkpoint's folder an adapter's, by name."""
    lora = run.config.lora
    assert lora is not None
    strengths = dict.fromkeys(targets_of(run.outline, lora), (lora.rank, lora.alpha))
    folder = None if base.folder is None else str(base.folder)
    about = {"weights": folder, "version": base.version, "format": lora.base}
    return {
        CONFIG: config_text(strengths, is_stabilized=False, base=folder),
        BASE: json.dumps(about, indent=1) + "\n",
    }


def _version(folder: Path, peers: Peers) -> str:
    """The digest of a folder's weights; each rank reads its share of them."""

    def mine() -> dict[str, str]:
        weights = open_weights(folder)
        return digests({name: weights[name] for name in sorted(weights)[peers.rank :: peers.size]})

    parts = together(peers, mine, _unreadable(folder), dict[str, str])
    return version_of(open_weights(folder), {name: digest for part in parts for name, digest in part.items()})


def _unreadable(path: Path) -> Callable[[Exception], SuperstepError]:
    return lambda error: StateError(f"{path} cannot be read ({error}); fetch or save it again.")
