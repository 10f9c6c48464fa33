"""Trouble: why a rank did not return, as it reports to its launcher, and which of several causes came first."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass

import torch
import torch.distributed as dist

from superstep.errors import Fault, SuperstepError, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """Why a rank did not return.

    Attributes:
        at_s: when, on the host's clock.
        order: 0 where the rank reported the cause, 1 where it was killed, 2 for an unforeseen error, 3 for an error of
            a
        connection: as a rule, the rank at the other end failed first.
        error: the launcher raises it.
    """

    at_s: float
    order: int
    error: SuperstepError


def trouble_of(rank: int, error: BaseException) -> RankFailure:
    """The report of the error that ended a rank."""
    known: SuperstepError
    order = 3 if is_echo(error) else 2
    match error:
        case UserError():
            known, order = UserError(str(error)), 0
        case Fault():
            known = error if error.rank >= 0 else error.on(rank)
            order = order if isinstance(error.__cause__, RuntimeError | EOFError | ConnectionError) else 0
        case SystemExit():
            known, order = Fault("the process was told to end.", rank=rank), 1
        case torch.OutOfMemoryError():
            known = Fault(str(error).partition("\n")[0], rank=rank)
        case OSError():
            known = Fault(f"{type(error).__name__}: {error}.", rank=rank)
        case _:
            text = "".join(traceback.format_exception(error)).rstrip()
            known = Fault(f"{type(error).__name__}: {error}\n{text}", rank=rank)
    return RankFailure(at_s=time.time(), order=order, error=known)


def is_echo(error: BaseException) -> bool:
    """Whether the error came over a connection between ranks."""
    cause = error.__cause__ or error
    if isinstance(cause, dist.DistError | EOFError | ConnectionError):
        return True
    return isinstance(cause, RuntimeError) and "gloo" in str(cause)
