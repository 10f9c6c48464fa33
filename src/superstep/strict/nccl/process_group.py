"""NCCL on the strict device: the calls of ``ProcessGroupNCCL``, with Gloo as transport.

Calls that NCCL refuses are refused, and calls that would hang are reported, by the members' comparison (``transport``)
or by the watchdog (``watchdog``).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from superstep.strict.nccl import gloo_on_gpus, host_group
from superstep.strict.nccl.communicator import Communicator, GroupOptions
from superstep.strict.nccl.tensor_rules import has_gaps, in_words
from superstep.strict.nccl.transport import Call, GlooTransport, Reduction, Views
from superstep.strict.nccl.watchdog import Watchdog
from superstep.strict.nccl.works import BarrierWork, StreamWork

c10d = dist.distributed_c10d


class Nccl(Communicator):
    """``ProcessGroupNCCL``, and its group."""

    Options = GroupOptions

    def allreduce(self, tensors: Any, opts: Any = None) -> StreamWork:  # noqa: ANN401
        """A reduction, in place."""
        return self._reduce_all(as_list(tensors), opts, takes_dense=False)

    def broadcast(self, tensors: Any, opts: Any = None) -> StreamWork:  # noqa: ANN401
        """The numbers of one member, on all."""
        own = as_list(tensors)
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
        own, of_each = as_list(inputs), outputs[0]
        what = in_words(*of_each)
        self._require_part(own[0], of_each, self.rank(), "all_gather", what)
        self._require_order([*own, *of_each], "all_gather", what)
        return self._call("all_gather", what, own, of_each, lambda transport, at, to: transport.gather(to, at[0]))

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> StreamWork:  # noqa: ANN401
        """Each member's numbers, concatenated."""
        return self._gather_single([output], [own], takes_dense=False)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> StreamWork:  # noqa: ANN401
        """A reduction, of which each member gets its part."""
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    def reduce(self, tensors: Any, opts: Any) -> StreamWork:  # noqa: ANN401
        """A reduction, on one member alone; the tensors of the others are unchanged."""
        own, root = as_list(tensors), opts.rootRank
        rule = self._reduction("reduce", own, opts)

        def run(transport: GlooTransport, at: Views, to: Views) -> None:
            total = (*to, *at)[0].clone()
            transport.reduce(total, rule)
            if transport.rank == root:
                to[0].copy_(total)

        ends = (own, own) if root == self.rank() else (own, [])
        return self._call("reduce", f"{rule} of {in_words(*own)} on {root}", *ends, run)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> StreamWork:  # noqa: ANN401
        """Each member's numbers, on one of them alone."""
        own, root = as_list(inputs), opts.rootRank
        of_each = list(outputs[0]) if outputs else []
        if of_each:
            self._require_part(own[0], of_each, root, "gather", in_words(*of_each))

        def run(transport: GlooTransport, at: Views, to: Views) -> None:
            transport.gather(to or [torch.empty_like(at[0]) for _ in range(transport.size)], at[0])

        return self._call("gather", f"{in_words(*own)} on {root}", own, of_each, run)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> StreamWork:  # noqa: ANN401
        """One member's tensors, one to each member."""
        own, root = as_list(outputs), opts.rootRank
        for_each = list(inputs[0]) if inputs else []
        if for_each:
            self._require_part(own[0], for_each, root, "scatter", in_words(*for_each))

        def run(transport: GlooTransport, at: Views, to: Views) -> None:
            whole = torch.stack(at) if at else to[0].new_empty(transport.size, *to[0].shape)
            transport.broadcast(whole, root)
            to[0].copy_(whole[transport.rank])

        return self._call("scatter", f"{in_words(*own)} from {root}", for_each, own, run)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> StreamWork:  # noqa: ANN401
        """A reduction of a tensor for each member."""
        own, for_each = as_list(outputs), list(inputs[0])
        rule = self._reduction("reduce_scatter", own, opts)
        what = f"{rule} of {in_words(*for_each)}"
        self._require_part(own[0], for_each, self.rank(), "reduce_scatter", what)
        self._require_order([*own, *for_each], "reduce_scatter", what)

        def run(transport: GlooTransport, at: Views, to: Views) -> None:
            total = torch.cat([each.reshape(-1) for each in at])
            transport.reduce(total, rule)
            to[0].view(-1).copy_(total.split([each.numel() for each in at])[transport.rank])

        return self._call("reduce_scatter", what, for_each, own, run)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> StreamWork:  # noqa: ANN401
        """A tensor for each member, from each member."""
        what = f"{inputs[0].dtype}"
        for tensors in (outputs, inputs):
            self._require_one_each(tensors, "all_to_all", what)

        def run(transport: GlooTransport, at: Views, to: Views) -> None:
            came = torch.cat([each.reshape(-1) for each in to])
            sent = torch.cat([each.reshape(-1) for each in at])
            transport.exchange(came, sent, [each.numel() for each in to], [each.numel() for each in at])
            for each, part in zip(to, came.split([each.numel() for each in to]), strict=True):
                each.copy_(part.view_as(each))

        return self._call("all_to_all", what, list(inputs), list(outputs), run, takes_dense=True)

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
        name, what = "all_to_all_single", f"{own.dtype}"
        for tensor, rows in ((own, to_each), (output, from_each)):
            # checkSplitSizes in torch/csrc/distributed/c10d/Utils.hpp
            is_cut = len(rows) == self.size() and sum(rows) == len(tensor) if rows else len(tensor) % self.size() == 0
            parts = rows or f"{self.size()} equal parts"
            self._require(is_cut, name, what, f"{len(tensor)} rows cannot be cut into {parts}, one for each member")

        def run(transport: GlooTransport, at: Views, to: Views) -> None:
            transport.exchange(to[0], at[0], from_each, to_each)

        return self._call(name, what, [own], [output], run, takes_dense=True)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> StreamWork:
        """To another member; NCCL has no tags."""
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
            index = self.ranks[self.rank()] % torch.cuda.device_count()
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
        return self._reduce_all(tensors, opts, takes_dense=True)

    def _reduce_all(self, tensors: Sequence[Tensor], opts: Any, *, takes_dense: bool) -> StreamWork:  # noqa: ANN401
        rule = self._reduction("all_reduce", tensors, opts)

        def run(transport: GlooTransport, _: Views, to: Views) -> None:
            for each in to:
                transport.reduce(each, rule)

        what = f"{rule} of {in_words(*tensors)}"
        return self._call("all_reduce", what, tensors, tensors, run, takes_dense=takes_dense)

    def all_gather_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,  # noqa: ANN401
    ) -> StreamWork:
        """Several gathers as one call."""
        return self._gather_single(outputs, inputs, takes_dense=True)

    def _gather_single(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, takes_dense: bool) -> StreamWork:
        what = in_words(*inputs)
        for own, output in zip(inputs, outputs, strict=True):
            self._require_whole(output, own, "output", "input", "all_gather_single", what)

        def run(transport: GlooTransport, at: Views, to: Views) -> None:
            for own, output in zip(at, to, strict=True):
                transport.gather(list(output.view(-1).chunk(transport.size)), own.reshape(-1))

        return self._call("all_gather_single", what, inputs, outputs, run, takes_dense=takes_dense)

    def reduce_scatter_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,  # noqa: ANN401
    ) -> StreamWork:
        """Several reductions, of which each member gets its part, as one call."""
        rule = self._reduction("reduce_scatter_single", inputs, opts)
        what = f"{rule} of {in_words(*inputs)}"
        for whole, output in zip(inputs, outputs, strict=True):
            self._require_whole(whole, output, "input", "output", "reduce_scatter_single", what)

        def run(transport: GlooTransport, at: Views, to: Views) -> None:
            for whole, output in zip(at, to, strict=True):
                transport.reduce_part(output, whole, rule)

        return self._call("reduce_scatter_single", what, inputs, outputs, run, takes_dense=True)

    def _reduction(self, name: str, tensors: Sequence[Tensor], opts: Any) -> Reduction:  # noqa: ANN401
        """The reduction of torch's options; raises a CollectiveError if NCCL does not support it."""
        rule = Reduction.of(opts)
        self._require(not (why := rule.refusal_of(tensors)), name, f"{rule} of {in_words(*tensors)}", why)
        return rule

    def _require_whole(self, whole: Tensor, part: Tensor, of_whole: str, of_part: str, name: str, what: str) -> None:
        """Raise a CollectiveError unless a tensor is as large as the parts of all members."""
        rule = f"its {of_whole} must have as many numbers as the {of_part}s of all {self.size()} members together"
        sizes = f"it has {whole.numel()}, which is not {self.size()} x {part.numel()}"
        self._require(whole.numel() == self.size() * part.numel(), name, what, f"{rule}; {sizes}")

    def _require_one_each(self, tensors: Sequence[Tensor], name: str, what: str) -> None:
        rule = f"a list must have a tensor for each of the {self.size()} members; one has {len(tensors)}"
        self._require(len(tensors) == self.size(), name, what, rule)

    def _require_order(self, tensors: Sequence[Tensor], name: str, what: str) -> None:
        """Raise a CollectiveError if memory is not in the order of elements: torch copies a list element by element to
        or from the memory that NCCL moves (``newLikeFlat``), and so would give the elements another order.
        """
        rule = "torch gives elements of a list that is not contiguous another order; .contiguous() copies a tensor"
        self._require(all(each.is_contiguous() or has_gaps(each) for each in tensors), name, what, rule)

    def _require_part(self, own: Tensor, parts: Sequence[Tensor], member: int, name: str, what: str) -> None:
        """Raise a CollectiveError if this member's part has another size in the list of all members' parts."""
        self._require_one_each(parts, name, what)
        part = parts[member]
        rule = f"tensor {member} of its list has {part.numel()} numbers, and this rank's own one {own.numel()}"
        self._require(part.numel() == own.numel(), name, what, rule)

    # Names before torch 2.13.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def as_list(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Tensors as a list; torch passes one or a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def batch_isend_irecv(operations: Sequence[dist.P2POp]) -> list[dist.Work]:
    """``torch.distributed``'s, which groups calls only for its own class of process group."""
    group = operations[0].group or dist.group.WORLD
    if not isinstance(group, Communicator) or (group.on_host is not None and operations[0].tensor.is_cpu):
        return torch_batch(operations)  # type: ignore[arg-type]
    with c10d._coalescing_manager(group, operations[0].tensor.device, async_ops=True) as manager:
        for one in operations:
            end = {"group_dst" if one.op is dist.isend else "group_src": one.group_peer}
            one.op(one.tensor, group=group, tag=one.tag, **end)
    return manager.works


torch_batch = dist.batch_isend_irecv


def install(device: ModuleType) -> None:
    """Add NCCL to torch, as its build for CPUs lacks it.

    Args:
        device: the compiled module.
    """
    Communicator.device, Communicator.watchdog = device, Watchdog(device)
    Communicator.on_gloo = gloo_on_gpus.install(device)
    host_group.install()
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = Nccl
    c10d._NCCL_AVAILABLE = True
    dist.batch_isend_irecv = c10d.batch_isend_irecv = batch_isend_irecv
    dist.Backend.default_device_backend_map["cuda"] = "nccl"
    torch.cuda.nccl = importlib.import_module("torch.cuda.nccl")
    torch.cuda.nccl.version = lambda: (2, 27, 0)
