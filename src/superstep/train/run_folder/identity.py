"""What a checkpoint says of its run, in run.json: the seed, the data and the model. It is of no other run's use.

The manifest has the hash of the file, as of all that stands beside the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from superstep.errors import StateError
from superstep.plan.resolution.resolve import Resolved
from superstep.state.tensor_file import digest

FILE = "run.json"

TOKENS = "the tokens of data.corpus"
"""What their digest is called."""

SAMPLE_BYTES = 1 << 16
"""Of the token file, from its beginning and from its end: with its size they tell corpora apart."""

_ELSEWHERE = ("weights", "source")
"""Fields of the model that are paths: the same model may lie elsewhere by now."""


def identity_of(run: Resolved, corpus: Path | None = None) -> dict[str, str]:
    """What a run's checkpoints say of it, by the names of fields; of its tokens where their folder is given."""
    model = asdict(run.config.model)
    identity = {"train.seed": str(run.config.train.seed)}
    identity |= {f"model.{k}": str(v) for k, v in model.items() if v is not None and k not in _ELSEWHERE}
    return identity if corpus is None else identity | {TOKENS: _sample_digest(corpus / "train.tokens")}


def identity_text(identity: Mapping[str, str]) -> str:
    """The text of the file."""
    return json.dumps(identity, indent=1) + "\n"


def require_same_run(checkpoint: Path, identity: Mapping[str, str]) -> None:
    """See that a checkpoint is of this run. One that says nothing of its run, or is damaged there, is let pass: who
    loads it holds all of it against its hashes.

    Raises:
        StateError: it is of another.
    """
    try:
        saved = json.loads((checkpoint / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for name, mine in identity.items():
        if isinstance(saved, dict) and saved.get(name, mine) != mine:
            raise StateError(
                f"{checkpoint} is of another run: there {name} = {saved[name]}, and here {mine}. Move it away and "
                "resume, or begin a new run with its weights by --model.weights and --state.existing new."
            )


def _sample_digest(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        first = file.read(SAMPLE_BYTES)
        file.seek(max(0, size - SAMPLE_BYTES))
        return digest(str(size).encode() + first + file.read())
