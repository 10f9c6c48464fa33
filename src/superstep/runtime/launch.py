"""Launching ranks: in-process through torch elastic, or joining ranks that torchrun has launched already.

The contract is torchrun's environment, which torch itself reads. A rank that fails leaves a note of why; the launcher
ends the others and raises the first cause, not the broken connections that follow from it.
"""

from __future__ import annotations

import json
import logging
import signal
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from superstep.errors import Fault, SuperstepError, UserError
from superstep.runtime.device import Device, pick

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class World:
    """The launched ranks, seen from one of them."""

    rank: int
    size: int
    device: Device


Worker = Callable[Concatenate[World, P], T]


def launch(world: int, worker: Worker[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``worker(World, ...)`` on every rank, each a process of its own; a single rank runs right here.

    Returns:
        What rank 0 returned.

    Raises:
        UserError, Fault: the first cause, as the rank that met it said.
    """
    if world == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
        device = pick(0)
        dist.init_process_group(device.backend, store=store, rank=0, world_size=1, timeout=TIMEOUT)
        try:
            return worker(World(0, 1, device), *args, **kwargs)
        finally:
            dist.destroy_process_group()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="superstep-launch-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            start_method="spawn",
            max_restarts=0,
            monitor_interval=0.1,
        )
        try:
            results = elastic_launch(config, _rank)(Path(folder), worker, args, kwargs)
        except ChildFailedError as error:
            raise _first_cause(Path(folder), error) from None
        value: T = results[0]
        return value


def join(worker: Worker[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``worker(World, ...)`` as the one rank that torchrun's environment says this process is."""
    device = pick(dist.get_node_local_rank(fallback_rank=0))
    dist.init_process_group(device.backend, timeout=TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    try:
        return worker(World(group.rank(), group.size(), device), *args, **kwargs)
    finally:
        dist.destroy_process_group()


def _rank(folder: Path, worker: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    # Cores are shared out by running one rank on each; more threads would only fight over them.
    torch.set_num_threads(1)
    rank = -1

    def noted(world: World, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        nonlocal rank
        rank = world.rank
        return worker(world, *args, **kwargs)

    try:
        return join(noted, *args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - whatever ended the rank must reach the launcher
        note = {
            "rank": rank,
            "at_s": time.time(),
            "user": isinstance(error, UserError),
            "known": isinstance(error, SuperstepError),
            "interrupted": isinstance(error, KeyboardInterrupt),
            "message": str(error) if isinstance(error, SuperstepError) else f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc(),
        }
        (folder / f"{max(rank, 0)}-{uuid.uuid4().hex}.json").write_text(json.dumps(note), encoding="utf-8")
        raise SystemExit(2 if isinstance(error, UserError) else 1) from None


def _first_cause(folder: Path, error: ChildFailedError) -> SuperstepError | KeyboardInterrupt:
    notes = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    if any(note["interrupted"] for note in notes):
        return KeyboardInterrupt()
    killed = [(rank, failure.exitcode) for rank, failure in error.failures.items() if failure.exitcode < 0]
    # A rank that was killed or that knows why comes before ranks that lost their connection to it.
    known = sorted((note for note in notes if note["known"]), key=lambda note: note["at_s"])
    if known:
        note = known[0]
        return UserError(note["message"]) if note["user"] else Fault(note["message"])
    if killed:
        rank, code = killed[0]
        return Fault(f"the process was killed by {signal.Signals(-code).name}.", rank=rank)
    if notes:
        note = min(notes, key=lambda note: note["at_s"])
        return Fault(f"{note['message']}\n{note['trace']}", rank=note["rank"])
    rank, failure = next(iter(error.failures.items()))
    return Fault(f"the process ended with exit status {failure.exitcode} before it could say why.", rank=rank)


def barrier() -> None:
    """Wait for every rank."""
    dist.barrier()


def gather(value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank. For small things."""
    group = dist.group.WORLD
    if group is None or group.size() == 1:
        return [value]
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value)
    return found
