"""The base weights of an adapter, which a file beside the adapter names. This file imports no torch.

    base.json       {"weights": folder, "version": digest, "format": nf4, int8 or null}

If no weights are given, as in proofs, the base weights are random values of ``train.seed`` and have no folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from superstep.errors import StateError
from superstep.plan.block_weights import BlockFormat

BASE = "base.json"
_FORMATS: dict[str | None, BlockFormat | None] = {None: None, "nf4": "nf4", "int8": "int8"}


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """Base weights.

    Attributes:
        folder: a checkpoint or Hugging Face folder; None if the weights are random values.
        version: digest of the tensors, whichever files hold them; or the seed of random values.
        block_format: of the linears of the blocks in training; None for the compute dtype.
    """

    folder: Path | None
    version: str
    block_format: BlockFormat | None = None


def read_base(checkpoint: Path) -> BaseWeights:
    """The base weights of an adapter's checkpoint.

    Raises:
        StateError: the file is missing or invalid.
    """
    try:
        raw = json.loads((checkpoint / BASE).read_text(encoding="utf-8"))
        folder = None if raw["weights"] is None else Path(raw["weights"])
        return BaseWeights(folder, str(raw["version"]), _FORMATS[raw.get("format")])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"'{checkpoint}' does not name its base weights ({error!r}); it needs {BASE}.") from error
