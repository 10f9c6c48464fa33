"""A page that animates a step: its timeline, its memory, and where the data is.

It shows the chosen plan. A chooser switches to the same model with other schedules and ZeRO stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from superstep.observe.page.bundle_html import assemble, pack
from superstep.observe.page.step_data import KINDS, LANES, StepDrawing, step_value
from superstep.plan.config import Schedule
from superstep.program import instructions as ins
from superstep.program.instructions import Instruction

SCRIPTS = (
    "format.js",
    "data.js",
    "paint.js",
    "dense.js",
    "timeline.js",
    "memory.js",
    "tips.js",
    "where_state.js",
    "where.js",
    "main.js",
)
# For each instruction: its name in the script, its lane ("wire" means act or grad), and its text in the legend.
_LABELS: dict[type[Instruction], tuple[str, str, str]] = {
    ins.Forward: ("forward", "compute", "forward"),
    ins.Recompute: ("recompute", "compute", "computed again"),
    ins.Backward: ("backward", "compute", "backward"),
    ins.BackwardInput: ("backward-input", "compute", "backward, inputs"),
    ins.BackwardWeight: ("backward-weight", "compute", "backward, weights"),
    ins.Settle: ("settle", "compute", "settle gradients"),
    ins.Tie: ("tie", "compute", "sum of a tied gradient"),
    ins.ReducePartial: ("reduce-partial", "compute", "sum over tp"),
    ins.Step: ("step", "compute", "optimizer's step"),
    ins.Free: ("free", "compute", "free"),
    ins.Fetch: ("fetch", "fetch", "fetch parameters"),
    ins.Reduce: ("reduce", "reduce", "reduce gradients"),
    ins.ReduceRows: ("reduce-rows", "reduce", "reduce touched rows"),
    ins.ReduceReplicas: ("reduce-replicas", "reduce", "reduce over replicas"),
    ins.Send: ("send", "wire", "send"),
    ins.Recv: ("recv", "wire", "receive"),
    ins.Snapshot: ("snapshot", "snapshot", "snapshot"),
    ins.Offload: ("offload", "out", "offload activations"),
    ins.Reload: ("reload", "in", "reload activations"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooserEntry:
    """One entry of the chooser. ``drawn``: the step; None if the plan cannot run, and then ``why`` has the reason."""

    schedule: Schedule
    zero: int
    drawn: StepDrawing | None
    why: str = ""


def moving_page(title: str, about: str, choices: Sequence[ChooserEntry], chosen: int) -> str:
    """The page, opened on ``choices[chosen]``."""
    return assemble(
        markup="step.html",
        styles=["assets/step.css"],
        scripts=SCRIPTS,
        title=title,
        data=page_value(about, choices, chosen),
    )


def page_value(about: str, choices: Sequence[ChooserEntry], chosen: int) -> dict[str, Any]:
    """The script's data."""
    kinds = [_LABELS[kind] for kind in KINDS]
    return {
        "format": 1,
        "about": about,
        "kinds": [{"name": name, "lane": lane, "says": says} for name, lane, says in kinds],
        "lanes": list(LANES),
        "options": [
            {
                "schedule": choice.schedule,
                "zero": choice.zero,
                "program": pack(step_value(choice.drawn)) if choice.drawn else None,
                "why": choice.why,
            }
            for choice in choices
        ],
        "chosen": chosen,
    }
