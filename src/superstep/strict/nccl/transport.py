"""Transport between members of a communicator: comparison of their calls, and their numbers.

NCCL compares nothing: members with different calls hang, or read other data. Here each call first sends its signature,
and a mismatch is an error that names both lines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from superstep.errors import CollectiveError

SIGNATURE_BYTES = 512
DIGEST_BYTES = 8
WANTED, SENT, NUMBERS, CALLED = 1, 2, 3, 4
"""Tags of messages: of a transfer the receiver's call, the sender's call, and the numbers; of a collective each
member's call.
"""

CLOSED = "gloo/transport/tcp/pair"
"""In Gloo's errors of a connection that has ended: its source file."""

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types that NCCL sums and Gloo does not support."""

Views = list[Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of a communicator.

    Attributes:
        name: in ``torch.distributed``.
        what: properties that all its members must share; of a transfer, both of its ends.
        line: of the call.
        reads, writes: its tensors.
        run: moves the numbers, with the members' transport and the kernels' views of the tensors; None for a transfer.
        peer: of a transfer, the other end's rank.
    """

    name: str
    what: str
    line: str
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    run: Callable[[GlooTransport, Views, Views], None] | None = None
    peer: int | None = None

    def __str__(self) -> str:
        """The call in words."""
        return f"{self.name} of {self.what} ({self.line})"

    def signature(self) -> Tensor:
        """A hash that is equal for matching calls, followed by the call in words."""
        same = f"{self.name if self.peer is None else 'transfer'} {self.what}"
        data = hashlib.sha256(same.encode()).digest()[:DIGEST_BYTES] + str(self).encode()
        return torch.frombuffer(bytearray(data[:SIGNATURE_BYTES].ljust(SIGNATURE_BYTES, b"\0")), dtype=torch.uint8)


class MemberLeft(RuntimeError):
    """A member has left the communicator: its connection is closed."""


def describe(signature: Tensor) -> str:
    """The words of a signature."""
    return bytes(signature.tolist())[DIGEST_BYTES:].rstrip(b"\0").decode(errors="replace")


def movable(numbers: Tensor) -> Tensor:
    """The same bytes, with a type that Gloo supports."""
    return numbers.view(torch.uint8) if numbers.dtype in FLOAT8 else numbers


def fits(one: Tensor, other: Tensor) -> bool:
    """Whether two calls are one operation."""
    return torch.equal(one[:DIGEST_BYTES], other[:DIGEST_BYTES])


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction over members.

    Attributes:
        operation: of Gloo, which has no mean.
        is_mean: whether the sum is divided by the number of members, integers towards zero.
        factor: of each member's numbers before the reduction; None for none.
    """

    operation: Any
    is_mean: bool = False
    factor: float | Tensor | None = None

    @classmethod
    def of(cls, opts: Any) -> Self:  # noqa: ANN401 - torch's options have no common type
        """The reduction of torch's options."""
        operation: Any = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if operation == dist.ReduceOp.AVG:
            return cls(dist.ReduceOp.SUM, is_mean=True)
        if operation == dist.ReduceOp.PREMUL_SUM:
            return cls(dist.ReduceOp.SUM, factor=operation.__getstate__()[1])
        return cls(operation)

    def refusal_of(self, tensors: Sequence[Tensor]) -> str:
        """Why NCCL does not support it (getNcclReduceOp in ProcessGroupNCCL.cpp); empty if it does."""
        if any(self.operation == bits for bits in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)):
            return f"Cannot use ReduceOp.{str(self).upper()} with NCCL"
        if self.is_mean and tensors[0].dtype == torch.bool:
            return "Cannot use ReduceOp.AVG with boolean inputs"
        if self.factor is not None and not tensors[0].is_floating_point():
            return f"PreMulSum Data type must be half, float, bfloat16 or double, not {tensors[0].dtype}"
        return ""

    def __str__(self) -> str:
        name = str(getattr(self.operation, "op", self.operation)).rpartition(".")[2].lower()
        return "mean" if self.is_mean else name if self.factor is None else f"{name} times {self.factor:g}"


@dataclass(frozen=True, slots=True)
class GlooTransport:
    """The members' Gloo group, which moves the device's numbers.

    Attributes:
        gloo: the group.
        rank: this member.
        ranks: of each member in the job, for messages.
        limit: of a message.
        name: of the communicator, for messages.
        awaited: the member that the running call waits for, if any; of several the first.
        last: the last call of each member, in words.
        left: members that left while a call waited for them. Later calls fail, as they do on a communicator of NCCL
            that has had an error.
    """

    gloo: dist.ProcessGroupGloo
    rank: int
    ranks: Sequence[int]
    limit: timedelta
    name: str
    awaited: set[int] = field(default_factory=set)
    last: dict[int, str] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def reduce(self, numbers: Tensor, rule: Reduction) -> None:
        """Reduce all members' numbers, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = rule.operation
        total = numbers.float() if numbers.dtype in FLOAT8 else numbers
        if rule.factor is not None:
            total.mul_(rule.factor)
        self.gloo.allreduce([total], options).wait(self.limit)
        if rule.is_mean:
            is_real = total.is_floating_point() or total.is_complex()
            total.div_(self.size, rounding_mode=None if is_real else "trunc")
        numbers.copy_(total)

    def reduce_part(self, output: Tensor, whole: Tensor, rule: Reduction) -> None:
        """This member's part of the reduction."""
        total = whole.clone().view(-1)
        self.reduce(total, rule)
        output.view(-1).copy_(total.chunk(self.size)[self.rank])

    def broadcast(self, numbers: Tensor, root: int) -> None:
        """The root's numbers, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        self.gloo.broadcast([movable(numbers)], options).wait(self.limit)

    def gather(self, outputs: Sequence[Tensor], own: Tensor) -> None:
        """Every member's numbers, in rank order, of each output's size."""
        if len({output.numel() for output in outputs}) == 1:
            self.gloo.allgather([[movable(output) for output in outputs]], [movable(own)]).wait(self.limit)
            return
        outputs[self.rank].copy_(own.view_as(outputs[self.rank]))
        for rank, output in enumerate(outputs):
            self.broadcast(output, rank)

    def exchange(self, output: Tensor, own: Tensor, from_each: Sequence[int], to_each: Sequence[int]) -> None:
        """A part for each member, from each member.

        Raises:
            CollectiveError: a member sends a part of another size than this one receives.
        """
        mine = torch.tensor(list(to_each) or [len(own) // self.size] * self.size)
        sent = [torch.empty_like(mine) for _ in range(self.size)]
        self.gloo.allgather([sent], [mine]).wait(self.limit)
        wanted = list(from_each) or [len(output) // self.size] * self.size
        for other, each, rows in zip(self.ranks, sent, wanted, strict=True):
            if int(each[self.rank]) != rows:
                own = self.ranks[self.rank]
                raise CollectiveError(
                    f"rank {own} receives {rows} rows from rank {other}, which sends {int(each[self.rank])}"
                )
        options = dist.AllToAllOptions()
        parts = list(from_each), list(to_each)
        self.gloo.alltoall_base(movable(output), movable(own), *parts, options).wait(self.limit)

    def collect(self, call: Call, reads: Views, writes: Views) -> None:
        """Run a collective, once all members are known to make the same call.

        Raises:
            CollectiveError: a member makes another one.
            MemberLeft: a member makes none any more.
        """
        own = call.signature()
        others = {rank: torch.empty_like(own) for rank in range(self.size) if rank != self.rank}
        sent = {rank: self._start(self.gloo.send, own, rank, CALLED) for rank in others}
        coming = {rank: self._start(self.gloo.recv, other, rank, CALLED) for rank, other in others.items()}
        for rank, message in coming.items():
            self._receive(rank, others[rank], message)
        for rank, message in sent.items():
            self._end(rank, message)
        for rank, other in others.items():
            if not fits(own, other):
                raise CollectiveError(f"members of {self.name} call differently: {self._both(call, rank, other)}")
        assert call.run is not None
        try:
            call.run(self, reads, writes)
        except CollectiveError as error:
            raise CollectiveError(f"{call} over {self.name}: {error}") from None

    def transfer(self, calls: Sequence[tuple[Call, Views, Views]]) -> None:
        """Run a group of sends and receives, each with its views. A send ends once its receive has been called.

        Raises:
            CollectiveError: the ends of a transfer do not match.
            MemberLeft: the other end makes no call any more.
        """
        sends = [(call, call.peer, reads[0]) for call, reads, _ in calls if call.name == "send"]
        receives = [(call, call.peer, writes[0]) for call, _, writes in calls if call.name == "recv"]
        send, recv = self.gloo.send, self.gloo.recv
        works = [(peer, self._start(send, call.signature(), peer, WANTED)) for call, peer, _ in receives]
        faults: list[str] = []
        for call, peer, numbers in sends:
            fault = self._compare(call, WANTED)
            works.append((peer, self._start(send, call.signature(), peer, SENT)))
            if fault:
                faults.append(fault)
            else:
                works.append((peer, self._start(send, numbers, peer, NUMBERS)))
        for call, peer, numbers in receives:
            if fault := self._compare(call, SENT):
                faults.append(fault)
            else:
                works.append((peer, self._start(recv, numbers, peer, NUMBERS)))
        for peer, work in works:
            self._end(peer, work)
        if faults:
            raise CollectiveError(f"the ends of a transfer over {self.name} do not fit: {faults[0]}")

    def _compare(self, call: Call, tag: int) -> str:
        """Both ends of a transfer, once the other one has arrived; empty if they match."""
        came = torch.empty(SIGNATURE_BYTES, dtype=torch.uint8)
        assert call.peer is not None
        self._receive(call.peer, came, self._start(self.gloo.recv, came, call.peer, tag))
        return "" if fits(call.signature(), came) else self._both(call, call.peer, came)

    def _both(self, call: Call, member: int, other: Tensor) -> str:
        return f"rank {self.ranks[self.rank]} {call}, rank {self.ranks[member]} {describe(other)}"

    def _receive(self, rank: int, signature: Tensor, message: dist.Work) -> None:
        """Wait for another member's call."""
        self.awaited.add(rank)
        self._end(rank, message)
        self.awaited.clear()
        self.last[rank] = describe(signature)

    def _start(self, transfer: Callable[..., dist.Work], numbers: Tensor, rank: int | None, tag: int) -> dist.Work:
        with self._connection_to(rank):
            return transfer([numbers], rank, tag)

    def _end(self, rank: int | None, message: dist.Work) -> None:
        with self._connection_to(rank):
            message.wait(self.limit)

    @contextmanager
    def _connection_to(self, rank: int | None) -> Iterator[None]:
        """Raises a MemberLeft where the other end has closed the connection."""
        assert rank is not None
        try:
            yield
        except RuntimeError as error:
            if CLOSED not in str(error):
                raise
            self.left.add(rank)
            raise MemberLeft(self.missing(rank, "has left it")) from error

    def missing(self, rank: int, ended: str = "") -> str:
        """A member that a call waits for, and its last call, in words.

        Args:
            rank: of the member.
            ended: why no call of it comes any more; empty if one may come.
        """
        last = self.last.get(rank)
        called = f"whose last call there is {last}" if last else "which has made no call there"
        return f"rank {self.ranks[rank]}, {f'which {ended} and ' * bool(ended)}{called}"
