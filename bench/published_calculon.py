"""Calculon's seconds for the rows that it can price, beside which ours are put.

    python -m bench.published_calculon --source CHECKOUT --json OUT
    python -m bench.published --calculon OUT

CHECKOUT is a copy of github.com/calculon-ai/calculon; its stock systems are taken as they are, but for memory, which is
made endless so that a step is priced that Calculon thinks too large. What a row leaves open, and what Calculon asks for
and no row says, is tried both ways, and the fastest counts, as with ours. It knows dense models on A100 and H100 in 16
bits, with dp, tp and pp; a gate is counted as half a feed-forward more, ZeRO as a sharded optimizer.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.published_refused import kept
from bench.published_rows import DATA, Row, is_layer, is_timed, number, read_rows, readings

SYSTEMS = {"A100-80GB-SXM": "a100_80g", "A100-40GB-SXM": "a100_80g", "H100-SXM": "h100_80g_nvl8"}
ENDLESS = 10**6
"""GiB."""
RECOMPUTE = ("none", "attn_only", "full")


def main(argv: Sequence[str] | None = None) -> None:
    """Price and write."""
    parser = argparse.ArgumentParser(prog="python -m bench.published_calculon", description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="a copy of Calculon")
    parser.add_argument("--json", type=Path, required=True, help="where its seconds go, by row_id")
    options = parser.parse_args(argv)
    sys.path.insert(0, str(options.source))
    # Its searches write tables; its price needs none.
    for name in ("pandas", "psutil"):
        sys.modules.setdefault(name, ModuleType(name))
    rows = kept([row for table in ("runs.csv", "runs_2.csv") for row in read_rows(DATA / table)])[0]
    systems = {name: _system(options.source, name) for name in set(SYSTEMS.values())}
    found = {}
    for row in filter(is_priced, rows):
        seconds = [each for each in _each(row, systems[SYSTEMS[row["gpu"]]]) if each is not None]
        if seconds:
            found[row["row_id"]] = min(seconds)
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{len(found)} rows")


def is_priced(row: Row) -> bool:
    """Whether it is a step that Calculon knows."""
    is_plain = not number(row, "n_experts") and number(row, "cp", 1.0) <= 1 and row["kind"] == "pretrain_step"
    is_half = "8" not in row["precision"] and "fp4" not in row["precision"].lower()
    return is_timed(row) and not is_layer(row) and is_plain and is_half and row["gpu"] in SYSTEMS


def _system(source: Path, name: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((source / "systems" / f"{name}.json").read_text(encoding="utf-8"))
    told["mem1"]["GiB"] = ENDLESS
    return told


def _each(row: Row, told: dict[str, Any]) -> Iterator[float | None]:
    from calculon import System  # type: ignore[import-not-found]
    from calculon.llm import Llm  # type: ignore[import-not-found]

    heads = number(row, "n_heads", 1)
    wide = 1.5 if row["gated_mlp"] != "0" else 1.0
    application = Llm.Application(
        {
            "hidden": int(number(row, "hidden")),
            "feedforward": int(wide * number(row, "ffn")),
            "seq_size": int(number(row, "seq_len")),
            "attn_heads": int(heads),
            "attn_size": int(number(row, "head_dim", number(row, "hidden") / heads)),
            "num_blocks": int(number(row, "n_layers")),
        }
    )
    for reading, is_fused, overlaps in product(readings(row), (False, True), (False, True)):
        model = Llm(application, logging.getLogger("calculon"))
        try:
            model.compile(System(told), Llm.Execution.from_json(_execution(row, reading.layout, is_fused, overlaps)))
            model.run(System(told))
        except (AssertionError, Llm.Error):
            # A degree that it does not split by, or an overlap without anything to overlap.
            yield None
        else:
            yield float(model.get_total_time())


def _execution(row: Row, layout: Any, is_fused: bool, overlaps: bool) -> dict[str, Any]:
    dp, tp, pp = (int(getattr(layout, axis)) for axis in ("dp", "tp", "pp"))
    batch = int(layout.microbatch) * int(layout.microbatches) * dp
    return {
        "num_procs": dp * tp * pp,
        "tensor_par": tp,
        "pipeline_par": pp,
        "data_par": dp,
        "tensor_par_net": 0 if tp <= 8 else 1,
        "pipeline_par_net": 0 if tp * pp <= 8 else 1,
        "data_par_net": 0 if dp * tp * pp <= 8 else 1,
        "batch_size": batch,
        "microbatch_size": int(layout.microbatch),
        "datatype": "float16",
        "fused_activation": is_fused,
        "attention_type": "multihead",
        "activation_recompute": RECOMPUTE[int(layout.recompute)],
        "pipeline_interleaving": int(layout.chunks),
        "optimizer_sharding": float(layout.zero) > 0 and dp > 1,
        "tensor_par_comm_type": "rs_ag" if float(layout.sequence_parallel) else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": False,
        "data_par_overlap": overlaps,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }


if __name__ == "__main__":
    main()
