"""Superstep's peers: the same decoder trained with PyTorch's own parts, side by side.

    python -m bench.peers --peer ddp --dtype bf16        one peer on two ranks of one thread
    python -m bench.peers --vocab 32000                  all of them

``run`` is what tests and benchmarks call inside a Gloo process group that stands already.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from bench.peers_common import (
    IGNORE,
    Peer,
    PeerJob,
    PeerResult,
    Side,
    initial_weights,
    random_batches,
    train,
)
from bench.peers_data import ddp, fsdp2, one_process
from bench.peers_model import pipelining, tensor_parallel
from bench.peers_wrapped import accelerate, missing, zero2, zero3
from bench.spawn import Workload, measure
from superstep.plan.config import ModelConfig
from superstep.plan.model.sizes.lookup import shape_of

__all__ = ["IGNORE", "PEERS", "PeerJob", "PeerResult", "initial_weights", "random_batches", "run"]

PEERS: dict[Peer, Callable[[int, int, PeerJob], Side]] = {
    "one_process": one_process,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "tensor_parallel": tensor_parallel,
    "pipelining": pipelining,
    "zero2": zero2,
    "zero3": zero3,
    "accelerate": accelerate,
}


def run(rank: int, world: int, job: PeerJob) -> PeerResult:
    """Trains the job with the peer it names. Sets torch's threads to ``job.threads``."""
    return train(job, lambda: PEERS[job.peer](rank, world, job))


LINE_UP: tuple[tuple[str, int, dict], ...] = (
    ("DDP fp32", 2, {"peer": "ddp"}),
    ("DDP bf16", 2, {"peer": "ddp", "dtype": "bf16"}),
    ("DDP fp32, compiled", 2, {"peer": "ddp", "compile": True}),
    ("DDP bf16, compiled", 2, {"peer": "ddp", "dtype": "bf16", "compile": True}),
    ("FSDP2 fp32", 2, {"peer": "fsdp2"}),
    ("FSDP2 fp32, weights kept", 2, {"peer": "fsdp2", "reshard_after_forward": False}),
    ("FSDP2 bf16", 2, {"peer": "fsdp2", "dtype": "bf16"}),
    ("FSDP2 bf16, weights kept", 2, {"peer": "fsdp2", "dtype": "bf16", "reshard_after_forward": False}),
    ("FSDP2 bf16, least memory", 2, {"peer": "fsdp2", "dtype": "bf16", "reduce_every_microbatch": True}),
    ("FSDP2 bf16, compiled", 2, {"peer": "fsdp2", "dtype": "bf16", "compile": True}),
    ("TP fp32", 2, {"peer": "tensor_parallel", "sequence_parallel": False}),
    ("TP fp32, sequence-parallel", 2, {"peer": "tensor_parallel"}),
    ("pipelining GPipe fp32", 2, {"peer": "pipelining"}),
    ("pipelining 1F1B fp32", 2, {"peer": "pipelining", "schedule": "1f1b"}),
    ("one process fp32", 1, {"peer": "one_process", "threads": 2}),
    ("one process bf16", 1, {"peer": "one_process", "threads": 2, "dtype": "bf16"}),
    ("DeepSpeed ZeRO-2 bf16", 2, {"peer": "zero2", "dtype": "bf16"}),
    ("DeepSpeed ZeRO-3 bf16", 2, {"peer": "zero3", "dtype": "bf16"}),
    ("Accelerate bf16", 2, {"peer": "accelerate", "dtype": "bf16"}),
    (
        "one process bf16, compiled",
        1,
        {"peer": "one_process", "threads": 2, "dtype": "bf16", "compile": True},
    ),
)


def train_peer(rank: int, world: int, settings: dict, load: Workload) -> PeerResult:
    """One rank of the peer that the settings name; ``spawn.measure`` takes it."""
    shape = shape_of(ModelConfig(name=load.shape, vocab=load.vocab))
    job = PeerJob(
        shape=shape,
        weights=initial_weights(shape, seed=0),
        batches=random_batches(shape, load.steps, load.sequences, load.sequence_tokens),
        microbatch=load.microbatch,
        **settings,
    )
    return run(rank, world, job)


def main(argv: list[str]) -> None:
    """Measures one peer, or the whole line-up."""
    options = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__.splitlines()[0])
    options.add_argument("--peer", choices=[*PEERS, "all"], default="all")
    options.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    options.add_argument("--compile", action="store_true")
    options.add_argument("--keep-weights-gathered", action="store_true", help="fsdp2: reshard_after_forward=False")
    options.add_argument("--reduce-every-microbatch", action="store_true", help="fsdp2: less memory, more traffic")
    options.add_argument("--no-sequence-parallel", action="store_true", help="tensor_parallel: whole residual stream")
    options.add_argument("--schedule", choices=["gpipe", "1f1b"], default="gpipe")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--threads", type=int, default=1, help="threads of torch on each rank")
    options.add_argument("--shape", default="bench")
    options.add_argument("--vocab", type=int)
    options.add_argument("--sequences", type=int, default=8)
    options.add_argument("--sequence-tokens", type=int, default=512)
    options.add_argument("--microbatch", type=int, default=2)
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--warmup", type=int, default=2)
    options.add_argument("--json", type=Path, help="write the measurements to this file")
    asked = options.parse_args(argv)
    load = Workload(**{name: getattr(asked, name) for name in Workload.__slots__})
    if asked.peer == "all":
        chosen = LINE_UP
    else:
        settings = {
            "peer": asked.peer,
            "dtype": asked.dtype,
            "compile": asked.compile,
            "threads": asked.threads,
            "schedule": asked.schedule,
            "reduce_every_microbatch": asked.reduce_every_microbatch,
            "reshard_after_forward": not asked.keep_weights_gathered,
            "sequence_parallel": not asked.no_sequence_parallel,
        }
        chosen = ((f"{asked.peer} {asked.dtype}", asked.ranks, settings),)
    found = {}
    for name, world, settings in chosen:
        if why := missing(settings["peer"]):
            print(f"{name:28s} left out: {why}", flush=True)
            continue
        found[name] = measured = measure(train_peer, world, settings, load)
        fullest_mib = max(measured["training_bytes"]) / 2**20
        print(
            f"{name:28s} {measured['tokens_per_s']:8.0f} tokens/s   "
            f"{measured['median_step_s']:6.2f} s a step, {measured['median_cpu_s']:6.2f} s of all cores   "
            f"{fullest_mib:6.0f} MiB on the fullest rank",
            flush=True,
        )
    if asked.json:
        about = {"python": platform.python_version(), "torch": torch.__version__, "cpu": platform.processor()}
        asked.json.write_text(json.dumps({"about": about, "workload": asdict(load), "peers": found}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
