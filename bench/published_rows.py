"""Rows of published tables as the cost model's values: a decoder, a layout, a cluster, a software.

The columns are those of ``tests/data/published/README.md``. What a row leaves open is tried at each plausible value
(``readings``), and the best one counts, as a careful team would have chosen it.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from superstep.cost.closed.framework import Attention, Software
from superstep.cost.closed.known_frameworks import Shorthand, shorthand, usual_attention
from superstep.cost.closed.model_numbers import DecoderNumbers, array
from superstep.cost.closed.parallel_degrees import RECOMPUTE, SCHEDULES, Layout
from superstep.errors import DataError
from superstep.hardware.catalogue import chip
from superstep.hardware.chip import Rate
from superstep.hardware.cluster import Cluster
from superstep.hardware.network import usual_cluster

Row = Mapping[str, str]
IsNamed = Callable[[Row], bool]
"""Whether a row's framework may be read by its name."""


def everyone(_row: Row) -> bool:
    """All are."""
    return True


DATA = Path(__file__).parent.parent / "tests" / "data" / "published"

_COLUMNS = frozenset(
    [
        "row_id",
        "source",
        "trust",
        "kind",
        "framework",
        "date",
        "model",
        "arch",
        "n_layers",
        "hidden",
        "n_heads",
        "n_kv_heads",
        "head_dim",
        "ffn",
        "vocab",
        "seq_len",
        "gated_mlp",
        "tied_emb",
        "n_experts",
        "top_k",
        "n_shared_experts",
        "moe_ffn",
        "n_dense_layers",
        "n_gpus",
        "dp",
        "tp",
        "sp",
        "pp",
        "vpp",
        "cp",
        "ep",
        "zero_stage",
        "fsdp_shard",
        "mbs",
        "gbs",
        "num_microbatches",
        "schedule",
        "recompute",
        "precision",
        "dist_optimizer",
        "attn_kernel",
        "comm_overlap",
        "offload",
        "gpu",
        "gpu_mem_gb",
        "gpus_per_node",
        "intra_bw_GBps",
        "inter_bw_Gbps_per_gpu",
        "step_time_s",
        "peak_mem_gb",
        "mem_kind",
        "oom",
        "notes",
        "leak_group",
    ]
)

CLASSIC = ("gpt", "neox-parallel", "glm-geglu")
"""Architectures with layer norms and biases."""
LATENT = (1536.0, 512.0)
"""Inner widths of latent attention in the published configurations of DeepSeek-V3 and Kimi K2."""


WINDOW = (128.0, 0.5)
"""Tokens that a layer of gpt-oss sees, and of how many layers, in its published configuration."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read a row."""

    decoder: DecoderNumbers
    layout: Layout
    cluster: Cluster
    software: Software


Change = Callable[[Row, Reading], Reading]
"""A row read otherwise."""


def read_rows(path: Path = DATA / "runs.csv") -> list[Row]:
    """All rows of a table.

    Raises:
        DataError: there is no such file, or it lacks columns of runs.csv.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    missing = sorted(_COLUMNS - set(rows[0])) if rows else []
    if missing:
        raise DataError(
            f"{path} lacks the columns {', '.join(missing)}; README.md beside runs.csv tells what they hold."
        )
    return rows


def number(row: Row, column: str, otherwise: float = 0.0) -> float:
    """A column's number; ``otherwise`` where it is empty or words."""
    try:
        return float(row.get(column) or otherwise)
    except ValueError:
        return otherwise


def year_of(row: Row) -> float:
    """When the software was in use; the middle of the year where the month is not told."""
    found = re.match(r"(\d{4})(?:-(\d\d)(?!\d))?", row["date"])
    if found is None:
        return 2024.0
    told = int(found[2] or 0)
    return int(found[1]) + ((told if 1 <= told <= 12 else 6) - 1) / 12


def is_timed(row: Row) -> bool:
    """Whether a step's seconds and the dims of its model are there."""
    return bool(row["step_time_s"] and row["hidden"] and row["n_layers"])


def is_layer(row: Row) -> bool:
    """Whether the seconds are those of one layer, forward and backward, without head and update."""
    return row["kind"] == "layer_fwd_bwd_ms"


def readings(row: Row, *, is_named: bool = True) -> list[Reading]:
    """Every plausible reading of a row; one where the row leaves nothing open.

    Args:
        row: what was published.
        is_named: whether the framework's name may be read; without it, it is software that nobody has heard of.

    Raises:
        ConfigError: the catalogue does not know the chip.
    """
    cluster, software, decoder = cluster_of(row), software_of(row, is_named=is_named), decoder_of_row(row)
    sizes, known = _microbatches(row), known_of(row, is_named=is_named)
    split = {"sequence_parallel": array(degrees(row)[1] > 1)} if known.splits_stream else {}
    return [
        Reading(decoder, replace(layout_of(row, microbatch, chunks), **split), cluster, software)
        for microbatch, chunks in product(sizes, _chunks(row))
    ]


def decoder_of_row(row: Row) -> DecoderNumbers:
    """The model; classic ones drop activations until 2023, latent attention has the widths of ``LATENT``."""
    is_classic = row["arch"] in CLASSIC
    is_latent = "mla" in row["arch"]
    heads = number(row, "n_heads", 1)
    experts = number(row, "n_experts")
    return DecoderNumbers(
        layers=array(1.0 if is_layer(row) else number(row, "n_layers")),
        width=array(number(row, "hidden")),
        heads=array(heads),
        kv_heads=array(number(row, "n_kv_heads", heads)),
        head_dim=array(number(row, "head_dim", number(row, "hidden") / heads)),
        ffn=array(number(row, "ffn")),
        vocab=array(0.0 if is_layer(row) else number(row, "vocab")),
        gated=array(number(row, "gated_mlp", 1.0) if row["gated_mlp"] != "0" else 0.0),
        tied=array(number(row, "tied_emb")),
        biases=array(is_classic),
        dropout=array(is_classic and year_of(row) < 2023),
        experts=array(experts),
        experts_per_token=array(number(row, "top_k")),
        shared_ffn=array(number(row, "n_shared_experts") * number(row, "moe_ffn")),
        expert_ffn=array(number(row, "moe_ffn")),
        dense_layers=array(number(row, "n_dense_layers") if experts else 0.0),
        sequence_tokens=array(number(row, "seq_len")),
        query_rank=array(LATENT[0] if is_latent else 0.0),
        key_rank=array(LATENT[1] if is_latent else 0.0),
        rotates=array(row["arch"] != "gpt"),
        frozen=array(row["kind"] == "lora_step"),
        window=array(WINDOW[0] if row["arch"].endswith("-swa") else 0.0),
        windowed_layers=array(WINDOW[1] if row["arch"].endswith("-swa") else 0.0),
    )


def degrees(row: Row) -> tuple[float, float, float, float]:
    """dp, tp, pp, cp."""
    tp, pp, cp = (max(number(row, axis, 1.0), 1.0) for axis in ("tp", "pp", "cp"))
    return number(row, "dp", max(number(row, "n_gpus", 1.0) / (tp * pp * cp), 1.0)), tp, pp, cp


def layout_of(row: Row, microbatch: float, chunks: float) -> Layout:
    """The plan, with what the row may leave open given."""
    dp, tp, pp, cp = degrees(row)
    zero = number(row, "zero_stage", 1.0 if row["dist_optimizer"] == "1" else 0.0)
    code, share = _recompute(row)
    return Layout(
        dp=array(dp),
        tp=array(tp),
        pp=array(pp),
        cp=array(cp),
        ep=array(number(row, "ep", 1.0)),
        shards=array(number(row, "fsdp_shard", dp * cp if zero else 1.0)),
        zero=array(zero),
        sequence_parallel=array(row["sp"] == "1" and tp > 1),
        chunks=array(chunks),
        schedule=array(_schedule(row, chunks)),
        microbatch=array(microbatch),
        microbatches=array(_count(row, microbatch, dp)),
        recompute=array(RECOMPUTE.index(code)),
        recomputed_layers=array(share),
        offload=array("offload" in row["offload"].lower()),
    )


def _count(row: Row, microbatch: float, dp: float) -> float:
    if number(row, "mbs") == microbatch and number(row, "num_microbatches"):
        return number(row, "num_microbatches")
    return max(number(row, "gbs", 1.0) / (microbatch * dp), 1.0)


def _microbatches(row: Row) -> list[float]:
    told = number(row, "mbs")
    if told:
        return [told]
    each = number(row, "gbs", 1.0) / degrees(row)[0]
    return [size for size in (1.0, 2.0, 4.0, 8.0) if each % size == 0] or [1.0]


def _chunks(row: Row) -> list[float]:
    told, pp = number(row, "vpp"), degrees(row)[2]
    is_interleaved = "interleaved" in row["schedule"] and "non-interleaved" not in row["schedule"]
    if told or not is_interleaved or pp == 1:
        return [told or 1.0]
    layers = math.ceil(number(row, "n_layers") / pp)
    return [float(chunks) for chunks in range(2, min(layers, 6) + 1) if layers % chunks == 0] or [1.0]


def _schedule(row: Row, chunks: float) -> int:
    named = row["schedule"]
    if "zb" in named:
        return SCHEDULES.index("zb-2p" if "2p" in named else "zb-v" if "zb-v" in named or "zbv" in named else "zb-h1")
    return SCHEDULES.index("interleaved" if chunks > 1 else "gpipe" if "gpipe" in named else "1f1b")


def _recompute(row: Row) -> tuple[str, float]:
    told = row["recompute"]
    if counted := re.search(r"of (\d+) layers", told):
        return "full", int(counted[1]) / number(row, "n_layers", 1.0)
    if told.startswith("full"):
        return "full", 1.0
    if told.endswith("offloaded"):
        # All but one projection is computed again.
        return "full", 0.75
    if told.startswith("minimal"):
        return "selective", 1.0
    if not told.startswith("selective") or "0 layers" in told:
        return "none", 1.0
    # torchtitan's default keeps every other product; elsewhere the word is Korthikanti's: attention alone.
    return ("full", 0.4) if "titan" in row["framework"].lower() else ("selective", 1.0)


def cluster_of(row: Row) -> Cluster:
    """The chips, with the links that the row tells in the place of the usual ones."""
    found = chip(row["gpu"])
    usual = usual_cluster(found, max(int(number(row, "n_gpus", 1)), 1))
    has_switch = "nvswitch" in row.get("interconnect", "").lower()
    return replace(
        usual,
        topology="switched" if has_switch else usual.topology,
        domain=found.domain if found.domain > 8 else int(number(row, "gpus_per_node", found.domain)),
        link_bytes_per_s=number(row, "intra_bw_GBps", usual.link_bytes_per_s / 1e9) * 1e9,
        network_bytes_per_s=number(row, "inter_bw_Gbps_per_gpu", usual.network_bytes_per_s * 8e-9) / 8 * 1e9,
    )


def known_of(row: Row, *, is_named: bool = True) -> Shorthand:
    """What the framework's name stands for; where it is not named, what the chip tells: a TPU runs what XLA made."""
    name = row["framework"] if is_named else "xla" if row["gpu"].startswith("TPU") else ""
    return shorthand(name, year_of(row))


def software_of(row: Row, *, is_named: bool = True) -> Software:
    """What the framework is known to do, with what the row says of its own."""
    stands_for = known_of(row, is_named=is_named)
    known, year = stands_for.software, year_of(row)
    says_overlap = "overlap on" in row["comm_overlap"].lower()
    notes = row["notes"].lower()
    has_liger = "liger" in notes
    return replace(
        known,
        compute=_format(row),
        attention=_attention(row) or usual_attention(stands_for, year),
        # torch's layer norm is one kernel; its root-mean-square norm is not.
        has_fused_norms=known.has_fused_norms or row["arch"] in CLASSIC or "rms" in row["attn_kernel"].lower(),
        has_fused_loss=has_liger or "fused ce" in notes,
        bucket_bytes=max(known.bucket_bytes, known.bucket_bytes_per_rank * degrees(row)[0]),
        overlaps_data=known.overlaps_data or says_overlap,
        overlaps_tensor=known.overlaps_tensor or says_overlap,
        sends_once=year >= 2025.5,
    )


def _format(row: Row) -> Rate:
    told = row["precision"].lower()
    if "bf16/fp8" in told:
        return "bf16"
    if "16" not in told and re.search(r"fp32|tf32|float32", told):
        return "tf32" if "tf32" in told else "fp32"
    return "fp4" if "fp4" in told else "fp8" if re.search(r"fp8|float8", told) else "bf16"


def _attention(row: Row) -> Attention | None:
    """The kernel that the row names, if it names one."""
    told = row["attn_kernel"].lower()
    if told in ("torch", "eager"):
        return "eager"
    if "unfused" in told or told == "fused":
        return "fused-softmax"
    for words, kernel in _KERNELS:
        if re.search(words, told):
            return kernel
    return "flash-2" if row["gpu"].startswith("TPU") else None


_KERNELS: Sequence[tuple[str, Attention]] = (
    (r"fa-?3|fa-?4|attention-?3|cudnn", "flash-3"),
    (r"triton|v1(?!.*v2)|attention 1", "flash-1"),
    (r"attention|fa-?2|sdpa|flash|splash", "flash-2"),
)
