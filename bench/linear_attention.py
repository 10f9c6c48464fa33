"""Linear attention over context-parallel ranks: the time of a step of one rank, and of two, each on one core.

    python -m bench.linear_attention                              JSON under bench/results/
    python -m bench.linear_attention --tokens 2048 --steps 3

One sequence a step, through blocks that all have the gated delta rule; and the operator alone, forward and backward.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.machine import write_result
from bench.peers_common import random_batches
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.engine.activations.saved_activations import with_kept
from superstep.engine.engine import Engine
from superstep.engine.parallel.state_passing import ScanOverRanks
from superstep.engine.values.microbatch import microbatches
from superstep.model.axes import units
from superstep.model.mixers.gated_delta import WholeScan
from superstep.plan.config import DataConfig, ModelConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.model.attention_rule import DeltaShape
from superstep.plan.model.hf_config import to_hf_config
from superstep.plan.model.sizes.named_sizes import SHAPES
from superstep.plan.resolution.resolve import Resolved, resolve

TIMEOUT = timedelta(minutes=5)
MOST_SHARE = 0.6
"""Of one rank's time, what two may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The shape of the model, and of a step."""

    tokens: int = 8192
    layers: int = 4
    width: int = 256
    ffn: int = 704
    vocab: int = 2048
    heads: int = 4
    head_dim: int = 64
    steps: int = 5


def run_of(cp: int, work: Work, folder: Path) -> Resolved:
    """The run on ``cp`` ranks."""
    delta = DeltaShape(key_heads=work.heads, value_heads=work.heads, key_dim=work.head_dim, value_dim=work.head_dim)
    shape = replace(
        SHAPES["qwen3.5-9b"], layers=work.layers, width=work.width, heads=work.heads, kv_heads=work.heads,
        head_dim=work.head_dim, ffn=work.ffn, vocab=work.vocab, full_layers=(), delta=delta,
    )  # fmt: skip
    path = folder / "config.json"
    path.write_text(json.dumps(to_hf_config(shape)), encoding="utf-8")
    config = RunConfig(
        model=ModelConfig(name=str(path)),
        data=DataConfig(sequence_tokens=work.tokens),
        train=TrainConfig(batch_sequences=1),
        plan=PlanConfig(cp=cp, dp=1),
    )
    return with_kept(resolve(config, cp), Device("cpu"))


Clock = tuple[float, float]
"""Seconds, and those in which the processor worked: less where other processes take turns."""


def _now() -> Clock:
    return time.perf_counter(), time.process_time()


def _since(begin: Clock) -> Clock:
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


def _median(clocks: list[Clock]) -> Clock:
    return statistics.median(each for each, _ in clocks), statistics.median(each for _, each in clocks)


def time_steps(run: Resolved, rank: int, work: Work) -> Clock:
    """The median of seconds of a step, after a first one."""
    mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=TIMEOUT)
    engine = Engine(run, units(run.shape), mesh)
    ((tokens_BS, targets_BS),) = random_batches(run.shape, 1, 1, work.tokens)
    seconds = []
    for _ in range(work.steps + 1):
        mine = microbatches(tokens_BS, targets_BS, run.plan, mesh)
        begin = _now()
        engine.train_step(mine, valid_tokens=work.tokens, lr=1e-3)
        seconds.append(_since(begin))
    mesh.destroy()
    return _median(seconds[1:])


def time_rule(rank: int, world: int, work: Work) -> Clock:
    """The median of seconds of the operator, forward and backward."""
    generator = torch.Generator().manual_seed(rank)
    shape = (1, work.tokens // world, work.heads)

    def normal(*more: int) -> torch.Tensor:
        return torch.randn(*shape, *more, generator=generator)

    given = [normal(work.head_dim) for _ in range(3)] + [-normal().abs() / 10, normal().sigmoid()]
    leaves = [x.requires_grad_() for x in given]
    scan = WholeScan() if world == 1 else ScanOverRanks(dist.group.WORLD)
    seconds = []
    for _ in range(work.steps + 1):
        begin = _now()
        scan.attend(*leaves).sum().backward()
        seconds.append(_since(begin))
    return _median(seconds[1:])


def _rank(rank: int, world: int, work: Work, folder: str) -> None:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    rule = time_rule(rank, world, work)
    own = Path(folder, str(rank))  # each rank writes its configuration
    own.mkdir()
    step = time_steps(run_of(world, work, own), rank, work)
    if rank == 0:
        keys = ("rule_s", "rule_cpu_s", "step_s", "step_cpu_s")
        Path(folder, "seconds.json").write_text(json.dumps(dict(zip(keys, (*rule, *step), strict=True))), "utf-8")


def measure(world: int, work: Work) -> dict[str, float]:
    """Seconds of ``world`` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (world, work, folder), nprocs=world)
        measured: dict[str, float] = json.loads(Path(folder, "seconds.json").read_text("utf-8"))
        return measured


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=Work().tokens)
    parser.add_argument("--steps", type=int, default=Work().steps)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("bench/results/linear_attention.json"))
    args = parser.parse_args()
    work = Work(tokens=args.tokens, steps=args.steps)
    rounds = [{str(world): measure(world, work) for world in (1, 2)} for _ in range(args.rounds)]
    shares = {kind: statistics.median(each["2"][kind] / each["1"][kind] for each in rounds) for kind in rounds[0]["1"]}
    print(f"two ranks take {shares['step_s']:.2f} of one rank's step, and {shares['rule_s']:.2f} of the rule's time")
    print(f"processor seconds of each: {shares['step_cpu_s']:.2f} of a step, {shares['rule_cpu_s']:.2f} of the rule")
    write_result(args.json, work=asdict(work), rounds=rounds, shares=shares)
    return 0 if shares["step_s"] <= MOST_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
