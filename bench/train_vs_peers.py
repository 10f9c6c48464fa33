"""Superstep beside PyTorch's own parts: tokens/s and memory on the same model, data, dtype and threads.

    python -m bench.train_vs_peers                         every pair, three rounds, JSON under bench/results/
    python -m bench.train_vs_peers --pair "DDP bf16" --rounds 5

Beside a peer that is compiled Superstep runs its own kernels, which are faster than what torch.compile makes. Both
sides of a pair run in turn, A B B A A B ..., each run in rank processes of its own; a pair's figure is the
median over rounds of the ratio of their median step times, so that the machine's drift cancels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from bench.machine import machine_facts
from bench.peers import train_peer
from bench.peers_common import PeerResult, peak_bytes, random_batches, reset_peak
from bench.peers_wrapped import missing
from bench.spawn import PATIENCE, Workload, measure
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import microbatches, rows
from superstep.model.axes import units
from superstep.plan.config import DataConfig, ModelConfig, NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import resolve

PAIRS: dict[str, tuple[dict, dict, int]] = {
    "DDP fp32": ({"dp": 2}, {"peer": "ddp"}, 2),
    "DDP bf16": ({"dp": 2, "compute": "bf16"}, {"peer": "ddp", "dtype": "bf16"}, 2),
    "DDP bf16 compiled": (
        {"dp": 2, "compute": "bf16"},
        {"peer": "ddp", "dtype": "bf16", "compile": True},
        2,
    ),
    "FSDP2 fp32": ({"dp": 2, "zero": 3}, {"peer": "fsdp2"}, 2),
    "FSDP2 bf16": ({"dp": 2, "zero": 3, "compute": "bf16"}, {"peer": "fsdp2", "dtype": "bf16"}, 2),
    "FSDP2 bf16 least memory": (
        {"dp": 2, "zero": 3, "compute": "bf16"},
        {"peer": "fsdp2", "dtype": "bf16", "reduce_every_microbatch": True},
        2,
    ),
    "FSDP2 bf16 weights kept": (
        {"dp": 2, "zero": 1, "compute": "bf16"},
        {"peer": "fsdp2", "dtype": "bf16", "reshard_after_forward": False},
        2,
    ),
    "FSDP2 bf16 compiled": (
        {"dp": 2, "zero": 1, "compute": "bf16"},
        {"peer": "fsdp2", "dtype": "bf16", "compile": True, "reshard_after_forward": False},
        2,
    ),
    "TP fp32": ({"tp": 2, "dp": 1}, {"peer": "tensor_parallel"}, 2),
    "pipelining GPipe fp32": ({"pp": 2, "dp": 1, "schedule": "gpipe"}, {"peer": "pipelining"}, 2),
    "pipelining 1F1B fp32": (
        {"pp": 2, "dp": 1, "schedule": "1f1b"},
        {"peer": "pipelining", "schedule": "1f1b"},
        2,
    ),
    "pipelining 1F1B bf16": (
        {"pp": 2, "dp": 1, "schedule": "1f1b", "compute": "bf16"},
        {"peer": "pipelining", "schedule": "1f1b", "dtype": "bf16"},
        2,
    ),
    "zb-v beside GPipe fp32": ({"pp": 2, "dp": 1, "schedule": "zb-v", "chunks": 2}, {"peer": "pipelining"}, 2),
    "zb-v beside 1F1B fp32": (
        {"pp": 2, "dp": 1, "schedule": "zb-v", "chunks": 2},
        {"peer": "pipelining", "schedule": "1f1b"},
        2,
    ),
    "zb-v beside 1F1B bf16": (
        {"pp": 2, "dp": 1, "schedule": "zb-v", "chunks": 2, "compute": "bf16"},
        {"peer": "pipelining", "schedule": "1f1b", "dtype": "bf16"},
        2,
    ),
    "DeepSpeed ZeRO-2 fp32": ({"dp": 2, "zero": 2}, {"peer": "zero2"}, 2),
    "DeepSpeed ZeRO-2 bf16": ({"dp": 2, "zero": 2, "compute": "bf16"}, {"peer": "zero2", "dtype": "bf16"}, 2),
    "DeepSpeed ZeRO-3 bf16": ({"dp": 2, "zero": 3, "compute": "bf16"}, {"peer": "zero3", "dtype": "bf16"}, 2),
    "Accelerate bf16": ({"dp": 2, "compute": "bf16"}, {"peer": "accelerate", "dtype": "bf16"}, 2),
    "one process bf16": (
        {"dp": 1, "compute": "bf16", "threads": 2},
        {"peer": "one_process", "threads": 2, "dtype": "bf16"},
        1,
    ),
    "one process bf16 compiled": (
        {"dp": 1, "compute": "bf16", "threads": 2},
        {"peer": "one_process", "threads": 2, "dtype": "bf16", "compile": True},
        1,
    ),
}


def train_ours(rank: int, world: int, settings: dict, load: Workload) -> PeerResult:
    """One rank of the engine; ``spawn.measure`` takes it."""
    settings = dict(settings)
    torch.set_num_threads(settings.pop("threads", 1))
    numerics = NumericsConfig(compute=settings.pop("compute", "fp32"), compile=settings.pop("compile", False))
    run = resolve(
        RunConfig(
            model=ModelConfig(name=load.shape, vocab=load.vocab),
            data=DataConfig(sequence_tokens=load.sequence_tokens),
            train=TrainConfig(batch_sequences=load.sequences),
            plan=PlanConfig(microbatch=load.microbatch, **settings),
            numerics=numerics,
        ),
        world,
    )
    batches = random_batches(run.shape, load.steps, load.sequences, load.sequence_tokens)
    baseline_bytes = reset_peak()
    mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=PATIENCE)
    engine = Engine(run, units(run.shape), mesh)
    losses, norms, seconds, cpu_seconds = [], [], [], []
    dist.barrier()
    for tokens_BS, targets_BS in batches:
        start, cpu_start = time.perf_counter(), time.process_time()
        mine = rows(run.plan, mesh)
        result = engine.train_step(
            microbatches(tokens_BS[mine], targets_BS[mine], run.plan, mesh),
            valid_tokens=targets_BS.numel(),
            lr=1e-3,
        )
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    peak_rss_bytes = peak_bytes()
    mesh.destroy()
    return PeerResult(
        losses=losses,
        grad_norms=norms,
        step_seconds=seconds,
        cpu_seconds=cpu_seconds,
        baseline_bytes=baseline_bytes,
        peak_rss_bytes=peak_rss_bytes,
    )


def compare(name: str, rounds: int, load: Workload) -> dict:
    """One pair, its sides in turn."""
    ours, theirs, world = PAIRS[name]
    found: dict[str, list[dict]] = {"superstep": [], "peer": []}
    for number in range(rounds):
        sides = [("superstep", train_ours, ours), ("peer", train_peer, theirs)]
        for side, train, settings in sides if number % 2 == 0 else sides[::-1]:
            found[side].append(measure(train, world, settings, load))
    ratios = [p["median_step_s"] / s["median_step_s"] for s, p in zip(found["superstep"], found["peer"], strict=True)]
    cpu = [p["median_cpu_s"] / s["median_cpu_s"] for s, p in zip(found["superstep"], found["peer"], strict=True)]

    def middle(side: str, key: str) -> float:
        return statistics.median(run[key] for run in found[side])

    def memory(side: str) -> float:
        return statistics.median(max(run["training_bytes"]) for run in found[side])

    drift = max(
        abs(a - b) / b for a, b in zip(found["superstep"][0]["losses"], found["peer"][0]["losses"], strict=True)
    )
    return {
        "pair": name,
        "speed_ratio": statistics.median(ratios),
        "speed_ratios": ratios,
        "cpu_ratio": statistics.median(cpu),
        "superstep_tokens_per_s": middle("superstep", "tokens_per_s"),
        "peer_tokens_per_s": middle("peer", "tokens_per_s"),
        "superstep_training_bytes": memory("superstep"),
        "peer_training_bytes": memory("peer"),
        "largest_relative_loss_difference": drift,
        "runs": found,
    }


def main(argv: list[str]) -> int:
    """Measure, print a table, write JSON."""
    options = argparse.ArgumentParser(prog="python -m bench.train_vs_peers", description=__doc__.splitlines()[0])
    options.add_argument("--pair", choices=list(PAIRS), action="append", help="default: all")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--vocab", type=int, default=4096)
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--warmup", type=int, default=1)
    options.add_argument("--json", type=Path, default=None, help="default: bench/results/train_vs_peers-VOCAB.json")
    asked = options.parse_args(argv)
    load = Workload(vocab=asked.vocab, steps=asked.steps, warmup=asked.warmup)
    facts = machine_facts()
    print(f"{facts['cpu']}, {'with' if facts['amx'] else 'without'} AMX")
    head = f"{'peer':26}{'superstep':>11}{'peer':>9}  tokens/s {'ratio':>8}{'cpu':>7}{'memory':>16}"
    print(head, flush=True)
    table = []
    for name in asked.pair or PAIRS:
        if why := missing(PAIRS[name][1]["peer"]):
            print(f"{name:26} left out: {why}", flush=True)
            continue
        row = compare(name, asked.rounds, load)
        table.append(row)
        ours, theirs = (row[f"{side}_training_bytes"] / 2**20 for side in ("superstep", "peer"))
        print(
            f"{name:26}{row['superstep_tokens_per_s']:>11,.0f}{row['peer_tokens_per_s']:>9,.0f}"
            f"{row['speed_ratio']:>17.2f}x{row['cpu_ratio']:>6.2f}x{ours:>8,.0f} /{theirs:>6,.0f} MiB",
            flush=True,
        )
    path = asked.json or Path(__file__).parent / "results" / f"train_vs_peers-{asked.vocab}.json"
    path.parent.mkdir(exist_ok=True)
    facts = {
        **facts,
        "workload": {"shape": load.shape, "vocab": asked.vocab, "sequences": load.sequences,
                     "sequence_tokens": load.sequence_tokens, "microbatch": load.microbatch,
                     "steps": load.steps, "warmup": load.warmup, "rounds": asked.rounds},
    }  # fmt: skip
    path.write_text(json.dumps({**facts, "pairs": table}, indent=1), encoding="utf-8")
    worst = min(row["speed_ratio"] for row in table)
    print(f"slowest pair: {worst:.2f}x the peer's speed; figures in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
