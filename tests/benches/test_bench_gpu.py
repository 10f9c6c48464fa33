"""The pieces of bench.gpu, as far as a CPU goes."""

from __future__ import annotations

import json

import pytest
import torch

from bench import gpu
from superstep.comm.device import Device
from superstep.engine.instruction_timer import TimedInstruction
from superstep.program.instructions import Fetch, Forward, Reduce, Send

CPU = Device("cpu")
SMALL = gpu.Size(layers=2, width=32, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab=64, tokens=16, sequences=2)


def test_without_a_gpu_it_says_so_in_a_line(capsys):
    assert gpu.main(["--only", "attention"]) == 2
    said = capsys.readouterr().err
    assert "no GPU" in said
    assert said.count("\n") == 1


def test_blocks_of_attention_are_as_exact_as_torchs():
    found = gpu.attention(CPU, (8, 20), (32, 19), (torch.float32, torch.bfloat16))
    assert len(found["cases"]) == 2 * 2 * 2 * 2
    for case in found["cases"]:
        allowed = 1e-5 if "float32" in case["dtype"] else 2e-2
        assert len(case["ours"]) == len(case["torch"]) == 4
        assert max(case["ours"]) < allowed
        assert case["time_over_torchs"] > 0
    assert found["worst_error_over_torchs"] < 2


def test_experts_without_rows_get_nothing():
    found = gpu.experts(CPU, 16, 24, (0, 5, 0, 3), nobodys=2)
    assert found["product_error"] < 1e-2
    assert found["gradient_error"] < 1e-2
    assert found["nobodys_rows_are_zero"]
    assert found["empty_experts_gradients_are_zero"]


def test_every_policys_peak_is_beside_its_prediction():
    found = gpu.recompute(CPU, SMALL)["policies"]
    assert list(found) == ["none", "selective", "full"]
    assert found["full"]["predicted_bytes"] < found["none"]["predicted_bytes"]
    assert all(p["ratio"] == p["peak_bytes"] / p["predicted_bytes"] for p in found.values())


def test_a_step_is_timed_beside_the_peers():
    found = gpu.beside_peers(CPU, SMALL, 3, names=("superstep", "superstep exact", "transformers"), is_profiled=False)
    ours, exact, theirs = found["sides"]
    assert [len(side["all_step_s"]) for side in (ours, exact, theirs)] == [3, 3, 3]
    assert ours["superstep is faster by"] == 1
    assert theirs["tokens_per_s"] == pytest.approx(found["tokens"] / theirs["step_s"])
    # Two products of 32 x 32 and two of 16 x 32, three of 64 x 32 a layer; attention; the head.
    products = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 32 * 16) + 64 * 32
    assert found["flops"] == 6 * 32 * products


def test_what_lies_under_compute():
    program = (Fetch(0), Forward(0, 0, "all"), Send("act", 0, 0, 1), Reduce(0), Forward(1, 0, "all"))
    times = ((0, 3), (1, 2), (2, 4), (2, 2), (3, 5))
    found = gpu.under_compute([TimedInstruction(i, *time) for i, time in enumerate(times)], program)
    assert found["fetch"] == {"seconds": 3, "under_compute": 1, "share": pytest.approx(1 / 3)}
    assert found["act"]["share"] == 0.5
    assert found["reduce"] == {"seconds": 0, "under_compute": 0, "share": 0.0}
    assert "skipped" in gpu.overlap(SMALL, 1)


def test_a_piece_that_fails_is_noted_and_the_next_one_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "gpus", lambda: 1)
    monkeypatch.setattr(gpu, "gpu_facts", lambda: {"gpus": ["made up"]})
    broken = {"attention": lambda: 1 / 0, "experts": lambda: {"well": 1}, "prove": lambda: {"status": 1}}
    monkeypatch.setattr(gpu, "pieces", lambda size: broken)
    out = tmp_path / "gpu.json"
    assert gpu.main(["--json", str(out)]) == 1
    written = json.loads(out.read_text())
    assert written["gpus"] == ["made up"]
    assert written["torch"] == torch.__version__
    assert written["pieces"]["attention"]["failed"] == "ZeroDivisionError: division by zero"
    assert written["pieces"]["experts"] == {"well": 1}
    said = capsys.readouterr().out
    assert [line.split()[-1] for line in said.splitlines() if " s  " in line] == ["FAILED", "done", "FAILED"]


def test_its_commands_are_accepted(tmp_path):
    """Of the sizes that a GPU is given, read as the verbs read them."""
    from superstep.cli.flags.options import DEMO, read_flags

    config = read_flags(DEMO, gpu.Size().flags(), prog="superstep train", description="")
    assert config.plan == gpu.Size().run().config.plan.__class__(dp=1, zero=0, microbatch=1)
    assert (config.data.sequence_tokens, config.model.head_dim, config.numerics.compute) == (2048, 128, "bf16")
    assert gpu.command(["this", "--nothing"])["said"]
    assert gpu.Size().run().shape.head_dim == 128
