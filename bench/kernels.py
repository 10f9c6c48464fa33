"""Our kernels beside torch's: attention forward and backward, products of fp32 matrices, weights' gradients of bf16.

    python -m bench.kernels [--threads 1] [--json FILE]

The sides run in turn, round after round; told are medians of their seconds, and of the rounds' ratios. Errors are
against fp64, in units of the last place of what is stored, in the mean over the numbers of a result, each in those of
the result's own mean size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F

from bench.machine import write_result
from superstep.engine.parallel.flash_partial import attend_block, attend_block_backward
from superstep.kernels import amx_weight_grad
from superstep.kernels.attention import attend, attend_backward, compile_library, reference
from superstep.kernels.product import prefers_onednn

ROOT = Path(__file__).resolve().parent.parent
SHAPES = (
    # sequences, query heads, key heads, tokens, width
    (8, 8, 2, 128, 64),
    (2, 8, 2, 512, 64),
    (2, 8, 8, 512, 64),
    (1, 8, 2, 2048, 64),
    (1, 8, 2, 2048, 128),
    (1, 2, 1, 8192, 64),
)
PRODUCTS = ((1024, 512, 512), (1024, 512, 1408), (1024, 1408, 512), (1024, 512, 4096))
"""Rows, inputs, outputs: of the benchmark's layers."""

Side = Callable[[], object]


def timed(sides: Mapping[str, Side], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side, by turns."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side()
    for number in range(rounds):
        for name in sorted(sides, reverse=bool(number % 2)):
            begin_s = time.perf_counter()
            sides[name]()
            found[name].append(time.perf_counter() - begin_s)
    return found


def told(sides: Mapping[str, Side], rounds: int) -> dict[str, object]:
    """Medians, and how often ours has run in the time of each other."""
    seconds = timed(sides, rounds)
    ratios = {
        name: round(statistics.median(t / o for t, o in zip(row, seconds["ours"], strict=True)), 3)
        for name, row in seconds.items()
        if name != "ours"
    }
    return {"seconds": {name: statistics.median(row) for name, row in seconds.items()}, "faster_by": ratios}


def ulps(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The mean error in units of the last place."""
    unit = torch.finfo(found.dtype).eps * exact.abs().mean()
    return round(float((found.double() - exact).abs().mean() / unit), 3)


def attention(shape: tuple[int, ...], dtype: torch.dtype, rounds: int) -> dict[str, object]:
    """One shape, forward and backward, causal."""
    B, N, K, S, H = shape
    torch.manual_seed(0)
    q, grad = (torch.randn(B, S, N, H).to(dtype).transpose(1, 2) for _ in range(2))
    k, v = (torch.randn(B, S, K, H).to(dtype).transpose(1, 2) for _ in range(2))
    out, lse = attend(q, k, v, is_causal=True)

    def composed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    torch._dynamo.reset()  # each shape is compiled anew, and is not counted as one too many
    run = torch.compile(composed, dynamic=False)
    forward = {
        "ours": lambda: attend(q, k, v, is_causal=True),
        "torch": lambda: attend_block(q, k, v, is_causal=True),
        "torch.compile": lambda: run(q, k, v),
    }
    wanted = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    whole, made = composed(*wanted), run(*wanted)
    backward = {
        "ours": lambda: attend_backward(grad, (q, k, v), out, lse, is_causal=True),
        "torch": lambda: attend_block_backward(grad, (q, k, v), out, lse, is_causal=True),
        "torch autograd": lambda: torch.autograd.grad(whole, wanted, grad, retain_graph=True),
        "torch.compile": lambda: torch.autograd.grad(made, wanted, grad, retain_graph=True),
    }
    row: dict[str, object] = {
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "forward": told(forward, rounds),
        "backward": told(backward, rounds),
    }
    flops = 2 * 2 * B * N * H * S * S / 2
    row["gflops_per_s"] = {
        "forward": flops / row["forward"]["seconds"]["ours"] / 1e9,  # type: ignore[index]
        "backward": 2.5 * flops / row["backward"]["seconds"]["ours"] / 1e9,  # type: ignore[index]
    }
    rights = exact_attention(q, k, v, grad)
    theirs = attend_block(q, k, v, is_causal=True)
    sides = {
        "ours": (out, *attend_backward(grad, (q, k, v), out, lse, is_causal=True)),
        "torch": (theirs[0], *attend_block_backward(grad, (q, k, v), *theirs, is_causal=True)),
        "torch.compile": (made.detach(), *torch.autograd.grad(made, wanted, grad)),
    }
    row["ulps"] = {
        side: {name: ulps(x, y) for name, x, y in zip(("out", "dq", "dk", "dv"), found, rights, strict=True)}
        for side, found in sides.items()
    }
    return row


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The output and the gradients in fp64, head by head: all scores of one have room."""
    found = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, q, k, v)]
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        mine, theirs = slice(head, head + 1), slice(head // group, head // group + 1)
        exact = [x.detach().double().requires_grad_() for x in (q[:, mine], k[:, theirs], v[:, theirs])]
        out, _ = reference(*exact, is_causal=True)
        parts = (out.detach(), *torch.autograd.grad(out, exact, grad[:, mine].double()))
        for into, part, place in zip(found, parts, (mine, mine, theirs, theirs), strict=True):
            into[:, place] += part
    return tuple(found)


def products(rounds: int) -> list[dict[str, object]]:
    """fp32, by both libraries."""
    rows = []
    for T, inner, outputs in PRODUCTS:
        x, weight = torch.randn(T, inner), torch.randn(outputs, inner)
        sides = {
            "ours": lambda x=x, weight=weight: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""),
            "MKL": lambda x=x, weight=weight: F.linear(x, weight),
        }
        row = told(sides, rounds)
        speed = 2e-9 * T * inner * outputs / row["seconds"]["ours"]  # type: ignore[index]
        rows.append({"shape": (T, inner, outputs), "gflops_per_s": speed, **row})
    return rows


def gradients(rounds: int) -> list[dict[str, object]]:
    """Of weights, from bf16 into a buffer of fp32: by tiles, where the processor has them."""
    rows: list[dict[str, object]] = []
    if not amx_weight_grad.has_tiles():
        return rows

    def add(into: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return into.add_(grad @ x)

    torch._dynamo.reset()
    run = torch.compile(add, dynamic=False)
    for T, inner, outputs in PRODUCTS:
        torch.manual_seed(0)
        grad, x = torch.randn(T, outputs).bfloat16().t(), torch.randn(T, inner).bfloat16()
        exact = grad.double() @ x.double()
        into = torch.zeros(outputs, inner)
        ways = {"ours": amx_weight_grad.add, "torch": add, "torch.compile": run}
        sides = {name: lambda way=way, grad=grad, x=x, into=into: way(into, grad, x) for name, way in ways.items()}
        row = told(sides, rounds)
        errors = {}
        for name, way in ways.items():
            way(into.zero_(), grad, x)
            errors[name] = ulps(into, exact)
        speed = 2e-9 * T * inner * outputs / row["seconds"]["ours"]  # type: ignore[index]
        rows.append({"shape": (T, inner, outputs), "gflops_per_s": speed, **row, "ulps": errors})
        print("gradient", (T, inner, outputs), row["faster_by"], speed, errors, flush=True)
    return rows


def main(argv: list[str]) -> None:
    """Measure, print, and write the figures."""
    options = argparse.ArgumentParser(prog="python -m bench.kernels", description=(__doc__ or "").splitlines()[0])
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "kernels.json")
    asked = options.parse_args(argv)
    torch.set_num_threads(asked.threads)
    if compile_library().library is None:
        raise SystemExit(f"there is nothing to measure: {compile_library().why}.")
    found = products(asked.rounds)
    for row in found:
        print(row["shape"], row["faster_by"], row["gflops_per_s"], flush=True)
    onednn, rows, summed = prefers_onednn(), [], gradients(asked.rounds)
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            rows.append(attention(shape, dtype, asked.rounds))
            row = rows[-1]
            faster = {pass_: row[pass_]["faster_by"]["torch"] for pass_ in ("forward", "backward")}  # type: ignore[index]
            print(shape, row["dtype"], faster, row["gflops_per_s"], flush=True)
            write_result(asked.json, threads=asked.threads, prefers_onednn=onednn, attention=rows, products=found,
                         gradients=summed)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
