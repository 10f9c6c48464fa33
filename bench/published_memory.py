"""Peak memory of published runs, and which of their layouts fit.

A published peak is what torch allocated, what its allocator reserved, or what nvidia-smi saw: ``mem_kind`` says which.
Where it does not, it is read as reserved, and in GiB, as programs print it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bench.published_interval import alike, quantile, weights_of
from bench.published_rows import Change, IsNamed, Reading, Row, everyone, known_of, number, readings, year_of
from superstep.cost.closed.framework import price_of, stack_fields
from superstep.cost.closed.framework_arrays import Stack
from superstep.cost.closed.framework_memory import KeptMemory, keeping_of
from superstep.cost.closed.memory import COMMUNICATOR_BYTES, CONTEXT_BYTES, USABLE, Footprint, footprint
from superstep.cost.closed.model_numbers import DecoderNumbers, array
from superstep.cost.closed.parallel_degrees import RECOMPUTE, Layout
from superstep.cost.closed.uncertainty import SHARE
from superstep.errors import ConfigError
from superstep.hardware.units import Array

GIB, GB = float(2**30), 1e9


def is_fitting(
    total: Footprint, layout: Layout, memory_bytes: Array, *, is_planned: bool = False
) -> npt.NDArray[np.bool_]:
    """Whether each plan's fullest rank fits into a chip's memory, with what no allocator counts.

    Args:
        memory_bytes: of the chip.
        is_planned: a compiler has placed every tensor in advance (XLA), without gaps.
    """
    if is_planned:
        return np.asarray(total.bytes <= USABLE * memory_bytes)
    beside = CONTEXT_BYTES + np.where(layout.world > 1, COMMUNICATOR_BYTES, 0.0)
    return np.asarray(total.reserved + beside <= USABLE * memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Rows and what each would hold."""

    rows: Sequence[Row]
    model: DecoderNumbers
    layout: Layout
    found: Footprint
    memory_bytes: Array
    is_planned: npt.NDArray[np.bool_]

    @property
    def fits(self) -> Array:
        """1 where the fullest rank fits into its chip; XLA places all tensors beforehand."""
        planned, allocated = (
            is_fitting(self.found, self.layout, self.memory_bytes, is_planned=each) for each in (True, False)
        )
        return np.where(self.is_planned, array(planned), array(allocated))

    @property
    def share(self) -> Array:
        """Of its chip's memory, all that each takes, with what no allocator counts."""
        beside = CONTEXT_BYTES + np.where(self.layout.world > 1, COMMUNICATOR_BYTES, 0.0)
        taken: Array = (np.broadcast_to(self.found.reserved, (len(self.rows),)) + beside) / self.memory_bytes
        return taken

    @property
    def reported(self) -> Array:
        """The peak as each row's figure counts it, in its unit."""
        beside = CONTEXT_BYTES + np.where(self.layout.world > 1, COMMUNICATOR_BYTES, 0.0)
        kinds = [row["mem_kind"] for row in self.rows]
        is_allocated = np.array([re.search("torch max|allocated|GB peak", kind) is not None for kind in kinds])
        is_all = np.array(["nvidia-smi" in kind for kind in kinds])
        unit = np.array([GB if re.search(r"to GB|converted|^GB|titan", kind) else GIB for kind in kinds])
        asked = np.where(is_allocated, self.found.bytes, self.found.reserved + np.where(is_all, beside, 0.0))
        value: Array = asked / unit
        return value


def as_it_is(_row: Row, reading: Reading) -> Reading:
    """No change."""
    return reading


def hold(rows: Sequence[Row], is_named: IsNamed = everyone, change: Change = as_it_is) -> Held:
    """The footprints of rows that the catalogue knows; where a microbatch is open, the smallest one counts."""
    known: list[tuple[Row, bool, tuple[DecoderNumbers, Layout, Stack, KeptMemory, Array]]] = []
    for row in rows:
        named = is_named(row)
        try:
            reading = change(row, readings(row, is_named=named)[0])
        except ConfigError:
            continue
        known.append((row, reading.software.holds.places_tensors, values(row, reading, is_named=named)))
    parts = list(zip(*(each for _, _, each in known), strict=True))
    model, layout, stack, keeping = (stack_fields(part) for part in parts[:4])
    return Held(
        rows=[row for row, _, _ in known],
        model=model,
        layout=layout,
        found=footprint(model, layout, stack, keeping),
        memory_bytes=np.stack(parts[4]),
        is_planned=np.array([planned for _, planned, _ in known], dtype=bool),
    )


def leanest(row: Row) -> Row:
    """A row as it holds least where it leaves open what it keeps: whoever publishes a run's time made it fit.

    That a recipe has no word of recomputation leaves it open: Megatron Bridge's for Llama 3 70B under FSDP keep the
    activations of 20 to 30 layers in the host's memory (cpu_offloading_num_layers).
    """
    is_open = row["recompute"].startswith(("unknown", "recipe")) or "no recompute keys" in row["recompute"]
    return {**row, "recompute": "full"} if is_open else row


def values(row: Row, reading: Reading, *, is_named: bool) -> tuple[DecoderNumbers, Layout, Stack, KeptMemory, Array]:
    """A row as footprints take it, and its chip's memory."""
    software = reading.software
    if "liger" in row["notes"].lower():
        # Liger's kernels are for norms, rotations and activations too.
        software = replace(software, has_fused_norms=True, has_fused_kernels=True)
    drops = array(reading.decoder.dropout > 0 or year_of(row) < known_of(row, is_named=is_named).drops_until)
    # The format changes no rates here, and not every chip has every format.
    stack = price_of(reading.cluster, replace(software, compute="bf16"))[1]
    stack = replace(stack, is_eight_bit=array(software.compute in ("fp8", "fp4")))
    memory = array(number(row, "gpu_mem_gb", reading.cluster.chip.memory_bytes / GIB) * GIB)
    layout = reading.layout
    if row["recompute"].startswith("selective") and software.holds.selects_products > 0:
        # Priced as so much of full recomputation; what it keeps is counted product by product.
        layout = replace(layout, recompute=array(RECOMPUTE.index("selective")), recomputed_layers=array(1))
    if row["recompute"].endswith("offloaded"):
        # What is not computed again waits in the host's memory.
        layout = replace(layout, recomputed_layers=array(1))
    return replace(reading.decoder, dropout=drops), layout, stack, keeping_of(software.holds), memory


@dataclass(frozen=True, slots=True)
class Peaks:
    """Rows that tell their peak memory, and ours in each row's own unit."""

    rows: Sequence[Row]
    published: Array
    predicted: Array

    @property
    def errors(self) -> Array:
        """Relative."""
        return np.abs(self.predicted / self.published - 1)


@dataclass(frozen=True, slots=True)
class Labels:
    """Layouts, whether they were out of memory, whether we say so, and which share of it we say they take."""

    rows: Sequence[Row]
    published: Array
    predicted: Array
    share: Array

    def of(self, mask: Array) -> str:
        """Layouts, those out of memory, wrongly refused, wrongly let through, the share that is right."""
        told, ours = self.published[mask], self.predicted[mask]
        counts = f"{len(told):5} {told.sum():5} {(ours & ~told).sum():6} {(~ours & told).sum():7}"
        return f"{counts}  {(ours == told).mean():.1%}"

    @property
    def right(self) -> tuple[int, float]:
        """All layouts, those of sources without any failure too, and the share that is right."""
        share = float((self.predicted == self.published).mean()) if self.rows else float("nan")
        return len(self.rows), share

    @property
    def wrong(self) -> tuple[int, int]:
        """Layouts that ran and are refused, those that failed and are let through."""
        return int((self.predicted & ~self.published).sum()), int((~self.predicted & self.published).sum())


def peaks_of(rows: Sequence[Row], is_named: IsNamed = everyone, change: Change = as_it_is) -> Peaks:
    """The peaks of the rows that tell one."""
    told = [row for row in rows if number(row, "peak_mem_gb")]
    held = hold(told, is_named, change) if told else None
    if held is None:
        return Peaks([], array([]), array([]))
    return Peaks(held.rows, np.array([number(row, "peak_mem_gb") for row in held.rows]), held.reported)


def labels_of(rows: Sequence[Row], is_named: IsNamed = everyone, change: Change = as_it_is) -> Labels:
    """Whether the layouts fit: those that are told not to, and those that were timed."""
    told = [leanest(row) for row in rows if row["oom"] == "1" or row["step_time_s"]]
    held = hold(told, is_named, change) if told else None
    if held is None:
        return Labels([], np.zeros(0, dtype=bool), np.zeros(0, dtype=bool), np.zeros(0))
    return Labels(held.rows, np.array([row["oom"] == "1" for row in held.rows]), held.fits == 0, held.share)


def by_share(labels: Labels) -> list[dict[str, float]]:
    """How many layouts were out of memory, by the share of it that they were predicted to take."""
    edges = (0.0, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1, 1e9)
    found = []
    for low, high in itertools.pairwise(edges):
        mine = (labels.share >= low) & (labels.share < high)
        if mine.any():
            out = int(labels.published[mine].sum())
            found.append({"from": low, "to": min(high, 9.0), "rows": int(mine.sum()), "out": out})
    return found


def peaks_interval(peaks: Peaks) -> tuple[float, float, float]:
    """Factors that hold 80% of the peaks, and the share of them that those of the other stacks hold."""
    ratios, stacks = peaks.published / peaks.predicted, np.array([row["leak_group"] for row in peaks.rows])
    if not len(ratios):
        return float("nan"), float("nan"), float("nan")
    inside = np.zeros(len(ratios), dtype=bool)
    for stack in set(stacks.tolist()) if len(set(stacks.tolist())) > 1 else ():
        low, high = _factors(ratios[stacks != stack], stacks[stacks != stack])
        inside[stacks == stack] = (ratios[stacks == stack] >= low) & (ratios[stacks == stack] <= high)
    return (*_factors(ratios, stacks), float(inside.mean()))


def _factors(ratios: Array, stacks: npt.NDArray[np.str_]) -> tuple[float, float]:
    weights = weights_of(stacks.tolist(), alike(np.log(ratios), stacks.tolist()))
    return quantile(ratios, weights, (1 - SHARE) / 2), quantile(ratios, weights, (1 + SHARE) / 2)


def print_peaks(peaks: Peaks) -> None:
    """Errors by source, and the rows beyond 15%."""
    sources = np.array([row["source"] for row in peaks.rows])
    print(f"\n{'peak memory':26}{'rows':>6}{'median':>9}{'90th':>8}{'bias':>7}")
    for source in dict.fromkeys(sources):
        own = sources == source
        error, bias = peaks.errors[own], np.median((peaks.predicted / peaks.published)[own])
        print(f"{source:26}{own.sum():6}{np.median(error):9.1%}{np.quantile(error, 0.9):8.1%}{bias:7.2f}")
    for row, told, ours in zip(peaks.rows, peaks.published, peaks.predicted, strict=True):
        if abs(ours / told - 1) > 0.15:
            print(f"  beyond 15%: {row['row_id']:24} published {told:6.1f}, ours {ours:6.1f}")


def print_labels(labels: Labels) -> None:
    """Which layouts fit, by source and, where some did not, by kernel and recomputation."""
    sources = np.array([row["source"] for row in labels.rows])
    print(f"\n{'out of memory':44} rows   oom  false  missed  right")
    for source in dict.fromkeys(sources):
        print(f"{source:43}{labels.of(sources == source)}")
    groups = np.array([f"{row['recompute'][:9]}, {row['attn_kernel'][:30]}" for row in labels.rows])
    mixed = np.isin(sources, sources[labels.published])
    for group in dict.fromkeys(groups[mixed]):
        print(f"  {group:41}{labels.of((groups == group) & mixed)}")
    print()
