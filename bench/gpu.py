"""The first hours of a GPU: what is to be run on one, in this order, with all figures in one JSON.

    tests        pytest -m gpu
    prove        a decoder of 2,048 tokens and heads 128 wide in bf16, against the fp32 reference on the CPU
    measure      superstep measure --quick
    train        the same decoder for a few steps, and superstep view of what was recorded
    attention    blocks of attention against torch's own: heads of 64, 80 and 128, odd lengths, grouped queries
    experts      the one kernel for all experts against one product each, where some have no rows
    kernels      Triton's kernels beside torch's and torch.compile's, at 128 to 8,192 tokens
    recompute    a step's peak memory against its prediction, for what the backward computes again
    compile      a compiled step's time over an eager one's
    peers        a step beside transformers' model, eager and compiled
    peers-large  the same of a decoder of a billion parameters, eager
    overlap      zero 3 over all GPUs: how much of each lane lies under compute (needs two)

    python -m bench.gpu [--only attention experts] [--json FILE]

A piece that fails is noted with its last words, and the next one runs. Without a GPU it says so, and exits with 2.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import gpu_train
from bench.machine import write_result
from superstep.comm.device import Device, gpus, pick
from superstep.comm.mesh import build_mesh
from superstep.cost.program.memory.memory import rank_bytes
from superstep.engine.engine import Engine
from superstep.engine.instruction_timer import TimedInstruction, recorder_for
from superstep.engine.measure.probe_kernels import TimingOptions
from superstep.engine.parallel.flash_partial import attend_block, attend_block_backward
from superstep.engine.values.microbatch import microbatches, rows
from superstep.kernels import triton_loader
from superstep.launch.ranks import World, launch
from superstep.model.axes import units
from superstep.model.mixture import experts as grouped
from superstep.plan.config import DataConfig, ModelConfig, NumericsConfig, PlanConfig, RunConfig, TrainConfig
from superstep.plan.resolution.resolve import Resolved, resolve
from superstep.program.compile import compile_step
from superstep.program.instructions import Instruction, lane

Figures = dict[str, object]

SHAPE = ("layers", "width", "heads", "kv_heads", "head_dim", "ffn", "vocab")
"""Names of a decoder's sizes, as ``ModelConfig`` has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A decoder and its batch; smaller ones serve the tests of this file."""

    layers: int = 8
    width: int = 1024
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 128
    ffn: int = 2816
    vocab: int = 8192
    tokens: int = 2048
    sequences: int = 4
    dtype: str = "bf16"
    microbatch: int = 1

    def run(self, *, compile: bool = False, kernels: str = "auto", exact: bool = False, **plan: object) -> Resolved:
        """A run of it."""
        return resolve(
            RunConfig(
                model=ModelConfig(name="demo", **{name: getattr(self, name) for name in SHAPE}),
                data=DataConfig(sequence_tokens=self.tokens),
                train=TrainConfig(batch_sequences=self.sequences),
                plan=PlanConfig(**{"microbatch": self.microbatch, **plan}),
                numerics=NumericsConfig(compute=self.dtype, compile=compile, kernels=kernels, exact=exact),
            )
        )

    def flags(self) -> list[str]:
        """The same on a command line."""
        found = [word for name in SHAPE for word in (f"--model.{name.replace('_', '-')}", str(getattr(self, name)))]
        found += ["--data.sequence-tokens", str(self.tokens), "--train.batch-sequences", str(self.sequences)]
        return [
            *found,
            "--numerics.compute",
            self.dtype,
            "--plan.dp",
            "1",
            "--plan.zero",
            "0",
            "--plan.microbatch",
            str(self.microbatch),
        ]


LARGE = Size(layers=16, width=2048, heads=16, kv_heads=8, ffn=8192, vocab=32768, sequences=16, microbatch=4)
"""A decoder of 1.14 billion parameters."""


def command(words: Sequence[str], limit_s: float = 3600) -> Figures:
    """Run it by itself: its exit status, seconds and last lines."""
    start_s = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=limit_s)
    said = (done.stdout + done.stderr).strip().splitlines()
    return {
        "command": " ".join(words),
        "status": done.returncode,
        "seconds": time.perf_counter() - start_s,
        "said": said[-12:],
    }


def trained(size: Size, steps: int = 12) -> Figures:
    """Train, and view what was recorded."""
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        flags = [*size.flags(), "--state.dir", run, "--train.steps", str(steps), "--train.warmup-steps", "2"]
        return {"train": command(["superstep", "train", *flags]), "view": command(["superstep", "view", run, "--text"])}


def error(found: Tensor, exact: Tensor) -> float:
    """L2 norm of the difference over that of the exact value."""
    return float((found.double() - exact).norm() / exact.norm())


def exact_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in fp64, written out."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


def attention(device: Device, widths: Sequence[int], lengths: Sequence[int], dtypes: Sequence[torch.dtype]) -> Figures:
    """Errors of our blocks and of torch's attention against fp64, forward and backward, and our time over torch's."""
    cases = [
        attention_case(device, width, length, kv_heads, dtype)
        for dtype in dtypes
        for width in widths
        for length in lengths
        for kv_heads in (8, 2)
    ]
    worst = max(max(case["ours"]) / max(case["torch"]) for case in cases)
    return {"worst_error_over_torchs": worst, "cases": cases}


def attention_case(device: Device, width: int, length: int, kv_heads: int, dtype: torch.dtype) -> dict:
    """One shape; errors are those of the output and of the three gradients."""
    torch.manual_seed(0)
    shapes = [(2, heads, length, width) for heads in (8, kv_heads, kv_heads, 8)]
    q, k, v, grad = (torch.randn(shape, device=device.torch).to(dtype) for shape in shapes)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact = exact_attention(*leaves)
    wanted = [exact.detach(), *torch.autograd.grad(exact, leaves, grad.double())]

    def ours() -> tuple[Tensor, ...]:
        out, lse = attend_block(q, k, v, is_causal=True)
        return (out, *attend_block_backward(grad, (q, k, v), out, lse, is_causal=True))

    inputs = [x.clone().requires_grad_() for x in (q, k, v)]

    def theirs() -> tuple[Tensor, ...]:
        # Torch has no fused attention of grouped heads in fp32, and would write out all scores.
        q, *heads = inputs
        shared = (
            [x.repeat_interleave(q.shape[1] // kv_heads, dim=1) for x in heads] if dtype is torch.float32 else heads
        )
        out = F.scaled_dot_product_attention(q, *shared, is_causal=True, enable_gqa=dtype is not torch.float32)
        return (out.detach(), *torch.autograd.grad(out, inputs, grad))

    with torch.no_grad():
        mine = ours()
        ours_s = TimingOptions(device=device).seconds(ours)
    return {
        "dtype": str(dtype),
        "width": width,
        "length": length,
        "kv_heads": kv_heads,
        "ours": [error(a, b) for a, b in zip(mine, wanted, strict=True)],
        "torch": [error(a, b) for a, b in zip(theirs(), wanted, strict=True)],
        "time_over_torchs": ours_s / TimingOptions(device=device).seconds(theirs),
    }


def experts(device: Device, width: int, ffn: int, counts: Sequence[int], nobodys: int = 8) -> Figures:
    """Grouped products and outer products of bf16 against fp64, where experts without rows must get nothing."""
    torch.manual_seed(0)
    total = sum(counts) + nobodys
    x, grad = (torch.randn(total, n, device=device.torch).bfloat16() for n in (width, ffn))
    weight = torch.randn(len(counts), width, ffn, device=device.torch).bfloat16()
    rows_E = torch.tensor(counts, device=device.torch)
    out = grouped.products(x, weight, rows_E)
    into = torch.zeros(len(counts), ffn, width, device=device.torch)
    grouped.add_outer_products(into, grad, x, rows_E)
    expected, gradient = torch.zeros_like(out, dtype=torch.float64), torch.zeros_like(into, dtype=torch.float64)
    start = 0
    for expert, count in enumerate(counts):
        part = slice(start, start + count)
        expected[part] = x[part].double() @ weight[expert].double()
        gradient[expert] = grad[part].double().t() @ x[part].double()
        start += count
    empty = [expert for expert, count in enumerate(counts) if count == 0]
    return {
        "is_grouped": grouped.is_grouped(x, weight),
        "rows": list(counts),
        "product_error": error(out, expected),
        "gradient_error": error(into, gradient),
        "nobodys_rows_are_zero": not bool(out[start:].any()),
        "empty_experts_gradients_are_zero": not bool(into[empty].any()),
    }


def triton_kernels(lengths: Sequence[int], dtypes: Sequence[torch.dtype]) -> Figures:
    """Those of ``bench.gpu_kernels``, imported where Triton is there."""
    if why := triton_loader.missing(pick(0).torch):
        return {"skipped": why}
    return importlib.import_module("bench.gpu_kernels").kernels(pick(0), lengths, dtypes)  # type: ignore[no-any-return]


class Driven:
    """An engine with a batch of random tokens."""

    def __init__(self, run: Resolved, world: World) -> None:
        self.mesh = build_mesh(run.plan, world.rank, world.device, timeout=timedelta(seconds=120))
        self.engine = Engine(run, units(run.shape), self.mesh)
        size, tokens = run.config.train.batch_sequences, run.config.data.sequence_tokens
        text = torch.randint(run.shape.vocab, (size, tokens + 1), generator=torch.Generator().manual_seed(0))
        mine = text[rows(run.plan, self.mesh)]
        self._batch = microbatches(mine[:, :-1], mine[:, 1:], run.plan, self.mesh)
        self._valid = size * tokens

    def step(self, **also: object) -> float:
        """One step's loss."""
        return self.engine.train_step(self._batch, valid_tokens=self._valid, lr=1e-4, **also).loss


def predicted_bytes(run: Resolved) -> int:
    """The peak that the planner predicts."""
    return max(rank.bytes for rank in rank_bytes(run, compile_step(run.plan)))


def recompute(device: Device, size: Size) -> Figures:
    """Each policy's peak over three steps, beside what was predicted, and beside keeping all."""
    found: dict[str, dict[str, float]] = {}
    for policy in ("none", "selective", "full"):
        run = size.run(recompute=policy)
        gc.collect()  # the engine before this one has cycles
        before = device.count_from_here()
        driven = Driven(run, World(0, 1, device))
        for _ in range(3):
            driven.step()
        device.synchronize()
        peak = device.peak_bytes() - before
        predicted = predicted_bytes(run)
        found[policy] = {"peak_bytes": peak, "predicted_bytes": predicted, "ratio": peak / predicted}
        del driven
    return {"policies": found}


def compiled(device: Device, size: Size, rounds: int = 5) -> Figures:
    """Eager and compiled steps in turn, on the same tokens."""
    sides = [Driven(size.run(compile=is_compiled), World(0, 1, device)) for is_compiled in (False, True)]
    losses = [side.step() for side in sides]
    ratios = []
    for _ in range(rounds):
        taken = []
        for side in sides:
            start_s = time.perf_counter()
            side.step()
            device.synchronize()
            taken.append(time.perf_counter() - start_s)
        ratios.append(taken[1] / taken[0])
    return {"time_over_eager": statistics.median(ratios), "ratios": ratios, "first_losses": losses}


def beside_peers(
    device: Device, size: Size, rounds: int = 7, *, names: Sequence[str] = gpu_train.SIDES, is_profiled: bool = True
) -> Figures:
    """Steps of ours, eager, compiled, in exact mode and with Triton's kernels, beside those of transformers."""
    settings = {name: getattr(size, name) for name in SHAPE}
    text = torch.randint(size.vocab, (size.sequences, size.tokens), generator=torch.Generator().manual_seed(0))

    def ours(**how: object) -> gpu_train.Step:
        return Driven(size.run(**how), World(0, 1, device)).step  # type: ignore[arg-type]

    def theirs(*, is_compiled: bool) -> gpu_train.Step:
        config = gpu_train.llama_config(settings, size.tokens)
        return gpu_train.TransformersSide(device, config, text, size.microbatch, is_compiled=is_compiled)

    makes: dict[str, Callable[[], gpu_train.Step]] = {
        "superstep": ours,
        "superstep triton": lambda: ours(kernels="triton"),
        "superstep exact": lambda: ours(exact=True),
        "superstep compiled": lambda: ours(compile=True),
        "transformers": lambda: theirs(is_compiled=False),
        "transformers compiled": lambda: theirs(is_compiled=True),
    }
    sides = [gpu_train.made(name, makes[name], device) for name in names]
    tokens = size.tokens * size.sequences
    flops = gpu_train.step_flops(settings, tokens, size.tokens)
    rows = gpu_train.measured(sides, device, rounds, tokens, flops)
    kernels = {side.name: gpu_train.kernels_of(side.step) for side in sides} if is_profiled else {}
    return {"tokens": tokens, "flops": flops, "sides": rows, "kernels": kernels}


def under_compute(ran: Sequence[TimedInstruction], instructions: Sequence[Instruction]) -> dict[str, dict[str, float]]:
    """Seconds of each lane beside compute, and the share of them during which the compute lane was at work."""
    busy = [(r.start_s, r.end_s) for r in ran if lane(instructions[r.index]) == "compute"]
    found: dict[str, dict[str, float]] = {}
    for r in ran:
        name = lane(instructions[r.index])
        if name == "compute":
            continue
        figures = found.setdefault(name, {"seconds": 0.0, "under_compute": 0.0})
        figures["seconds"] += r.end_s - r.start_s
        figures["under_compute"] += sum(max(0.0, min(r.end_s, end) - max(r.start_s, start)) for start, end in busy)
    for figures in found.values():
        figures["share"] = figures["under_compute"] / figures["seconds"] if figures["seconds"] else 0.0
    return found


def _overlap(world: World, size: Size) -> dict[str, dict[str, float]]:
    run = size.run(dp=world.size, zero=3, prefetch=2)
    driven = Driven(run, world)
    for _ in range(3):
        driven.step()
    record = recorder_for(world.device, is_kept=True)
    driven.step(record=record)
    found = under_compute(record.ran(), driven.engine.step_program.ranks[0])
    driven.mesh.destroy()
    return found


def overlap(size: Size, ranks: int) -> Figures:
    """One recorded step of zero 3."""
    if ranks < 2:
        return {"skipped": "one GPU has nobody to fetch from; zero 3 overlaps from two on"}
    wide = replace(size, sequences=max(size.sequences, 2 * ranks))
    return {"ranks": ranks, "lanes": launch(ranks, _overlap, wide)}


def pieces(size: Size) -> dict[str, Callable[[], Figures]]:
    """What is run, in order; those that are processes of their own come first, and find the memory free."""
    halves = (torch.bfloat16, torch.float32)
    return {
        "tests": lambda: command(["pytest", "-q", "-m", "gpu", "tests"]),
        "prove": lambda: command(["superstep", "prove", *size.flags(), "--state.dir", "runs/bench-gpu"]),
        "measure": lambda: command(["superstep", "measure", "--quick", "--dtype", size.dtype]),
        "train": lambda: trained(size),
        "peers": lambda: beside_peers(pick(0), size),
        "peers-large": lambda: beside_peers(pick(0), LARGE, 5, names=("superstep", "superstep triton", "transformers")),
        "overlap": lambda: overlap(size, gpus()),
        "attention": lambda: attention(pick(0), (64, 80, 128), (2048, 1999, 37), halves),
        "experts": lambda: experts(pick(0), 512, 1024, (0, 640, 0, 1, 383, 0, 1016, 0)),
        "kernels": lambda: triton_kernels((128, 512, 2048, 8192), halves),
        "recompute": lambda: recompute(pick(0), size),
        "compile": lambda: compiled(pick(0), size),
    }


def noted(piece: Callable[[], Figures]) -> Figures:
    """Its figures, or why it has none."""
    try:
        return piece()
    except Exception as problem:  # noqa: BLE001 - whatever one piece meets, the others are to run
        return {"failed": f"{type(problem).__name__}: {problem}", "where": traceback.format_exc().splitlines()[-6:]}


def gpu_facts() -> Figures:
    """The GPUs and what drives them."""
    return {
        "gpus": [torch.cuda.get_device_name(index) for index in range(gpus())],
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def main(argv: list[str]) -> int:
    """Run the pieces, print a line for each, write JSON."""
    size = Size()
    names = list(pieces(size))
    options = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.splitlines()[0])
    options.add_argument("--only", nargs="+", choices=names, default=names, metavar="PIECE", help=", ".join(names))
    options.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "gpu.json")
    asked = options.parse_args(argv)
    if gpus() == 0:
        print("bench.gpu: torch finds no GPU on this host; the other benchmarks run on a CPU.", file=sys.stderr)
        return 2
    found: dict[str, Figures] = {}
    for name in asked.only:
        start_s = time.perf_counter()
        found[name] = noted(pieces(size)[name])
        is_bad = "failed" in found[name] or found[name].get("status", 0) != 0
        print(f"{name:12}{time.perf_counter() - start_s:>8.0f} s  {'FAILED' if is_bad else 'done'}", flush=True)
        write_result(asked.json, **gpu_facts(), pieces=found)
    return 1 if any("failed" in figures or figures.get("status", 0) != 0 for figures in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
