"""The run's identity in a checkpoint, run.json: seed, data and model. Other runs cannot resume from it.

The manifest has the hash of the file, as of all files beside the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path

from superstep.data.sources.source import open_any_samples
from superstep.errors import StateError
from superstep.plan.resolution.resolve import Resolved
from superstep.state.tensor_file import digest

FILE = "run.json"

TOKENS = "the tokens of data.corpus"
"""The name of their digest."""

SAMPLES = "the samples of data.source"
"""The name of the digest of a user's samples."""

SAMPLE_BYTES = 1 << 16
"""Bytes of the token file that are hashed at its beginning and end; with its size they distinguish corpora."""

_ELSEWHERE = ("weights", "source")
"""Fields of the model that are paths: the same model may have moved."""

FORMATS = ("train.moments", "numerics.master")
"""Fields in which a resumed run may differ, if its state is to be converted."""

_EARLIER = {"train.optimizer": "adamw", **dict.fromkeys(FORMATS, "fp32")}
"""What a checkpoint has that does not say so."""


def identity_of(run: Resolved, corpus: Path | None = None) -> dict[str, str]:
    """A run's identity by field names; with its tokens if their folder is given."""
    model = asdict(run.config.model)
    identity = {"train.seed": str(run.config.train.seed), "train.optimizer": run.config.train.optimizer}
    identity |= {name: attrgetter(name)(run.config) for name in FORMATS}
    identity |= {f"model.{k}": str(v) for k, v in model.items() if v is not None and k not in _ELSEWHERE}
    if corpus is None:
        return identity
    if run.samples is not None:
        return identity | {SAMPLES: open_any_samples(corpus).digest()}
    return identity | {TOKENS: _sample_digest(corpus / "train.tokens")}


def identity_text(identity: Mapping[str, str]) -> str:
    return json.dumps(identity, indent=1) + "\n"


def require_same_run(checkpoint: Path, identity: Mapping[str, str], *, converts: bool) -> None:
    """Check that a checkpoint belongs to this run. A missing or damaged file passes: the loader verifies all hashes.

    Args:
        checkpoint: its folder.
        identity: of this run.
        converts: whether its moments and master weights may have other formats there.

    Raises:
        StateError: it belongs to another run.
    """
    try:
        saved = json.loads((checkpoint / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for name, mine in identity.items():
        if not isinstance(saved, dict) or (there := saved.get(name, _EARLIER.get(name, mine))) == mine:
            continue
        if name not in FORMATS:
            raise StateError(
                f"{checkpoint} is of another run: there {name} = {there}, and here {mine}. Move it away and "
                "resume, or begin a new run with its weights by --model.weights and --state.existing new."
            )
        if not converts:
            raise StateError(
                f"{checkpoint} has {name} = {there}, and here it is {mine}; resume with --{name} {there}, or have the "
                "state rounded to the format of this run by --state.convert."
            )


def _sample_digest(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        first = file.read(SAMPLE_BYTES)
        file.seek(max(0, size - SAMPLE_BYTES))
        return digest(str(size).encode() + first + file.read())
