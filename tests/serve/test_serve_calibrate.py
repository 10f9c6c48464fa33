"""Calibration opens engine after engine in one process: each has the threads that a server's would have."""

import torch

from superstep.comm.device import Device
from superstep.launch.ranks import World
from superstep.plan.model.sizes.named_sizes import SHAPES
from superstep.serve import benchmark_steps
from superstep.serve.config import ServeConfig


def test_engines_of_exact_mode_all_have_a_servers_threads(monkeypatch, tmp_path):
    monkeypatch.setattr("superstep.serve.load_rank.cores", lambda: 2)
    monkeypatch.setattr(benchmark_steps, "BATCHES", (1,))
    monkeypatch.setattr(benchmark_steps, "CONTEXT", 32)
    had, opened = [], benchmark_steps.open_engine

    def open_engine(*args, **kwargs):
        had.append(torch.get_num_threads())
        return opened(*args, **kwargs)

    monkeypatch.setattr(benchmark_steps, "open_engine", open_engine)
    benchmark_steps.save_random(benchmark_steps.scale_shape(SHAPES["demo"], 64, 1, 256, 1), tmp_path)
    serve = ServeConfig(context_tokens=64, pages=128, requests=64, step_tokens=512, exact=True)
    before = torch.get_num_threads()
    try:
        found = benchmark_steps.calibrate_rank(
            World(0, 1, Device("cpu")), [tmp_path, tmp_path], serve, benchmark_steps.Timing()
        )
    finally:
        torch.set_num_threads(before)
    assert had == [2, 2]
    assert all(seen.samples and seen.way.is_exact for seen in found)
