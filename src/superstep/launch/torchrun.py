"""Joins ranks that torchrun has started: its environment gives this process's rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import torch.distributed as dist

from superstep.comm.codec import Codec
from superstep.comm.device import pick
from superstep.errors import Fault, SuperstepError, UserError
from superstep.launch.failure import is_echo
from superstep.launch.network_interface import address_to
from superstep.launch.peer_failure import FAILED, PeerWatch, abandon, status_of
from superstep.launch.ranks import RankWorld, World
from superstep.launch.rendezvous import TIMEOUT, LaunchStore
from superstep.launch.stack_dump import own_heart
from superstep.launch.stop_request import StopRequest
from superstep.plan.config import DeviceKind

R = TypeVar("R")
T = TypeVar("T")
M = TypeVar("M")

POLL_S = 0.2
"""Seconds between a rank's reads of whether rank 0 has prepared."""

PREPARED = "superstep/prepared"
"""The store's key of rank 0's answer."""


@dataclass(frozen=True, slots=True)
class StoredValue(Generic[T]):
    """How a value goes through the store. Anybody who reaches its port can write to it, so nothing is unpickled.
    ``decode``: raises msgspec.DecodeError for foreign bytes.
    """

    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]


def make_stored_message(
    codec: Codec[M | None], message_of: Callable[[T], M], value_of: Callable[[M], T]
) -> StoredValue[T | None]:
    """A value, or None, that goes through the store as a message.

    Args:
        codec: of the messages.
        message_of: the message of a value.
        value_of: the value of a message; ``decode`` raises what it raises.
    """

    def encode(value: T | None) -> bytes:
        return codec.encode(None if value is None else message_of(value))

    def decode(data: bytes) -> T | None:
        message = codec.decode(data)
        return None if message is None else value_of(message)

    return StoredValue(encode, decode)


class Rank0Value(msgspec.Struct, frozen=True, tag=True):
    """Rank 0's value."""

    encoded: bytes


class FailureNotice(msgspec.Struct, frozen=True, tag=True):
    """Rank 0's failure, with its exit status; ``words`` is None where it was already printed."""

    words: str | None
    exit_status: int


ANSWERS: Codec[Rank0Value | FailureNotice] = Codec(Rank0Value | FailureNotice)


def one_world(worker: Callable[[World, T], R]) -> Callable[[T, int], Sequence[RankWorld]]:
    """All ranks as one world, whose worker has the prepared value."""
    return lambda value, ranks: [RankWorld(size=ranks, worker=worker, args=(value,))]


def join(
    prepare: Callable[[int], AbstractContextManager[T]],
    worlds: Callable[[T, int], Sequence[RankWorld]],
    form: StoredValue[T],
    wanted: Callable[[T], DeviceKind | None] = lambda _: None,
) -> Any:  # noqa: ANN401 - what the rank's worker returns
    """Run a worker as the one rank that torchrun's environment names.

    After an error the process waits for no group, and ends with that error's exit status.

    Args:
        prepare: given the number of ranks, makes on rank 0 the value for every rank; the others wait.
        worlds: of the value and the number of ranks: the first world has the first ranks, and so on.
        form: how the value goes to the others.
        wanted: the device that the value asks for.

    Raises:
        SystemExit: another rank failed first and reports it; one report is enough.
    """
    store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))  # type: ignore[attr-defined]
    stop = StopRequest()
    with PeerWatch(store, stop):
        try:
            with ExitStack() as stack:
                value = from_rank_0(store, rank, lambda: stack.enter_context(prepare(size)), form)
                # srun, unlike torchrun, does not say how the ranks of a host are numbered.
                device = pick(dist.get_node_local_rank(fallback_rank=rank), wanted(value))
                world, number = _place(worlds(value, size), rank)
                own = dist.PrefixStore(f"ranks {world.name}", store)  # type: ignore[attr-defined]
                dist.init_process_group(
                    device.backend,
                    store=own,
                    rank=number,
                    world_size=world.size,
                    timeout=TIMEOUT,
                    device_id=device.of_groups,
                )
                with own_heart(rank, device) as heart:
                    here = World(number, world.size, device, stop, LaunchStore(store, _own_address(store)), heart)
                    result = world.worker(here, *world.args, **world.kwargs)
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


def _place(worlds: Sequence[RankWorld], rank: int) -> tuple[RankWorld, int]:
    """The world of a rank, and its number there."""
    for world in worlds:
        if rank < world.size:
            return world, rank
        rank -= world.size
    raise AssertionError("there are more ranks than the worlds have")


def _own_address(store: dist.Store) -> str:  # type: ignore[name-defined]
    """This host's address on the way to the store."""
    while not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return address_to((store.host, store.port))


def from_rank_0(
    store: dist.Store,  # type: ignore[name-defined]
    rank: int,
    make: Callable[[], T],
    form: StoredValue[T],
) -> T:
    """What rank 0 makes, on every rank; or its error. Raises Fault where the store holds something else."""
    if rank == 0:
        try:
            value = make()
        except (SuperstepError, SystemExit) as error:
            words = str(error) if isinstance(error, SuperstepError) else None
            store.set(PREPARED, ANSWERS.encode(FailureNotice(words, status_of(error))))
            raise
        store.set(PREPARED, ANSWERS.encode(Rank0Value(form.encode(value))))
        return value
    while not store.check([PREPARED]):
        time.sleep(POLL_S)
    try:
        answer = ANSWERS.decode(store.get(PREPARED))
        if isinstance(answer, Rank0Value):
            return form.decode(answer.encoded)
    except msgspec.DecodeError as error:
        raise Fault(
            f"the store at MASTER_ADDR holds under {PREPARED} what rank 0 did not write ({error}); start all ranks "
            "from the same version, and let no others reach MASTER_PORT.",
            rank=rank,
        ) from error
    raise _error_of(answer.words, answer.exit_status)


def _error_of(words: str | None, exit_status: int) -> BaseException:
    if words is None:
        return SystemExit(exit_status)
    return UserError(words) if exit_status == UserError.exit_status else Fault(words)


def _is_first(store: dist.Store, error: BaseException) -> bool:  # type: ignore[name-defined]
    try:
        return int(store.add(FAILED, 1)) == 1
    except RuntimeError:  # the store's own process has ended, which says enough about a broken connection
        return not is_echo(error)
