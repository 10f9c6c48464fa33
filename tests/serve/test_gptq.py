"""Codes of 4 bits that are chosen by a calibration text."""

import pytest
import torch

import small
from low_rank import write_model
from superstep.comm.device import Device
from superstep.errors import ConfigError
from superstep.model.files.hf import open_weights
from superstep.serve.compute.linears.gptq import calibrate, to_4_bits_by_inputs
from superstep.serve.compute.linears.quantize import format_named, to_4_bits
from superstep.serve.compute.serving_model import build, fill
from superstep.serve.config import ServeConfig, check_ranges, plan_of
from superstep.serve.load_rank import read_windows

GROUP = 64


def test_outputs_have_less_error_than_with_each_weight_rounded():
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 128, generator=draw) * 0.05
    x = torch.randn(512, 16, generator=draw) @ torch.randn(16, 128, generator=draw)
    x += 0.1 * torch.randn(512, 128, generator=draw)
    wanted = x @ weight.t()

    def error(quantized):
        return float((x @ quantized.weight().t() - wanted).square().mean())

    by_inputs = to_4_bits_by_inputs(weight, x.t() @ x, GROUP)
    assert by_inputs.codes.max() <= 15
    assert error(by_inputs) < 0.5 * error(to_4_bits(weight, GROUP))


def test_inputs_without_correlation_leave_each_weight_at_its_nearest():
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
    by_inputs, nearest = to_4_bits_by_inputs(weight, torch.eye(128), GROUP), to_4_bits(weight, GROUP)
    assert torch.equal(by_inputs.codes, nearest.codes)
    assert torch.equal(by_inputs.scale, nearest.scale)


def test_a_model_is_calibrated_block_by_block(tmp_path):
    folder = write_model(tmp_path / "model", width=64, head_dim=16)
    run = plan_of(folder, ServeConfig(compute="bf16", quantize="int4"))
    served = build(run, 0, None, Device("cpu"))
    fill(served, open_weights(folder))
    before = {id(p): p.clone() for module in served.modules for p in module.parameters()}
    windows = torch.randint(0, small.VOCAB, (4, 16), generator=torch.Generator().manual_seed(0)).tolist()
    packs = calibrate(served, format_named("int4"), windows)
    assert len(packs) == 4 * run.shape.layers  # queries, keys and values are one; gate and up are
    changed = [p for module in served.modules for p in module.parameters() if not torch.equal(before[id(p)], p)]
    assert len(changed) == 7 * run.shape.layers


def test_a_text_that_has_no_use_or_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"serve\.calibration = .*set serve\.quantize to int4"):
        check_ranges(ServeConfig(calibration=tmp_path / "none.txt", quantize="int8"))
    with pytest.raises(ConfigError, match="is no file; name a text file"):
        read_windows(tmp_path / "none.txt", tmp_path, 16)
