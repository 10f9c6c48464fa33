"""The second loss of multi-token prediction: of the token after the next one.

The last unit's output has twice the rows of the microbatch: first those of the next token, then those of the further
one, which have a weight in the loss. The model's loss stays that of the next token; both are reported.

    B  sequences    S  positions
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from superstep.data.batch import FURTHER_TARGETS
from superstep.engine.values.microbatch import Microbatch
from superstep.numerics.fixed_point import exact_loss_sum
from superstep.numerics.loss import IGNORE
from superstep.numerics.objective import LossTarget, TrainedTokens

FURTHER_LOSS = "mtp_loss"
"""The name of its mean in metrics."""
IS_FURTHER = "is_further"
"""The stream with 1 for a further token, else 0."""


@dataclass(slots=True)
class FurtherLoss:
    """The sums of both losses over a step's microbatches.

    Attributes:
        weight: of the second loss.
        sums: nats of the next tokens, nats of the further ones, and how many of these there are: fp64 [3].
    """

    weight: float
    sums: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))

    def aim(self, plain: LossTarget, microbatch: Microbatch, *, is_trained: bool) -> LossTarget:
        """The target of both halves. In an evaluation the second has none."""
        targets_BS = plain.targets
        further_BS = microbatch.fields[FURTHER_TARGETS]
        if not is_trained:
            both = torch.cat((targets_BS, torch.full_like(further_BS, IGNORE)))
            return replace(plain, targets=both)
        one_BS = torch.ones(targets_BS.shape, device=targets_BS.device)
        streams = {
            "weights": torch.cat((one_BS, self.weight * one_BS)),
            IS_FURTHER: torch.cat((0.0 * one_BS, one_BS)),
        }
        return replace(plain, targets=torch.cat((targets_BS, further_BS)), streams=streams, tell=self.count)

    def count(self, trained: TrainedTokens) -> None:
        """Add some tokens' losses."""
        is_further_T = trained.streams[IS_FURTHER] != 0
        nats_T = -trained.logp_T.detach().double()
        further_T = is_further_T & trained.counts_T
        parts = (nats_T.where(~is_further_T & trained.counts_T, 0.0), nats_T.where(further_T, 0.0), further_T)
        sums = torch.stack([exact_loss_sum(part) for part in parts])
        self.sums = self.sums.to(sums.device) + sums

    def mean(self, nats: float, count: float) -> dict[str, float]:
        """The measure, from the sums over all ranks."""
        return {FURTHER_LOSS: nats / count if count else 0.0}
