"""Events as a run reports them."""

from __future__ import annotations

from superstep.observe.events import RouterStats, RunStarted, StepDone

STEP = StepDone(
    step=1,
    loss=6.25,
    lr=1e-3,
    grad_norm=0.5,
    tokens=4096,
    tokens_per_s=8192.0,
    step_s=0.5,
    data_s=0.001,
    mfu=0.25,
    memory_bytes=1 << 30,
    elapsed_s=0.5,
    tokens_seen=4096,
)
STARTED = RunStarted(
    run="runs/demo", plan="demo, dp 2", parameters=7_000_000, world=2, transport="shared memory", steps=6
)

ROUTERS = RouterStats(
    step=2,
    steps=2,
    chosen=((6, 2, 0, 0), (2, 2, 2, 2)),
    dropped=((2, 0, 0, 0), (0, 0, 0, 0)),
    balance=(2.5, 1.0),
    z=(4.0, 3.0),
)
