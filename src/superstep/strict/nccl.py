"""NCCL on the strict device: the calls of ``ProcessGroupNCCL``, with Gloo to move the numbers.

What NCCL refuses is refused, and what it lets hang is named, where members tell each other (``transport``) or by the
watchdog (``watchdog``).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from superstep.strict.communicator import Communicator, GroupOptions, in_words
from superstep.strict.transport import Call, GlooTransport, Reduction, Views
from superstep.strict.watchdog import Watchdog
from superstep.strict.works import BarrierWork, StreamWork

c10d = dist.distributed_c10d


class Nccl(Communicator):
    """``ProcessGroupNCCL``, and the group that has it."""

    Options = GroupOptions

    def allreduce(self, tensors: Any, opts: Any = None) -> StreamWork:  # noqa: ANN401
        """A reduction, in place."""
        return self.allreduce_coalesced(listed(tensors), opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> StreamWork:  # noqa: ANN401
        """The numbers of one member, on all."""
        own = listed(tensors)
        what = f"{in_words(*own)} from {opts.rootRank}"
        reads, writes = (own, []) if opts.rootRank == self.rank() else ([], own)
        return self._call(
            "broadcast",
            what,
            reads,
            writes,
            lambda transport, at, to: transport.broadcast((*at, *to)[0], opts.rootRank),
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> StreamWork:  # noqa: ANN401
        """Each member's numbers, in a tensor for each."""
        own, all_of_them = listed(inputs), outputs[0]
        return self._call(
            "all_gather", in_words(*own), own, all_of_them, lambda transport, at, to: transport.gather(to, at[0])
        )

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> StreamWork:  # noqa: ANN401
        """Each member's numbers, one after the other."""
        require(
            output.numel() == own.numel() * self.size(),
            "output tensor size must be equal to world_size times input tensor size",
        )
        return self.all_gather_single_coalesced([output], [own], opts)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> StreamWork:  # noqa: ANN401
        """A reduction, of which each member gets its part."""
        require(
            output.numel() * self.size() == whole.numel(),
            "input tensor must be the same size as output size times world size",
        )
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    def reduce(self, tensors: Any, opts: Any) -> StreamWork:  # noqa: ANN401
        """A reduction, on one member alone; the tensors of the others keep their numbers."""
        rule, own, root = Reduction.of(opts), listed(tensors), opts.rootRank

        def run(transport: GlooTransport, at: Views, to: Views) -> None:
            total = (*to, *at)[0].clone()
            transport.reduce(total, rule)
            if transport.rank == root:
                to[0].copy_(total)

        ends = (own, own) if root == self.rank() else (own, [])
        return self._call("reduce", f"{rule} of {in_words(*own)} on {root}", *ends, run)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> StreamWork:  # noqa: ANN401
        """Each member's numbers, on one of them alone."""
        own, root = listed(inputs), opts.rootRank
        of_each = list(outputs[0]) if outputs else []

        def run(transport: GlooTransport, at: Views, to: Views) -> None:
            transport.gather(to or [torch.empty_like(at[0]) for _ in range(transport.size)], at[0])

        return self._call("gather", f"{in_words(*own)} on {root}", own, of_each, run)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> StreamWork:  # noqa: ANN401
        """To each member its tensor out of those of one."""
        own, root = listed(outputs), opts.rootRank
        for_each = list(inputs[0]) if inputs else []

        def run(transport: GlooTransport, at: Views, to: Views) -> None:
            whole = torch.stack(at) if at else to[0].new_empty(transport.size, *to[0].shape)
            transport.broadcast(whole, root)
            to[0].copy_(whole[transport.rank])

        return self._call("scatter", f"{in_words(*own)} from {root}", for_each, own, run)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> StreamWork:  # noqa: ANN401
        """A reduction of a tensor for each member."""
        own, for_each, rule = listed(outputs), list(inputs[0]), Reduction.of(opts)

        def run(transport: GlooTransport, at: Views, to: Views) -> None:
            total = torch.stack(at)
            transport.reduce(total, rule)
            to[0].copy_(total[transport.rank])

        return self._call("reduce_scatter", f"{rule} of {in_words(*for_each)}", for_each, own, run)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> StreamWork:  # noqa: ANN401
        """A tensor for each member, from each member."""

        def run(transport: GlooTransport, at: Views, to: Views) -> None:
            came = torch.cat([each.reshape(-1) for each in to])
            sent = torch.cat([each.reshape(-1) for each in at])
            transport.exchange(came, sent, [each.numel() for each in to], [each.numel() for each in at])
            for each, part in zip(to, came.split([each.numel() for each in to]), strict=True):
                each.copy_(part.view_as(each))

        return self._call("all_to_all", f"{inputs[0].dtype}", list(inputs), list(outputs), run)

    def all_to_all_single(
        self,
        output: Tensor,
        own: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,  # noqa: ANN401
    ) -> StreamWork:
        """A part for each member, from each member."""
        to_each, from_each = list(input_split_sizes or ()), list(output_split_sizes or ())

        def run(transport: GlooTransport, at: Views, to: Views) -> None:
            transport.exchange(to[0], at[0], from_each, to_each)

        return self._call("all_to_all_single", f"{own.dtype}", [own], [output], run)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> StreamWork:
        """To another member; NCCL knows no tags."""
        return self._transfer("send", peer, sent=tensors)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> StreamWork:
        """From another member."""
        return self._transfer("recv", peer, received=tensors)

    def barrier(self, opts: Any = None) -> StreamWork:  # noqa: ANN401
        """A reduction that the host waits for; on the GPU that is named, bound, first used, or guessed by rank."""
        named = list(getattr(opts, "device_ids", None) or ())
        bound = getattr(self.bound_device_id, "index", None)
        index = next((each for each in (*named[:1], bound, *self._transports) if each is not None), None)
        if index is None:
            ranks = self.options.global_ranks_in_group or range(self.size())
            index = ranks[self.rank()] % torch.cuda.device_count()
        one = torch.zeros(1, device=torch.device("cuda", index))
        call = Call(
            "barrier",
            "",
            self.device.caller(),
            [one],
            [one],
            lambda transport, _, to: transport.reduce(to[0], Reduction.of(None)),
        )
        return self._issue([call], BarrierWork)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> StreamWork:  # noqa: ANN401
        """Several reductions as one call."""
        rule = Reduction.of(opts)

        def run(transport: GlooTransport, _: Views, to: Views) -> None:
            for each in to:
                transport.reduce(each, rule)

        return self._call("all_reduce", f"{rule} of {in_words(*tensors)}", tensors, tensors, run)

    def all_gather_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,  # noqa: ANN401
    ) -> StreamWork:
        """Several gathers as one call."""

        def run(transport: GlooTransport, at: Views, to: Views) -> None:
            for own, output in zip(at, to, strict=True):
                transport.gather(list(output.view(-1).chunk(transport.size)), own.reshape(-1))

        return self._call("all_gather_single", in_words(*inputs), inputs, outputs, run)

    def reduce_scatter_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,  # noqa: ANN401
    ) -> StreamWork:
        """Several reductions, of which each member gets its part, as one call."""
        rule = Reduction.of(opts)

        def run(transport: GlooTransport, at: Views, to: Views) -> None:
            for whole, output in zip(at, to, strict=True):
                transport.reduce_part(output, whole, rule)

        return self._call("reduce_scatter_single", f"{rule} of {in_words(*inputs)}", inputs, outputs, run)

    # Names before torch 2.13.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def require(rule: bool, why: str) -> None:
    """Raise what ProcessGroupNCCL raises of sizes."""
    if not rule:
        raise ValueError(why)


def listed(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Tensors, of which torch gives one or a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def batch_isend_irecv(operations: Sequence[dist.P2POp]) -> list[dist.Work]:
    """``torch.distributed``'s, which makes a group of calls only where the process group is its own class."""
    group = operations[0].group or dist.group.WORLD
    if not isinstance(group, Communicator):
        return torch_batch(operations)  # type: ignore[arg-type]
    with c10d._coalescing_manager(group, operations[0].tensor.device, async_ops=True) as manager:
        for one in operations:
            end = {"group_dst" if one.op is dist.isend else "group_src": one.group_peer}
            one.op(one.tensor, group=group, tag=one.tag, **end)
    return manager.works


torch_batch = dist.batch_isend_irecv


def install(device: ModuleType) -> None:
    """Give torch NCCL, which its build for CPUs lacks.

    Args:
        device: the compiled module.
    """
    Communicator.device, Communicator.watchdog = device, Watchdog(device)
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = Nccl
    c10d._NCCL_AVAILABLE = True
    dist.batch_isend_irecv = c10d.batch_isend_irecv = batch_isend_irecv
    dist.Backend.default_device_backend_map["cuda"] = "nccl"
    torch.cuda.nccl = importlib.import_module("torch.cuda.nccl")
    torch.cuda.nccl.version = lambda: (2, 27, 0)
