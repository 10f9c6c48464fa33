"""The rows of bench.gpu_kernels, at sizes that an interpreter has time for."""

from __future__ import annotations

import torch

from bench import gpu_kernels
from superstep.comm.device import Device


def test_both_sides_compute_the_same(device, monkeypatch):
    monkeypatch.setattr(gpu_kernels.TimingOptions, "seconds", lambda self, work: 2.0)
    monkeypatch.setattr(gpu_kernels, "TOKENS", 16)
    on = Device("cpu") if device == "cpu" else Device("cuda", 0)
    operations = [
        *gpu_kernels.attended(on.torch, torch.float32, 16, 16, 2, 1),
        *gpu_kernels.others(on.torch, torch.float32, 16, 32, 40),
    ]
    rows = [gpu_kernels.measured(operation, on, lambda run: run) for operation in operations]
    assert [row["operation"].split()[0] for row in rows] == [
        *("attention", "documents", "window", "alibi", "t5"),
        *("rms_norm", "swiglu", "rope", "linear"),
    ]
    for row in rows:
        assert set(row["errors"]) == {"ours", "torch", "torch.compile"}
        assert max(max(found) for found in row["errors"].values()) < 1e-5, row["operation"]
        assert row["faster_by"] == {"torch": 1.0, "torch.compile": 1.0}
