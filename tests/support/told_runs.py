"""Runs as their metrics.jsonl tells them, without a run."""

from __future__ import annotations

import math
import random


def lines(*, steps=600, seed=1, worse=0.0, experts=0):
    """The objects of a run: a loss that falls with noise of its own, validated and saved every 100 steps."""
    luck = random.Random(seed)
    yield {
        "event": "started", "run": "runs/demo", "plan": "dp=2 zero=2 m=2x4 fp32", "parameters": 1_000_000, "world": 2,
        "transport": "shared memory", "steps": steps, "unigram_entropy": 6.38, "predicted_step_s": 0.132,
        "predicted_memory_bytes": 49 << 20, "memory": "resident",
    }  # fmt: skip
    for step in range(1, steps + 1):
        loss = 3.2 + 4.4 * math.exp(-step / 120) + 0.06 * luck.gauss(0, 1) + worse
        step_s = 0.15 + 0.02 * abs(luck.gauss(0, 1))
        yield {
            "event": "step", "step": step, "loss": loss, "lr": 3e-3 * min(1, step / 50), "tokens": 4096,
            "grad_norm": 0.6 + abs(luck.gauss(0, 0.2)), "tokens_per_s": 4096 / step_s, "step_s": step_s,
            "data_s": 0.002, "mfu": 0.14 + 0.01 * luck.random(), "memory_bytes": (396 << 20) + step * 20_000,
            "elapsed_s": step * 0.16, "tokens_seen": step * 4096,
        }  # fmt: skip
        if step % 100 == 0:
            if experts:
                yield {"event": "router", "step": step, "steps": 100, "chosen": [[5, 3, 4, 4], [16, 0, 0, 0]]}
            yield {"event": "evaluated", "step": step, "loss": loss + 0.1, "bits_per_byte": 2.1, "seconds": 1.25}
            yield {"event": "saved", "step": step, "path": f"step-{step:06}", "seconds": 0.25, "bytes": 12 << 20}
    yield {"event": "finished", "step": steps, "elapsed_s": 0.16 * steps, "tokens_seen": steps * 4096}
