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


def learning(*, steps=80, seed=1):
    """The objects of a run of reinforcement learning: a reward that rises, answers that become longer."""
    luck = random.Random(seed)
    yield {"event": "started", "run": "runs/rl", "plan": "dp=2", "parameters": 1_000_000, "world": 2, "steps": steps}
    for step in range(1, steps + 1):
        yield {
            "event": "step", "step": step, "loss": -0.01 * luck.random(), "lr": 1e-5, "tokens": 4096,
            "grad_norm": 0.4 + 0.1 * luck.random(), "tokens_per_s": 900 + 50 * luck.random(), "step_s": 4.2,
            "data_s": 2.9, "mfu": None, "memory_bytes": 500 << 20, "elapsed_s": step * 4.2, "tokens_seen": step * 4096,
        }  # fmt: skip
        yield {
            "event": "rolled", "step": step, "reward": 1 - 0.9 * math.exp(-step / 30) + 0.03 * luck.random(),
            "answers": 62, "lost": 2, "cut": luck.randrange(9), "uniform": luck.randrange(6), "lag": 1,
            "drawn_tokens": 60 * (200 + step), "seconds": 4.2, "at_s": 4.2 * step,
            "measures": {"entropy": 1.2 * math.exp(-step / 50), "reference_kl": 0.001 * step, "ratio": 1.0},
        }  # fmt: skip
    yield {"event": "finished", "step": steps, "elapsed_s": 4.2 * steps, "tokens_seen": steps * 4096}
