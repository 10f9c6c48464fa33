"""Joining ranks that torchrun has launched already: its environment says which one this process is."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar, cast

import torch.distributed as dist

from superstep.errors import SuperstepError
from superstep.plan.config import DeviceKind
from superstep.runtime.device import pick
from superstep.runtime.launch import World
from superstep.runtime.leaving import FAILED, PeerWatch, abandon, status_of
from superstep.runtime.meeting import TIMEOUT
from superstep.runtime.stacks import own_heart
from superstep.runtime.stop import Stop
from superstep.runtime.trouble import is_echo

R = TypeVar("R")
T = TypeVar("T")

POLL_S = 0.2
"""How often a rank asks whether rank 0 has prepared."""


def join(
    prepare: Callable[[int], AbstractContextManager[T]],
    worker: Callable[[World, T], R],
    asked: Callable[[T], DeviceKind | None] = lambda _: None,
) -> R:
    """Run ``worker`` as the one rank that torchrun's environment says this process is.

    Args:
        prepare: given the number of ranks, makes on rank 0 what every rank's worker is given; the others wait, as
            long as it takes.
        worker: what a rank does.
        asked: which device what was made asks for.

    Returns:
        What the worker returned.

    Raises:
        SystemExit: another rank has failed before this one, and reports it; one report is enough.

    After an error no group is waited for, and the process ends with that error's exit status.
    """
    store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))  # type: ignore[attr-defined]
    stop = Stop()
    with PeerWatch(store, stop):
        try:
            with ExitStack() as stack:
                value = _from_rank_0(store, rank, lambda: stack.enter_context(prepare(size)))
                # srun, unlike torchrun, does not say how the ranks of a host are numbered.
                device = pick(dist.get_node_local_rank(fallback_rank=rank), asked(value))
                own = dist.PrefixStore("ranks", store)  # type: ignore[attr-defined]
                dist.init_process_group(
                    device.backend, store=own, rank=rank, world_size=size, timeout=TIMEOUT, device_id=device.of_groups
                )
                with own_heart(rank, device) as heart:
                    result = worker(World(rank, size, device, stop, heart=heart), value)
        except BaseException as error:
            status = status_of(error)
            if status:
                is_first = _is_first(store, error)
                abandon(status)
                if not is_first:
                    raise SystemExit(status) from None
            raise
        if dist.is_initialized():
            dist.destroy_process_group()
    return result


def _from_rank_0(store: dist.Store, rank: int, make: Callable[[], T]) -> T:  # type: ignore[name-defined]
    """What rank 0 makes, on every rank; so too the error, if it cannot."""
    if rank == 0:
        answer: tuple[T | None, BaseException | None]
        try:
            answer = make(), None
        except (SuperstepError, SystemExit) as error:
            answer = None, error
        store.set("superstep/prepared", pickle.dumps(answer))
    else:
        while not store.check(["superstep/prepared"]):
            time.sleep(POLL_S)
        answer = pickle.loads(store.get("superstep/prepared"))
    value, problem = answer
    if problem is not None:
        raise problem
    return cast(T, value)


def _is_first(store: dist.Store, error: BaseException) -> bool:  # type: ignore[name-defined]
    try:
        return int(store.add(FAILED, 1)) == 1
    except RuntimeError:  # the store's own process has ended, which says enough about a broken connection
        return not is_echo(error)
