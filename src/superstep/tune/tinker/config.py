"""Settings of the Tinker service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from superstep.plan.config import Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerConfig:
    """The served model and limits.

    Attributes:
        folder: of the base model.
        name: for clients, besides the folder's path.
        root: the folder of saved weights.
        compute: dtype of weights, in training as in sampling.
        exact: whether samples have the trainer's bits.
        context_tokens: the most tokens of a sequence, and of a prompt with its answer.
        alpha: the strength of adapters; their product is multiplied by alpha / rank.
        most_rank: the largest rank of an adapter.
        models: the most created models at once.
        adapters: the most saved weights that the sampler holds at once; others are read again on request.
        batch_tokens: the most tokens of one pass, padding included.
        kernels: the folder of compiled operations; None uses torch.
    """

    folder: Path
    name: str
    root: Path
    compute: Dtype = "bf16"
    exact: bool = False
    context_tokens: int | None = None
    alpha: float = 32.0
    most_rank: int = 128
    models: int = 8
    adapters: int = 16
    batch_tokens: int = 8192
    kernels: Path | None = None
