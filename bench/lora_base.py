"""The loss of adapters beside a base in few bits: the same adapters, trained beside bf16, nf4 and int8 weights.

    superstep train --model.ffn 384 --state.dir runs/base
    python -m bench.lora_base runs/base [--seeds 3] [--steps 120]

The text is torch's own Python source, which the base has not seen. Each seed trains every base in turn, on one rank in
bf16, from the same factors on the same batches. The figure is the validation loss over that beside bf16, as a mean over
the seeds with the interval of 1.96 standard errors. The result is written after each seed.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import torch

from bench.machine import write_result
from bench.trained_text import compare_losses, open_trainer, train_to_end
from superstep.cost.program.flops import rank_parameters
from superstep.data.preparation.prepare import prepare
from superstep.plan.block_weights import BlockFormat
from superstep.plan.config import (
    DataConfig,
    LoraConfig,
    ModelConfig,
    NumericsConfig,
    PlanConfig,
    RunConfig,
    TrainConfig,
)
from superstep.plan.resolution.resolve import Resolved, resolve
from superstep.train.loop import evaluate

RESULT = Path(__file__).parent / "results" / "lora_base.json"
BASES: dict[str, BlockFormat | None] = {"bf16": None, "nf4": "nf4", "int8": "int8"}
BEFORE = "bf16"


def run_of(base: Path, model: ModelConfig, data: DataConfig, seed: int, count: int, name: str) -> Resolved:
    """The run of one base and seed."""
    return resolve(
        RunConfig(
            model=model,
            data=data,
            train=TrainConfig(steps=count, warmup_steps=10, seed=seed, lr=2e-3, eval_batches=16),
            plan=PlanConfig(dp=1, microbatch=8),
            numerics=NumericsConfig(compute="bf16"),
            lora=LoraConfig(rank=8, alpha=16.0, base=BASES[name]),
        )
    )


def train_beside(run: Resolved, corpus: Path) -> dict[str, float]:
    """The validation losses before and after training."""
    with open_trainer(run, corpus) as trainer:
        position = trainer.start()
        before = evaluate(trainer, position).loss
        return {"before": before, "loss": evaluate(trainer, train_to_end(trainer, position)).loss}


def bytes_per_weight(run: Resolved) -> float:
    """Bytes of the base's linears in blocks, for each of their weights."""
    matrices = [p.dims for owned in run.outline.owned for p in owned if p.block_format]
    return sum(unit.count_packed_on_rank(1) for unit in rank_parameters(run)) / sum(map(math.prod, matrices))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="a run whose widths are multiples of 64")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = ModelConfig(name="demo", ffn=384, weights=str(options.base))
    data = DataConfig(
        corpus=(str(Path(torch.__file__).parent / "nn"),), tokenizer=str(options.base / "data" / "tokenizer.json")
    )
    rows: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare(data, 2048, Path(folder)).folder
        for seed in range(options.seeds):
            runs = {name: run_of(options.base, model, data, seed, options.steps, name) for name in BASES}
            rows.append({name: train_beside(run, corpus) for name, run in runs.items()})
            print(seed, rows[-1], flush=True)
            write_result(
                options.out,
                steps=options.steps,
                seeds=rows,
                over_bf16={name: compare_losses(rows, name, BEFORE) for name in BASES if name != BEFORE},
                bytes_per_weight={name: round(bytes_per_weight(run), 4) for name, run in runs.items() if BASES[name]},
            )


if __name__ == "__main__":
    main()
