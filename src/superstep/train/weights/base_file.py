"""The base weights of an adapter, which a file beside the adapter names. This file imports no torch.

    base.json       {"weights": folder, "version": digest}

If no weights are given, as in proofs, the base weights are random values of ``train.seed`` and have no folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from superstep.errors import StateError

BASE = "base.json"


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """Base weights.

    Attributes:
        folder: a checkpoint or Hugging Face folder; None if the weights are random values.
        version: digest of the tensors, whichever files hold them; or the seed of random values.
    """

    folder: Path | None
    version: str


def read_base(checkpoint: Path) -> BaseWeights:
    """The base weights of an adapter's checkpoint.

    Raises:
        StateError: the file is missing or invalid.
    """
    try:
        raw = json.loads((checkpoint / BASE).read_text(encoding="utf-8"))
        return BaseWeights(None if raw["weights"] is None else Path(raw["weights"]), str(raw["version"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"'{checkpoint}' does not name its base weights ({error!r}); it needs {BASE}.") from error
