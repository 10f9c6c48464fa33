"""Which weights an adapter adds to, as a file beside it says. Without torch.

    base.json       {"weights": folder, "version": digest}

Where no weights were given, as while a layout is proven, the base is drawn from ``train.seed``, and has no folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from superstep.errors import StateError

BASE = "base.json"


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """The weights that an adapter adds to.

    Attributes:
        folder: a checkpoint, or one of Hugging Face's; None where the weights were drawn.
        version: the digest of its tensors, whatever files they lie in; or what they were drawn from.
    """

    folder: Path | None
    version: str


def read_base(checkpoint: Path) -> BaseWeights:
    """Which weights the adapter of a checkpoint adds to.

    Raises:
        StateError: it does not say so.
    """
    try:
        raw = json.loads((checkpoint / BASE).read_text(encoding="utf-8"))
        return BaseWeights(None if raw["weights"] is None else Path(raw["weights"]), str(raw["version"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"'{checkpoint}' does not say which weights it adds to ({error!r}); it needs {BASE}."
        ) from error
