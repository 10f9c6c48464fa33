"""How far fast mode lies from exact mode: what ``numerics.tolerance`` is derived from.

Exact mode on one rank has one set of bits for a model, whatever the layout. Three distances, largest over tensors and
layouts, for each dtype, dense and with experts:

    order    fast mode on every layout of 1, 2 and 4 ranks, from exact mode in the same dtype: sums in another order
    dtype    exact mode from the fp32 reference, which is written without the engine: the dtype's own rounding
    prove    fast mode on those layouts from the fp32 reference: what ``superstep prove`` compares

fp16 has no exact mode, so of it there is the last one alone; and so it is of moments in fewer bits, in fp32, over three
steps.

    python -m bench.tolerance [--worlds 1 2 4]
    python -m bench.tolerance --moments 8bit bf16 --worlds 1 2 --json bench/results/moments-tolerance.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.machine import write_result
from superstep.data.batch import Batch
from superstep.launch.ranks import World, launch
from superstep.plan.config import DataConfig, ModelConfig, NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.optimizers import MomentFormat
from superstep.plan.resolution.resolve import Resolved, resolve
from superstep.train.proof.all_layouts import layouts
from superstep.train.proof.compare import Difference
from superstep.train.proof.prove_exact import write_bits
from superstep.train.proof.prove_tolerance import differences as differences_of
from superstep.train.proof.prove_tolerance import write_reference

STEPS = 2
TOKENS = 32
SEQUENCES = 8


def config_of(dtype: str, model: str) -> RunConfig:
    """A small model with every kind of layer; large ones have longer sums, of which ``numerics.tolerance`` speaks."""
    experts: dict[str, object] = {"ffn": 64}
    if model == "experts":
        experts = {"experts": 4, "router": "dropless", "ffn": 32, "balance_weight": 0.1}
    return RunConfig(
        model=ModelConfig(
            name="tiny", layers=4, width=32, heads=8, kv_heads=8, head_dim=4, vocab=64, qk_norm=True, **experts
        ),
        data=DataConfig(sequence_tokens=TOKENS),
        train=TrainConfig(batch_sequences=SEQUENCES, warmup_steps=1, steps=10, clip_norm=0.2, lr=5e-4),
        plan=PlanConfig(microbatch=1),
        numerics=NumericsConfig(compute=dtype),
    )


def batches(steps: int = STEPS) -> tuple[Batch, ...]:
    """Made-up tokens."""
    random = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 64, (SEQUENCES, TOKENS + 1), generator=random) for _ in range(steps)]
    return tuple(Batch({"tokens": t[:, :-1].contiguous()}, t[:, 1:].contiguous(), SEQUENCES * TOKENS) for t in texts)


def differences(world: World, runs: Sequence[Resolved], folder: Path, steps: int = STEPS) -> list[Difference]:
    """Every compared value of every layout."""
    return [d for run in runs for d in differences_of(world, run, batches(steps), folder)]


def measure(dtype: str, model: str, worlds: Sequence[int]) -> dict[str, dict[str, float]]:
    """The three distances, each by kind of value."""
    config = config_of(dtype, model)
    with tempfile.TemporaryDirectory(prefix="superstep-tolerance-") as name:
        distances = ("prove",) if dtype == "fp16" else ("order", "dtype", "prove")
        found: dict[str, list[Difference]] = {distance: [] for distance in distances}
        kinds = {(tied, packed) for tied in (True, False) for packed in (True,)}
        for tied, _ in sorted(kinds):
            plain, bits = Path(name) / f"plain-{tied}", Path(name) / f"bits-{tied}"
            plain.mkdir()
            bits.mkdir()
            alone = resolve(replace(config, model=replace(config.model, tied=tied)))
            write_reference(alone.shape, config.train, batches(), plain)
            if "dtype" in found:
                exact = replace(config, numerics=replace(config.numerics, exact=True))
                alone = resolve(replace(exact, model=replace(exact.model, tied=tied)))
                launch(1, write_bits, alone, batches(), bits, stop=1)
                found["dtype"] += launch(1, differences, [alone], plain)
            for world in worlds:
                runs = [run for run in layouts(config, world) if run.shape.tied == tied]
                runs = [replace(run, config=replace(run.config, data=config.data)) for run in runs]
                if "order" in found:
                    found["order"] += launch(world, differences, runs, bits)
                found["prove"] += launch(world, differences, runs, plain)
    return {distance: _largest(values) for distance, values in found.items()}


def measure_moments(moments: MomentFormat, worlds: Sequence[int], steps: int = 3) -> dict[str, float]:
    """The largest distances of a model with moments of a format from the reference, by kind of value."""
    config = config_of("fp32", "dense")
    config = replace(
        config,
        model=replace(config.model, ffn=1024, tied=False),
        train=replace(config.train, moments=moments),
    )
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="superstep-tolerance-") as name:
        write_reference(resolve(config).shape, config.train, batches(steps), Path(name))
        for world in worlds:
            runs = [run for run in layouts(config, world) if not run.shape.tied]
            runs = [replace(run, config=replace(run.config, data=config.data)) for run in runs]
            for each in launch(world, differences, runs, Path(name), steps):
                found[each.kind] = max(found.get(each.kind, 0.0), each.relative)
    return found


def _largest(values: Sequence[Difference]) -> dict[str, float]:
    """By kind; gradients of the first step and of later ones apart."""
    found: dict[str, float] = {}
    for value in values:
        kind = value.kind if value.kind != "gradient" or value.step == 0 else "gradient_later"
        if value.kind in ("loss", "gradient", "update"):  # norms and moments are allowed what gradients are
            found[kind] = max(found.get(kind, 0.0), value.relative)
    return found


def main(argv: list[str]) -> int:
    """Measure, print a table, write JSON."""
    options = argparse.ArgumentParser(prog="python -m bench.tolerance", description=__doc__.splitlines()[0])
    options.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    options.add_argument("--dtypes", nargs="+", default=["fp32", "bf16", "fp16"])
    options.add_argument("--moments", nargs="+", choices=["8bit", "bf16"], help="these formats, instead of dtypes")
    options.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "tolerance.json")
    asked = options.parse_args(argv)
    torch.set_num_threads(1)
    if asked.moments:
        formats = {moments: measure_moments(moments, asked.worlds) for moments in asked.moments}
        print(formats)
        write_result(
            asked.json, workload={"layers": 4, "width": 32, "ffn": 1024, "worlds": asked.worlds}, moments=formats
        )
        return 0
    table = []
    print(f"{'dtype':6}{'model':9}{'distance':10}{'loss':>10}{'gradient':>10}{'later':>10}{'update':>10}", flush=True)
    for dtype in asked.dtypes:
        for model in ("dense", "experts"):
            for distance, found in measure(dtype, model, asked.worlds).items():
                table.append({"dtype": dtype, "model": model, "distance": distance, **found})
                figures = "".join(f"{found[kind]:>10.1e}" for kind in ("loss", "gradient", "gradient_later", "update"))
                print(f"{dtype:6}{model:9}{distance:10}{figures}", flush=True)
    workload = {"layers": 4, "width": 32, "sequences": SEQUENCES, "sequence_tokens": TOKENS, "worlds": asked.worlds}
    write_result(asked.json, workload=workload, distances=table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
