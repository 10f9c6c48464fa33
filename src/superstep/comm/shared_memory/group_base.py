"""OwnGroup: what our own groups share: names for ``torch.distributed``, and checks of arguments."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from superstep.comm.shared_memory.channel import SUMMED, Rule

RULES: dict[Any, Rule] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
}


# torch 2.13 renamed these two; both names mean the same.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ProcessGroupBase(dist.ProcessGroup):
    """A group that is no backend of torch's.

    Args:
        backend: its name in ``torch.distributed``.
        rank: this rank's place.
    """

    def __init__(self, backend: str, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._backend = backend
        # torch keeps these two in the backends of a group, of which this has none.
        self._name = self._desc = ""

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """What it was made for."""
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getBackendName(self) -> str:  # noqa: N802
        return self._backend

    # torch before 2.13 has other names.

    def _allgather_base(self, *given: Any) -> dist.Work:  # noqa: ANN401
        return self.all_gather_single(*given)

    def _reduce_scatter_base(self, *given: Any) -> dist.Work:  # noqa: ANN401
        return self.reduce_scatter_single(*given)

    def alltoall_base(self, *given: Any) -> dist.Work:  # noqa: ANN401
        return self.all_to_all_single(*given)


def rule_of(given: Tensor, opts: Any) -> Rule:  # noqa: ANN401
    """The rule that combines a tensor's numbers; raises ``NotImplementedError`` for unsupported ones."""
    if given.dtype not in SUMMED:
        raise NotImplementedError(f"sums of {given.dtype} over shared memory; it has {', '.join(map(str, SUMMED))}.")
    rule = dist.ReduceOp.SUM if opts is None else opts.reduceOp.op
    if rule not in RULES:
        raise NotImplementedError(f"{rule} over shared memory; what it has: {', '.join(RULES.values())}.")
    return RULES[rule]


def whole_of(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def own_of(tensor: Tensor) -> Tensor:
    """Check that a written tensor is contiguous, as a copy would not do."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of strides {tensor.stride()} is to be filled; it must lie in one piece.")
    return tensor


def rows_of(x: Tensor, counts: Any, size: int) -> list[int]:  # noqa: ANN401
    """Rows of a tensor for each of ``size`` ranks; without counts, equal parts."""
    rows = list(counts)
    if not rows:
        require_equal(len(x) % size, 0, "rows more than equal parts have")
        rows = [len(x) // size] * size
    require_equal(sum(rows), len(x), "rows for all ranks together")
    return rows


def require_parts(whole: Tensor, part: Tensor, size: int) -> None:
    """Raise ``ValueError`` unless ``whole`` is ``size`` parts like ``part``."""
    require_equal(whole.numel(), part.numel() * size, "elements of all ranks together")


def require_one_type(output: Tensor, given: Tensor) -> None:
    """Raise ``ValueError`` where the dtypes differ."""
    if output.dtype != given.dtype:
        raise ValueError(f"{given.dtype} cannot come out as {output.dtype}: both must be of one type.")


def require_equal(given: int, wanted: int, what: str) -> None:
    """Raise ``ValueError`` where the numbers differ."""
    if given != wanted:
        raise ValueError(f"{given} {what}; there must be {wanted}.")


def start(work: dist.Work | None) -> dist.Work:
    """The started work; it is never None for a member of the group."""
    assert work is not None
    return work
