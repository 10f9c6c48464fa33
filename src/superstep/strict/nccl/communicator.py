"""A communicator of the emulated NCCL: its rendezvous, and how a call is issued.

It is a queue: its calls run in order, one at a time, and ``wait`` orders streams only. Its first use, or its creation
if it is bound to a GPU, blocks the host until all members have joined; so does its first collective, and its first
transfer between two of them.

Source of the rules: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from superstep.errors import CollectiveError
from superstep.strict.nccl.tensor_rules import in_memory, in_words, refusal_of
from superstep.strict.nccl.transport import Call, GlooTransport, MemberLeft, Views
from superstep.strict.nccl.watchdog import Members, Watchdog
from superstep.strict.nccl.works import PendingCall, StreamWork
from superstep.strict.torch_cuda import find_stream

WATCHDOG_FIRST = timedelta(minutes=1)
"""Extra time of a message over a call: the watchdog should report a hang first."""

FIRST_USE = timedelta(seconds=2)
"""Extra time of a first use over a call, likewise: an older call that hangs is the reason."""

POLL_S, LOOK_S = 0.01, 1.0
"""Seconds after which a waiting host asks the store again, and after which it checks who is missing."""

Run = Callable[[GlooTransport, Views, Views], None]


class GroupOptions:
    """``ProcessGroupNCCL.Options``; torch sets its fields."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=0)
        self._timeout = timedelta(minutes=10)
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self.split_from: Communicator | None = None
        self.split_color = 0


class Communicator(dist.ProcessGroup):
    """A group of ranks, each with a GPU of its own."""

    supports_splitting = True
    supports_coalescing = True
    # Set by ``install``.
    device: ModuleType
    watchdog: Watchdog
    on_gloo: torch.library.Library

    def __init__(self, store: dist.Store, rank: int, size: int, options: GroupOptions) -> None:  # type: ignore[name-defined]
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.options = options
        self._store = store
        self._name, self._desc = options.group_name, ""
        self._call_numbers = itertools.count(1)
        self._splits = itertools.count(1)
        self._coalesced: list[Call] | None = None
        self._is_aborted = False
        self._transports: dict[int, tuple[int, GlooTransport]] = {}
        self._first_uses: set[str] = set()
        self.on_host: dist.ProcessGroup | None = None

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks of the job, in the group's order."""
        return self.options.global_ranks_in_group or range(self.size())

    # Interface of a group in torch.

    def getBackendName(self) -> str:  # noqa: N802
        """The backend's name in ``torch.distributed``."""
        return "nccl"

    @property
    def group_name(self) -> str:
        """The name for lookups."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """The group's description."""
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")] if self.on_host is None else [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:  # noqa: ANN401 - itself, or torch's for the host
        if device.type == "cpu" and self.on_host is not None:
            return self.on_host._get_backend(device)
        if device.type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _group_start(self) -> None:
        pass

    def _group_end(self) -> None:
        pass

    def _is_initialized(self) -> bool:
        return bool(self._transports)

    # Rendezvous of members.

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Create the communicator now. For a split, all members of the other one take part."""
        assert device is not None
        self.bound_device_id = device
        if self.options.split_from is not None:
            self.options.split_from.split(self.options._timeout)
        self._connect(device.index)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Take part in splitting this one, without being a member of the result."""
        self.split(self.options._timeout)

    def split(self, limit: timedelta) -> None:
        """Wait until all members take part in splitting this communicator."""
        self._rendezvous(f"split {next(self._splits)}", limit)

    def _rendezvous(self, what: str, limit: timedelta) -> None:
        self._meet({what: range(self.size())}, limit)

    def _meet(self, uses: Mapping[str, Iterable[int]], limit: timedelta) -> None:
        """Block the host until members have joined.

        Args:
            uses: this member's new uses, each with the members that must join it.
            limit: of the wait.
        """
        for use in uses:
            self._store.set(f"{use}: {self.rank()}", "came")
        awaited = {f"{use}: {member}": (use, member) for use, members in uses.items() for member in members}
        began_s = time.monotonic()
        deadline_s, look_s = began_s + limit.total_seconds(), began_s + LOOK_S
        with self.watchdog.waiting_host() as wait:
            # A store in a file counts its own timeouts in whole seconds (FileStore::wait in torch's FileStore.cpp).
            while not self._store.check(list(awaited)):
                time.sleep(POLL_S)
                is_over = time.monotonic() >= deadline_s or self._is_aborted
                if not is_over and time.monotonic() < look_s:
                    continue
                missing = [awaited[key] for key in awaited if not self._store.check([key])]
                if not missing:
                    return
                look_s += LOOK_S
                use = missing[0][0]
                ranks = [self.ranks[member] for other, member in missing if other == use]
                line = self.device.caller()
                wait.why = f"communicator {self._name}: ranks {ranks} of it have not come to '{use}' ({line})"
                if is_over:
                    raise dist.DistBackendError(
                        f"{wait.why} within {limit.total_seconds():g} s; every rank has to make each group (new_group) "
                        "and to use it first in one order"
                    )

    def _connect(self, index: int) -> tuple[int, GlooTransport]:
        """The queue of the communicator on a GPU, created at its first use; members wait for each other."""
        if index not in self._transports:
            self._store.set(f"gpu of {self.rank()}", str(index))
            self._store.set(f"process of {self.rank()}", str(os.getpid()))
            limit = self.options._timeout
            self._rendezvous(f"use {len(self._transports)}", limit)
            gpus = [int(self._store.get(f"gpu of {rank}")) for rank in range(self.size())]
            if len(set(gpus)) < self.size():
                raise CollectiveError(f"NCCL error: Duplicate GPU detected: ranks of {self._name} are on GPUs {gpus}")
            store = dist.PrefixStore(f"gloo {len(self._transports)}/", self._store)
            longer = limit + WATCHDOG_FIRST
            gloo = dist.ProcessGroupGloo(store, self.rank(), self.size(), timeout=longer)
            # A member that left now would end it for those that still connect.
            self._rendezvous(f"transport {len(self._transports)}", longer)
            transport = GlooTransport(gloo, self.rank(), self.ranks, longer, f"communicator {self._name}")
            queue = self.device.add_communicator(index, self.options.config.max_ctas)
            self._transports[index] = queue, transport
            processes = [psutil.Process(int(self._store.get(f"process of {rank}"))) for rank in range(self.size())]
            self.watchdog.add_members(queue, Members(transport, processes))
        return self._transports[index]

    def _meet_first(self, index: int, calls: Sequence[Call]) -> None:
        """NCCL connects members at their first use, and their hosts wait: those of a transfer, in each direction, and
        of a collective all; of calls of one group together (ncclP2PPreconnectFunc and ncclCollPreconnectFunc in
        src/group.cc, ncclTransportP2pSetup in src/transport.cc, since NCCL 2.22).
        """
        made = f"use {list(self._transports).index(index)}"
        me, uses = self.rank(), dict[str, Iterable[int]]()
        for call in calls:
            if call.peer is None:
                uses[f"{made}, the first collective"] = range(self.size())
            else:
                source, target = (me, call.peer) if call.name == "send" else (call.peer, me)
                first = f"{made}, the first transfer from {self.ranks[source]} to {self.ranks[target]}"
                uses[first] = [call.peer]
        new = {use: members for use, members in uses.items() if use not in self._first_uses}
        if new:
            self._meet(new, self.options._timeout + FIRST_USE)
            self._first_uses |= new.keys()

    def abort(self) -> None:
        """End running and waiting calls."""
        self._is_aborted = True
        for queue, _ in self._transports.values():
            self.device.abort(queue)
            self.device.close(queue)
        self.watchdog.forget([queue for queue, _ in self._transports.values()])

    def shutdown(self) -> None:
        """Wait for running calls, and close it."""
        for queue, _ in self._transports.values():
            self.device.drain(queue)
            self.device.close(queue)
        self.watchdog.forget([queue for queue, _ in self._transports.values()])
        self._transports.clear()
        self.on_host = None

    # Issue of calls.

    def _call(
        self,
        name: str,
        what: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        run: Run,
        *,
        takes_dense: bool = False,
    ) -> StreamWork:
        """Issue a collective, which moves the memory of its tensors."""
        self._require(not (why := refusal_of([*reads, *writes], takes_dense=takes_dense)), name, what, why)
        memory = [in_memory(each) for each in reads], [in_memory(each) for each in writes]
        return self._issue_or_keep(Call(name, what, self.device.caller(), *memory, run))

    def _require(self, holds: bool, name: str, what: str, rule: str) -> None:
        if not holds:
            raise CollectiveError(f"{name} of {what} ({self.device.caller()}): {rule}", rank=self.ranks[self.rank()])

    def _transfer(
        self, name: str, peer: int, *, sent: Sequence[Tensor] = (), received: Sequence[Tensor] = ()
    ) -> StreamWork:
        what = in_words(*sent, *received)
        others = [rank for rank in range(self.size()) if rank != self.rank()]
        self._require(peer in others, name, what, f"Invalid peer rank {peer}; it must be one of {others} in its group")
        self._require(not (why := refusal_of([*sent, *received], takes_dense=True)), name, what, why)
        memory = [in_memory(each) for each in sent], [in_memory(each) for each in received]
        return self._issue_or_keep(Call(name, what, self.device.caller(), *memory, peer=peer))

    def _issue_or_keep(self, call: Call) -> StreamWork:
        """Issue a call now, or at the end of its group of calls, with a common work."""
        if self._coalesced is None:
            return self._issue([call])
        self._coalesced.append(call)
        return StreamWork(PendingCall(-1, str(call), torch.cuda.Event(), time.monotonic(), []))

    def _issue(self, calls: Sequence[Call], kind: type[StreamWork] = StreamWork) -> StreamWork:
        if self._is_aborted:
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self.rank()}: {self._name}")
        reads = [tensor for call in calls for tensor in call.reads]
        writes = [tensor for call in calls for tensor in call.writes]
        (index,) = {tensor.device.index for tensor in (*reads, *writes)}
        queue, transport = self._connect(index)
        self._meet_first(index, calls)
        stream = find_stream(queue, index)
        stream.wait_event(torch.cuda.current_stream(index).record_event())

        # Running kernels keep no memory: the work keeps it, until wait().
        bare = [(replace(call, reads=(), writes=()), len(call.reads), len(call.writes)) for call in calls]

        line = calls[0].line
        what = f"call {next(self._call_numbers)} of {transport.name}: " + " and ".join(call.name for call in calls)

        def run(read_views: Views, written_views: Views) -> None:
            reads, writes = iter(read_views), iter(written_views)
            each = [(call, list(islice(reads, read)), list(islice(writes, written))) for call, read, written in bare]
            if transport.left:
                raise CollectiveError(f"{what} ({line}) comes after a call that failed, as a member has left")
            try:
                for call, own, to in each:
                    if call.peer is None:
                        transport.collect(call, own, to)
                transport.transfer([one for one in each if one[0].peer is not None])
            except CollectiveError:
                raise
            except MemberLeft as error:
                raise CollectiveError(f"{what} ({line}) waits for {error}") from error.__cause__
            except RuntimeError as error:
                raise dist.DistBackendError(f"{what} ({line}): {error}") from error

        self.device.launch(queue, reads, writes, run, what)
        deadline_s = time.monotonic() + self.options._timeout.total_seconds()
        work = kind(PendingCall(queue, f"{what} ({line})", stream.record_event(), deadline_s, [*reads, *writes]))
        self.watchdog.watch(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> StreamWork | None:
        calls, self._coalesced = self._coalesced, None
        return self._issue(calls) if calls else None
