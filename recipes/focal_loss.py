"""The focal loss (Lin 2017): what the model knows already counts less. For train.loss."""

from torch import Tensor

FOCUS = 2.0


def loss(logp: Tensor) -> Tensor:
    """-(1 - p)^FOCUS · log p, of each token."""
    return -((1 - logp.exp()) ** FOCUS) * logp
