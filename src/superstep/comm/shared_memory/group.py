"""SharedGroup: a ``torch.distributed`` process group of ranks on one host, over a lane.

It has NCCL's calls: operations run in the order of issue, and a transfer's group is its channel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from superstep.comm.shared_memory.channel import GroupSlice, LaneError, OperationKind, OperationQueue, StartedOperation
from superstep.comm.shared_memory.group_base import (
    ProcessGroupBase,
    own_of,
    require_equal,
    require_one_type,
    require_parts,
    rows_of,
    rule_of,
    whole_of,
)
from superstep.comm.shared_memory.region import Region
from superstep.hardware.host import cores

BACKEND = "shared"
"""The backend's name in ``torch.distributed``."""

SPIN_S = 20e-6
"""Seconds that a rank with its own core polls before it sleeps: waking up takes about as long."""


class SharedWork(dist.Work):
    def __init__(self, started: StartedOperation, then: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._started = started
        self._then = then

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._started.is_done()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return once it is done; raises DistBackendError, with the reason, where it never will be."""
        try:
            self._started.wait()
        except LaneError as error:
            raise dist.DistBackendError(f"shared memory: {error}.") from None
        if self._then is not None:
            self._then()
            self._then = None
        return True


class SharedGroup(ProcessGroupBase):
    def __init__(self, lane: OperationQueue, region: Region, rank: int, size: int) -> None:
        super().__init__(BACKEND, rank, size)
        self._lane = lane
        # Without its file a lane could not see who lives, nor be seen to live.
        self._region = region

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> SharedWork:  # type: ignore[override]  # noqa: ANN401
        """Sum, maximum or minimum, in place."""
        (tensor,) = tensors
        rule = rule_of(tensor, opts)
        whole = whole_of(tensor)
        started = self._start(OperationKind.ALL_REDUCE, whole, whole, whole.numel(), opts, rule=rule)
        return SharedWork(started, None if whole is tensor else lambda: tensor.copy_(whole))

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> SharedWork:  # noqa: ANN401
        """Concatenate every rank's tensor."""
        require_parts(output, given, self.size())
        require_one_type(output, given)
        return SharedWork(self._start(OperationKind.ALL_GATHER, whole_of(given), own_of(output), given.numel(), opts))

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> SharedWork:  # noqa: ANN401
        """This rank's part of a sum."""
        require_parts(given, output, self.size())
        require_one_type(output, given)
        rule, whole, own = rule_of(given, opts), whole_of(given), own_of(output)
        return SharedWork(self._start(OperationKind.REDUCE_SCATTER, whole, own, output.numel(), opts, rule=rule))

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        coming: Sequence[int],
        going: Sequence[int],
        opts: Any = None,  # noqa: ANN401
    ) -> SharedWork:
        """Rows to and from each rank; without counts, equal parts."""
        require_one_type(output, given)
        ways = []
        for x, counts in ((given, going), (output, coming)):
            rows = rows_of(x, counts, self.size())
            ways.append([each * (x[0].numel() if len(x) else 0) * x.element_size() for each in rows])
        me = self.rank()
        require_equal(ways[0][me], ways[1][me], "bytes that stay here")
        started = self._start(
            OperationKind.ALL_TO_ALL, whole_of(given), own_of(output), 0, opts, going=ways[0], coming=ways[1]
        )
        return SharedWork(started)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> SharedWork:  # type: ignore[override]  # noqa: ANN401
        """Copy one rank's tensor to all."""
        (tensor,) = tensors
        own = own_of(tensor)
        return SharedWork(self._start(OperationKind.BROADCAST, own, own, own.numel(), opts, peer=opts.rootRank))

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> SharedWork:
        (tensor,) = tensors
        whole = whole_of(tensor)
        return SharedWork(self._start(OperationKind.SEND, whole, whole, whole.numel(), None, peer=peer))

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> SharedWork:
        own = own_of(tensors[0])
        return SharedWork(self._start(OperationKind.RECEIVE, own, own, own.numel(), None, peer=peer))

    def barrier(self, opts: Any = None) -> SharedWork:  # noqa: ANN401
        token = torch.zeros(1, dtype=torch.uint8)
        return SharedWork(self._start(OperationKind.ALL_REDUCE, token, token, 1, None))

    def shutdown(self) -> None:
        self._lane.close()

    abort = shutdown

    def _start(
        self,
        kind: OperationKind,
        given: Tensor,
        out: Tensor,
        count: int,
        opts: Any,  # noqa: ANN401 - torch's own
        **more: Any,  # noqa: ANN401
    ) -> StartedOperation:
        return self._lane.start(kind, given, out, count, is_waited=opts is not None and not opts.asyncOp, **more)


def make(opts: Any, region: Region) -> SharedGroup:  # noqa: ANN401
    """Make a group for ``torch.distributed.new_group``; called by its members, each with the group's number."""
    where = GroupSlice(
        file=region.file,
        offset=region.part(int(opts.group_id)),
        me=opts.group_rank,
        locks=opts.global_ranks_in_group,
    )
    spin_s = SPIN_S if region.neighbours <= cores() else 0.0
    lane = OperationQueue(region.native, where, patience_s=opts.timeout.total_seconds(), spin_s=spin_s)
    return SharedGroup(lane, region, opts.group_rank, opts.group_size)


dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["cpu"])
