"""Superstep's engine, as a library."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from bench.serve_sides.asked import Answers, Side, answer_jobs
from superstep.comm.device import Device, gpus
from superstep.serve.batch_generate import generate
from superstep.serve.build_engine import open_engine
from superstep.serve.config import ServeConfig
from superstep.serve.scheduling.request import Sampling


def load(asked: dict) -> tuple[Side, dict]:
    """An engine with the settings that ``asked["serve"]`` gives."""
    torch.set_num_threads(asked["threads"])
    folder = Path(asked["folder"])
    kernels = Path(tempfile.gettempdir()) / "superstep-kernels"
    device = Device("cuda", 0) if gpus() else None
    engine = open_engine(folder, ServeConfig(compute="bf16", kernels=kernels, **asked["serve"]), device=device)

    def side(prompts: list[list[int]], tokens: list[int]) -> Answers:
        ways = [Sampling(max_tokens=count, temperature=0.0, ignore_eos=True) for count in tokens]
        return [answer.ids for answer in generate(engine, prompts, ways)]

    return side, {"torch": torch.__version__}


if __name__ == "__main__":
    answer_jobs(load)
