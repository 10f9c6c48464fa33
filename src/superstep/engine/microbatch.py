"""A microbatch: what one rank is given of a global batch at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """One microbatch on this rank: tokens and targets [microbatch, S], or any input [microbatch, ...] and class
    numbers [microbatch].

    Attributes:
        starts: with a document mask: where in its row each token's document starts, of the whole sequences and on the
            host, whichever tokens this rank holds: int64 [microbatch, cp · S].
        streams: by name, what the loss reads of each target: fp32, of the targets' shape.
    """

    tokens: Tensor
    targets: Tensor
    starts: Tensor | None = None
    streams: Mapping[str, Tensor] = field(default_factory=dict)
