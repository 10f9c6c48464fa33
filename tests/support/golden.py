"""The golden files: text that may change only on purpose.

python tests/support/golden.py             which files differ from what the code writes now
python tests/support/golden.py --update    write them anew; read the diff before you commit it
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from plans import plan_of
from superstep.cost.program.time.simulate import PerUnit, UnitSeconds, simulate
from superstep.observe.drawing.timeline import draw_text
from superstep.plan.resolution.resolve import Plan
from superstep.program.compile import compile_step
from superstep.program.text import write_program

FOLDER = Path(__file__).parents[1] / "golden"

PLANS: dict[str, Plan] = {
    "dp2-zero1": plan_of(layers=2, microbatches=2, dp=2, zero=1),
    "pp2-1f1b": plan_of(pp=2, layers=2, microbatches=4),
    "pp2-interleaved-x2": plan_of(pp=2, chunks=2, layers=4, microbatches=4, schedule="interleaved"),
    "pp2-breadth-first-zero3": plan_of(
        pp=2, chunks=2, dp=2, zero=3, layers=4, microbatches=2, schedule="breadth-first", tied=True
    ),
    "pp2-zb-h1-zero2": plan_of(pp=2, layers=2, dp=2, zero=2, microbatches=3, schedule="zb-h1"),
    "pp2-zb-v": plan_of(pp=2, chunks=2, layers=4, microbatches=3, schedule="zb-v", tied=True),
    "full-recompute": plan_of(layers=2, microbatches=2, recompute="full"),
}


def _drawing(plan: Plan) -> str:
    program = compile_step(plan)
    unit = UnitSeconds(
        forward_s=1e-3, backward_s=2e-3, weight_s=1e-3, recompute_s=1e-3, fetch_s=5e-4, reduce_s=5e-4, transfer_s=2.5e-4
    )
    timeline = simulate(program, PerUnit(units=(unit,) * len(program.units), step_s=1e-3))
    return draw_text(timeline, 120, colour=False)


GOLDEN: dict[str, Callable[[], str]] = {
    **{f"program-{name}.txt": lambda plan=plan: write_program(compile_step(plan)) for name, plan in PLANS.items()},
    **{f"timeline-{name}.txt": lambda plan=plan: _drawing(plan) for name, plan in PLANS.items()},
}


def main(arguments: list[str]) -> int:
    """Compare or update; the exit status is 1 where files differ and were not updated."""
    status = 0
    for name, make in GOLDEN.items():
        path, text = FOLDER / name, make()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        print(f"{'updated' if '--update' in arguments else 'differs'}: {path}")
        if "--update" in arguments:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        else:
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
