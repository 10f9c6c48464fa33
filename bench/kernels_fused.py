"""What a step does between its products, by our kernels beside plain torch and torch.compile: speed and error.

    python -m bench.kernels_fused [--rounds 9] [--uncompiled] [--json FILE]

Each is run forward and backward as a step runs it, at the width of the benchmarks' model. The sides run in turn; errors
are as in ``bench.kernels``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels import ROOT, told, ulps
from bench.machine import write_result
from superstep.kernels import cpu_library, norm, rope, swiglu
from superstep.model.norm import RMSNorm
from superstep.model.rope import Rope
from superstep.numerics.loss import linear_cross_entropy_sum
from superstep.plan.model.sizes.named_sizes import SHAPES

TOKENS = (128, 512, 2048, 8192)
WIDTH, FFN, HEADS, HEAD_DIM, VOCAB = 512, 1376, 8, 64, 4096

Work = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel: by us, by what the model does without it, in a line for a compiler, and what they are given; of that
    the last few have no gradient. ``exact`` is what fp64 is asked for, where that is not the line.
    """

    name: str
    ours: Work
    plain: Work
    line: Work
    given: tuple[Tensor, ...]
    fixed: tuple[Tensor, ...] = ()
    exact: Work | None = None


def cases(tokens: int, dtype: torch.dtype) -> Iterator[Case]:
    """At one length, the model's sizes."""
    torch.manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    own = RMSNorm(WIDTH, 1e-5).to(dtype)
    line = partial(norm.reference, eps=1e-5)
    yield Case(
        name="norm",
        ours=partial(norm.rms_norm, eps=1e-5),
        plain=lambda x, weight: torch.func.functional_call(own, {"weight": weight}, (x,)),
        line=lambda x, weight: line(x.float(), weight.float()).to(x.dtype),
        given=(numbers(1, tokens, WIDTH), numbers(WIDTH)),
        exact=line,
    )
    turns = Rope(replace(SHAPES["bench"], head_dim=HEAD_DIM))
    x = numbers(1, tokens, HEADS, HEAD_DIM)
    yield Case(
        name="rope",
        ours=rope.turn,
        plain=lambda x, cos, sin: torch.addcmul(x * cos, x.roll(HEAD_DIM // 2, -1), sin),
        line=rope.reference,
        given=(x,),
        fixed=turns.tables_of(x, None),
    )
    both = numbers(1, tokens, FFN), numbers(1, tokens, FFN)
    yield Case(name="swiglu", ours=swiglu.swiglu, plain=swiglu.reference, line=swiglu.reference, given=both)
    targets = torch.randint(0, VOCAB, (1, tokens))
    yield Case(
        name="head and loss",
        ours=partial(linear_cross_entropy_sum, targets_BS=targets, is_compiled=True),
        plain=partial(linear_cross_entropy_sum, targets_BS=targets),
        line=lambda h, weight: F.cross_entropy(F.linear(h, weight).float().flatten(0, 1), targets[0], reduction="sum"),
        exact=lambda h, weight: F.cross_entropy(F.linear(h, weight).flatten(0, 1), targets[0], reduction="sum"),
        given=(numbers(1, tokens, WIDTH), (numbers(VOCAB, WIDTH).float() * 0.05).to(dtype)),
    )


def passes(work: Work, case: Case, of: Callable[[Tensor], Tensor] = lambda x: x) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward: the result and the gradients."""
    given = [of(x.detach()).requires_grad_() for x in case.given]
    fixed = [of(x) for x in case.fixed]

    def run() -> tuple[Tensor, ...]:
        out = work(*given, *fixed)
        return out.detach(), *torch.autograd.grad(out, given, torch.ones_like(out))

    return run


def measured(case: Case, tokens: int, rounds: int, *, is_compiled: bool) -> dict[str, object]:
    """One kernel at one length."""
    sides = {"ours": passes(case.ours, case), "torch": passes(case.plain, case)}
    if is_compiled:
        torch._dynamo.reset()
        sides = {**sides, "torch.compile": passes(torch.compile(case.line, dynamic=False), case)}
    dtype = str(case.given[0].dtype).removeprefix("torch.")
    row = {"kernel": case.name, "tokens": tokens, "dtype": dtype, **told(sides, rounds)}
    exact = passes(case.exact or case.line, case, Tensor.double)()
    row["ulps"] = {side: [ulps(x, y) for x, y in zip(run(), exact, strict=True)] for side, run in sides.items()}
    return row


def main(argv: list[str]) -> None:
    """Measure, print, and write the figures."""
    options = argparse.ArgumentParser(prog="python -m bench.kernels_fused", description=(__doc__ or "").splitlines()[0])
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--uncompiled", action="store_true", help="without torch.compile, which takes its time")
    options.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "kernels_fused.json")
    asked = options.parse_args(argv)
    torch.set_num_threads(asked.threads)
    if cpu_library.compile_library().library is None:
        raise SystemExit(f"there is nothing to measure: {cpu_library.compile_library().why}.")
    found = []
    for tokens in TOKENS:
        for dtype in (torch.float32, torch.bfloat16):
            for case in cases(tokens, dtype):
                found.append(measured(case, tokens, asked.rounds, is_compiled=not asked.uncompiled))
                row = found[-1]
                print(tokens, row["dtype"], case.name, row["faster_by"], row.get("ulps", ""), flush=True)
        write_result(asked.json, threads=asked.threads, rounds=asked.rounds, rows=found)


if __name__ == "__main__":
    main(sys.argv[1:])
