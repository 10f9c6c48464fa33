"""The attention of a rank, and the positions of its tokens: those of the sequence, or of their documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from superstep.comm.device import Device
from superstep.comm.mesh import Group, Mesh
from superstep.engine.attention.document_attention import DocumentAttend
from superstep.engine.exact.attention import ExactAttend, WholeSequence
from superstep.engine.layers.fused import wants_kernels
from superstep.engine.parallel.ring import RingAttend
from superstep.engine.parallel.state_passing import ScanOverRanks, list_positions
from superstep.engine.parallel.ulysses import UlyssesAttend
from superstep.engine.parallel.zigzag import gather_kv, scatter_sum
from superstep.kernels.attention import has_tiles, missing
from superstep.model.decoder import Attend, flash
from superstep.model.mixers.gated_delta import Scan, WholeScan
from superstep.numerics.fixed_point import ACTIVATION, RangeExcess
from superstep.numerics.noise import EVALUATION, SamplePlace
from superstep.numerics.sending import send
from superstep.plan.resolution.resolve import Resolved
from superstep.plan.sharding.sequence import positions


@dataclass(frozen=True, slots=True)
class GatheredKeys:
    """Exchange of exact mode: every rank gathers keys and values of all context-parallel ranks."""

    group: Group

    def gather(self, x_BsKH: Tensor) -> Tensor:
        """The whole sequence, in order."""
        return gather_kv(x_BsKH, self.group)

    def scatter_sum(self, x_BSKH: Tensor) -> Tensor:
        """The sum over ranks, for this rank's own tokens."""
        return scatter_sum(x_BSKH, self.group)


@dataclass(frozen=True, slots=True)
class SequenceView:
    """Attention and positions of a microbatch's sequences, and the place of its random numbers.

    Attributes:
        attend: the attention of the plan.
        positions: of this rank's tokens, [S] or [B, S], where they are not 0, 1, 2, ...
        scan: of linear attention; None in a model without.
        place: of random numbers.
        numbers: of this rank's tokens among the equal ones of their row, where it has not all tokens: [B, S].
    """

    attend: Attend
    positions: Tensor | None
    scan: Scan | None = None
    place: SamplePlace = EVALUATION
    numbers: Tensor | None = None


def build_sight(run: Resolved, mesh: Mesh, excess: RangeExcess) -> Callable[[Tensor | None], SequenceView]:
    """A function from document starts to a microbatch's sight: int64 [B, S] on the host, of the whole sequences on
    every rank; None where attention crosses documents. Overflows of exact sums are noted in ``excess``.
    """
    tokens, cp = run.targets_of_row, mesh.shape.cp
    held = torch.tensor(positions(tokens, cp=cp, rank=mesh.at.cp if cp > 1 else 0))
    at = None if cp == 1 else held.to(mesh.device.torch)
    across = SequenceView(_attend(run, mesh, None, excess), at, _scan(run, mesh, None))

    def sight(starts: Tensor | None) -> SequenceView:
        if starts is None:
            return across
        # One tensor for all units: its tables of positions are made once.
        inside = send(held - starts[:, held], mesh.device.torch)
        return SequenceView(_attend(run, mesh, starts, excess), inside, _scan(run, mesh, starts))

    return sight


def kernel_of(run: Resolved, device: Device) -> str:
    """The implementation of attention, in words."""
    if run.plan.grain is not None:
        return "in exact mode"
    if not wants_kernels(run, device):
        return "by torch"
    why = missing(device.torch)
    if why:
        return f"by torch ({why})"
    if device.kind != "cpu":
        return "in Triton"
    return "in C++ by AMX" if run.config.numerics.compute == "bf16" and has_tiles() else "in C++"


def is_compiled(run: Resolved, device: Device) -> bool:
    """Whether ``kernels.attention`` computes attention."""
    return wants_kernels(run, device) and not missing(device.torch)


def _scan(run: Resolved, mesh: Mesh, starts: Tensor | None) -> Scan | None:
    if run.decoder is None or run.decoder.delta is None:
        return None
    taps, is_exact, device = run.decoder.delta.taps, run.plan.grain is not None, mesh.device.torch
    if mesh.cp is not None:
        at = None if starts is None else send(list_positions(starts, taps, mesh.cp), device)
        return ScanOverRanks(mesh.cp, starts, at, is_exact)
    if starts is None:
        return WholeScan(is_exact=is_exact)
    inside = torch.arange(starts.shape[1]) - starts
    return WholeScan(starts, send(F.pad(inside, (0, taps - 1)).unsqueeze(1), device), is_exact)


def _attend(run: Resolved, mesh: Mesh, starts: Tensor | None, excess: RangeExcess) -> Attend:
    grain, group = run.plan.grain, mesh.cp
    if grain is None:
        in_kernel = is_compiled(run, mesh.device)
        if group is not None and run.plan.context == "ring":
            return RingAttend(group, starts, in_kernel)
        if starts is not None and in_kernel:  # once for all units
            starts = starts.to(mesh.device.torch)
        has_sinks = run.decoder is not None and run.decoder.style.attention_sinks
        # The sinks need a kernel that gives the log-sum-exp.
        is_plain = starts is None and not in_kernel and not has_sinks
        whole = flash if is_plain else DocumentAttend(starts, in_kernel)
        return whole if group is None else UlyssesAttend(group, whole)
    there = None if starts is None else starts.to(mesh.device.torch)
    grid = ACTIVATION.of(grain.chunks, "the gradient of a key or a value", excess)
    if group is not None and run.plan.context == "ring":
        return ExactAttend(positions(grain.chunks, cp=mesh.shape.cp, rank=mesh.at.cp), GatheredKeys(group), grid, there)
    whole = ExactAttend(range(grain.chunks), WholeSequence(), grid, there)
    return whole if group is None else UlyssesAttend(group, whole)
