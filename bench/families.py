"""A training step of each model family beside transformers' own model, compiled; and its memory beside its prediction.

    python -m bench.families [--only qwen3.5 gpt-oss] [--out FILE]

Each family is its published model with fewer and narrower layers, large on a GPU and small on a CPU. Both sides train
it in bf16 with fp32 master weights, on the same random tokens, a step each in turn: ``bench.gpu_train`` tells how. The
peer's attention is torch's fused one, or flex attention on a GPU where the model has no other that is fused.
Memory is that of our eager steps, on a GPU alone. ``--warm``: compile and write no figures, so that families can be
compiled side by side before they are measured in turn.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers

from bench import gpu_train
from bench.gpu import Driven, predicted_bytes
from bench.machine import write_result
from superstep.comm.device import Device, gpus, pick
from superstep.launch.ranks import World
from superstep.plan.config import DataConfig, ModelConfig, NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.model.hf_config import to_hf_config
from superstep.plan.model.shape import ModelShape
from superstep.plan.model.sizes.named_sizes import SHAPES
from superstep.plan.resolution.resolve import Resolved, resolve

FAMILIES = {
    "qwen3": "qwen3-8b",
    "qwen3-moe": "qwen3-30b-a3b",
    "gemma2": "gemma2-2b",
    "gemma3": "gemma3-1b",
    "olmo3": "olmo3-7b",
    "qwen3.5": "qwen3.5-9b",
    "qwen3-next": "qwen3-next-80b-a3b",
    "gpt-oss": "gpt-oss-20b",
    "deepseek-v3": "deepseek-v3",
}
"""The published model of each family that is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What is left of a published model, and the batch."""

    layers: int
    width: int
    heads: int
    head_dim: int
    ffn: int
    vocab: int
    window: int
    experts: int
    tokens: int
    sequences: int
    microbatch: int

    def shape(self, name: str) -> ModelShape:
        """The family with these sizes: its last layer attends to all tokens, where layers differ."""
        whole = SHAPES[FAMILIES[name]]
        cut = replace(
            whole,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            kv_heads=max(1, self.heads * whole.kv_heads // whole.heads),
            head_dim=self.head_dim,
            ffn=self.ffn,
            vocab=self.vocab,
            max_tokens=max(self.tokens, 4096),
            window=None if whole.window is None else self.window,
            full_layers=(self.layers - 1,) if whole.full_layers else (),
        )
        if whole.moe is not None:
            groups = min(whole.moe.groups, self.experts // 2)  # a group is ranked by its two best
            moe = replace(
                whole.moe,
                experts=self.experts,
                experts_per_token=min(whole.moe.experts_per_token, self.experts // 2),
                balance_weight=0.0,  # transformers adds it on request alone
                groups=groups,
                groups_per_token=min(whole.moe.groups_per_token, groups // 2 or 1),
            )
            cut = replace(cut, moe=moe, ffn=self.ffn // 4)
        if whole.dense_layers:
            cut = replace(cut, dense_layers=1, dense_ffn=self.ffn)
        if whole.latent is not None:
            cut = replace(cut, latent=replace(whole.latent, query_rank=self.width // 2, key_rank=self.width // 4))
        if whole.delta is not None:
            delta = replace(
                whole.delta,
                key_heads=self.heads // 2,
                value_heads=self.heads,
                key_dim=self.head_dim,
                value_dim=self.head_dim,
            )
            cut = replace(cut, delta=delta)
        return cut


LARGE = Cut(
    layers=4,
    width=2048,
    heads=16,
    head_dim=128,
    ffn=6144,
    vocab=8192,
    window=512,
    experts=8,
    tokens=2048,
    sequences=8,
    microbatch=2,
)
SMALL = Cut(
    layers=2,
    width=256,
    heads=4,
    head_dim=64,
    ffn=768,
    vocab=2048,
    window=128,
    experts=8,
    tokens=256,
    sequences=4,
    microbatch=2,
)


SIDES = ("superstep compiled", "superstep", "transformers compiled", "transformers")
"""All that can be measured, ours first."""


def run_of(config: Path, cut: Cut, *, is_compiled: bool) -> Resolved:
    """The run on one rank."""
    return resolve(
        RunConfig(
            model=ModelConfig(name=str(config)),
            data=DataConfig(sequence_tokens=cut.tokens),
            train=TrainConfig(batch_sequences=cut.sequences),
            plan=PlanConfig(dp=1, zero=0, microbatch=cut.microbatch),
            numerics=NumericsConfig(compute="bf16", compile=is_compiled),
        )
    )


def family(name: str, cut: Cut, device: Device, rounds: int, names: Sequence[str] = SIDES) -> dict[str, object]:
    """Its figures; with no rounds, its steps are compiled and that is all."""
    shape = cut.shape(name)
    text = torch.randint(shape.vocab, (cut.sequences, cut.tokens), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(to_hf_config(shape)), encoding="utf-8")
        theirs = transformers.AutoConfig.from_pretrained(folder)
        eager, compiled = (run_of(path, cut, is_compiled=each) for each in (False, True))
        has_fused = shape.style.soft_cap is None and not shape.style.attention_sinks
        attention = "sdpa" if has_fused else "flex_attention" if device.kind == "cuda" else "eager"

        def peer(*, is_compiled: bool) -> gpu_train.Step:
            return gpu_train.TransformersSide(
                device, theirs, text, cut.microbatch, is_compiled=is_compiled, attention=attention
            )

        world = World(0, 1, device)
        makes = {
            "superstep compiled": lambda: Driven(compiled, world).step,
            "superstep": lambda: Driven(eager, world).step,
            "transformers compiled": lambda: peer(is_compiled=True),
            "transformers": lambda: peer(is_compiled=False),
        }
        if rounds == 0:
            for side in names:
                if "compiled" in side:
                    gpu_train.made(side, makes[side], device)
                    gc.collect()
            return {}
        sides = [gpu_train.made(side, makes[side], device) for side in names]
    tokens = cut.tokens * cut.sequences
    figures: dict[str, object] = {
        "attention of transformers": attention,
        "sides": gpu_train.measured(sides, device, rounds, tokens, 0.0),
    }
    if device.kind == "cuda":
        figures["predicted_bytes"] = predicted_bytes(eager)
    return figures


def main(argv: list[str]) -> int:
    """Measure the families in turn; one that fails is noted with its last words, and the next one runs."""
    options = argparse.ArgumentParser(prog="python -m bench.families", description=__doc__.splitlines()[0])
    options.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), metavar="FAMILY")
    options.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, metavar="SIDE", help=", ".join(SIDES))
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--warm", action="store_true")
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "families.json")
    asked = options.parse_args(argv)
    device = pick(0) if gpus() else Device("cpu")
    cut = LARGE if gpus() else SMALL
    found: dict[str, dict[str, object]] = {}
    for name in asked.only:
        start_s = time.perf_counter()
        try:
            found[name] = family(name, cut, device, 0 if asked.warm else asked.rounds, asked.sides)
        except Exception as problem:  # noqa: BLE001 - whatever one family meets, the others are to run
            found[name] = {"failed": f"{type(problem).__name__}: {problem}"[:600]}
            traceback.print_exc()
        gc.collect()
        torch.compiler.reset()
        print(f"{name:12}{time.perf_counter() - start_s:>8.0f} s  {told(found[name])}", flush=True)
        if not asked.warm:
            write_result(asked.out, cut=str(cut), transformers=transformers.__version__, families=found)
    return 1 if any("failed" in figures for figures in found.values()) else 0


def told(figures: dict[str, object]) -> str:
    """Its line."""
    if "failed" in figures:
        return f"FAILED {figures['failed']}"
    rows: list[dict[str, float]] = figures.get("sides", [])  # type: ignore[assignment]
    if not rows:
        return "compiled"
    ratio = f"{rows[0]['side']} is faster by"
    said = [f"{row['side']} {row['step_s'] * 1e3:.1f} ms x{row[ratio]:.2f}" for row in rows]
    if "predicted_bytes" in figures:
        peak = next(row["peak_bytes"] for row in rows if row["side"] == "superstep")
        said.append(f"memory {peak / figures['predicted_bytes']:.3f} of predicted")  # type: ignore[operator]
    return ", ".join(said)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
