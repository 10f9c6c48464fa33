"""Long context on ranks with little memory: one budget, at which cp = 1 is refused memory and cp = 4 trains.

    python -m bench.long_context                          JSON under bench/results/
    python -m bench.long_context --tokens 8192 --budget-mib 256
    python -m bench.long_context --tokens 32768 --cp 1 --cp 2 --no-budget --json bench/results/long_context-32768.json

A rank is a process with one thread. The budget is what a rank may allocate beyond what it has when torch is loaded and
the ranks are connected: parameters, gradients, the optimizer's state, activations, and what comes and goes. The
operating system holds it (RLIMIT_DATA), so that an allocation beyond it fails as it does on a GPU that is full.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.machine import machine_facts
from bench.peers_common import peak_bytes, random_batches, reset_peak
from superstep.comm.device import Device
from superstep.comm.mesh import build_mesh
from superstep.cost.program.memory.memory import rank_bytes
from superstep.engine.activations.saved_activations import with_kept
from superstep.engine.engine import Engine
from superstep.engine.values.microbatch import Microbatch, microbatches
from superstep.model.axes import units
from superstep.plan.config import DataConfig, ModelConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import Resolved, resolve
from superstep.program.compile import compile_step

TIMEOUT = timedelta(minutes=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One sequence a step, through the demo's shape with the room for long ones."""

    tokens: int = 4096
    layers: int = 4
    width: int = 128
    ffn: int = 352
    vocab: int = 2048
    steps: int = 3


def run_of(cp: int, work: Work) -> Resolved:
    """The run on ``cp`` ranks."""
    config = RunConfig(
        model=ModelConfig(
            name="llama3.1-8b",
            layers=work.layers,
            width=work.width,
            heads=4,
            kv_heads=2,
            head_dim=work.width // 4,
            ffn=work.ffn,
            vocab=work.vocab,
            tied=True,
        ),
        data=DataConfig(sequence_tokens=work.tokens),
        train=TrainConfig(batch_sequences=1),
        plan=PlanConfig(cp=cp, dp=1),
    )
    return with_kept(resolve(config, cp), Device("cpu"))


def saved_bytes(engine: Engine, mine: Sequence[Microbatch], *, valid_tokens: int) -> tuple[int, float]:
    """Train one step of one microbatch: the bytes that autograd saves, each storage once and the engine's buffers not
    at all; and the loss.
    """
    there = [t for buffers in engine.buffers.values() for b in buffers for t in (b.full, b.gradient)]
    there += [m.targets for m in mine]
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    # Nothing that is saved of the one microbatch is let go before the last of it is.
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = engine.train_step(mine, valid_tokens=valid_tokens, lr=1e-3)
    own = {tensor.untyped_storage().data_ptr() for tensor in there}
    return sum(size for address, size in found.items() if address not in own), result.loss


def attempt(cp: int, work: Work, budget_bytes: int | None) -> dict:
    """Train on ``cp`` ranks: what each of them saw, or which allocation was refused."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(cp, work, budget_bytes, folder), nprocs=cp)
        found = [json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(cp)]
    refused = [seen["refused"] for seen in found if "refused" in seen]
    return {"outcome": "out of memory", "refused": refused} if refused else {"outcome": "trained", "ranks": found}


def _rank(rank: int, cp: int, work: Work, budget_bytes: int | None, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=cp, timeout=TIMEOUT)
    run = run_of(cp, work)
    mesh = build_mesh(run.plan, rank, Device("cpu"), timeout=TIMEOUT)
    batches = random_batches(run.shape, work.steps, 1, work.tokens)
    (torch.ones(64, 64, requires_grad=True) @ torch.ones(64, 64)).sum().backward()  # what a first product loads
    dist.barrier()
    baseline = reset_peak()
    if budget_bytes is not None:
        most = _data_bytes() + budget_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        engine = Engine(run, units(run.shape), mesh)
        saved, losses, seconds = 0, [], []
        for number, (tokens_BS, targets_BS) in enumerate(batches):
            mine = microbatches(tokens_BS, targets_BS, run.plan, mesh)
            dist.barrier()
            begin_s = time.perf_counter()
            if number == 0:
                saved, loss = saved_bytes(engine, mine, valid_tokens=targets_BS.numel())
            else:
                loss = engine.train_step(mine, valid_tokens=targets_BS.numel(), lr=1e-3).loss
            seconds.append(time.perf_counter() - begin_s)
            losses.append(loss)
        peak = peak_bytes() - baseline
        seen = {"saved_bytes": saved, "peak_bytes": peak, "losses": losses, "step_s": min(seconds[1:])}
    except (RuntimeError, MemoryError) as error:
        seen = {"refused": f"rank {rank}: {type(error).__name__}: {str(error).splitlines()[0]}"}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(seen), encoding="utf-8")
    os._exit(0)  # the others see a closed connection and no rank waits for one that is out of memory


def _data_bytes() -> int:
    """What RLIMIT_DATA counts: private memory that can be written to."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = [line for line in status.splitlines() if line.startswith("VmData:")]
    return int(line.split()[1]) * 1024


def measure(cp: int, work: Work, budget_bytes: int | None) -> dict:
    """One number of ranks: without a budget and with one, and what the cost model says."""
    run = run_of(cp, work)
    (predicted,) = rank_bytes(run, compile_step(run.plan))
    free = attempt(cp, work, None)
    held = {} if budget_bytes is None else {"with_budget": attempt(cp, work, budget_bytes)}
    return {
        "cp": cp,
        "predicted_saved_bytes": predicted.peak.kept_bytes,
        "predicted_bytes": predicted.bytes,
        "saved_bytes": max(seen["saved_bytes"] for seen in free["ranks"]),
        "peak_bytes": max(seen["peak_bytes"] for seen in free["ranks"]),
        "step_s": max(seen["step_s"] for seen in free["ranks"]),
        "losses": free["ranks"][0]["losses"],
        **held,
    }


def _outcome(held: dict | None) -> str:
    if held is None:
        return "without one"
    return held["refused"][0] if "refused" in held else f"trained, loss {held['ranks'][0]['losses'][-1]:.6f}"


def main(argv: list[str]) -> int:
    """Measure cp = 1, 2, 4, print a table, write JSON."""
    options = argparse.ArgumentParser(prog="python -m bench.long_context", description=__doc__.splitlines()[0])
    options.add_argument("--tokens", type=int, default=Work().tokens)
    options.add_argument("--budget-mib", type=int, default=192)
    options.add_argument("--no-budget", action="store_true")
    options.add_argument("--steps", type=int, default=Work().steps, help="the first one is not timed")
    options.add_argument("--cp", type=int, action="append", help="numbers of ranks; default: 1, 2, 4")
    options.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "long_context.json")
    asked = options.parse_args(argv)
    work, budget = Work(tokens=asked.tokens, steps=asked.steps), None if asked.no_budget else asked.budget_mib * 2**20
    print(f"{work.tokens} tokens, {asked.budget_mib} MiB a rank\n{'cp':>3}{'saved':>8}{'peak':>8} MiB  with the budget")
    table = []
    for cp in asked.cp or (1, 2, 4):
        row = measure(cp, work, budget)
        table.append(row)
        peak = f"{cp:>3}{row['saved_bytes'] / 2**20:>8.1f}{row['peak_bytes'] / 2**20:>8.1f}"
        print(f"{peak}      {_outcome(row.get('with_budget'))}, {row['step_s']:.2f} s a step", flush=True)
    facts = {
        **machine_facts(),
        "work": asdict(work),
        "threads_per_rank": 1,
        "budget_bytes": budget,
    }
    asked.json.parent.mkdir(exist_ok=True)
    asked.json.write_text(json.dumps({**facts, "rows": table}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
