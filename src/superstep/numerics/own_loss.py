"""A user's own loss: from each target's log-probability to each token's loss, in a file.

The file has a function ``loss(logp)``. It takes log-probabilities in a row, fp32 [T], and returns as many losses, in
torch; autograd computes the derivative. A token's loss may depend only on its own number, so that it is the same for
any split of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from superstep.errors import ConfigError
from superstep.numerics.objective import Streams
from superstep.plan.user_file import first_line, load_functions, place_in

LOSS = "loss(logp)"
ADVICE = "write one that gives the loss of each token from the log-probability of its target, such as return -logp"
PROBED = 64
"""Log-probabilities of the trial run, of probabilities from e^-20 to nearly 1."""

SAME = 1e-5
"""The largest relative difference of a token's loss alone and among others: vectorised code may round differently."""

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """An objective (``numerics.objective``) from a function of log-probabilities, times the stream ``weights``.
    ``function``: fp32 [T] to as many losses.
    """

    function: Function
    reads: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()

    def terms(self, logp_T: Tensor, streams: Streams) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf_T = logp_T.detach().requires_grad_()
            loss_T = self.function(leaf_T)
            (slope_T,) = torch.autograd.grad(loss_T.sum(), leaf_T)
        if "weights" in streams:
            loss_T, slope_T = loss_T * streams["weights"], slope_T * streams["weights"]
        return loss_T.detach(), slope_T

    def watch(self, logp_T: Tensor, streams: Streams) -> Mapping[str, Tensor]:
        """Nothing: the loss says it all."""
        return {}


def load_loss(source: str) -> Function:
    """The function ``loss`` of the file ``train.loss``, tried once.

    Raises:
        ConfigError: the file cannot be run, has no such function, or the function does not return a loss for each
            token;
        names file and line.
    """
    path = Path(source)
    function: Function = load_functions(source, {"loss": LOSS}, kind="loss", field="train.loss", advice=ADVICE)["loss"]
    logp_T = torch.linspace(-20.0, -1e-3, PROBED)
    try:
        with torch.enable_grad():
            leaf_T = logp_T.clone().requires_grad_()
            loss_T = function(leaf_T)
        alone = function(logp_T[7:8])
    except Exception as error:
        raise ConfigError(f"train.loss: {place_in(path, error)}: {LOSS} fails: {first_line(error)}.") from error
    if (fault := _fault(leaf_T, loss_T, alone)) is not None:
        line = getattr(getattr(function, "__code__", None), "co_firstlineno", 1)
        raise ConfigError(f"train.loss: {path}:{line}: {LOSS} {fault}")
    return function


def _fault(leaf_T: Tensor, loss_T: object, alone: object) -> str | None:
    """What is wrong with some tokens' losses, and what is expected."""
    wanted = f"return a torch.float32 of shape [{PROBED}], a loss for each of the {PROBED} log-probabilities."
    if not isinstance(loss_T, Tensor) or not isinstance(alone, Tensor):
        return f"gives a {type(loss_T).__name__}; {wanted}"
    if loss_T.shape != leaf_T.shape or loss_T.dtype != torch.float32:
        return f"gives a {loss_T.dtype} of shape {list(loss_T.shape)}; {wanted}"
    if not loss_T.requires_grad:
        return "has no derivative by logp; compute the losses of it, by torch and without detach()."
    (slope_T,) = torch.autograd.grad(loss_T.sum(), leaf_T)
    if not (loss_T.isfinite().all() and slope_T.isfinite().all()):
        at = float(leaf_T.detach()[~(loss_T.isfinite() & slope_T.isfinite())][0])
        return f"gives no number, or has no finite derivative, at logp = {at:.4g}; bound it there."
    if alone.shape != (1,) or not torch.allclose(alone, loss_T[7:8].detach(), rtol=SAME, atol=SAME):
        return "looks at several tokens at once, which layouts split; compute each loss of its own logp alone."
    return None
