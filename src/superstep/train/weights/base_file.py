"""The base weights of an adapter, named by a file beside it. Without torch.

    base.json       {"weights": folder, "version": digest}

Without given weights, as in proofs, the base is drawn from ``train.seed``, and has no folder.
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
        folder: a checkpoint or Hugging Face folder; None where the weights were drawn.
        version: the digest of its tensors, independent of their files; or the seed.
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
