"""A process group over several hosts: shared memory within each of them, messages between them.

A host's ranks first sum what they have, each its part, so that one sum for each host crosses the network, not one for
each rank; a gather crosses it once for each host, and is passed on there (Goyal 2017, sec. 4; Jia 2018).

    rank 0  rank 1 │ rank 2  rank 3       ranks of a host follow each other in the group: rank = host · seats + seat
       └─ host 0 ──┘    └─ host 1 ──┘
    sum of part 0      ranks 0 and 1 in memory, ranks 2 and 3 in memory; then rank 2 sends its sum to rank 0

Each rank talks to the ranks with its seat on the other hosts, so that all of a host's ranks share its link. The order
of a sum is: ranks of a host, then hosts. Sums of bf16 are made in fp32, and rounded once on each host and once more.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from superstep.comm.shared_memory.channel import CLOSED, ENDS, Rule
from superstep.comm.shared_memory.group_base import (
    RULES,
    ProcessGroupBase,
    gather_single,
    own_of,
    require_one_type,
    require_parts,
    rows_of,
    rule_of,
    scatter_single,
    start,
    whole_of,
)

BACKEND = "two_levels"
"""The backend's name in ``torch.distributed``."""

SMALL_BYTES = 32 << 10
"""Smaller sums go to every seat whole: one message instead of two in sequence."""

_LETTERS, _TAGS = 0, 2**30
"""The tag of a message between two ranks, and the number of further tags, one for each collective: hosts at different
collectives wait for each other and cannot confuse their messages.
"""

_OPS = {rule: name for name, rule in RULES.items()}

_COMBINE: dict[Rule, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


@dataclass(frozen=True, slots=True)
class GroupLevels:
    """The groups within a group over several hosts.

    Attributes:
        near: ranks of this host, for collectives.
        letters: the same ranks again, for messages between two of them.
        far: all ranks, over the network.
    """

    near: dist.ProcessGroup
    letters: dist.ProcessGroup
    far: dist.ProcessGroup


class BackgroundOperation(dist.Work):
    """An operation of the group's thread."""

    def __init__(self, future: Future[None]) -> None:
        super().__init__()
        self._future = future

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._future.done()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return once it is done; raises DistBackendError, with the reason, where it never will be."""
        try:
            self._future.result()
        except dist.DistBackendError:
            raise
        except RuntimeError as error:
            raise dist.DistBackendError(f"between hosts: {error}") from None
        return True


class HierarchicalGroup(ProcessGroupBase):
    """Ranks of several hosts, equally many on each, in the order of hosts."""

    def __init__(self, levels: GroupLevels, rank: int, size: int) -> None:
        super().__init__(BACKEND, rank, size)
        self._levels = levels
        self._seats = levels.near.size()
        self._hosts = size // self._seats
        self._host, self._seat = divmod(rank, self._seats)
        self._exchanges = 0
        self._line = _Line()

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> BackgroundOperation:  # type: ignore[override]  # noqa: ANN401
        """Sum, maximum or minimum, in place."""
        (tensor,) = tensors
        rule, whole = rule_of(tensor, opts), whole_of(tensor)

        def work() -> None:
            self._all_reduce(whole.view(-1), rule)
            if whole is not tensor:
                tensor.copy_(whole)

        return self._start(work)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> BackgroundOperation:  # noqa: ANN401
        """Concatenate every rank's tensor."""
        require_parts(output, given, self.size())
        require_one_type(output, given)
        out, own = own_of(output).view(-1), whole_of(given).view(-1)
        return self._start(lambda: self._all_gather(out, own))

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> BackgroundOperation:  # noqa: ANN401
        """This rank's part of a sum; where it lies inside the input, the rest of the input is undefined afterwards."""
        require_parts(given, output, self.size())
        require_one_type(output, given)
        out, whole, rule = own_of(output).view(-1), whole_of(given).view(-1), rule_of(given, opts)
        return self._start(lambda: self._reduce_scatter(out, whole, rule))

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        coming: Sequence[int],
        going: Sequence[int],
        opts: Any = None,  # noqa: ANN401
    ) -> BackgroundOperation:
        """Rows to and from each rank; without counts, equal parts."""
        require_one_type(output, given)
        rows = rows_of(given, going, self.size()), rows_of(output, coming, self.size())
        whole, out = whole_of(given), own_of(output)
        return self._start(lambda: self._all_to_all(whole.split(rows[0]), out.split(rows[1])))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> BackgroundOperation:  # type: ignore[override]  # noqa: ANN401
        """Copy one rank's tensor to all."""
        own = own_of(tensors[0])
        return self._start(lambda: self._broadcast(own, opts.rootRank))

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        group, peer = self._way_to(peer)
        return start(dist.isend(whole_of(tensor), group=group, group_dst=peer, tag=_LETTERS))

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> dist.Work:
        group, peer = self._way_to(peer)
        return start(dist.irecv(own_of(tensors[0]), group=group, group_src=peer, tag=_LETTERS))

    def barrier(self, opts: Any = None) -> BackgroundOperation:  # noqa: ANN401
        return self.allreduce([torch.zeros(1, dtype=torch.uint8)])

    def shutdown(self) -> None:
        """Leave the group and those within it: waiting ranks of this host learn it at once, those of other hosts when
        their connections end.
        """
        self._line.close()
        for each in (self._levels.near, self._levels.letters, self._levels.far):
            with suppress(ValueError):  # torch lets go of all groups one by one, and may have come to it before
                dist.destroy_process_group(each)

    abort = shutdown

    def _start(self, work: Callable[[], None]) -> BackgroundOperation:
        return BackgroundOperation(self._line.put(work))

    def _rank(self, host: int) -> int:
        """The rank with this rank's seat on another host."""
        return host * self._seats + self._seat

    def _others(self) -> list[int]:
        """The other hosts, the next one first, so that not all send to the same one."""
        return [(self._host + ahead) % self._hosts for ahead in range(1, self._hosts)]

    def _way_to(self, peer: int) -> tuple[dist.ProcessGroup, int]:
        host, seat = divmod(peer, self._seats)
        return (self._levels.letters, seat) if host == self._host else (self._levels.far, peer)

    def _send(self, tensor: Tensor, peer: int) -> dist.Work:
        return start(dist.isend(tensor, group=self._levels.far, group_dst=peer, tag=1 + self._exchanges % _TAGS))

    def _receive(self, tensor: Tensor, peer: int) -> dist.Work:
        return start(dist.irecv(tensor, group=self._levels.far, group_src=peer, tag=1 + self._exchanges % _TAGS))

    def _all_reduce(self, whole: Tensor, rule: Rule) -> None:
        size = self.size()
        even = whole.numel() // size * size if whole.numel() * whole.element_size() > SMALL_BYTES else 0
        if even:
            own = whole[:even].chunk(size)[self.rank()]
            self._reduce_scatter(own, whole[:even], rule)
            self._all_gather(whole[:even], own)
        if even < whole.numel() or not even:
            self._all_reduce_small(whole[even:], rule)

    def _all_reduce_small(self, whole: Tensor, rule: Rule) -> None:
        self._exchanges += 1
        dist.all_reduce(whole, op=_OPS[rule], group=self._levels.near)
        rows = [whole if host == self._host else torch.empty_like(whole) for host in range(self._hosts)]
        works = [self._receive(rows[host], self._rank(host)) for host in self._others()]
        works += [self._send(whole, self._rank(host)) for host in self._others()]
        for work in works:
            work.wait()
        _combine(rows, rule, whole)

    def _reduce_scatter(self, out: Tensor, whole: Tensor, rule: Rule) -> None:
        """Where ``out`` is this rank's own part of ``whole``, the other parts are overwritten."""
        self._exchanges += 1
        parts = whole.view(self._hosts, self._seats, -1)
        is_own = out.data_ptr() == parts[self._host, self._seat].data_ptr()
        rows = [out if host == self._host else torch.empty_like(out) for host in range(self._hosts)]
        works = [self._receive(rows[host], self._rank(host)) for host in self._others()]
        # What is for others comes first, so that it travels while the own part is summed.
        for host in self._others():
            going = parts[host, self._seat] if is_own else torch.empty_like(out)
            self._sum_near(going, parts[host].view(-1), rule)
            works.append(self._send(going, self._rank(host)))
        self._sum_near(out, parts[self._host].view(-1), rule)
        for work in works:
            work.wait()
        _combine(rows, rule, out)

    def _sum_near(self, out: Tensor, parts: Tensor, rule: Rule) -> None:
        scatter_single(out, parts, op=_OPS[rule], group=self._levels.near)

    def _all_gather(self, out: Tensor, own: Tensor) -> None:
        """``own`` may be this rank's part of ``out``."""
        self._exchanges += 1
        blocks = out.view(self._hosts, self._seats, -1)
        arriving = {host: self._receive(blocks[host, self._seat], self._rank(host)) for host in self._others()}
        leaving = [self._send(own, self._rank(host)) for host in self._others()]
        self._gather_near(blocks[self._host], own)
        for host, work in arriving.items():
            work.wait()
            self._gather_near(blocks[host], blocks[host, self._seat])
        for work in leaving:
            work.wait()

    def _gather_near(self, out: Tensor, own: Tensor) -> None:
        gather_single(out.view(-1), own, group=self._levels.near)

    def _all_to_all(self, going: Sequence[Tensor], coming: Sequence[Tensor]) -> None:
        self._exchanges += 1
        others = [host * self._seats + seat for host in self._others() for seat in range(self._seats)]
        works = [self._receive(coming[peer], peer) for peer in others if coming[peer].numel()]
        works += [self._send(going[peer], peer) for peer in others if going[peer].numel()]
        here = slice(self._host * self._seats, (self._host + 1) * self._seats)
        rows_in, rows_out = ([len(part) for part in parts[here]] for parts in (coming, going))
        given, out = (_join_rows(parts[here]) for parts in (going, coming))
        dist.all_to_all_single(out, given, rows_in, rows_out, group=self._levels.near)
        for work in works:
            work.wait()

    def _broadcast(self, own: Tensor, root: int) -> None:
        self._exchanges += 1
        seat = root % self._seats
        works = []
        if self.rank() == root:
            works = [self._send(own, self._rank(host)) for host in self._others()]
        elif self._seat == seat:
            self._receive(own, root).wait()
        dist.broadcast(own, group=self._levels.near, group_src=seat)
        for work in works:
            work.wait()


class _Line:
    """A queue of work that a thread does in order. After a failure nothing more is begun: others would take later
    messages for those that they wait for.
    """

    def __init__(self) -> None:
        self._line: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._failed: BaseException | None = None
        # A daemon: who ends does not wait for what a rank that is gone will never send.
        threading.Thread(target=self._serve, name=BACKEND, daemon=True).start()

    def put(self, work: Callable[[], None]) -> Future[None]:
        """Queue some work."""
        done: Future[None] = Future()
        with self._lock:
            if self._is_closed:
                raise _make_closed_error()
            self._line.put((work, done))
        return done

    def close(self) -> None:
        """Begin nothing more."""
        with self._lock:
            self._is_closed = True
            self._failed = self._failed or _make_closed_error()
            self._line.put(None)

    # Numbers are summed as they are, whatever of autograd the caller has switched on.
    @torch.inference_mode()
    def _serve(self) -> None:
        while (task := self._line.get()) is not None:
            work, done = task
            try:
                if self._failed is not None:
                    raise self._failed
                work()
            except BaseException as error:  # noqa: BLE001
                self._failed = self._failed or error
                done.set_exception(error)
            else:
                done.set_result(None)
            del task, work, done  # and with them the tensors


def _make_closed_error() -> dist.DistBackendError:
    return dist.DistBackendError(f"shared memory: {ENDS[CLOSED]}.")


def _combine(rows: Sequence[Tensor], rule: Rule, out: Tensor) -> None:
    """The rows combined, in order; ``out`` may be one of them."""
    first, *between, last = rows
    total = first.float() if first.dtype in (torch.bfloat16, torch.float16) else first
    for row in between:
        total = _COMBINE[rule](total, row)
    _COMBINE[rule](total, last, out=out)


def _join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Neighbouring rows of one tensor, without a copy."""
    first = parts[0]
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride(), first.storage_offset())


def make(opts: Any, levels: GroupLevels) -> HierarchicalGroup:  # noqa: ANN401
    return HierarchicalGroup(levels, opts.group_rank, opts.group_size)


dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["cpu"])
